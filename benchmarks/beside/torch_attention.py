"""torch's own attention and top-k."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .cases import DENSE, TOP_K, Case, Timed, require, row

LIBRARY = "torch"


def rows(case: Case) -> Iterator[dict[str, Any]]:
    yield dense(case)
    yield top_k(case)


def dense(case: Case) -> dict[str, Any]:
    """The fastest of the backends that take the call, all tried."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    from .torch_clock import attention, device, distance, timed

    layers = case.layers(case.dense_bytes)
    shape = (layers, case.batch, case.kv_heads, case.length, case.head_dim)
    k, v = (torch.randn(shape, device=device(), dtype=torch.bfloat16) for _ in range(2))
    query = (case.batch, case.q_heads, 1, case.head_dim)
    q = torch.randn(query, device=device(), dtype=torch.bfloat16)
    want = attention(q[0, :, 0], k[0, 0].transpose(0, 1), v[0, 0].transpose(0, 1))

    def run(layer: int) -> torch.Tensor:
        return scaled_dot_product_attention(q, k[layer], v[layer], enable_gqa=True)

    best: tuple[Timed, str, float] | None = None
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        if backend == SDPBackend.MATH and best is not None:
            continue  # it expands keys and values of the group
        try:
            with sdpa_kernel(backend):
                error = require(distance(run(0)[0, :, 0], want), 1e-2, f"torch, {backend.name}")
                took = timed(case, run, layers)
        except RuntimeError:  # a backend that does not take the call
            continue
        if best is None or took.us < best[0].us:
            best = took, backend.name, error
    assert best is not None, "MATH takes every call"
    took, backend_name, error = best
    return row(
        case,
        DENSE,
        LIBRARY,
        "torch SDPA",
        "torch.nn.functional.scaled_dot_product_attention(enable_gqa=True)",
        took,
        layers=layers,
        error=error,
        setting=f"the fastest backend, {backend_name}",
    )


def top_k(case: Case) -> dict[str, Any]:
    import torch

    from .torch_clock import device, timed

    rows_read = case.batch * case.kv_heads
    layers = case.layers(4.0 * rows_read * case.length)
    scores = torch.randn(layers, rows_read, case.length, device=device())

    def run(layer: int) -> torch.Tensor:
        return torch.topk(scores[layer], case.budget, sorted=False).indices

    return row(
        case,
        TOP_K,
        LIBRARY,
        "torch.topk",
        "torch.topk(sorted=False)",
        timed(case, run, layers),
        layers=layers,
        error=wrong_slots(run(0), scores[0], case.budget),
    )


def wrong_slots(slots: Any, scores: Any, k: int) -> float:
    """The share of rows whose k distinct slots do not hold the k largest of scores [rows, S]."""
    import torch

    in_order = torch.sort(scores, dim=-1, descending=True).values[:, :k]
    picked = torch.gather(scores, 1, slots.long())
    same = torch.sort(picked, dim=-1, descending=True).values == in_order
    distinct = torch.sort(slots.long(), dim=-1).values.diff(dim=-1).ne(0).all(-1)
    wrong = 1 - float((same.all(-1) & distinct).float().mean())
    return require(wrong, 0.0, "top-k")
