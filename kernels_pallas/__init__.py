"""Pallas Mosaic GPU kernels for NVIDIA GPUs from Ampere on, with the semantics of their
references in `kvjax.ops`.

Kernels are in folders by family, one operation per file. They are written with the operations
of `simt`. Arguments are the arrays of the reference without its named tuples. `kvjax.ops`
selects the implementation, and `kvjax.ops.explain` says which and why. Importing this package
imports no kernel. `tuned` has block sizes by kind of device; times and variants that were tried
are in `benchmarks/NOTES.md`.
"""
