"""Other libraries' kernels, one module a library, for `peers.py`.

Each module has `rows(case)`, which yields what it measured: every call is checked against
`reference` before it is timed, at the settings that its documentation recommends. A module
imports its library when `rows` runs, so that the others work without it.
"""
