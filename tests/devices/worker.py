"""One of several processes that decode together: `worker.py ADDRESS PROCESSES NUMBER CHECKPOINT SAVES`."""

from __future__ import annotations

import json
import sys
from typing import Any

import jax

METHOD = "fier:budget=24,group=8,chunk=32,dense_layers=0,host=yes"


def work(checkpoint: str, saves: str, *, split: bool = True) -> dict[str, Any]:
    """The tokens of a batch, on one device or split by data=2, model=2, ctx=2, and those that follow after a save."""
    import numpy as np

    import kvjax
    from kvjax.generation import decode, generate
    from kvjax.models import load

    placement = None
    if split:
        mesh = jax.make_mesh((2, 2, 2), ("data", "model", "ctx"))
        placement = kvjax.Placement(mesh=mesh, batch="data", heads="model", context="ctx")
    loaded = load(checkpoint, "float32", placement=placement)
    cache = loaded.init_cache(METHOD, capacity=128, batch=2, dtype="float32")
    prompt = [list(range(1, 60)), [7] * 40]
    done = generate(loaded.model, cache, prompt, max_new_tokens=20, chunk=64, measure=True)
    assert np.all(done.attended > 0)
    kvjax.save(saves, done.cache)
    restored = kvjax.restore(saves, done.cache)
    more = decode(loaded.model, restored, done.logits, max_new_tokens=20, measure=True)  # the same program again
    return {"tokens": done.tokens.tolist(), "more": more.tokens.tolist(), "devices": jax.device_count()}


if __name__ == "__main__":
    address, processes, number, *given = sys.argv[1:]
    jax.distributed.initialize(address, int(processes), int(number))
    found = work(*given)
    if jax.process_index() == 0:
        print(json.dumps(found))
