"""Times on docs/performance.md: decode steps, kernels, whole models, prompts, and batches that
fill the memory.
"""

from __future__ import annotations

from typing import Any

from docs.tables.reading import RESULTS, load_file, load_rows
from docs.tables.writing import markdown, short
from kvjax.kernels_pallas.score import score_pages
from kvjax.kernels_pallas.select import select_4bit
from kvjax.presets import REGISTRY

STEP_METHODS = ("cudnn", "full", "fier", "quest", "pariskv", "logquant")
CACHES = {"cudnn": "full attention by cuDNN"} | {
    name: f"`{name}`"
    for name in ("full", "fier", "quest", "pariskv", "freekv", "freekv:tau=-1", "logquant")
}
ONE_CALL = "floor: one cuDNN call"


def default_steps() -> dict[tuple[int, int, str], dict[str, Any]]:
    """Length, batch and method -> decode step of a layer by the implementation that runs by
    default.
    """
    rows = (row for row in load_rows("decode_step") if row["implementation"] == "default")
    return {(row["length"], row["batch"], row["method"]): row for row in rows}


def seconds_to_first_token() -> dict[tuple[str, str, int], float]:
    """Method, prompt or turn, and tokens -> seconds."""
    return {
        (row["method"], row["what"], row["tokens"]): row["seconds"] for row in load_rows("ttft")
    }


def steps() -> str:
    found, rows = default_steps(), []
    for length, batch in sorted({key[:2] for key in found}):
        cells = [f"{length} x {batch}"]
        for method in STEP_METHODS:
            row = found[length, batch, method]
            times = "" if method == "cudnn" else f", {row['times_faster_than_cudnn']:.2f}x"
            cells.append(f"{row['us']:.1f} ({row['floor_us']:.1f}){times}")
        rows.append(cells)
    return markdown(
        ["tokens x rows", "cuDNN", *(f"`{name}`" for name in STEP_METHODS[1:])], rows
    )


def compared() -> str:
    """Decode steps of methods that papers compare with: time, launches, and the floor of their
    bytes.
    """
    by_device = sorted(
        load_rows("compared"), key=lambda row: row["device"]
    )  # of two rows that of the H200 counts
    found = {(row["method"], row["length"]): row for row in by_device}
    lengths = sorted({length for _, length in found})
    rows = []
    for method in sorted(
        {method: None for method, _ in found}, key=lambda method: method != "cudnn"
    ):
        cells = []
        for length in lengths:
            row = found.get((method, length))
            times = None if row is None else row["times_faster_than_cudnn"]
            other = " (H100)" if row is not None and "H100" in row["device"] else ""
            cells += [
                "" if row is None else f"{row['us']:.0f}{other}",
                "" if times is None else f"{times:.2f}x",
            ]
        last = found[method, lengths[-1]]
        name = "full, cuDNN" if method == "cudnn" else f"`{method}`"
        rows.append([name, *cells, f"{last['kernels']:.0f}", f"{last['floor_us']:.0f}"])
    head = [part for length in lengths for part in (f"{length} tokens, us", "against cuDNN")]
    return markdown(["cache", *head, "launches", f"floor at {lengths[-1]}, us"], rows)


BY_HAND = {"select": "select", "attend": "attend to all", "held": "attend to as many"}


def steps_in_plain_jax() -> str:
    """Steps without kernels over the same by hand, of every preset."""
    found = {(row["method"], row["backend"], row["length"]): row for row in load_rows("plain")}
    lengths, rows = sorted({length for _, backend, length in found if backend == "cpu"}), []
    for name in REGISTRY:
        on_cpu, on_gpu = (
            [found[name, "cpu", n] for n in lengths],
            found.get((name, "gpu", lengths[-1])),
        )
        cells = (
            ["", ""] if on_gpu is None else [f"{on_gpu['ratio']:.2f}", f"{on_gpu['us']:.0f}"]
        )
        if on_gpu is not None and (fetched := on_gpu.get("fetch_by_hand_us")):
            cells[0] += f" ({on_gpu['us'] / fetched:.2f})"
        cells[1] += (
            " (all tokens)" if on_gpu is not None and on_gpu["policy"] == "Short" else ""
        )
        rows.append(
            [
                f"`{name}`",
                BY_HAND[on_cpu[0]["by_hand"]],
                *(f"{row['ratio']:.2f}" for row in on_cpu),
                *cells,
            ]
        )
    columns = [
        *(f"CPU, {n} tokens" for n in lengths),
        f"H100, {lengths[-1]} tokens",
        "us there",
    ]
    return markdown(["cache", "by hand", *columns], rows)


KERNELS = {
    "score_1bit": "score all keys by 1 bit",
    "select_1bit": "score by 1 bit, reduce over the group, select 2048",
    "score_pages": "score all pages of 16 tokens by their boxes",
    "select_pages": "score pages and 16 pending pages, reduce over the group, select 126",
    "top_k_grouped": "reduce scores over the group, select 2048",
    "top_k": "select 2048",
    "attend_zones": "attend to 2048 selected and recent tokens",
    "attend_slots": "attend to 2048 selected tokens",
    "attend_span": "attend to all",
    "attend_quantized": "attend to all, stored in 2 bits",
    "collide": "ParisKV's votes for all keys",
    "most_voted": "the 13108 keys with most votes",
    "rerank": "score 6554 candidates by 4 bits",
    "select_4bit": "score 13108 candidates by 4 bits, select 1916",
    "put_token": "write the key and value of one token",
    "host_rows": "read 2 MiB of pinned host memory",
    "host_append": "write 8 x 32 rows to pinned host memory",
}

# Kernels whose default block sizes are not those of the benchmark's first entry.
DEFAULTS: dict[str, Any] = {
    "score_pages": score_pages.Config(),
    "select_4bit": select_4bit.config_for(8, 13108, 256),
}


def time_of(file: dict[str, Any], config: Any) -> float:
    """The time of a kernel's first shape with the block sizes of `config`, which a file labels
    by the fields that it names: "config: blocks x warpgroups". Fields that came later are not
    in its labels."""
    names = file["what"].partition("config: ")[2].partition(";")[0].split(" x ")
    return file["rows"][0]["all"]["x".join(str(getattr(config, name)) for name in names)]


def kernels() -> str:
    others = {
        "plain_score_pages",
        "host_rows_footprint",
        "kernels_h100",
        "attend_key_blocks",  # that of a prompt
        "heads_of_256",  # in a table of its own
    }
    files = {
        path.stem for path in RESULTS.glob("*.json") if '"kernel": ' in path.read_text()
    } - others
    if files != set(KERNELS):
        raise ValueError(
            f"KERNELS and benchmarks/results disagree about {sorted(files ^ set(KERNELS))}"
        )
    rows = []
    for name, what in KERNELS.items():
        file = load_file(name)
        row = file["rows"][0]
        us, floor = (
            time_of(file, DEFAULTS[name]) if name in DEFAULTS else row["kernel"],
            row["floor"],
        )
        rows.append([f"`{name}`: {what}", *(f"{x:.1f}" for x in (us, floor, row["xla"]))])
    return markdown(
        ["operation", "kernel, us", "floor of its bytes, us", "plain JAX, us"], rows
    )


def first_tokens() -> str:
    found = seconds_to_first_token()
    columns = [("prompt", 65536), ("prompt", 131072), ("turn", 32768), ("turn", 131072)]
    rows = []
    for method in dict.fromkeys(method for method, *_ in found):
        cells = (found.get((method, *column)) for column in columns)
        shown = "one cuDNN call" if method == ONE_CALL else f"`{method}`"
        rows.append(
            [shown, *("" if seconds is None else f"{seconds:.2f}" for seconds in cells)]
        )
    return markdown(
        [
            "cache",
            "prompt of 65536",
            "prompt of 131072",
            "1024 more after 32768",
            "1024 more after 131072",
        ],
        rows,
    )


# Of a process: its row's work and programs, the number of it, and how the table calls that.
FIRST_ANSWERS = (
    ("answer", "cold", "first_seconds", "8B, empty folder: s to the first text"),
    ("answer", "warm", "first_seconds", "8B, filled folder: s to the first text"),
    ("answer", "warm", "cpu_seconds", "the same: CPU seconds to the end"),
    ("lengths", None, "seconds", "8B, a third length of prompt: s"),
    ("job", "cold", "cpu_seconds", "README's command, empty folder: CPU seconds"),
    ("job", "warm", "cpu_seconds", "README's command, filled folder: CPU seconds"),
)


def first_answers() -> str:
    """Processes of this state and of an earlier one, in turns; ranges where several ran."""
    states = ("kvjax at e2f12fd", "kvjax")
    found = {
        (row["by"], row["work"], row["programs"]): row
        for row in load_rows("first_answer")
        if "runs" in row
    }
    rows = []
    for work, programs, number, words in FIRST_ANSWERS:
        cells = [words]
        for state in states:
            row = found[state, work, programs]
            runs = [run[number] for run in row["runs"]]
            several = f" ({min(runs):.2f} to {max(runs):.2f})" if len(runs) > 1 else ""
            cells.append(f"{row[number]:.2f}{several}")
        rows.append(cells)
    return markdown(["process", "at e2f12fd", "now"], rows)


def million() -> str:
    """A prompt of a million tokens: its rate, the whole of it at that rate, and a token after
    it.
    """
    rows = []
    for row in load_rows("million"):
        rate, whole = f"{row['tflops']:.0f}", f"{row['prompt_seconds_at_rate']:.0f}"
        cells = str(row["length"]), str(row["chunk"]), rate, whole, f"{row['tpot_ms']:.2f}"
        rows.append([f"`{row['method']}`", *cells])
    return markdown(
        ["cache", "tokens", "chunk", "TFLOP/s", "s at that rate", "ms a token after it"], rows
    )


def indexing() -> str:
    rows = []
    for row in load_rows("prefill"):
        if row["method"] != "full":
            shares = (f"{100 * row[name]:+.1f} %" for name in ("added", "seal_added"))
            rows.append([f"`{row['method']}`", str(row["length"]), *shares])
    return markdown(
        ["cache", "tokens", "added to a prompt", "added to a token by flushes"], rows
    )


def tokens() -> str:
    """Time per output token of a whole model."""
    measured = [row for row in load_rows("end_to_end") if not row.get("largest_batch")]
    took = {
        (row["cache"], row["batch"], row["length"]): f"{row['tpot_ms']:.2f}" for row in measured
    }
    sizes = sorted({key[1:] for key in took}, key=lambda size: size[::-1])
    rows = [
        [shown, *(took.get((cache, *size), "") for size in sizes)]
        for cache, shown in CACHES.items()
    ]
    return markdown(["cache", *(f"{batch} x {length}" for batch, length in sizes)], rows)


def coded_steps() -> str:
    """Steps of `fier` over bf16 and over codes: a layer's attention, a model's token, and the
    bytes of a row.
    """
    layers = {
        (row["length"], row["batch"], row["method"]): row["us"]
        for row in load_rows("turbo_step")
    }
    rows = []
    for row in load_rows("turbo_end_to_end"):
        size = f"{row['cache_bytes_device'] / row['batch'] / 1e9:.2f}"
        us = layers.get((row["length"], row["batch"], row["cache"]))
        took = "" if us is None else f"{us:.0f}", f"{row['tpot_ms']:.2f}"
        rows.append([f"{row['length']} x {row['batch']}", f"`{row['cache']}`", *took, size])
    return markdown(
        ["tokens x rows", "cache", "a layer's attention, us", "a token, ms", "GB a row"],
        sorted(rows),
    )


def mixtures() -> str:
    """Steps of mixtures of experts, beside the bytes that they must read."""
    rows = [
        [
            row["shape"],
            f"`{row['method']}`",
            *(f"{row[key]:.2f}" for key in ("ms", "floor_ms", "times_floor")),
        ]
        for row in load_rows("moe_steps")
    ]
    return markdown(["shape", "cache", "a step, ms", "floor, ms", "times the floor"], rows)


def largest_batches() -> str:
    found: dict[str, dict[int, list[str]]] = {}
    for row in load_rows("end_to_end"):
        if row.get("largest_batch"):
            cells = [str(row["batch"]), f"{row['tokens_per_second']:.0f}"]
            found.setdefault(row["cache"], {})[row["length"]] = cells
    rows = []
    for cache in (name for name in CACHES if name in found):
        rows.append(
            [
                CACHES[cache],
                *(cell for n in (32768, 131072) for cell in found[cache].get(n, ["", ""])),
            ]
        )
    header = ["cache", "rows of 32768", "tokens a second", "rows of 131072", "tokens a second"]
    return markdown(header, rows)


def serving() -> str:
    """Tokens per second of many requests, by engines and by fixed batches of the same memory."""
    names = {
        "batches": "fixed batches",
        "engine": "engine",
        "sizes": "engine, several capacities",
        "groups": "fixed batches",
        "copied": "engine, prompts copied",
        "shared": "engine, prompts stored once",
    }
    rows = []
    for row in sorted(
        load_rows("serving"),
        key=lambda row: (-row["layers"], row["requests"], row["method"] != "full"),
    ):
        if row["part"] not in names or (
            row["part"] == "engine" and row["prompt_tokens"] < 40000
        ):
            continue
        load = (
            f"{row['requests'] // 8} x 8"
            if row["part"] in ("groups", "copied", "shared")
            else str(row["requests"])
        )
        busy = row.get("busy_tokens_per_second")
        sizes = load, str(row["layers"]), str(row["slots"]), f"{row['answered']:.0f}"
        rates = f"{row['tokens_per_second']:.0f}", f"{busy:.0f}" if busy else ""
        rows.append([f"`{row['method']}`, {names[row['part']]}", *sizes, *rates])
    return markdown(
        [
            "cache",
            "requests",
            "layers",
            "rows",
            "answered",
            "tokens a second",
            "while all are busy",
        ],
        rows,
    )


def while_reading() -> str:
    """Longest milliseconds of each call of an engine that reads a long prompt."""
    calls = {
        "submit": "`submit`",
        "cancel": "`cancel`",
        "stats": "`stats`",
        "row": "`row`",
        "between_blocks": "between two blocks of a streamed answer",
        "step": "`step`",
    }
    measured = sorted(load_rows("while_reading"), key=lambda row: not row["streams"])

    def cell(row: dict[str, Any], name: str) -> str:
        seconds = row.get(name)
        return "" if seconds is None else f"{1000 * seconds:.1f}"

    rows = [
        [what, *(cell(row, f"longest_{call}") for row in measured)]
        for call, what in calls.items()
    ]
    first = "first token of a prompt of 8 tokens"
    rows.append([first, *(cell(row, "short_first_longest") for row in measured)])
    bound = "twice the time of a chunk and a block alone"
    rows.append([bound, *(cell(row, "bound") for row in measured)])
    kinds = ["a request streams" if row["streams"] else "none streams" for row in measured]
    return markdown(["longest milliseconds", *kinds], rows)


def host_batches() -> str:
    """Tokens per second of more rows than device memory holds, by the hit rate of the hot set."""
    rows = []
    for row in load_rows("host_batch"):
        layers, hot = (str(row[name]) for name in ("layers_on_host", "hot"))
        rate, speed = short(row["hit_rate"], 3), f"{row['tokens_per_second']:.0f}"
        stored = {"HostOffload": "bf16", "HostFloat8": "float8"}[row["store"]]
        rows.append([f"`{row['method']}`", str(row["rows"]), layers, stored, hot, rate, speed])
    head = [
        "cache",
        "rows",
        "layers on the host",
        "stored there in",
        "hot set",
        "hit rate",
        "tokens a second",
    ]
    return markdown(head, rows)
