"""Pallas kernels for TPUs, with the semantics of their references in `kvjax.ops`.

The TPU's compiler, which needs no TPU, compiles them, and the tests run them in an interpreter;
none has run on a chip. `benchmarks/tpu.py` says what they move.
"""

from kvjax.kernels_pallas.tpu import attend_groups as attend_groups
from kvjax.kernels_pallas.tpu import attend_pages as attend_pages
from kvjax.kernels_pallas.tpu import score_1bit as score_1bit
from kvjax.kernels_pallas.tpu import score_pages as score_pages
