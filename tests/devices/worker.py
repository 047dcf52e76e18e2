"""One of several processes that decode together: `worker.py CHECKPOINT SAVES READ [--command]`.
The environment names the others; what each found is in SAVES.NUMBER.json. READ is the save from
which it goes on, SAVES for its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

from kvjax.cli.options import join_processes

METHOD = "fier:budget=24,group=8,chunk=32,dense_layers=0,store=host"
PROMPT, NEW = "One of several.", 12


def command(checkpoint: str, *more: str) -> str:
    """What `kvjax generate` streams to the standard output of this process."""
    from kvjax.cli import main

    given = [
        "generate",
        checkpoint,
        "--prompt",
        PROMPT,
        "--max-new-tokens",
        str(NEW),
        "--dtype",
        "float32",
        *more,
    ]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(given) == 0
    return out.getvalue()


def work(checkpoint: str, saves: str, read: str, *, split: bool = True) -> dict[str, Any]:
    """The tokens of a batch, on one device or split by data=2, model=2, ctx=2, and those that
    follow after a save.
    """
    import jax
    import numpy as np

    import kvjax
    from kvjax.generation import decode, generate, stream
    from kvjax.models import load

    placement = None
    if split:
        mesh = jax.make_mesh((2, 2, 2), ("data", "model", "ctx"))
        placement = kvjax.Placement(mesh=mesh, batch="data", heads="model", context="ctx")
    loaded = load(checkpoint, "float32", placement=placement)
    # The same shapes and settings throughout, so that two programs are compiled in all.
    settings: Any = {"max_new_tokens": NEW, "measure": True}
    prompt = [list(range(1, 60)), [7] * 40]

    def empty() -> kvjax.Cache:
        return loaded.init_cache(METHOD, capacity=128, batch=2, dtype="float32")

    done = generate(loaded.model, empty(), prompt, chunk=64, **settings)
    assert np.all(done.attended > 0)
    blocks = list(stream(loaded.model, empty(), prompt, chunk=64, block=5, **settings))
    assert len(blocks) == 3
    np.testing.assert_array_equal(np.concatenate(blocks, axis=1), done.tokens)
    kvjax.save(saves, done.cache)
    more = decode(loaded.model, kvjax.restore(read, done.cache), done.logits, **settings)
    return {
        "tokens": done.tokens.tolist(),
        "more": more.tokens.tolist(),
        "devices": jax.device_count(),
    }


if __name__ == "__main__":
    checkpoint, saves, read, *more = sys.argv[1:]
    text = None
    if more:
        text = command(checkpoint, "--mesh", "data=2,model=2,ctx=2", "--distributed")
    else:
        join_processes()
    found = {"text": text, **work(checkpoint, saves, read)}
    Path(f"{saves}.{os.environ['JAX_PROCESS_ID']}.json").write_text(json.dumps(found))
