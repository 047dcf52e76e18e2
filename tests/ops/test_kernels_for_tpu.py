"""Kernels for TPUs against their references, in Pallas' interpreter."""

from collections.abc import Callable
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from kvjax import ops
from kvjax.kernels_pallas.tpu import attend_groups, attend_pages, score_1bit, score_pages
from kvjax.numerics import platforms
from kvjax.numerics.partial import Logits
from kvjax.numerics.quant import OneBit, quantize_1bit
from kvjax.numerics.selection import Selection
from kvjax.ops.op import _forms
from kvjax.ops.partitioned import on_one_device

STRICT = pltpu.InterpretParams(uninitialized_memory="nan")
LOGITS = Logits(0.1)


def keys_of(kind: str, rows: tuple[int, int], tokens: int, D: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    normal = rng.normal(size=(*rows, tokens, D)).astype(np.float32)
    sizes = np.exp(4 * rng.normal(size=D)).astype(np.float32)
    return {
        "random": normal,
        "equal": np.full_like(normal, 0.5),
        "far from zero": normal + 100,
        "channels of many sizes": normal * sizes,
        "huge": normal * 1e15,
        "tiny": normal * 1e-15,
    }[kind]


def queries(*shape: int) -> np.ndarray:
    """Of numpy, as all inputs here: each operation of jax on an array is a program."""
    return np.random.default_rng(1).normal(size=shape).astype(jnp.bfloat16)


def quantized(keys: np.ndarray) -> OneBit:
    return jax.jit(quantize_1bit, static_argnums=1)(keys, 32)


@jax.jit
def reference(q: jax.Array, keys: OneBit) -> jax.Array:
    return ops.score_1bit(q, keys, logits=Logits(1.0), implementation="xla")


@lru_cache
def score_by_bits(strict: bool) -> Callable[..., jax.Array]:
    return jax.jit(partial(score_1bit.score_1bit, interpret=STRICT if strict else True))


@jax.jit
def error_allowed(q: jax.Array, keys: OneBit) -> jax.Array:
    """f32[B, K, G, S]: products of query and step are rounded once to bf16, each with a factor
    of 0 or 2; sums in f32 add little."""
    step = jnp.repeat(keys.scale.astype(jnp.float32), 32, axis=2)
    zero = jnp.repeat(jnp.abs(keys.zero.astype(jnp.float32)), 32, axis=2)
    of_steps = jnp.einsum("bkgd,bksd->bkgs", jnp.abs(q).astype(jnp.float32), step)
    of_zeros = jnp.einsum("bkgd,bksd->bkgs", jnp.abs(q).astype(jnp.float32), zero)
    return 2 * 2.0**-8 * of_steps + 2.0**-18 * of_zeros


@pytest.mark.parametrize(
    ("B", "K", "G", "S", "D", "kind", "interpret"),
    [
        (1, 1, 3, 4096, 128, "random", STRICT),
        (2, 1, 5, 4096 + 128, 128, "random", True),
        (1, 1, 1, 2 * 4096 + 256, 128, "random", True),
        pytest.param(1, 1, 1, 4096, 256, "random", True, marks=pytest.mark.thorough),
        # Keys of each kind in one program.
        *(
            (1, 2, 8, 4096, 128, kind, True)
            for kind in ("channels of many sizes", "far from zero", "huge", "tiny", "equal")
        ),
    ],
)
def test_scores_equal_the_reference(B, K, G, S, D, kind, interpret) -> None:
    keys, q = quantized(keys_of(kind, (B, K), S, D)), queries(B, K, G, D)
    want = reference(q, keys)
    got = score_by_bits(interpret is STRICT)(q, *keys)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    difference = np.abs(np.asarray(got) - np.asarray(want))
    assert (difference <= error_allowed(q, keys) + 1e-30).all()


def test_each_bit_of_each_channel_counts_for_its_own_token() -> None:
    """Whole numbers, so that scores are exact: a bit in another place changes one."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 256, size=(1, 1, 4096, 16)).astype(np.uint8)
    step = rng.integers(1, 4, size=(1, 1, 128, 128)).astype(jnp.bfloat16)
    zero = rng.integers(-3, 4, size=(1, 1, 128, 128)).astype(jnp.bfloat16)
    q = rng.integers(-4, 5, size=(1, 1, 4, 128)).astype(jnp.bfloat16)
    got = score_by_bits(False)(q, bits, step, zero)
    np.testing.assert_array_equal(got, reference(q, OneBit(bits, step, zero)))


def test_slots_of_nan_leave_the_scores_of_others() -> None:
    q, keys = inputs()
    poisoned = OneBit(*(np.array(a) for a in keys))
    poisoned.bits[:, :, 70 * 32 :] = 255
    poisoned.scale[:, :, 70:] = np.nan
    poisoned.zero[:, :, 70:] = np.nan
    run = score_by_bits(False)
    got, want = np.asarray(run(q, *poisoned)), np.asarray(run(q, *keys))
    np.testing.assert_array_equal(got[..., : 70 * 32], want[..., : 70 * 32])
    assert np.isnan(got[..., 70 * 32 :]).all()


@pytest.mark.parametrize(
    ("q", "bits", "step", "why"),
    [
        ((1, 1, 4, 64), (1, 1, 4096, 8), (1, 1, 128, 64), "head sizes"),
        ((1, 1, 9, 128), (1, 1, 4096, 16), (1, 1, 128, 128), "query heads"),
        ((1, 1, 4, 128), (1, 1, 4096, 16), (1, 1, 64, 128), "groups of 32"),
        ((1, 1, 4, 128), (1, 1, 2048, 16), (1, 1, 64, 128), "4096 tokens or more"),
        ((1, 1, 4, 128), (1, 1, 4128, 16), (1, 1, 129, 128), "tiles of 128"),
    ],
)
def test_limits_are_named(q, bits, step, why) -> None:
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (
        (q, jnp.bfloat16), (bits, jnp.uint8), (step, jnp.bfloat16), (step, jnp.bfloat16)
    )]  # fmt: skip
    with pytest.raises(NotImplementedError, match=why):
        score_1bit.score_1bit(*shapes)


# -------------------------------------------------------------------------------------- pages


def boxes_of(kind: str, rows: tuple[int, int], pages: int, D: int) -> list[np.ndarray]:
    """Corners bf16[B, K, P, D] of pages of four keys each."""
    keys = keys_of(kind, rows, 4 * pages, D).reshape(*rows, pages, 4, D)
    return [a.astype(jnp.bfloat16) for a in (keys.min(axis=3), keys.max(axis=3))]


@pytest.mark.parametrize(
    ("B", "K", "G", "P", "D", "kind", "interpret"),
    [
        (1, 1, 4, 128, 128, "random", STRICT),
        (2, 1, 3, 300, 128, "random", True),
        (1, 2, 8, 2048 + 128, 128, "channels of many sizes", True),
        (1, 1, 1, 2048 + 130, 256, "far from zero", True),
        (1, 1, 5, 256, 128, "huge", True),
        (1, 1, 4, 256, 128, "tiny", True),
        (1, 1, 2, 256, 128, "equal", True),
    ],
)
def test_scores_of_pages_equal_the_reference(B, K, G, P, D, kind, interpret) -> None:
    low, high = boxes_of(kind, (B, K), P, D)
    q = queries(B, K, G, D)
    plain = partial(ops.score_pages, logits=Logits(1.0), implementation="xla")
    want = jax.jit(plain)(q, low, high)
    got = jax.jit(partial(score_pages.score_pages, interpret=interpret))(q, low, high)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    # Products of bf16 are exact; only the order of sums differs.
    largest = np.maximum(np.abs(low), np.abs(high)).astype(np.float32)
    sizes = np.einsum("bkgd,bkpd->bkgp", np.abs(q).astype(np.float32), largest)
    assert (np.abs(np.asarray(got) - np.asarray(want)) <= 2.0**-18 * sizes + 1e-30).all()


def test_pages_with_equal_boxes_tie() -> None:
    low, high = (np.tile(a, (1, 1, 150, 1)) for a in boxes_of("random", (1, 1), 2, 128))
    run = jax.jit(partial(score_pages.score_pages, interpret=True))
    got = np.asarray(run(queries(1, 1, 4, 128), low, high))
    np.testing.assert_array_equal(got, np.tile(got[..., :2], 150))


def test_boxes_of_nan_leave_the_scores_of_other_pages() -> None:
    corners = boxes_of("random", (1, 1), 300, 128)
    q = queries(1, 1, 4, 128)
    poisoned = [a.copy() for a in corners]
    for corner in poisoned:
        corner[:, :, 70:] = np.nan
    run = jax.jit(partial(score_pages.score_pages, interpret=True))
    got, want = np.asarray(run(q, *poisoned)), np.asarray(run(q, *corners))
    np.testing.assert_array_equal(got[..., :70], want[..., :70])
    assert np.isnan(got[..., 70:]).all()


@pytest.mark.parametrize(
    ("q", "corners", "dtype", "why"),
    [
        ((1, 1, 4, 64), (1, 1, 128, 64), jnp.bfloat16, "head sizes"),
        ((1, 1, 9, 128), (1, 1, 128, 128), jnp.bfloat16, "query heads"),
        ((1, 1, 4, 128), (1, 1, 127, 128), jnp.bfloat16, "128 pages or more"),
        ((1, 1, 4, 128), (1, 1, 128, 128), jnp.float16, "in bf16"),
    ],
)
def test_limits_of_score_pages_are_named(q, corners, dtype, why) -> None:
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape in (q, corners, corners)]
    with pytest.raises(NotImplementedError, match=why):
        score_pages.score_pages(*shapes)


PAGE = 16


def chosen(lead: tuple[int, ...], of: int, pages: int, page: int = PAGE) -> np.ndarray:
    """Slots i32[*lead, pages * page] of `pages` different pages of `of`."""
    rng = np.random.default_rng(1)
    lists = [rng.permutation(of)[:pages] for _ in range(int(np.prod(lead)))]
    first = np.array(lists).reshape(*lead, pages, 1) * page
    return (first + np.arange(page)).reshape(*lead, -1).astype(np.int32)


def attend_exactly(q, k, v, slots, valid, logits: Logits) -> tuple[np.ndarray, ...]:
    """Output and lse in f64, list by list, and the largest error that rounding weights to bf16
    allows."""
    B, K, G, _ = q.shape
    H = slots.shape[2]
    out = np.zeros((B, K, G, v.shape[3]))
    sizes = np.zeros_like(out)
    lse = np.full((B, K, G), -np.inf)
    for b, h, g in np.ndindex(B, K, G):
        own = slots[b, h, g // (G // H)][valid[b, h, g // (G // H)]]
        if own.size:
            keys, values = (np.asarray(a[b, h, own], np.float64) for a in (k, v))
            products = keys @ np.asarray(q[b, h, g], np.float64)
            scores = logits.scale * products
            if logits.cap is not None:
                scores = logits.cap * np.tanh(scores / logits.cap)
            weights = np.exp(scores - scores.max())
            lse[b, h, g] = np.log(weights.sum()) + scores.max()
            out[b, h, g] = weights @ values / weights.sum()
            sizes[b, h, g] = weights @ np.abs(values) / weights.sum()
    return out, lse, 2.0**-8 * sizes


CASES = ["random", "equal keys", "huge scores", "ragged", "one token", "none", "far apart"]


@lru_cache
def attend_by_pages(strict: bool, cap: float | None) -> Callable[..., tuple[jax.Array, ...]]:
    interpret = STRICT if strict else True
    run = partial(
        attend_pages.attend_pages, together=PAGE, scale=0.1, cap=cap, interpret=interpret
    )
    return jax.jit(run)


@pytest.mark.parametrize("strict", [False, pytest.param(True, id="strict")])
@pytest.mark.parametrize("case", CASES)
def test_attention_over_pages_is_exact(case: str, strict: bool) -> None:
    """Slots that are not valid hold NaN; a list may have any of its slots valid, or none."""
    rng = np.random.default_rng(0)
    B, K, G, H, pages = 2, 2, 4, (2 if case == "ragged" else 1), 5
    q = rng.normal(size=(B, K, G, 128)).astype(jnp.bfloat16)
    k, v = (rng.normal(size=(B, K, 12 * PAGE, size)) for size in (128, 256))
    slots = chosen((B, K, H), 12, pages)
    valid = np.ones(slots.shape, bool)
    if case == "equal keys":
        k[:] = 0.5
    if case == "huge scores":
        k *= 1e4
    if case == "ragged":
        valid = rng.random(slots.shape) < 0.6
        valid[1, 0] = False
    if case == "one token":
        valid = np.arange(slots.shape[3]) == np.array([[[3]], [[40]]])[:, :, :, None]
        valid = np.broadcast_to(valid, slots.shape)
    if case == "none":
        valid = np.zeros(slots.shape, bool)
    if case == "far apart":
        k *= np.exp(3 * rng.normal(size=(B, K, 12 * PAGE, 1)))
    for b, h in np.ndindex(B, K):
        kept = np.unique(slots[b, h][valid[b, h]])
        others = np.setdiff1d(np.arange(12 * PAGE), kept)
        k[b, h, others] = np.nan
        v[b, h, others] = np.nan
    k, v = (a.astype(jnp.bfloat16) for a in (k, v))

    logits = Logits(0.1, cap=5.0 if case == "random" else None)
    run = attend_by_pages(strict, logits.cap)
    got_out, got_lse = run(q, k, v, slots, valid)
    out, lse, allowed = attend_exactly(q, k, v, slots, valid, logits)
    np.testing.assert_allclose(got_lse, lse, rtol=1e-5, atol=1e-4)
    assert (np.abs(np.asarray(got_out) - out) <= allowed + 1e-6).all()


def test_pages_out_of_range_are_clipped_as_slots_are() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, 1, n, 128)).astype(jnp.bfloat16) for n in (4, 96, 96))
    slots = np.concatenate([np.arange(32, 48), np.arange(960, 976)]).astype(np.int32)
    slots, valid = slots.reshape(1, 1, 1, 32), np.ones((1, 1, 1, 32), bool)
    out, lse = attend_by_pages(False, None)(q, k, v, slots, valid)
    last = np.where(slots >= 96, slots - 960 + 80, slots)
    plain = partial(ops.attend_slots, logits=LOGITS, implementation="xla")
    want = jax.jit(plain)(q, k, v, Selection(last, valid))
    np.testing.assert_allclose(lse, want.lse, rtol=1e-5)
    np.testing.assert_allclose(out, want.out, atol=2e-2)


@pytest.mark.parametrize(
    ("D", "G", "S", "M", "together", "dtype", "why"),
    [
        (64, 4, 96, 32, 16, jnp.bfloat16, "head sizes"),
        (128, 9, 96, 32, 16, jnp.bfloat16, "query heads"),
        (128, 4, 96, 32, 1, jnp.bfloat16, "whole pages"),
        (128, 4, 96, 40, 16, jnp.bfloat16, "whole pages"),
        (128, 4, 100, 32, 16, jnp.bfloat16, "whole pages"),
        (128, 4, 96, 32, 16, jnp.float16, "in bf16"),
        (128, 4, 65536, 32768, 16, jnp.bfloat16, "fast memory twice"),
    ],
)
def test_limits_of_attend_pages_are_named(D, G, S, M, together, dtype, why) -> None:
    q, k, v = (jax.ShapeDtypeStruct((1, 1, n, D), dtype) for n in (G, S, S))
    slots, valid = (jax.ShapeDtypeStruct((1, 1, 1, M), dtype) for dtype in (jnp.int32, bool))
    with pytest.raises(NotImplementedError, match=why):
        attend_pages.attend_pages(q, k, v, slots, valid, together=together, scale=0.1)


GROUPS = 20  # so that the fullest list has three parts


@lru_cache
def attend_by_groups(strict: bool, cap: float | None) -> Callable[..., tuple[jax.Array, ...]]:
    interpret = STRICT if strict else True
    run = partial(attend_groups.attend_groups, scale=0.1, cap=cap, interpret=interpret)
    return jax.jit(run)


@pytest.mark.parametrize(
    ("case", "strict"),
    [
        *((case, False) for case in ("random", "equal keys", "huge scores", "ragged", "none")),
        *((case, False) for case in ("one group", "capped")),
        ("ragged", True),
    ],
)
def test_attention_over_groups_is_that_over_single_tokens(case: str, strict: bool) -> None:
    """Two lists of a KV head have tokens of their own; all others of a group hold NaN."""
    rng = np.random.default_rng(0)
    B, K, G, H, S, M = 2, 2, 4, 2, GROUPS * 128, 70
    q = rng.normal(size=(B, K, G, 128)).astype(jnp.bfloat16)
    k, v = rng.normal(size=(2, B, K, S, 128))
    slots = np.array([rng.permutation(S)[:M] for _ in range(B * K * H)])
    slots = slots.reshape(B, K, H, M).astype(np.int32)
    valid = np.ones(slots.shape, bool)
    if case == "equal keys":
        k[:] = 0.5
    if case == "huge scores":
        k *= 1e4
    if case == "ragged":  # a row with no token comes between others
        valid = rng.random(slots.shape) < 0.3
        valid[0, 1] = valid[1, 0, 1] = False
    if case == "none":
        valid[:] = False
    if case == "one group":
        slots = (np.argsort(rng.random((B, K, H, 128)), axis=3)[..., :M] + 640).astype(np.int32)
    for b, h in np.ndindex(B, K):
        others = np.setdiff1d(np.arange(S), slots[b, h][valid[b, h]])
        k[b, h, others] = v[b, h, others] = np.nan
    k, v = (a.astype(jnp.bfloat16) for a in (k, v))

    logits = Logits(0.1, cap=5.0 if case == "capped" else None)
    run = attend_by_groups(strict, logits.cap)
    got_out, got_lse = run(q, k, v, slots, valid)
    out, lse, allowed = attend_exactly(q, k, v, slots, valid, logits)
    np.testing.assert_allclose(got_lse, lse, rtol=1e-5, atol=1e-4)
    assert (np.abs(np.asarray(got_out) - out) <= 2 * allowed + 1e-6).all()


@pytest.mark.parametrize(
    ("D", "G", "S", "dtype", "why"),
    [
        (64, 4, 1024, jnp.bfloat16, "head sizes"),
        (128, 9, 1024, jnp.bfloat16, "query heads"),
        (128, 4, 1000, jnp.bfloat16, "whole groups"),
        (128, 4, 1024, jnp.float16, "in bf16"),
        (128, 4, 1 << 25, jnp.bfloat16, "groups in all"),
    ],
)
def test_limits_of_attend_groups_are_named(D, G, S, dtype, why) -> None:
    q, k = (jax.ShapeDtypeStruct((1, 1, n, D), dtype) for n in (G, S))
    slots, valid = (jax.ShapeDtypeStruct((1, 1, 1, 32), dtype) for dtype in (jnp.int32, bool))
    with pytest.raises(NotImplementedError, match=why):
        attend_groups.attend_groups(q, k, k, slots, valid, scale=0.1)


# ----------------------------------------------------------------------------------- dispatch


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process can compile for a TPU; kernels for it are interpreted."""
    monkeypatch.setattr(platforms, "reaches_tpus", lambda: True)
    run = partial(score_1bit.score_1bit, interpret=True)
    monkeypatch.setattr(score_1bit, "score_1bit", run)


def inputs() -> tuple[np.ndarray, OneBit]:
    return queries(1, 1, 4, 128), quantized(keys_of("random", (1, 1), 4096, 128))


def score(q: jax.Array, keys: OneBit) -> jax.Array:
    return ops.score_1bit(q, keys, logits=LOGITS)


def program(platform: str) -> str:
    traced = jax.jit(score).trace(*inputs())
    return traced.lower(lowering_platforms=(platform,)).as_text()


def test_only_a_program_for_a_tpu_has_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "reaches_tpus", lambda: True)
    assert "tpu_custom_call" in program("tpu")
    assert "custom_call" not in program("cpu")


def test_pages_are_scored_and_read_by_kernels_only_in_a_program_for_a_tpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platforms, "reaches_tpus", lambda: True)
    q = jax.ShapeDtypeStruct((1, 1, 4, 128), jnp.bfloat16)
    stored = jax.ShapeDtypeStruct((1, 1, 4096, 128), jnp.bfloat16)
    corners = jax.ShapeDtypeStruct((1, 1, 256, 128), jnp.bfloat16)
    slots, valid = (jax.ShapeDtypeStruct((1, 1, 1, 64), dtype) for dtype in (jnp.int32, bool))

    def text(platform: str, together: int) -> str:
        def run(q, k, v, selection, low, high):
            scores = ops.score_pages(q, low, high, logits=LOGITS)
            part = ops.attend_slots(q, k, v, selection, logits=LOGITS, together=together)
            return scores, part

        args = q, stored, stored, Selection(slots, valid), corners, corners
        return jax.jit(run).trace(*args).lower(lowering_platforms=(platform,)).as_text()

    assert text("tpu", PAGE).count("tpu_custom_call") == 2
    assert text("tpu", 1).count("tpu_custom_call") == 2
    for chip, kernels in (("TPU v5 lite", 2), ("TPU v6 lite", 1), ("TPU7x", 1)):
        device = AbstractDevice(platform="tpu", device_kind=chip, num_cores=1)
        with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
            # SparseCores gather pages and tokens.
            assert text("tpu", PAGE).count("tpu_custom_call") == kernels
            assert text("tpu", 1).count("tpu_custom_call") == kernels
    assert "custom_call" not in text("cpu", PAGE)


@pytest.mark.parametrize(
    ("chip", "implementation", "why"),
    [("TPU v5 lite", "mosaic", "never run on a chip"), ("TPU7x", "xla", "SparseCores")],
)
def test_explain_says_what_a_tpu_reads_tokens_with(
    chip: str, implementation: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    q, k = (jax.ShapeDtypeStruct((1, 1, n, 128), jnp.bfloat16) for n in (4, 4096))
    slots, valid = (jax.ShapeDtypeStruct((1, 1, 1, 64), dtype) for dtype in (jnp.int32, bool))
    device = AbstractDevice(platform="tpu", device_kind=chip, num_cores=1)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        told = ops.explain("attend_slots", q, k, k, Selection(slots, valid), logits=LOGITS)
    assert told.implementation == implementation
    assert why in told.reason


def test_a_reference_that_is_asked_for_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "reaches_tpus", lambda: True)
    with ops.use("xla"):
        assert "tpu_custom_call" not in program("tpu")


def test_the_kernel_has_the_derivative_of_the_reference_and_is_mapped(interpreted) -> None:
    q, keys = inputs()
    op = ops.OPS["score_1bit"]

    def kernel(q: jax.Array) -> jax.Array:
        static = (("logits", LOGITS),)
        return _forms.__wrapped__(op, static, False, False).on_tpu(q, keys)

    def slope(score: Callable[[jax.Array], jax.Array]) -> jax.Array:
        run = jax.grad(lambda q: score(q.astype(jnp.bfloat16)).sum())
        return jax.jit(run)(q.astype(np.float32))

    exact = partial(ops.score_1bit, keys=keys, logits=LOGITS, implementation="xla")
    np.testing.assert_allclose(slope(kernel), slope(exact), rtol=1e-2, atol=1e-2)

    several = np.stack([q, 2 * q])
    mapped, alone = jax.jit(jax.vmap(kernel))(several), jax.jit(kernel)(2 * q)
    np.testing.assert_allclose(mapped[1], alone, rtol=1e-6)


@pytest.mark.parametrize("together", [1, PAGE])
def test_kernels_that_read_a_cache_where_it_lies_are_mapped(
    together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caches of several maps stay in the main memory, too, for which jax has no rule."""
    monkeypatch.setattr(platforms, "reaches_tpus", lambda: True)
    q, k = (jax.ShapeDtypeStruct((2, 1, 1, n, 128), jnp.bfloat16) for n in (4, 1024))
    slots, valid = (jax.ShapeDtypeStruct((2, 1, 1, 1, 64), a) for a in (jnp.int32, bool))

    def run(q, k, slots, valid):
        selection = Selection(slots, valid)
        return ops.attend_slots(q, k, k, selection, logits=LOGITS, together=together)

    traced = jax.jit(jax.vmap(run)).trace(q, k, slots, valid)
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()


def test_on_one_device_keeps_the_tree_of_its_results() -> None:
    def run(x: jax.Array, more: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {"sum": x + more["y"], "x": x}

    operands = jnp.ones(3), {"y": jnp.arange(3.0)}
    got = jax.jit(partial(on_one_device, run, run))(*operands)
    jax.tree.map(np.testing.assert_array_equal, got, run(*operands))
