"""Times of reading selected tokens through a hot set, by hit rate, compared with the host store
and the device.

    python benchmarks/hot_set.py [--cases 1x131072,8x32768,48x32768] [--hits 0,50,90,100]
    [--tokens 8192]

A call makes one selection of `--select` tokens of each row and KV head resident and attends to
it. Of the tokens that a step selects, a share of `hits` is always the same, and the others are
not selected again for as many steps as the hot set could hold them. "host" reads every token
from the host; "device" has all of the history in device memory. "us" is the host's clock for a
call, the median of calls that each wait for their result; "kernels_us" is device time. Before
timing, the script compares the tokens read through the hot set with those of the host store.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from layers import (
    LAYER,
    SMALL_LAYER,
    clock,
    implementation,
    numbers,
    options,
    out_of,
    parse,
    save,
    show,
)

from kvjax import CacheSpec, Dense, HostOffload, HotSet, ops
from kvjax.numerics.partial import Logits, Span
from kvjax.numerics.selection import Selection

LOCAL = 64


def slots(step: int, slots_: int, select: int, share: float, spec: CacheSpec) -> Array:
    """i32[B, K, 1, M]: a share that every step selects, then others, new ones in each step
    while any are left.
    """
    same = round(share * select)
    others = select - same
    place = same + (step * others + np.arange(others)) % max(slots_ - same, 1)
    chosen = np.concatenate([np.arange(same), place]).astype(np.int32)
    scattered = (
        (chosen.astype(np.int64) * 40503) % slots_ if np.gcd(40503, slots_) == 1 else chosen
    )
    return jnp.broadcast_to(
        jnp.asarray(scattered, jnp.int32)[None, None, None],
        (spec.batch, spec.kv_heads, 1, select),
    )


def check(spec: CacheSpec) -> None:
    """Checks that the hot set gives the tokens of the host store, while pages are loaded and
    replaced.
    """
    spec = dataclasses.replace(spec, batch=2, capacity=256)
    host, hot = HostOffload(), HotSet(tokens=96)
    k, v = (
        jax.random.normal(jax.random.key(i), (2, spec.kv_heads, 256, spec.head_dim), spec.dtype)
        for i in range(2)
    )
    count = jnp.full(2, 256, jnp.int32)
    st_host, st = (
        jax.jit(store.append)(store.init(spec, 256), k, v, count) for store in (host, hot)
    )
    load = jax.jit(hot.load)
    for i in range(12):
        chosen = Selection(
            slots(i, 256, 48, 0.5, spec), jnp.ones((2, spec.kv_heads, 1, 48), bool)
        )
        st, loaded = load(st, chosen)
        there = ops.gather_slots(loaded.k, loaded.v, loaded.selection)
        for a, b in zip(there, jax.jit(host.gather)(st_host, chosen), strict=True):
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    reads = np.asarray(st.hot.loads)
    if not (reads > 48).all() or not (reads <= 48 + 11 * 24).all():
        raise SystemExit(f"the hot set read {reads.tolist()} tokens")


def measure(
    kind: str, spec: CacheSpec, select: int, tokens: int, hits: float, calls: int
) -> dict[str, Any]:
    B, K, D, S = spec.batch, spec.kv_heads, spec.head_dim, spec.capacity
    store: Any = {"hot": HotSet(tokens=tokens), "host": HostOffload(), "device": Dense()}[kind]
    state = store.init(spec, S)
    full = jnp.full(B, S, jnp.int32)
    if kind == "hot":
        state = dataclasses.replace(
            state, history=dataclasses.replace(state.history, count=full)
        )
    else:
        state = dataclasses.replace(state, count=full)
    q = jax.random.normal(jax.random.key(0), (B, K, spec.group, D), spec.dtype)
    zone = jnp.zeros((B, K, LOCAL, D), spec.dtype)
    recent = Span(zone, zone, jnp.zeros(B, jnp.int32), jnp.full(B, LOCAL, jnp.int32))

    def run(carry: Any, q: Array, recent: Span, all_slots: Array) -> Any:
        state, turn = carry
        at = jax.lax.dynamic_index_in_dim(all_slots, turn % all_slots.shape[0], keepdims=False)
        chosen = Selection(at, jnp.ones(at.shape, bool))
        if kind == "hot":
            out, state = store.attend_zones(
                state, q, chosen, recent, None, LOCAL, logits=Logits(0.1)
            )
        elif kind == "host":
            history = store.attend_slots(state, q, chosen, logits=Logits(0.1))
            out = ops.attend_beside(history, q, None, recent, None, logits=Logits(0.1))
        else:
            out, state = store.attend_zones(
                state, q, chosen, recent, None, LOCAL, logits=Logits(0.1)
            )
        return out, (state, turn + 1)

    turns = (
        2 * max(1, -(-tokens // max(1, select - round(hits * select)))) + 2 if hits < 1 else 2
    )
    all_slots = jnp.stack([slots(i, S, select, hits, spec) for i in range(min(turns, 24))])
    step = jax.jit(run, donate_argnums=0)
    out, carry = step((state, jnp.int32(0)), q, recent, all_slots)
    del state
    for _ in range(-(-tokens // select) + 1):  # the hot set fills
        out, carry = step(carry, q, recent, all_slots)
    before = np.asarray(carry[0].hot.loads).sum() if kind == "hot" else 0
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        out, carry = step(carry, q, recent, all_slots)
        jax.block_until_ready(out)
        times.append(1e6 * (time.perf_counter() - start))
    read = (
        (np.asarray(carry[0].hot.loads).sum() - before) / (calls * B * K)
        if kind == "hot"
        else select
    )
    took, _ = clock(step, carry, q, recent, all_slots, calls=calls)
    return {
        "kind": kind,
        "batch": B,
        "length": S,
        "select": select,
        "tokens": tokens if kind == "hot" else None,
        "hit_rate": hits if kind == "hot" else None,
        "read_from_host": 0 if kind == "device" else float(read),
        "us": statistics.median(times),
        "kernels_us": took.us if took.parts else None,
        "bus_floor_us": 0
        if kind == "device"
        else float(read) * B * K * 2 * D * spec.dtype.itemsize / 50e3,
        "parts": {name: round(us, 2) for name, us in took.parts.items()},
    }


def main(args: Sequence[str] | None = None) -> None:
    parser = options(__doc__, "hot_set.json", calls=20)
    parser.add_argument("--cases", default="1x131072,8x32768,48x32768", help="rows x tokens")
    parser.add_argument("--hits", type=numbers, default=[0, 50, 90, 100], help="per cent")
    parser.add_argument(
        "--tokens", type=numbers, default=[8192], help="of the hot set, a row and KV head"
    )
    parser.add_argument("--select", type=int, default=1984)
    parser.add_argument(
        "--implementation",
        default="default",
        help="or kernels: also those without a measurement",
    )
    given = parse(parser, args)
    shape = SMALL_LAYER if given.quick else LAYER
    what = "selected tokens read and attended in a layer, " + ", ".join(
        f"{k} {v}" for k, v in shape.items()
    )
    what += (
        f"; zeros; us: host's clock, kernels_us: device time, medians of {given.calls} calls"
    )
    key = (
        "kind",
        "batch",
        "length",
        "select",
        "tokens",
        "hit_rate",
        "implementation",
        "backend",
    )
    with implementation(given.implementation):
        check(CacheSpec(batch=2, capacity=256, **shape))
    for case in given.cases.split(","):
        batch, length = (int(part) for part in case.split("x"))
        spec = CacheSpec(batch=batch, capacity=length, **shape)
        rows = [("hot", tokens, hits / 100) for tokens in given.tokens for hits in given.hits]
        for kind, tokens, hits in (("device", 0, 1.0), ("host", 0, 1.0), *rows):
            with implementation(given.implementation):
                row = measure(
                    kind, spec, given.select, tokens or given.select, hits, given.calls
                )
            row["implementation"] = given.implementation
            show(row)
            save(out_of(given, "hot_set.json"), what, [row], key)
            gc.collect()


if __name__ == "__main__":
    main()
