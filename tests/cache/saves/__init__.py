"""Saves that earlier versions wrote, one of each kind of policy, and how they were written.

    python -m tests.cache.saves --tree DIR [NAME ...]

writes the files of this folder by the library of another checkout. A save that is here stays as
it is: a later version must restore it. Each file is a zip with the save of one layer's cache
after a prompt, and the outputs of the steps that followed.
"""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FOLDER = Path(__file__).parent
SIZES = {"batch": 1, "q_heads": 2, "kv_heads": 1, "head_dim": 16, "capacity": 64}
PROMPT = 37
STEPS = 4

KINDS = {
    "full": "full",
    "fier": "fier:budget=16,group=8,chunk=16,dense_layers=0,dense_capacity=0",
    "codes": "fier:budget=16,group=8,chunk=16,dense_layers=0,dense_capacity=0,store=turbo4",
    "pariskv": "pariskv:budget=16,sink=2,local=4,chunk=16,dense_layers=0,dense_capacity=0",
    "freekv": "freekv:budget=24,page=4,sink=4,local=4,dense_layers=0",
    "hot_set": "quest:budget=24,page=8,dense_layers=0,store=host+16",
    "float8": "fier:budget=16,group=8,chunk=16,dense_layers=0,store=float8",
    "logquant": "logquant:window=6,group=16",
    "turboquant": "turboquant:sink=2,local=8,chunk=8,dense_layers=0",
    "streaming_llm": "streaming_llm:budget=16,rope_theta=10000.0",
    "h2o": "h2o:budget=16",
    "tova": "tova:budget=16",
    "exact": "exact:budget=16,chunk=16,dense_layers=0",
    "evict": "evict:budget=16",
    "logevict": "logevict:budget=16",
    "trigonometric": "evict:budget=16,rule=triattention,rope_theta=10000.0",
    "arkvale": "arkvale:budget=24,page=4,sink=4,local=4,per=layer,dense_layers=0",
    "magicpig": "magicpig:budget=32,bits=3,tables=32,sink=2,local=4,chunk=16,dense_layers=0,dense_capacity=0",
    "pqcache": "pqcache:budget=16,bits=2,learn=16,sink=2,local=4",
    "shadowkv": "shadowkv:budget=24,rank=8,page=4,outliers=1,learn=16,sink=2,local=4,host=no",
    "mikv": "mikv:budget=16,group=16,chunk=16",
    "raas": "raas:budget=16,prompt=40,page=4",
    "adakv": "adakv:budget=16,window=4",
    "razorattention": "razorattention:budget=16",
}


def empty(kv: Any, kind: str) -> Any:
    """An empty cache of one layer."""
    spec = kv.CacheSpec(**SIZES, dtype=jnp.float32)
    return kv.init_layer(kv.presets.parse(KINDS[kind]).rest, spec)


def tokens() -> Any:
    """q, k and v of the prompt and of the steps after it, the same on every version of NumPy."""
    state = np.random.RandomState(0)
    return [
        state.standard_normal((1, PROMPT + STEPS, heads, SIZES["head_dim"])).astype(np.float32)
        for heads in (SIZES["q_heads"], SIZES["kv_heads"], SIZES["kv_heads"])
    ]


def go_on(kv: Any, cache: Any) -> np.ndarray:
    """f32[STEPS, N, D]: outputs of the steps after the prompt."""
    attention = jax.jit(kv.attention)
    outputs = []
    for i in range(PROMPT, PROMPT + STEPS):
        out, cache = attention(cache, *(x[:, i : i + 1] for x in tokens()))
        outputs.append(np.asarray(out)[0, 0])
    return np.stack(outputs)


def write(kv: Any, kind: str, scratch: Path) -> None:
    """Writes the file of one kind."""
    _, cache = jax.jit(kv.attention)(empty(kv, kind), *(x[:, :PROMPT] for x in tokens()))
    kv.save(scratch / "save", cache)
    np.save(scratch / "outputs.npy", go_on(kv, cache))
    shutil.rmtree(scratch / "save" / ".lock", ignore_errors=True)
    with zipfile.ZipFile(FOLDER / f"{kind}.zip", "w", zipfile.ZIP_DEFLATED) as file:
        for path in sorted(scratch.rglob("*")):
            if path.is_file():
                file.write(path, path.relative_to(scratch))
