"""amass-kv: a step of its method by its own kernels, as its backend for vLLM calls them.

A step scores each page of 16 tokens by a summary, selects pages, and attends to them. The
backend's defaults are the score "clse" with summaries in 4 bits and heads combined by "nrm";
"quad" is the score that its configuration recommends for speed. Both select a fixed budget here.
What a step of the backend does once for all layers, or in vLLM (deriving counts of pages, writing
the new token), is left out. Its kernels are compiled by nvcc when they are first called.

Without a GPU the same calls go to its kernels in Triton, in Triton's interpreter
(`TRITON_INTERPRET=1`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .cases import SELECTED, STEP, Case, require, row

LIBRARY = "amass-kv"
PAGE, SINK_PAGES, WINDOW_PAGES = 16, 1, 1
SPLIT = 128  # programs that share a head's pages, as its backend sets them


@dataclass
class Layers:
    """Layers of a paged cache with their summaries."""

    state: Any  # amass.selection.QuadState
    caches: Any  # bf16[layers, blocks, 2, PAGE, K, D]
    table: Any  # i32[B, pages] blocks of a row's pages
    lengths: Any  # i32[B]
    q: Any  # bf16[B, N, D]
    out: Any  # bf16[B, N, D]

    @property
    def batch(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True)
class Verbs:
    """The three calls of a step."""

    score: Callable[..., None]
    select: Callable[..., None]
    attend: Callable[..., None]


def rows(case: Case) -> Iterator[dict[str, Any]]:
    for score in ("clse", "quad"):
        yield from step(case, score)


def step(case: Case, score: str) -> Iterator[dict[str, Any]]:
    from amass.attention import ResidentVSource

    from .torch_clock import timed

    verbs = by_cuda(score) if _on_gpu() else by_triton(score)
    summaries = case.batch * case.length * case.pair_bytes * 0.034  # as its README counts them
    layers = case.layers(case.selected_bytes + summaries)
    given = filled(case, layers, score)
    sources = [ResidentVSource(cache) for cache in given.caches]
    scale = case.head_dim**-0.5

    def attend(layer: int) -> None:
        verbs.attend(
            given.q,
            given.caches[layer],
            given.table,
            given.lengths,
            given.state,
            given.out,
            sources[layer],
            scale=scale,
        )

    def run(layer: int) -> None:
        verbs.score(given.state, layer, given.q, given.table, given.lengths, case.batch, scale)
        verbs.select(given.state, case.batch)
        attend(layer)

    errors = checked(given, score, run, scale)
    took = timed(case, run, layers)
    setting = f"{score}, rank 2, 4-bit, nrm; {case.budget // PAGE} pages of {PAGE}"
    common: dict[str, Any] = {
        "layers": layers,
        "setting": setting,
        "beside": ("torch", "triton"),
    }
    calls = f"{score}_score_cuda, topb_select_cuda, sparse_paged_decode_batched_cuda"
    yield row(case, STEP, LIBRARY, f"amass {score}", calls, took, error=max(errors), **common)
    if score == "clse":
        yield row(
            case,
            SELECTED,
            LIBRARY,
            f"amass, pages of {PAGE}",
            "sparse_paged_decode_batched_cuda",
            timed(case, attend, layers),
            error=errors[1],
            **common,
        )


def filled(case: Case, layers: int, score: str) -> Layers:
    """Random keys and values in blocks in random order, and their summaries."""
    import torch
    from amass.attention import ensure_stage_b_buffers
    from amass.selection import QuadState, derive_page_params, quad_build_refresh

    from .torch_clock import device

    pages = case.length // PAGE
    chosen = case.budget // PAGE - SINK_PAGES - WINDOW_PAGES
    state = QuadState(
        device(),
        num_layers=layers,
        num_blocks=case.batch * pages,
        n_kv=case.kv_heads,
        G=case.group,
        head_dim=case.head_dim,
        page=PAGE,
        max_reqs=case.batch,
        max_pages=pages,
        budget=(chosen - 0.5) / (pages - SINK_PAGES - WINDOW_PAGES),  # which it rounds up
        sink_pages=SINK_PAGES,
        window_pages=WINDOW_PAGES,
        v_bits=4,
        combine="nrm",
        coords="lse" if score == "clse" else "none",
    )
    state.D, state.scale = case.head_dim, case.head_dim**-0.5
    ensure_stage_b_buffers(state, device(), SPLIT)
    shape = (layers, case.batch * pages, 2, PAGE, case.kv_heads, case.head_dim)
    # Triton's interpreter multiplies matrices of bfloat16 wrongly.
    dtype = torch.bfloat16 if _on_gpu() else torch.float16
    caches = torch.randn(shape, device=device(), dtype=dtype)
    blocks = torch.randperm(case.batch * pages, device=device())
    table = blocks.reshape(case.batch, pages).to(torch.int32)
    lengths = torch.full((case.batch,), case.length, device=device(), dtype=torch.int32)
    for layer in range(layers):
        quad_build_refresh(state, layer, caches[layer][:, 0], table, lengths, case.batch)
    derive_page_params(state, lengths, case.batch)
    query = (case.batch, case.q_heads, case.head_dim)
    q = torch.randn(query, device=device(), dtype=dtype)
    return Layers(state, caches, table, lengths, q, torch.zeros_like(q))


def checked(
    given: Layers, score: str, run: Callable[[int], None], scale: float
) -> tuple[float, float]:
    """How far the scores are from those of its reference in Triton, and the output of the first
    row from attention in float32 to the pages that were selected.
    """
    import torch

    from .torch_clock import attention, distance

    state = given.state
    by_triton(score).score(state, 0, given.q, given.table, given.lengths, given.batch, scale)
    scored = int(state.n_sel_hi[0])
    want = state.score[..., :scored].clone()
    run(0)
    error = distance(state.score[..., :scored], want)
    require(error, 2e-2, f"amass, scores of {score}")

    K, group = state.n_kv, state.G
    outs = []
    for head in range(K):
        count = int(state.page_cnt[0, head])
        pages = state.page_table[0, head, :count].long()
        read = given.caches[0][given.table[0, pages].long()]  # [count, 2, PAGE, K, D]
        k, v = (read[:, i, :, head].reshape(count * PAGE, 1, -1) for i in range(2))
        outs.append(attention(given.q[0, head * group : (head + 1) * group], k, v))
    attended = distance(given.out[0], torch.cat(outs))
    return error, require(attended, 1e-2, f"amass, attention of {score}")


def by_cuda(score: str) -> Verbs:
    from amass.attention.decode_cuda import sparse_paged_decode_batched_cuda
    from amass.selection.quad_score_cuda import clse_score_cuda, quad_score_cuda
    from amass.selection.select_cuda import topb_select_cuda

    scored = {"clse": clse_score_cuda, "quad": quad_score_cuda}[score]
    return Verbs(scored, topb_select_cuda, sparse_paged_decode_batched_cuda)


def by_triton(score: str) -> Verbs:
    from amass.attention import sparse_paged_decode_batched
    from amass.selection import clse_score, quad_score, topb_select

    return Verbs(
        {"clse": clse_score, "quad": quad_score}[score],
        topb_select,
        sparse_paged_decode_batched,
    )


def _on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
