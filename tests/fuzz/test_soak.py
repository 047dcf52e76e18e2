"""A server's day in small: slots are filled, freed, inserted and rolled back for many steps,
and nothing wears out.

One program steps four policies side by side. Every step is compared with numpy; no program is
compiled after the first requests, and no buffer stays behind.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import presets

ROWS, HEADS, KV_HEADS, SIZE, CAPACITY, CHUNK = 4, 4, 2, 16, 96, 16
# tokens that requests are made of: a prime, so that starts and strides do not repeat
POOL = 509
SPEC = kvjax.CacheSpec(
    batch=ROWS,
    q_heads=HEADS,
    kv_heads=KV_HEADS,
    head_dim=SIZE,
    capacity=CAPACITY,
    dtype="float32",
)
POLICIES: tuple[kvjax.Policy, ...] = (
    presets.fier(24, group=8, chunk=8, layers=presets.Layers(dense=0)).rest,
    presets.freekv(40, page=8, sink=8, local=8, tau=0.0, layers=presets.Layers(dense=0)).rest,
    presets.h2o(20).rest,
    kvjax.Compressed(store=kvjax.Dense(), sink=2, local=4, demote=kvjax.LogSparse(window=8)),
)
REVERSIBLE: tuple[kvjax.Policy, ...] = (
    kvjax.Full(),
    POLICIES[0],
    POLICIES[3],
)  # which take tokens back


@contextmanager
def compilations() -> Iterator[list[str]]:
    """A list that grows by one for each program that is compiled inside of the block."""
    seen: list[str] = []

    def note(event: str, _: float, **about: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(str(about))

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def _all_layers(
    cache: kvjax.Cache, q: Any, k: Any, v: Any, **settings: Any
) -> tuple[Any, Any, kvjax.Cache]:
    """Every layer takes the same tokens: (outputs [L, B, T, N, D], positions of each layer,
    cache).
    """
    cache = kvjax.flush(cache)
    made = [
        kvjax.attention_info(layer, q, k, v, flush=False, **settings) for layer in cache.layers
    ]
    outs, layers, infos = zip(*made, strict=True)
    positions = [None if info is None else info.positions for info in infos]
    return jnp.stack(outs), positions, kvjax.Cache(layers)  # type: ignore[arg-type]


def _earliest(cache: kvjax.Cache) -> Any:
    """i32[B]: the smallest length that each row can be taken back to, in all layers."""
    return jnp.max(
        jnp.stack([layer.policy.earliest(layer.state) for layer in cache.layers]), axis=0
    )  # type: ignore[attr-defined]


class Server:
    """Rows that serve one request after the other, each a run of tokens of a pool."""

    def __init__(self, policies: tuple[kvjax.Policy, ...], seed: int) -> None:
        self.policies, self.rng = policies, np.random.default_rng(seed)
        made = (
            self.rng.normal(size=(POOL, h, SIZE)).astype(np.float32)
            for h in (HEADS, KV_HEADS, KV_HEADS)
        )
        self.pool = tuple(made)
        self.step = jax.jit(_all_layers, donate_argnums=0)
        self.prefill = jax.jit(_all_layers)
        self.insert = jax.jit(kvjax.insert, donate_argnums=0)
        self.rollback = jax.jit(kvjax.rollback, donate_argnums=0)
        self.earliest = jax.jit(_earliest)
        self.reversible = all(policy.reversible for policy in policies)
        one = dataclasses.replace(SPEC, batch=1)
        self.empty = kvjax.init(list(policies), one, layers=len(policies))
        self.cache = kvjax.init(list(policies), SPEC, layers=len(policies))
        self.start = np.zeros(ROWS, int)
        self.length = np.zeros(ROWS, int)
        self.end = np.zeros(ROWS, int)  # 0: the row is free
        self.served = self.taken_back = 0

    def advance(self) -> None:
        for row in np.flatnonzero(self.length >= self.end):
            self._admit(int(row)) if self.rng.random() < 0.5 else self._free(int(row))
        active = self.end > 0
        if not active.any():
            return
        q, k, v = (a[(self.start + self.length) % POOL][:, None] for a in self.pool)
        out, positions, self.cache = self.step(self.cache, q, k, v, active=active)
        self.length += active
        out = np.asarray(out)
        for layer, read in enumerate(positions):
            self._check(out[layer, :, 0], np.asarray(read), active, self.policies[layer])
        if self.reversible and self.rng.random() < 0.3:
            self._take_back(active)

    def _take_back(self, active: np.ndarray) -> None:
        """As for a rejected draft: up to three tokens of some rows are taken back, and fed
        again.
        """
        wanted = self.length - self.rng.integers(0, 4, ROWS) * active
        kept = np.minimum(
            np.maximum(wanted, np.asarray(self.earliest(self.cache))), self.length
        )
        self.cache = self.rollback(self.cache, kept.astype(np.int32))
        self.taken_back += int(np.sum(self.length - kept))
        self.length = kept

    def _admit(self, row: int) -> None:
        """A request is read alone and takes the row."""
        tokens = int(self.rng.integers(1, CHUNK + 1))
        self.start[row], self.length[row] = self.rng.integers(POOL), tokens
        self.end[row] = self.rng.integers(tokens + 1, CAPACITY + 1)
        q, k, v = (a[(self.start[row] + np.arange(CHUNK)) % POOL][None] for a in self.pool)
        _, _, prefix = self.prefill(self.empty, q, k, v, lengths=np.array([tokens], np.int32))
        self.cache = self.insert(self.cache, prefix, np.int32(row))
        self.served += 1

    def _free(self, row: int) -> None:
        self.cache = self.insert(self.cache, self.empty, np.int32(row))
        self.length[row] = self.end[row] = 0

    def _check(
        self, out: np.ndarray, positions: np.ndarray, active: np.ndarray, policy: kvjax.Policy
    ) -> None:
        """Checks for each row and query head that `out` [B, N, D] is attention over its
        `positions` [B, K, H, M].
        """
        choices = (
            np.repeat(positions, HEADS // KV_HEADS, axis=1)
            if positions.shape[2] == 1
            else positions
        )
        choices = choices.reshape(ROWS, HEADS, -1)
        valid = choices >= 0
        assert (choices < self.length[:, None, None]).all(), policy
        assert (np.max(choices, axis=2) == (self.length - 1)[:, None])[active].all(), policy
        q = self.pool[0][(self.start + self.length - 1) % POOL]
        at = (self.start[:, None, None] + np.maximum(choices, 0)) % POOL
        heads = np.arange(HEADS)[None, :, None] // (HEADS // KV_HEADS)
        keys, values = (a[at, heads].astype(np.float64) for a in self.pool[1:])
        logits = np.where(valid, np.einsum("bnmd,bnd->bnm", keys, q) * SIZE**-0.5, -np.inf)[
            active
        ]
        weights = np.exp(logits - logits.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        want = np.einsum("bnm,bnmd->bnd", weights, values[active])
        error = np.abs(out[active] - want).max()
        assert error < 2e-5, (
            f"{policy}: differs by {error:.1e}, rows of {self.length.tolist()} tokens"
        )


@pytest.mark.parametrize(
    ("steps", "policies"),
    [
        (300, POLICIES[::2]),
        (100, REVERSIBLE[:1]),
        pytest.param(100_000, POLICIES, marks=pytest.mark.thorough),
        pytest.param(100_000, REVERSIBLE, marks=pytest.mark.thorough),
    ],
)
def test_a_server_serves_without_wear(steps: int, policies: tuple[kvjax.Policy, ...]) -> None:
    server = Server(policies, seed=steps)
    for _ in range(60):
        server.advance()
    gc.collect()
    buffers, bytes_held = len(jax.live_arrays()), sum(a.nbytes for a in jax.live_arrays())
    with compilations() as compiled:
        for _ in range(steps):
            server.advance()
    assert not compiled
    assert server.served > steps / 50
    assert server.taken_back > steps / 20 or not server.reversible
    gc.collect()
    assert len(jax.live_arrays()) == buffers
    assert sum(a.nbytes for a in jax.live_arrays()) == bytes_held
    assert np.asarray(server.cache.length).tolist() == server.length.tolist()
    kvjax.raise_on_overflow(server.cache)
