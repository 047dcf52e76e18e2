"""The operations in which a decode step spends its time: each in plain JAX, and as a GPU
kernel.

The plain JAX version is the reference: it takes everything that the signature allows, and uses
little memory at a time. The argument `implementation` says which one runs, see `explain`; both
give the same result, but for the rounding that an operation's docstring states.

A new operation needs a function in the file of its family (see `kvjax.ops.op`), a file in
`kernels_pallas/` and one in `tests/kernels/`.
"""

from kvjax.ops.attend import (
    attend_beside,
    attend_gathered,
    attend_slots,
    attend_span,
    attend_zones,
    gather_slots,
    merge_beside,
)
from kvjax.ops.delta import delta_rule, delta_step
from kvjax.ops.host import (
    HotTables,
    host_append,
    host_rows,
    host_rows_first,
    host_rows_rest,
    hot_load,
    hot_load_float8,
    hot_places,
)
from kvjax.ops.key_blocks import attend_key_blocks
from kvjax.ops.op import (
    OPS,
    Explanation,
    Implementation,
    Op,
    device_kind,
    explain,
    explained,
    shares_traces,
    use,
)
from kvjax.ops.quantized import (
    attend_coded_zones,
    attend_quantized,
    attend_quantized_zones,
    gather_quantized,
)
from kvjax.ops.select import (
    rank_grouped,
    rerank,
    score_1bit,
    score_pages,
    select_1bit,
    select_4bit,
    select_pages,
    select_top,
    top_k,
    top_k_grouped,
)
from kvjax.ops.vote import collide, most_voted
from kvjax.ops.write import put_token, put_tokens

__all__ = [
    "OPS",
    "Explanation",
    "HotTables",
    "Implementation",
    "Op",
    "attend_beside",
    "attend_coded_zones",
    "attend_gathered",
    "attend_key_blocks",
    "attend_quantized",
    "attend_quantized_zones",
    "attend_slots",
    "attend_span",
    "attend_zones",
    "collide",
    "delta_rule",
    "delta_step",
    "device_kind",
    "explain",
    "explained",
    "gather_quantized",
    "gather_slots",
    "host_append",
    "host_rows",
    "host_rows_first",
    "host_rows_rest",
    "hot_load",
    "hot_load_float8",
    "hot_places",
    "merge_beside",
    "most_voted",
    "put_token",
    "put_tokens",
    "rank_grouped",
    "rerank",
    "score_1bit",
    "score_pages",
    "select_1bit",
    "select_4bit",
    "select_pages",
    "select_top",
    "shares_traces",
    "top_k",
    "top_k_grouped",
    "use",
]
