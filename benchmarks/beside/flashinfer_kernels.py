"""FlashInfer: dense decode, decode over a selection as pages, and top-k.

Its kernels are compiled by nvcc when they are first called (a minute or two).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .cases import DENSE, SELECTED, TOP_K, Case, Timed, require, row

LIBRARY = "flashinfer-python"
WORKSPACE_BYTES = 256 << 20
PAGE = 16


def rows(case: Case) -> Iterator[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("flashinfer has kernels for CUDA alone")
    yield dense(case)
    yield selected(case, page=1)
    yield selected(case, page=PAGE)
    yield top_k(case)


def dense(case: Case) -> dict[str, Any]:
    """Pages in order, all heads of a row one request."""
    import torch

    from .torch_clock import attention, distance, timed

    layers, pages = case.layers(case.dense_bytes), case.length // PAGE
    shape = (layers, case.batch * pages, 2, PAGE, case.kv_heads, case.head_dim)
    cache = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(
        case.batch, case.q_heads, case.head_dim, device="cuda", dtype=torch.bfloat16
    )
    indices = torch.arange(case.batch * pages, dtype=torch.int32, device="cuda")
    wrapper = planned(
        case, indices, requests=case.batch, q_heads=case.q_heads, kv_heads=case.kv_heads
    )
    first = cache[0, :pages]  # [pages, 2, PAGE, K, D] of the first row
    k, v = (first[:, i].reshape(-1, case.kv_heads, case.head_dim) for i in range(2))
    error = distance(wrapper.run(q, cache[0])[0], attention(q[0], k, v))
    took: Timed = timed(case, lambda layer: wrapper.run(q, cache[layer]), layers)
    return row(
        case,
        DENSE,
        LIBRARY,
        "FlashInfer",
        "BatchDecodeWithPagedKVCacheWrapper.run",
        took,
        layers=layers,
        error=require(error, 1e-2, "flashinfer, dense"),
        setting=f"tensor cores, pages of {PAGE} in order",
        beside=("torch",),
    )


def selected(case: Case, *, page: int) -> dict[str, Any]:
    """Each KV head selects for itself, and a request has one page table: so each KV head is a
    request with one KV head.
    """
    import torch

    from .torch_clock import attention, distance, timed

    layers, pages = case.layers(case.selected_bytes), case.length // page
    requests, chosen = case.batch * case.kv_heads, case.budget // page
    shape = (layers, requests * pages, 2, page, 1, case.head_dim)
    cache = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(requests, case.group, case.head_dim, device="cuda", dtype=torch.bfloat16)
    # One page of each of equal parts of the request's, in random order: unique, and spread.
    part = pages // chosen
    offsets = torch.randint(part, (requests, chosen), device="cuda")
    own = (offsets + part * torch.arange(chosen, device="cuda"))[:, torch.randperm(chosen)]
    table = own + pages * torch.arange(requests, device="cuda")[:, None]
    indices = table.flatten().to(torch.int32)
    wrapper = planned(
        case, indices, requests=requests, q_heads=case.group, kv_heads=1, page=page
    )
    read = cache[0, table[0]]  # [chosen, 2, page, 1, D]
    k, v = (read[:, i].reshape(-1, 1, case.head_dim) for i in range(2))
    error = distance(wrapper.run(q, cache[0])[0], attention(q[0], k, v))
    took: Timed = timed(case, lambda layer: wrapper.run(q, cache[layer]), layers)
    return row(
        case,
        SELECTED,
        LIBRARY,
        f"FlashInfer, pages of {page}",
        "BatchDecodeWithPagedKVCacheWrapper.run",
        took,
        layers=layers,
        error=require(error, 1e-2, f"flashinfer, pages of {page}"),
        setting="tensor cores, each KV head a request",
        beside=("torch",),
    )


def planned(
    case: Case, indices: Any, *, requests: int, q_heads: int, kv_heads: int, page: int = PAGE
) -> Any:
    """A wrapper over `indices`, as many pages for each request; for use in a CUDA graph."""
    import torch
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    each = len(indices) // requests
    counts = torch.arange(requests + 1, dtype=torch.int32, device="cuda") * each
    last = torch.full((requests,), page, dtype=torch.int32, device="cuda")
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda"),
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=counts.clone(),
        paged_kv_indices_buffer=indices.clone(),
        paged_kv_last_page_len_buffer=last.clone(),
        backend="fa2",
    )
    wrapper.plan(
        counts,
        indices,
        last,
        q_heads,
        kv_heads,
        case.head_dim,
        page,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    return wrapper


def top_k(case: Case) -> dict[str, Any]:
    import flashinfer
    import torch

    from .torch_attention import wrong_slots
    from .torch_clock import timed

    rows_read = case.batch * case.kv_heads
    layers = case.layers(4.0 * rows_read * case.length)
    scores = torch.randn(layers, rows_read, case.length, device="cuda")

    def run(layer: int) -> torch.Tensor:
        return flashinfer.top_k(scores[layer], case.budget)[1]

    return row(
        case,
        TOP_K,
        LIBRARY,
        "FlashInfer",
        "flashinfer.top_k",
        timed(case, run, layers),
        layers=layers,
        error=wrong_slots(run(0), scores[0], case.budget),
        beside=("torch",),
    )
