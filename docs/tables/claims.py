"""The tables of docs/claims.md: what each paper claims, the number measured here, and the verdict.

Claims and verdicts are typed; every number of the column "here" comes from a file of results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from docs.tables.published import NEEDLES, PASS_KEYS
from docs.tables.reading import load_measured, load_results, load_rows, load_scores
from docs.tables.writing import markdown, perplexity_change, short

CLAIM = ("claim", "the paper", "here", "command, file", "verdict")


def _scores_by_budget(scores: dict[str, Any], method: str, budgets: Sequence[int]) -> str:
    return " / ".join(short(scores[f"{method}@{budget}"]["mean"]) for budget in budgets)


def _decode_steps() -> dict[tuple[str, int, int], dict[str, Any]]:
    """Cache, length and batch -> whole decode steps of a Llama-3.1-8B shape that fitted into memory."""
    rows = (row for row in load_rows("end_to_end") if row["status"] == "ok")
    return {(row["cache"], row["length"], row["batch"]): row for row in rows}


def _times_faster(method: str, length: int, batch: int) -> str:
    """TPOT of full attention by cuDNN over that of the method."""
    found = _decode_steps()
    return f"{found['cudnn', length, batch]['tpot_ms'] / found[method, length, batch]['tpot_ms']:.2f}x"


def _points_lost(score: dict[str, Any]) -> str:
    """Points of 100 below full attention on the same questions, with the standard error."""
    return f"{short(-100 * score['difference'], 1)} ± {short(100 * score['difference_stderr'], 1)}"


def _largest(method: str, length: int) -> dict[str, Any]:
    """The decode step of the largest batch that fitted."""
    rows = [row for (cache, tokens, _), row in _decode_steps().items() if (cache, tokens) == (method, length)]
    return max(rows, key=lambda row: row["batch"])


def claims_fier() -> str:
    keys = load_scores("eval_qwen")[PASS_KEYS]
    small = load_scores("eval_smollm2")["pass key at 2048, question decoded"]
    evicting = {"h2o@256": "H2O", "tova@256": "TOVA", "streaming_llm@256": "StreamingLLM"}
    groups = load_measured("measure_groups")
    recall = {case: short(mean["head_recall"]) for case, mean in groups.items()}
    sizes = [name for name in groups if name.startswith("Fier") and "," not in name]
    by_size = ", ".join(f"{name.partition('=')[2]}: {recall[name]}" for name in sizes)
    larger = load_measured("measure_groups_qwen")
    beside, found = load_measured("measure_recall"), load_measured("measure_recall_qwen")
    book = {
        (row["cache"], row["length"]): row for row in load_rows("perplexity_equal") if row["dense_layers"] in (0, None)
    }
    (qwen,) = (row for row in load_rows("perplexity_shared_qwen") if row["cache"] == "fier")
    rows = [
        [
            "Pass key by budget; Quest needs more (Table 3)",
            "10K, LLaMA3-1B, budgets 32 to 512: 63, 87, 97, 100, 100 %; Quest 36, 60, 92, 99, 99 %",
            "16K, Qwen2.5-Coder-1.5B, 64 / 128 / 256 / 512: "
            f"{_scores_by_budget(keys, 'fier', (64, 128, 256, 512))}; "
            f"Quest {_scores_by_budget(keys, 'quest', (64, 128, 256, 512))}",
            "`kvjax eval`, `eval_qwen.json`",
            "order reproduced",
        ],
        [
            "Evicting methods find no pass key (Table 3)",
            "H2O, StreamingLLM, TOVA: under 8 %",
            f"StreamingLLM, SnapKV at 1024: {short(keys['streaming_llm@1024']['mean'])}, "
            f"{short(keys['snapkv@1024']['mean'])}; SmolLM2-135M, 2K, at 256: "
            + ", ".join(f"{name} {short(small[cache]['mean'])}" for cache, name in evicting.items()),
            "the same, `eval_smollm2.json`",
            "reproduced; 1 or 2 keys of 10 lie in the window",
        ],
        [
            "Selects more of each head's best tokens than Quest (Fig. 6)",
            "by layer and head",
            f"recall of each head's own best at a budget of 256: Qwen2.5-Coder-1.5B "
            f"{short(found['fier']['head_recall'])}, Quest {short(found['quest']['head_recall'])}; the package's small "
            f"model {short(beside['fier']['head_recall'])}, {short(beside['quest']['head_recall'])}",
            "`kvjax measure`, `measure_recall_qwen.json`, `measure_recall.json`",
            "reproduced",
        ],
        [
            "Small groups select better (Table 4)",
            "groups of 32, 128 and 256 compared",
            f"recall by group {by_size}; Qwen2.5-Coder-1.5B, 4K and 16K: "
            f"{', '.join(short(larger[name]['head_recall']) for name in sizes)}, Quest "
            f"{short(larger['Quest']['head_recall'])}",
            "`benchmarks.claims --what groups`, `measure_groups.json`, `measure_groups_qwen.json`",
            "reproduced",
        ],
        [
            "The gain comes from single tokens, not from 1-bit scores (Table 4)",
            "pages by quantised scores compared",
            f"recall of single tokens {recall['Fier g=32']}, of pages of 16 by their best token "
            f"{recall['Fier g=32, pages of 16']}, Quest {recall['Quest']}",
            "the same",
            "reproduced: with pages, 1-bit scores do worse than Quest's boxes",
        ],
        [
            "11 % of the cache is enough",
            "LongBench, as good as the full cache",
            f"perplexity of a book, 11 %: Qwen2.5-Coder-1.5B, 16384 tokens {perplexity_change(qwen)}; the package's "
            f"small model, 4096 tokens {perplexity_change(book['fier', 4096])}",
            "`kvjax perplexity`, `perplexity_shared_qwen.json`, `perplexity_equal.json`",
            "reproduced as perplexity",
        ],
        [
            "Decodes faster than full attention",
            "1.2x to 1.5x up to 32K, LLaMA-2-7B, RTX 4090",
            f"against cuDNN, 32K, 1 row: {_times_faster('fier', 32768, 1)}; 8 rows: {_times_faster('fier', 32768, 8)}; "
            f"128K, 1 row: {_times_faster('fier', 131072, 1)}, a Llama-3.1-8B shape, H200",
            "`benchmarks/end_to_end.py`, `end_to_end.json`",
            "reproduced from 32K on, on another GPU; by less with 1 row of 32K",
        ],
        [
            "Times of the stages of a layer",
            "estimate 16, recall 41, attention 68 us, RTX 4090",
            "",
            "",
            "not reproducible here: needs that GPU and the released code",
        ],
        [
            "LongBench by task",
            "",
            "",
            "lm-evaluation-harness, `--tasks longbench`",
            "not reproducible here: needs the data set and a 7B model",
        ],
    ]
    return markdown(CLAIM, rows, numbers=False)


def claims_pariskv() -> str:
    small, real = load_results("measure_drift"), load_results("measure_drift_qwen")

    def ends(case: str) -> str:
        by_length = [[short(one["recall"]) for one in of[case]["by_length"].values()] for of in (small, real)]
        return " and ".join(f"{recalls[0]} to {recalls[-1]}" for recalls in by_length)

    parts, of_package = load_measured("measure_paris_smollm2"), load_measured("measure_paris")

    def recalls(of: dict[str, dict[str, Any]], *cases: str) -> list[str]:
        return [short(of[case]["recall"], 3) for case in cases]

    reranked = recalls(parts, "all reranked, no alpha-correction", "candidates 1")
    as_published = recalls(parts, "as published", "no alpha-correction", "not rotated")
    not_rotated = recalls(of_package, "as published", "not rotated")
    full, paris = _largest("full", 32768), _largest("pariskv", 32768)
    steps = _decode_steps()
    one, four = steps["pariskv", 131072, 1], steps["pariskv", 131072, 4]
    million = {row["method"]: row for row in load_rows("million") if row["length"] == 1 << 20}
    rows = [
        [
            "Recall does not fall as the text grows; with learnt centroids it does",
            "figures of the keys' drift",
            f"recall@100 while SmolLM2-135M and Qwen2.5-Coder-1.5B write 4000 tokens: ParisKV {ends('Paris')}; k-means "
            f"of the prompt {ends('k-means, prompt')}, relearnt {ends('k-means, anew')}",
            "`benchmarks.claims --what drift`, `measure_drift.json`, `measure_drift_qwen.json`",
            "reproduced in part: the centroids of the prompt fall most; on Qwen ParisKV falls too, by its votes",
        ],
        [
            "Alpha-correction raises recall",
            "by 1.5 to 2.4 points",
            f"recall@100 of SmolLM2-135M at 4096 tokens: {as_published[1]} without, {as_published[0]} with; all "
            f"reranked {reranked[0]}, {reranked[1]}",
            "`benchmarks.claims --what paris`, `measure_paris_smollm2.json`",
            "reproduced, by one point",
        ],
        [
            "Rotated keys are found better (Fig. 10)",
            "ablation of the rotation",
            f"the same: rotated {as_published[0]}, not rotated {as_published[2]}; the package's small model "
            f"{not_rotated[0]}, {not_rotated[1]}",
            "the same, `measure_paris.json`",
            "reproduced on a published model; the small one's keys do not need it",
        ],
        [
            "Recall@100 of 100K keys with a tenth of them as candidates",
            "83.8 %",
            "",
            "`benchmarks.claims --what paris`",
            "not measured yet: needs a text of 100K tokens",
        ],
        [
            "Throughput over full attention",
            "up to 2.8x",
            "32K, largest batches, against `full`: "
            f"{paris['tokens_per_second'] / full['tokens_per_second']:.1f}x; 128K, 4 rows, against cuDNN: "
            f"{_times_faster('pariskv', 131072, 4)}",
            "`benchmarks/end_to_end.py`, `end_to_end.json`",
            "reproduced",
        ],
        [
            "Milliseconds a token at 128K",
            "24.3 at 1 row, 58.9 at 8, Qwen3-8B",
            f"{one['tpot_ms']:.1f} at 1 row, {four['tpot_ms']:.1f} at 4, a Llama-3.1-8B shape of random weights, H200",
            "the same",
            "faster here, with another model and keys on the device",
        ],
        [
            "Milliseconds a token at 1M tokens",
            "49, Llama-3.1-8B",
            f"{million['pariskv']['tpot_ms']:.1f}, `full` {million['full']['tpot_ms']:.1f}, a Qwen2.5-7B shape of "
            "random weights, H200",
            "`benchmarks/million.py`, `million.json`",
            "faster here, with another model and keys on the device",
        ],
        [
            "17x and 44x faster than MagicPIG and PQCache at 1M",
            "their released code",
            "",
            "",
            "not reproducible here: needs those programs on one machine",
        ],
        [
            "LongBench v2, AIME, MATH500, GPQA",
            "as good as full attention",
            "",
            "",
            "not reproducible here: needs the data sets and 8B models",
        ],
    ]
    return markdown(CLAIM, rows, numbers=False)


def paris_parts() -> str:
    """ParisKV with one part left out or changed at a time, on live queries of a published model."""
    rows = []
    for case, mean in load_measured("measure_paris_smollm2").items():
        shares = (short(mean[name], 3) for name in ("recall", "mass", "error"))
        rows.append([case, *shares, f"{mean['attended']:.0f}", f"{mean['bytes'] / 1024:.0f}"])
    head = ("ParisKV", "recall@100", "share of attention", "error of the output", "tokens read", "KiB read")
    return markdown(head, rows)


def claims_freekv() -> str:
    (turned,) = load_measured("measure_queries").values()
    (alike,) = load_measured("measure_queries_qwen").values()
    needles, keys = (load_scores("eval_qwen")[task] for task in (NEEDLES, PASS_KEYS))
    solved = load_scores("eval_qwen_gsm8k")["gsm8k"]
    name = "freekv:sink=0,local=32,page=16"
    steps = _decode_steps()
    ahead, behind = (steps[cache, 32768, 1]["tpot_ms"] for cache in ("freekv:tau=-1", "freekv"))
    corrected = [
        ", ".join(f"{short(one['corrected_steps'][tau])} at {tau}" for tau in ("0.8", "0.9")) for one in (alike, turned)
    ]
    rows = [
        [
            "Adjacent queries are alike, so few steps are corrected",
            "43 to 52 % of steps on hard reasoning",
            f"share of corrected layers and steps by tau, on books: Qwen2.5-Coder-1.5B {corrected[0]}; the package's "
            f"small model {corrected[1]}",
            "`benchmarks.claims --what queries`, `measure_queries_qwen.json`, `measure_queries.json`",
            "reproduced on a published model, not on the small one: its queries turn",
        ],
        [
            "Accuracy near that of full attention",
            "LongBench v2 within .6 points, budget 2048",
            "16K, Qwen2.5-Coder-1.5B, 256 / 1024 / 2048: pass keys "
            f"{_scores_by_budget(keys, name, (256, 1024, 2048))}, "
            f"needles {_scores_by_budget(needles, name, (256, 1024, 2048))}; full 1.00. GSM8K, 128: "
            f"{short(solved[f'{name}@128']['mean'])}, full {short(solved['full']['mean'])}",
            "`kvjax eval`, `eval_qwen.json`, `eval_qwen_gsm8k.json`",
            "reproduced for GSM8K from 128, pass keys from 1024; needles 5 points below at 2048; not at small budgets",
        ],
        [
            "The recall overlaps with the step",
            "overlap 1.9x, layout 10.5x, double buffering 1.2x",
            f"32K, 1 row: {ahead:.1f} ms where no head waits, {behind:.1f} where all do",
            "`benchmarks/end_to_end.py`, `end_to_end.json`",
            "reproduced in part: the overlap",
        ],
        [
            "13.7x over ArkVale, 8.4x over ShadowKV",
            "A100, PCIe 4",
            "",
            "",
            "not reproducible here: needs their programs on one machine",
        ],
    ]
    return markdown(CLAIM, rows, numbers=False)


def claims_logquant() -> str:
    gsm8k = load_scores("eval_qwen_gsm8k")["gsm8k"]
    quantised = [f"{name}{bits}" for bits in ("", ":bits=4") for name in ("logquant", "kivi")]
    lost = {cache: _points_lost(gsm8k[cache]) for cache in quantised}
    full, log = _largest("full", 32768), _largest("logquant", 32768)
    held, off = [], []
    for kept in (load_measured("measure_logquant_smollm2"), load_measured("measure_logquant")):
        dropped = [kept[f"{name}, drop"] for name in ("log-sparse", "window")]
        mass, later = (" against ".join(short(x[what], 3) for x in dropped) for what in ("mass", "mass_past_sinks"))
        held.append(f"{mass}, past the first two tokens {later}")
        off.append([short(kept[f"{name}, 2 bits"]["weights"], 3) for name in ("log-sparse", "window", "KIVI")])
    rows = [
        [
            "GSM8K at 2 bits, better than KIVI",
            "Llama-3.1-8B: 40.4, KIVI by token 18.0, 16 bits 71.4",
            f"Qwen2.5-Coder-1.5B: {short(gsm8k['logquant']['mean'])}, KIVI by channel {short(gsm8k['kivi']['mean'])}, "
            f"16 bits {short(gsm8k['full']['mean'])}, n = {gsm8k['full']['n']}; at 4 bits both "
            f"{short(gsm8k['logquant:bits=4']['mean'])}",
            "`kvjax eval`, `eval_qwen_gsm8k.json`",
            "not reproduced: no clear difference from KIVI. Points below 16 bits, LogQuant and KIVI: "
            f"{lost['logquant']} and {lost['kivi']} at 2 bits, {lost['logquant:bits=4']} and "
            f"{lost['kivi:bits=4']} at 4",
        ],
        [
            "Log-spaced tokens hold more attention (Fig. 4)",
            "than the newest",
            f"SmolLM2-135M {held[0]}; the package's small model {held[1]}",
            "`benchmarks.claims --what logquant`, `measure_logquant_smollm2.json`, `measure_logquant.json`",
            "reproduced; contradicted past the first tokens, which a sink keeps as well",
        ],
        [
            "Least error of attention (Table 2)",
            "L1 432.5; KIVI 556.1; eviction 1076.7 and 1612.6",
            f"L1 of the weights at 2 bits, LogQuant, newest tokens, KIVI: SmolLM2-135M {', '.join(off[0])}; "
            f"the package's small model {', '.join(off[1])}",
            "the same",
            "reproduced on a published model, by less; not on the small one. Eviction is far worse, as in the paper",
        ],
        [
            "Throughput and batch in equal memory",
            "25 % and 60 % more",
            f"32K, largest batches: {log['batch']} rows against {full['batch']} with `full`, "
            f"{log['tokens_per_second'] / full['tokens_per_second']:.1f}x the tokens a second",
            "`benchmarks/end_to_end.py`, `end_to_end.json`",
            "reproduced, with a larger gain: the codes are read directly",
        ],
        ["LongBench by task, other models", "", "", "", "not reproducible here: needs the data set and those models"],
    ]
    return markdown(CLAIM, rows, numbers=False)
