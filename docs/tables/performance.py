"""Figures inside of sentences of docs/performance.md and docs/real_models.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from docs.tables.reading import load_file, load_rows, load_scores, method_of
from docs.tables.writing import points, short, span


def _only(rows: Iterable[dict[str, Any]], **where: Any) -> dict[str, Any]:
    """The last measured of the rows that have these values."""
    return [row for row in rows if all(row.get(key) == value for key, value in where.items())][
        -1
    ]


# ------------------------------------------------------------------------------------- a step


def memory_rate() -> str:
    """TB/s at which floors of an H200 are reckoned."""
    return f"{load_file('scaling')['constants']['memory_bytes_us'] / 1e6:.1f}"


def fastest_read() -> str:
    """TB/s at which the fastest step of attention read its bytes."""
    rate = load_file("scaling")["constants"]["memory_bytes_us"] / 1e6
    return f"{max(row['floor_us'] / row['us'] for row in load_rows('decode_step')) * rate:.1f}"


def launches(*methods: str) -> str:
    """Kernels of a step at batch 1, without those that many layers share."""
    where = {"implementation": "default", "length": 131072, "batch": 1}
    rows = [_only(load_rows("decode_step"), method=method, **where) for method in methods]
    found = [int(row["kernels"]) for row in rows]
    return span(min(found), max(found))


def cudnn_on_h100(length: int) -> str:
    """Microseconds of cuDNN in the runs of methods that were measured on an H100."""
    rows = (row for row in load_rows("compared") if "H100" in row["device"])
    return f"{_only(rows, method='cudnn', length=length)['us']:.0f}"


# ---------------------------------------------------------------------------------- many steps


def _whole(**where: Any) -> dict[str, Any]:
    """A row of whole steps of the 8B shape."""
    return _only(load_rows("end_to_end"), status="ok", **where)


def history_gb() -> str:
    """GB of a history of 131072 tokens."""
    return f"{_history() / 1e9:.0f}"


def history_seconds(gb_a_second: float) -> str:
    """Seconds in which a bus moves a history of 131072 tokens."""
    return short(_history() / 1e9 / gb_a_second)


def _history() -> float:
    found = _whole(cache="full", length=131072, batch=1)
    return float(found["cache_bytes_device"])


def weights_gb() -> str:
    """GB of the weights that each step reads."""
    return f"{_whole(cache='full', length=131072, batch=1)['weight_bytes'] / 1e9:.0f}"


def weights_ms() -> str:
    """Milliseconds in which an H200 reads the weights."""
    weights = _whole(cache="full", length=131072, batch=1)["weight_bytes"]
    return f"{weights / load_file('scaling')['constants']['memory_bytes_us'] / 1e3:.1f}"


def memory_limit(cache: str, length: int, digits: int) -> str:
    """GB of the device that jax had where the largest batch of a cache was sought."""
    found = _whole(cache=cache, length=length, largest_batch=True)
    return f"{found['bytes_limit'] / 1e9:.{digits}f}"


def equal_queries() -> str:
    """The hit rate of a hot set where the queries of all steps are equal."""
    return short(_only(load_rows("host_batch"), steady=1.0)["hit_rate"], 3)


def hit_rate(size: str) -> str:
    """The share of Quest's pages that a hot set has while a published model writes."""
    found = _only(load_rows("hit_rates_qwen"), method="quest", along="answer")
    return short(found[size])


# -------------------------------------------------------------------------------- many requests


def _served(part: str, **where: Any) -> dict[str, Any]:
    return _only(load_rows("serving"), part=part, **where)


def times_batches() -> str:
    """How many times as fast as fixed batches an engine of several capacities is, whole."""
    found = [
        _served("sizes", method="full", layers=layers, slots=slots)["tokens_per_second"]
        / _served("batches", method="full", layers=layers)["tokens_per_second"]
        for layers, slots in ((32, 16), (4, 19))
    ]
    return f"{min(found):.1f}"


def busy_share() -> str:
    """Per cent of the rate of its loop alone that an engine has while all slots are busy."""
    (found,) = [row for row in load_rows("serving") if "busy_share" in row]
    return points(found["busy_share"])


def times_stored_once() -> str:
    """How many times as fast as fixed batches an engine is that stores each prompt once."""
    once, batches = (_served(part)["tokens_per_second"] for part in ("shared", "groups"))
    return f"{once / batches:.1f}"


def rollout(method: str, rows: int) -> str:
    """Tokens a second of rows that decode together after 32768 tokens."""
    return f"{_served('rollout', method=method, slots=rows)['tokens_per_second']:.0f}"


# -------------------------------------------------------------------------------------- quality

DROPPING = (
    "streaming_llm",
    "logevict",
    "h2o",
    "tova",
    "snapkv",
    "pyramidkv",
    "adakv",
    "raas",
    "razorattention",
    "duoattention",
)


def least_of_keeping() -> str:
    """The least share of needles that a method finds at a budget of 256, if it keeps all."""
    (scores,) = load_scores("eval_decoded").values()
    found = [
        score["mean"]
        for cache, score in scores.items()
        if method_of(cache) not in DROPPING and not cache.endswith("@64")
    ]
    return short(min(found))


def selecting_loss(which: Callable[[list[float]], float]) -> str:
    """Per cent of perplexity that selections of single tokens lose at 11 % of the context."""
    rows = load_rows("perplexity_equal")
    own = ("exact", "fier", "pariskv")
    return points(which([row["ratio"] - 1 for row in rows if method_of(row["cache"]) in own]))


def method_losses(methods: str) -> list[float]:
    """What methods lose of perplexity at a budget of 113 tokens."""
    rows = [row for row in load_rows("perplexity_methods") if row["budget"] == 113]
    return [row["ratio"] - 1 for row in rows if method_of(row["cache"]) in methods.split()]


def single_tokens_loss() -> str:
    """Per cent within which methods of single tokens are of full attention."""
    return points(max(method_losses("pariskv pqcache exact fier")))


def pages_loss() -> str:
    """Per cent that methods of pages, and by sampling, lose."""
    lost = method_losses("arkvale magicpig quest freekv shadowkv")
    return span(100 * min(lost), 100 * max(lost))


def two_bits_loss(file: str) -> str:
    """Points of GSM8K that two bits lose."""
    (scores,) = load_scores(file).values()
    lost = [scores["full"]["mean"] - scores[cache]["mean"] for cache in ("logquant", "kivi")]
    return span(100 * min(lost), 100 * max(lost))


def sparse_seconds(method: str) -> str:
    """Seconds to read a prompt of 131072 tokens with a sparse prompt, or without."""
    (row,) = [
        row
        for row in load_rows("ttft_sparse")
        if (row["method"], row["what"]) == (method, "prompt")
    ]
    return f"{row['seconds']:.1f}"


def _sparse_answer(what: str, share: float) -> dict[str, Any]:
    """What a published model did after 32768 tokens, by the share of blocks that it read."""
    (row,) = [
        row
        for row in load_rows("sparse_prompt")
        if row["model"].startswith("Qwen")
        and (row["what"], row["share"], row["tokens"]) == (what, share, 32768)
    ]
    return row


def sparse_needle(share: float) -> str:
    """Seconds to read a prompt with one of eight needles."""
    return short(_sparse_answer("needles, one of 8", share)["seconds"])


def sparse_loss(share: float) -> str:
    """Nats of a token of the text after the prompt."""
    return f"{_sparse_answer('text', share)['loss']:.2f}"


def served(design: str, requests: int) -> str:
    """How many times as fast as fixed batches a design of the engine is, by the model of it."""
    (row,) = [
        row
        for row in load_rows("serving_model")
        if (row["design"], row["requests"]) == (design, requests)
    ]
    return f"{row['ratio']:.2f}"


VALUES: dict[str, Callable[[], str]] = {
    "memory_rate": memory_rate,
    "fastest_read": fastest_read,
    "launches_dense": partial(launches, "full", "logquant"),
    "launches_fier": partial(launches, "fier"),
    "launches_quest": partial(launches, "quest"),
    "launches_pariskv": partial(launches, "pariskv"),
    "cudnn_32k_h100": partial(cudnn_on_h100, 32768),
    "cudnn_128k_h100": partial(cudnn_on_h100, 131072),
    "history_gb": history_gb,
    "history_seconds": partial(history_seconds, 50),
    "weights_gb": weights_gb,
    "weights_ms": weights_ms,
    "memory_limit": partial(memory_limit, "full", 131072, 1),
    "memory_limit_freekv": partial(memory_limit, "freekv", 131072, 0),
    "equal_queries": equal_queries,
    "hit_rate_2": partial(hit_rate, "2 x"),
    "hit_rate_4": partial(hit_rate, "4 x"),
    "sparse_tenth": partial(sparse_seconds, "full|sparse:0.1"),
    "sparse_twentieth": partial(sparse_seconds, "full|sparse:0.05"),
    "without_sparse": partial(sparse_seconds, "full"),
    "sparse_qwen": partial(sparse_needle, 0.1),
    "exact_qwen": partial(sparse_needle, 1.0),
    "sparse_loss": partial(sparse_loss, 0.1),
    "exact_loss": partial(sparse_loss, 1.0),
    "times_batches": times_batches,
    "busy_share": busy_share,
    "times_stored_once": times_stored_once,
    "rollout_full": partial(rollout, "full", 8),
    "rollout_fier": partial(rollout, "fier:budget=1024", 8),
    "rollout_full_six": partial(rollout, "full", 6),
    "rollout_einsum": partial(rollout, "einsum", 6),
    "served_few": partial(served, "sizes", 64),
    "served_many": partial(served, "sizes", 256),
    "served_three_few": partial(served, "three, chunks", 64),
    "served_three_many": partial(served, "three, chunks", 256),
    "served_ride_few": partial(served, "three, chunks, together, ride", 64),
    "served_ride_many": partial(served, "three, chunks, together, ride", 256),
    "served_bound_few": partial(served, "bound", 64),
    "served_bound_many": partial(served, "bound", 256),
    "least_of_keeping": least_of_keeping,
    "least_selecting_loss": partial(selecting_loss, min),
    "largest_selecting_loss": partial(selecting_loss, max),
    "single_tokens_loss": single_tokens_loss,
    "pages_loss": pages_loss,
    "two_bits_loss": partial(two_bits_loss, "eval_qwen_gsm8k"),
    "two_bits_loss_shots": partial(two_bits_loss, "eval_qwen_gsm8k_shots_all"),
}
