"""Pallas Mosaic GPU kernels for Hopper GPUs, one operation a file, with the semantics of its reference in `kvjax.ops`.

Arguments are the arrays of the reference without its named tuples. `kvjax.ops` selects the implementation, and
`kvjax.ops.explain` says which and why. Importing this package imports no kernel. Times and variants that were tried are
in `benchmarks/NOTES.md`.
"""
