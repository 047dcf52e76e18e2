"""Pallas Mosaic GPU kernels for Hopper, one operation a file, with the semantics of its reference in `kvjax.ops`.

Arguments are the arrays of the reference's, without its named tuples. `kvjax.ops` chooses (`kvjax.ops.explain` says
what and why); importing this package imports no kernel.
"""
