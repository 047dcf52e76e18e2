"""Pallas GPU kernels, one operation a file, with the signature of its reference in `kvjax.ops`.

There is none yet: every operation runs its reference, on every backend.
"""
