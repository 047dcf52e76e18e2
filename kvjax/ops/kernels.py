"""The modules of the kernels, each imported on first use.

`kernels.top_k` is the module `kvjax.kernels_pallas.select.top_k`. Pallas's GPU dialect needs jax
>= 0.11 and takes long to import, so a process that runs references alone imports none of it. To
a type checker and an editor the modules are plain imports, so that from an operation they lead
to the kernel.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvjax.kernels_pallas import tpu as tpu
    from kvjax.kernels_pallas.attend import attend_coded_zones as attend_coded_zones
    from kvjax.kernels_pallas.attend import attend_key_blocks as attend_key_blocks
    from kvjax.kernels_pallas.attend import attend_quantized as attend_quantized
    from kvjax.kernels_pallas.attend import attend_slots as attend_slots
    from kvjax.kernels_pallas.attend import attend_span as attend_span
    from kvjax.kernels_pallas.attend import attend_zones as attend_zones
    from kvjax.kernels_pallas.delta import delta_rule as delta_rule
    from kvjax.kernels_pallas.delta import delta_step as delta_step
    from kvjax.kernels_pallas.host import host_append as host_append
    from kvjax.kernels_pallas.host import host_rows as host_rows
    from kvjax.kernels_pallas.host import hot_float8 as hot_float8
    from kvjax.kernels_pallas.host import hot_pages as hot_pages
    from kvjax.kernels_pallas.score import rerank as rerank
    from kvjax.kernels_pallas.score import score_1bit as score_1bit
    from kvjax.kernels_pallas.score import score_pages as score_pages
    from kvjax.kernels_pallas.select import select_1bit as select_1bit
    from kvjax.kernels_pallas.select import select_4bit as select_4bit
    from kvjax.kernels_pallas.select import select_pages as select_pages
    from kvjax.kernels_pallas.select import top_k as top_k
    from kvjax.kernels_pallas.select import top_k_grouped as top_k_grouped
    from kvjax.kernels_pallas.vote import collide as collide
    from kvjax.kernels_pallas.vote import most_voted as most_voted
    from kvjax.kernels_pallas.write import put_token as put_token
else:
    from importlib import import_module
    from types import ModuleType

    PLACES = {
        "tpu": "kvjax.kernels_pallas.tpu",
        "attend_coded_zones": "kvjax.kernels_pallas.attend.attend_coded_zones",
        "attend_key_blocks": "kvjax.kernels_pallas.attend.attend_key_blocks",
        "attend_quantized": "kvjax.kernels_pallas.attend.attend_quantized",
        "attend_slots": "kvjax.kernels_pallas.attend.attend_slots",
        "attend_span": "kvjax.kernels_pallas.attend.attend_span",
        "attend_zones": "kvjax.kernels_pallas.attend.attend_zones",
        "delta_rule": "kvjax.kernels_pallas.delta.delta_rule",
        "delta_step": "kvjax.kernels_pallas.delta.delta_step",
        "host_append": "kvjax.kernels_pallas.host.host_append",
        "host_rows": "kvjax.kernels_pallas.host.host_rows",
        "hot_float8": "kvjax.kernels_pallas.host.hot_float8",
        "hot_pages": "kvjax.kernels_pallas.host.hot_pages",
        "rerank": "kvjax.kernels_pallas.score.rerank",
        "score_1bit": "kvjax.kernels_pallas.score.score_1bit",
        "score_pages": "kvjax.kernels_pallas.score.score_pages",
        "select_1bit": "kvjax.kernels_pallas.select.select_1bit",
        "select_4bit": "kvjax.kernels_pallas.select.select_4bit",
        "select_pages": "kvjax.kernels_pallas.select.select_pages",
        "top_k": "kvjax.kernels_pallas.select.top_k",
        "top_k_grouped": "kvjax.kernels_pallas.select.top_k_grouped",
        "collide": "kvjax.kernels_pallas.vote.collide",
        "most_voted": "kvjax.kernels_pallas.vote.most_voted",
        "put_token": "kvjax.kernels_pallas.write.put_token",
    }

    def __getattr__(name: str) -> ModuleType:
        if name not in PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return import_module(PLACES[name])
