"""The tables of docs/scaling.md, and the figures in its sentences: TPOT on several GPUs as
measured and as predicted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from docs.tables.reading import load_file, load_rows
from docs.tables.writing import markdown, points, short

SPLITS = {"model=2": "heads 2", "model=4": "heads 4", "ctx=2": "tokens 2", "ctx=4": "tokens 4",
          "model=2+ctx=2": "heads 2, tokens 2", "data=4": "rows 4"}  # fmt: skip


def cells() -> str:
    """Milliseconds of a step on several GPUs as measured, and in brackets as predicted from one
    GPU and the links.
    """
    times: dict[Any, dict[str, str]] = {}
    for row in load_file("scaling")["cells"]:
        size = f"{row['tokens']} x {row['rows']}"
        shape = row["model"].removeprefix("llama-3.1-").upper()
        line = times.setdefault((f"{shape}, {row['layers']}", row["method"], size), {})
        line["one GPU"] = "" if row["one_gpu_ms"] is None else f"{row['one_gpu_ms']:.2f}"
        line[SPLITS[row["placement"]]] = f"{row['measured_ms']:.2f} ({row['predicted_ms']:.2f})"
    names = ("one GPU", *SPLITS.values())
    body = [
        [shape, f"`{method}`", size, *(line.get(n, "") for n in names)]
        for (shape, method, size), line in times.items()
    ]
    return markdown(("shape, layers", "cache", "tokens x rows", *names), body)


WAYS = {"none": "one GPU", "model=2": "heads", "ctx=2": "tokens, exact",
        "ctx=2+share": "tokens, by share"}  # fmt: skip


def shares() -> str:
    """Milliseconds of a step on two H200s by how tokens over them are selected; in brackets what
    was predicted before, if anything was.
    """
    before = {
        (row["length"], row["batch"], row["method"], row["placement"]): row["predicted_ms"]
        for row in load_file("scaling")["four"]
        if row["measured_ms"] is not None
    }
    times: dict[Any, dict[str, float]] = {}
    for row in load_rows("devices"):
        if (
            "H200" not in row["device"]
            or row["placement"] not in WAYS
            or "tpot_ms_min" not in row
        ):
            continue
        size = row["length"], row["batch"], row["method"]
        times.setdefault(size, {})[row["placement"]] = row["tpot_ms_min"]
    body = []
    for (tokens, rows, method), found in sorted(times.items()):
        if list(found) == ["none"]:
            continue  # of a size that two GPUs were not given
        share = found.get("ctx=2+share")
        ratio = "" if share is None or "none" not in found else short(share / found["none"])
        cells = []
        for name in WAYS:
            predicted = before.get((tokens, rows, method, name))
            bracket = "" if predicted is None else f" ({predicted:.2f})"
            cells.append(f"{found[name]:.2f}{bracket}" if name in found else "")
        body.append([f"`{method}`", f"{tokens} x {rows}", *cells, ratio])
    return markdown(("cache", "tokens x rows", *WAYS.values(), "by share, of one GPU"), body)


OVER_FOUR = {"model=4": "heads 4", "ctx=4": "tokens 4", "ctx=4+share": "tokens 4, by share",
             "model=2+ctx=2": "heads 2, tokens 2", "model=2+ctx=2+share": "the same, by share"}  # fmt: skip


def _four() -> list[dict[str, Any]]:
    """Steps over four H200s that were measured."""
    return [
        row
        for row in load_file("scaling")["four"]
        if row["placement"] in OVER_FOUR and row["measured_ms"] is not None
    ]


def four() -> str:
    """Milliseconds of a step on four H200s as measured, and in brackets as predicted before."""
    times: dict[Any, dict[str, str]] = {}
    for row in _four():
        size = f"{row['length']} x {row['batch']}"
        shape = row["shape"].removeprefix("llama-3.1-").upper()
        line = times.setdefault((f"{shape}, {row['layers']}", row["method"], size), {})
        line["one GPU"] = "" if row["one_gpu_ms"] is None else f"{row['one_gpu_ms']:.2f}"
        measured = f"{row['measured_ms']:.2f} ({row['predicted_ms']:.2f})"
        line[OVER_FOUR[row["placement"]]] = measured
    names = ("one GPU", *OVER_FOUR.values())
    body = [
        [shape, f"`{method}`", size, *(line.get(name, "") for name in names)]
        for (shape, method, size), line in times.items()
    ]
    return markdown(("shape, layers", "cache", "tokens x rows", *names), body)


ROUNDS_OVER = {
    "none": "one GPU",
    "ctx=2": "tokens 2",
    "ctx=2+share": "tokens 2, by share",
    "ctx=4+share": "tokens 4, by share",
}


def rounds() -> str:
    """Milliseconds of the steps of a round over H200s, and its speed over full attention where
    each drafted token is right with .90 or .95.
    """
    rows = [
        row
        for row in load_rows("devices")
        if row["part"] == "drafts" and row["method"] != "full"
    ]
    body = []
    for row in sorted(
        rows,
        key=lambda row: (
            row["length"],
            row["batch"],
            row["placement"] != "none",
            row["placement"],
        ),
    ):
        method, placement = row["method"], row["placement"]
        full = _full_step(row["length"], row["batch"], placement.removesuffix("+share"))
        draft, verification = row["draft_ms"], row["verify_5_ms"]
        speeds = (_times_full(full, draft, verification, right) for right in (0.9, 0.95))
        body.append(
            [
                f"`{method}`",
                f"{row['length']} x {row['batch']}",
                ROUNDS_OVER[placement],
                *(f"{time:.2f}" for time in (full, draft, verification)),
                *(f"{speed:.2f}" for speed in speeds),
            ]
        )
    header = (
        "cache",
        "tokens x rows",
        "placement",
        "full attention",
        "a draft",
        "verification of 5",
    )
    return markdown((*header, "times full, .90", ".95"), body)  # fmt: skip


def _full_step(length: int, batch: int, placement: str) -> float:
    """Milliseconds of a step of `full` over H200s as those of a round, or its TPOT."""
    own = {
        row["part"]: row
        for row in load_rows("devices")
        if (row["device"], row["method"], row["placement"], row["length"], row["batch"])
        == ("NVIDIA H200", "full", placement, length, batch)
    }
    return own["drafts"]["step_ms"] if "drafts" in own else own["times"]["tpot_ms"]


def _times_full(full: float, draft: float, verification: float, right: float) -> float:
    """The speed of rounds of four drafted tokens over full attention's."""
    tokens = sum(right**n for n in range(5))
    return tokens * full / (4 * draft + verification)


FORMS = {"before": "as it is", "graph": "exchanges in the graph"}
BLOCK = 32  # steps of a call that benchmarks/step_trace.py times
SPENT = ("products_us", "attention_us", "scores_us", "selection_us", "rest_us")


def by_kind() -> str:
    """Microseconds of a step by kind of kernel, means over the GPUs; of exchanges and of idle
    time from the least of a GPU to the most.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for row in load_rows("step_trace"):
        found.setdefault(row["label"], []).append(row)
    body = []
    for label, form in FORMS.items():
        if label not in found:
            continue
        gpus = found[label]
        means = (sum(gpu[name] for gpu in gpus) / len(gpus) for name in SPENT)
        spread = (_from_to([gpu[name] for gpu in gpus]) for name in ("exchanges_us", "idle_us"))
        step = f"{gpus[0]['tpot_ms']:.2f}"
        one = f"{gpus[0]['call_of_one_ms']:.1f}"
        further = f"{_further_step(label):.2f}"
        body.append([form, step, one, further, *(f"{us:.0f}" for us in means), *spread])
    header = ("program", "a step, ms", "a call of one step, ms", "a further step, ms", "products", "attention",
              "scores", "selection", "other kernels", "exchanges", "no kernel")  # fmt: skip
    return markdown(header, body)


CALLS = {"apart": "read one by one", "loop": "one report", "alone": "without a loop"}


def calls() -> str:
    """Milliseconds of a step and of calls that emit one token, by form of the call."""
    found: dict[Any, dict[str, dict[str, Any]]] = {}
    for row in load_rows("calls"):
        key = tuple(row[name] for name in ("method", "placement", "length", "batch"))
        found.setdefault(key, {})[row["form"]] = row
    body = []
    for (method, placement, length, batch), forms in found.items():
        times = [f"{forms[form]['call_of_one_ms']:.2f}" for form in CALLS]
        body.append(
            [
                f"`{method}`",
                f"{length} x {batch}",
                WAYS[placement],
                *(f"{forms[form]['step_ms']:.2f}" for form in ("apart", "loop")),
                *times,
            ]
        )
    header = ("cache", "tokens x rows", "over", "a step of 32, read one by one", "one report")
    return markdown(
        (*header, *(f"a call of one token, {form}" for form in CALLS.values())), body
    )


def call_beside(form: str) -> str:
    """Milliseconds of a call of one token beside a step, from the least cache to the most."""
    rows = [row for row in load_rows("calls") if row["form"] == form]
    return _range_ms([row["call_of_one_ms"] - row["step_ms"] for row in rows])


def call_part(form: str, part: str) -> str:
    """Milliseconds of a part of a call of one token, from the least cache to the most."""
    return _range_ms([row[part] for row in load_rows("calls") if row["form"] == form])


def _range_ms(times: list[float]) -> str:
    return f"{min(times):.1f} to {max(times):.1f}"


def saved_a_step(placement: str) -> str:
    """Milliseconds that one report saves of a step, of 32 in a call."""
    before, now = (
        row["call_of_one_ms"]
        for form in ("apart", "loop")
        for row in load_rows("calls")
        if (row["form"], row["method"], row["placement"]) == (form, "fier", placement)
    )
    return short((before - now) / BLOCK)


def _step_of(label: str) -> dict[str, Any]:
    return next(row for row in load_rows("step_trace") if row["label"] == label)


def _further_step(label: str) -> float:
    """Milliseconds of a step beyond the first of a call."""
    row = _step_of(label)
    return float(BLOCK * row["tpot_ms"] - row["call_of_one_ms"]) / (BLOCK - 1)


def starting_ms(label: str) -> str:
    """Milliseconds that a call of the loop takes beside its steps."""
    return f"{_step_of(label)['call_of_one_ms'] - _further_step(label):.0f}"


def exchanging_ms(label: str) -> str:
    """Milliseconds of the exchanges of a step on the GPU that waits least, which comes last."""
    own = [row["exchanges_us"] for row in load_rows("step_trace") if row["label"] == label]
    return f"{min(own) / 1e3:.1f}"


def computing_ms() -> str:
    """Milliseconds of a step in kernels that are no exchanges, the mean over the GPUs."""
    rows = [row for row in load_rows("step_trace") if row["label"] == "before"]
    return f"{sum(row[name] for row in rows for name in SPENT) / len(rows) / 1e3:.1f}"


def traced_of_one_gpu(label: str) -> str:
    """A step by share over four H200s as traced, over that of one in the same run."""
    traced = _step_of(label)
    (one,) = [
        row["tpot_ms_min"]
        for row in load_rows("devices")
        if (row["device"], row["part"], row["placement"], row["layers"])
        == (traced["device"], "times", "none", traced["layers"])
        and all(row[name] == traced[name] for name in ("method", "length", "batch", "budget"))
    ]
    return short(traced["tpot_ms"] / one)


def _from_to(numbers: list[float]) -> str:
    low = f"{min(numbers):.0f}"
    high = f"{max(numbers):.0f}"
    return low if low == high else f"{low} to {high}"


def of_one_gpu(method: str, placement: str) -> str:
    """A step over four H200s at a million tokens of one row, over that of one."""
    (row,) = [
        row
        for row in _four()
        if (row["method"], row["placement"], row["length"], row["batch"])
        == (method, placement, 1 << 20, 1)
    ]
    return short(row["measured_ms"] / row["one_gpu_ms"])


def off(method: str, placement: str, rows: int) -> str:
    """Per cent that a step at a million tokens a row takes longer than predicted."""
    (row,) = [
        row
        for row in _four()
        if (row["method"], row["placement"], row["length"], row["batch"])
        == (method, placement, 1 << 20, rows)
    ]
    return str(row["off_percent"])


NAMED = (("fier", "model=4", 1), ("pariskv", "model=4", 1), ("fier", "ctx=4", 4))


def off_others() -> str:
    """The most per cent that a step over four H200s is off, but for those of NAMED."""
    named = {(method, placement, 1 << 20, rows) for method, placement, rows in NAMED}
    left = [
        row
        for row in _four()
        if (row["method"], row["placement"], row["length"], row["batch"]) not in named
    ]
    return str(max(abs(row["off_percent"]) for row in left))


def by_share_ms(*parts: str) -> str:
    """Milliseconds of parts of the step of `fier` by share over four H200s."""
    found = load_file("scaling")["fier_by_share_ms"]
    return f"{sum(found[part] for part in parts):.1f}"


def drafted(length: int, batch: int, right: float) -> str:
    """The speed of rounds of `fier` by share over that of full attention on four H200s."""
    (row,) = [
        row
        for row in load_rows("devices")
        if row["part"] == "drafts"
        and (row["placement"], row["length"], row["batch"]) == ("ctx=4+share", length, batch)
    ]
    full = _full_step(length, batch, "ctx=4")
    return f"{_times_full(full, row['draft_ms'], row['verify_5_ms'], right):.1f}"


def share_quality() -> str:
    """What a selection by share keeps of an exact one: mass, accepted drafts and needles."""
    found: dict[Any, dict[Any, Any]] = {}
    for row in load_rows("shares"):
        key = tuple(row[n] for n in ("model", "method", "budget", "length", "devices"))
        measured = found.setdefault(key, {})
        number = {"mass": "mass", "drafts": "accepted", "needles": "score"}[row["part"]]
        measured[row["part"], row["selection"]] = row[number]
    header = [
        "model",
        "cache",
        "budget",
        "tokens",
        "devices",
        "mass, exact",
        "by share",
        "kept",
    ]
    header += ["drafts, exact", "by share", "needles, exact", "by share"]
    body = []
    for (model, method, budget, length, devices), seen in found.items():
        both = [seen.get(("mass", way)) for way in ("exact", "share")]
        kept = "" if None in both else short(both[1] / both[0], 3)
        cells = [f"`{model}`", f"`{method}`", budget, length, devices, *map(_known, both), kept]
        for part in ("drafts", "needles"):
            cells += [_known(seen.get((part, way))) for way in ("exact", "share")]
        body.append([str(cell) for cell in cells])
    return markdown(header, body)


def kept(model: str, method: str, devices: int) -> str:
    """The mass of a selection by share over that of an exact one."""
    mass = {
        row["selection"]: row["mass"]
        for row in load_rows("shares")
        if (row["part"], row["model"], row["method"], row["devices"])
        == ("mass", model, method, devices)
    }
    return short(mass["share"] / mass["exact"], 3)


def _known(number: float | None) -> str:
    if number is None:
        return ""
    return short(number) if number <= 1 else f"{number:.2f}"


def links() -> str:
    """Microseconds of a collective by the bytes of a device."""
    found: dict[Any, dict[int, float]] = {}
    for row in load_rows("devices"):
        if row["part"] == "links":
            card = row["device"].split()[1]  # of "NVIDIA H200"
            own = found.setdefault((row["method"], card, row["devices"]), {})
            own[row["bytes"]] = row["us"]
    sizes = sorted({size for own in found.values() for size in own})
    body = [
        [f"{kind}, {n} {card}s", *(f"{own[size]:.0f}" for size in sizes)]
        for (kind, card, n), own in sorted(found.items())
    ]
    return markdown(("bytes", *(str(size) for size in sizes)), body)


def command_devices() -> str:
    """The commands that measured the 8 layers of the 8B shape over four GPUs, and predicted."""
    placements, layers = ("model=4", "ctx=4"), 8
    sizes: dict[str, dict[str, None]] = {}  # in order, by method
    for row in load_rows("devices"):
        of_four = row["placement"] in placements or row["placement"] == "none"
        if row["part"] == "times" and row["layers"] == layers and of_four:
            own = sizes.setdefault(row["method"], {})
            own[f"{row['length']}x{row['batch']}"] = None
    most = max(sizes.values(), key=len)
    methods = [method for method, own in sizes.items() if len(own) == len(most)]
    return (
        "```console\n"
        "$ export JAX_COMPILATION_CACHE_DIR=/tmp/programs\n"
        f"$ python benchmarks/devices.py --no-check --links --ahead 24 --layers {layers} "
        f"--methods {','.join(methods)} \\\n"
        f"    --placements {','.join(placements)} --sizes {','.join(most)}\n"
        "$ python benchmarks/scaling.py\n"
        "```\n"
    )


def prompts() -> str:
    """Seconds until the logits after a prompt, by placement."""
    found = {
        row["placement"]: row["prompt_ms"] / 1e3
        for row in load_rows("devices")
        if row["part"] == "prompt"
    }
    return markdown(("one GPU", *(SPLITS[name] for name in found if name != "none")),
                    [[f"{time:.2f}" for time in found.values()]])  # fmt: skip


def scaling() -> str:
    header = ("model", "tokens a row", "GPUs", "rows", "cache `full`, GB", "traffic `full`, ms", "TPOT `full`, ms",
              "traffic `fier`, ms", "TPOT `fier`, ms")  # fmt: skip

    def cells(row: dict[str, Any]) -> list[str]:
        times = []
        for method in ("full", "fier"):
            time = row[f"{method}_tpot_ms"]
            times += [
                f"{row['traffic_ms'] + row[f'{method}_context_ms']:.2f}",
                "does not fit" if time is None else time,
            ]
        return [
            row["model"],
            *(str(row[n]) for n in ("tokens", "gpus", "rows", "full_cache_gb")),
            *map(str, times),
        ]

    return markdown(header, map(cells, load_rows("scaling")))


# ----------------------------------------------------------------------- figures in sentences

PLAIN = "logquant:key_axis=token"


def _cells(method: str, placement: str) -> list[dict[str, Any]]:
    """Steps over several GPUs of shapes that were measured on one, too."""
    found = load_file("scaling")["cells"]
    own = [c for c in found if (c["method"], c["placement"]) == (method, placement)]
    return [cell for cell in own if cell["one_gpu_ms"] is not None]


def linear(tokens: int, rows: int) -> str:
    """The share of linear speed that `full` with heads over four GPUs reaches, where a step has
    so many tokens in so many rows; the least, of several sizes.
    """
    own = [c for c in _cells("full", "model=4") if (c["tokens"], c["rows"]) == (tokens, rows)]
    return short(min(cell["share_of_linear"] for cell in own))


def from_a_million() -> str:
    """The same from a million tokens in all rows on."""
    own = [c for c in _cells("full", "model=4") if c["tokens"] * c["rows"] >= 1 << 20]
    return short(min(cell["share_of_linear"] for cell in own))


def longer_on_two() -> str:
    """Per cent that `fier` takes longer with the tokens of one row over two GPUs than on one."""
    (cell,) = [c for c in _cells("fier", "ctx=2") if (c["tokens"], c["rows"]) == (131072, 1)]
    return points(cell["measured_ms"] / cell["one_gpu_ms"] - 1)


def crossing(gpus: str) -> str:
    """Thousands of tokens in all rows from which `fier` is faster than `full`, with the tokens
    over GPUs: between measured steps of one row and of eight.
    """
    return f"{round(load_file('scaling')['crossing'][gpus], -4) // 1000}"


def _times(method: str, placement: str) -> dict[str, Any]:
    """Steps of a cache as measured after 131072 tokens, of one row if there are several."""
    rows = [
        row
        for row in load_rows("devices")
        if row["part"] == "times"
        and (row["method"], row["placement"], row["length"]) == (method, placement, 131072)
    ]
    return min(rows, key=lambda row: row["batch"])


def fastest(method: str, placement: str) -> str:
    """Milliseconds of a step, the fastest of the blocks, as in the table."""
    return f"{_times(method, placement)['tpot_ms_min']:.2f}"


def device_gb(placement: str, kind: str) -> str:
    """GB of a device that holds a part of the 70B shape."""
    (row,) = [
        row
        for row in load_rows("devices")
        if row["part"] == "times"
        and (row["layers"], row["method"], row["placement"]) == (80, "full", placement)
    ]
    return f"{row[kind] / 1e9:.0f}"


def slower_on_64() -> str:
    """How many times as long a step of `fier` takes on 64 GPUs as on 8, after a million tokens."""
    eight, many = (
        row["fier_tpot_ms"]
        for gpus in (8, 64)
        for row in load_rows("scaling")
        if (row["model"], row["tokens"], row["rows"], row["gpus"])
        == ("Llama-3.1-8B", 1 << 20, 1, gpus)
    )
    return f"{many / eight:.1f}"


def constant(name: str, *, at: int | None = None, scale: float = 1, digits: int = 0) -> str:
    """A constant of the prediction."""
    found = load_file("scaling")["constants"][name]
    number = (found if at is None else found[at]) / scale
    return short(number, digits) if digits else f"{number:.0f}"


VALUES: dict[str, Callable[[], str]] = {
    "linear_from_a_million": from_a_million,
    "linear_262144": partial(linear, 131072, 2),
    "linear_131072": partial(linear, 131072, 1),
    "longer_on_two": longer_on_two,
    "crossing_two": partial(crossing, "2"),
    "crossing_four": partial(crossing, "4"),
    "freekv_on_one": partial(fastest, "freekv", "none"),
    "freekv_by_heads": partial(fastest, "freekv", "model=4"),
    "freekv_by_tokens": partial(fastest, "freekv", "ctx=4"),
    "freekv_by_both": partial(fastest, "freekv", "model=2+ctx=2"),
    "logquant_by_token": partial(fastest, PLAIN, "none"),
    "logquant_by_token_four": partial(fastest, PLAIN, "ctx=4"),
    "device_by_heads": partial(device_gb, "model=4", "used_bytes"),
    "weights_by_heads": partial(device_gb, "model=4", "weight_bytes"),
    "device_by_tokens": partial(device_gb, "model=2+ctx=2", "used_bytes"),
    "weights_by_tokens": partial(device_gb, "model=2+ctx=2", "weight_bytes"),
    "slower_on_64": slower_on_64,
    "fier_by_share_of_one": partial(of_one_gpu, "fier", "ctx=4+share"),
    "quest_by_share_of_one": partial(of_one_gpu, "quest", "ctx=4+share"),
    "pariskv_by_share_of_one": partial(of_one_gpu, "pariskv", "ctx=4+share"),
    "quest_kept": partial(kept, "SmolLM2-135M-Instruct", "quest", 4),
    "traced_of_one_gpu": partial(traced_of_one_gpu, "before"),
    "traced_in_graph_of_one_gpu": partial(traced_of_one_gpu, "graph"),
    "starting_ms": partial(starting_ms, "before"),
    "starting_in_graph_ms": partial(starting_ms, "graph"),
    "call_before_ms": partial(call_beside, "apart"),
    "call_alone_ms": partial(call_beside, "alone"),
    "reads_before_ms": partial(call_part, "apart", "read_ms"),
    "read_ms": partial(call_part, "loop", "read_ms"),
    "alone_returns_ms": partial(call_part, "alone", "returns_ms"),
    "saved_a_step_ms": partial(saved_a_step, "ctx=2+share"),
    "exchanging_ms": partial(exchanging_ms, "before"),
    "computing_ms": computing_ms,
    "full_by_tokens_of_one": partial(of_one_gpu, "full", "ctx=4"),
    "fier_by_heads_of_one": partial(of_one_gpu, "fier", "model=4"),
    "fier_layers_ms": partial(by_share_ms, "layers"),
    "fier_exchanges_ms": partial(by_share_ms, "traffic", "selection"),
    "off_fier_by_heads": partial(off, *NAMED[0]),
    "off_pariskv_by_heads": partial(off, *NAMED[1]),
    "off_fier_of_four_rows": partial(off, *NAMED[2]),
    "off_others": off_others,
    "drafted_half_million": partial(drafted, 524288, 1, 0.9),
    "drafted_four_rows": partial(drafted, 1 << 20, 4, 0.9),
    "step_us": partial(constant, "step_us"),
    "selection_us": partial(constant, "selection_us", at=0),
    "selection_ns": partial(constant, "selection_us", at=1, digits=2),
    "nvlink_gb": partial(constant, "nvlink_bytes_us", scale=1000),
    "network_gb": partial(constant, "network_bytes_us", scale=1000),
    "between_us": partial(constant, "between_us"),
}
