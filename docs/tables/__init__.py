"""The measured tables and the picture of README.md and docs/, written from benchmarks/results:
`python -m docs.tables`.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; NAME is a function of TABLES,
in the module for its page, or a command of `commands.PAGES`. A figure inside of a sentence stands
between `<!-- value: NAME -->` and `<!-- /value -->`; NAME is of `values.VALUES`. The suite checks
that a run would change nothing, so no measured number, and no text or length of a command beside
one, is typed by hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from docs.tables import (
    beside,
    board,
    claims,
    commands,
    drafts,
    faults,
    gpus,
    guides,
    hybrid,
    methods,
    prompts,
    published,
    quality,
    readme,
    scaling,
    speed,
    tpus,
    values,
)
from docs.tables.decode_step import picture
from docs.tables.reading import ROOT

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
PICTURE = ROOT / "docs" / "decode_step.svg"
FOLDER = ROOT / "docs" / "pictures"  # of the board's pictures, by name
PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

TABLES: dict[str, Callable[[], str]] = {
    table.__name__: table
    for table in (
        readme.headline, readme.speed, readme.quality,
        speed.steps, speed.compared, speed.steps_in_plain_jax, speed.kernels, speed.first_tokens,
        speed.first_answers, speed.million,
        speed.indexing, speed.tokens, speed.largest_batches, speed.host_batches, speed.serving,
        speed.while_reading,
        speed.coded_steps, speed.mixtures,
        quality.decoded_needles, quality.needles, quality.papers, quality.group_rules, quality.equal_perplexities,
        quality.method_perplexities, quality.perplexities, quality.tokens_read, quality.turbo_codes,
        quality.coded_quality, quality.evictors,
        methods.methods, methods.comparators, methods.low_rank, methods.coverage,
        published.which_method, published.real_needles, published.real_others, published.real_papers,
        published.real_known, published.real_gsm8k, published.real_ruler, published.real_ruler_codes,
        published.real_perplexities,
        published.real_long_generation, published.drift, published.real_speed,
        claims.claims_fier, claims.claims_pariskv, claims.paris_parts, claims.claims_freekv, claims.claims_logquant,
        claims.claims_counted, claims.claims_nothing,
        guides.several_tokens, guides.lossless, guides.lossless_same, guides.lossless_line, guides.lossless_steps,
        guides.accepted, guides.accepted_by_position, guides.accepted_by_text, guides.accepted_prose,
        guides.accepted_smollm2,
        drafts.round_parts, drafts.forms, drafts.selections,
        guides.hit_rates, guides.host_steps,
        guides.host_codes,
        guides.shared_quality, guides.shared_steps,
        scaling.cells, scaling.command_devices, scaling.shares, scaling.share_quality,
        scaling.four, scaling.rounds, scaling.by_kind, scaling.calls,
        scaling.links, scaling.prompts, scaling.scaling, gpus.gpus, gpus.cards,
        hybrid.hybrid_steps, hybrid.hybrid_parts, hybrid.delta_nets, hybrid.heads_of_256,
        hybrid.heads_by_group, hybrid.attention_of_256,
        tpus.tpus,
        tpus.tpu_kernels,
        board.board_reads, board.board_holds, board.board_drafts, board.board_gsm8k, board.board_ruler,
        board.board_perplexity, board.board_smollm2, board.boards,
        prompts.prompts_counted, prompts.prompts_differ, prompts.prompts_scored, prompts.prompts_gsm8k,
        faults.mutants,
        beside.peers_ahead, beside.peers, beside.peers_run, beside.presses_about, beside.presses, beside.products,
        beside.presses_qwen_about, beside.presses_qwen,
    )
}  # fmt: skip
PICTURES = board.PICTURES | beside.PICTURES
TABLES |= {name: partial(commands.block, name) for name in commands.PAGES}


def fill(text: str) -> str:
    """`text` with each table and each figure regenerated."""
    return values.fill(PLACE.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], text))


def main() -> None:
    """Writes the tables of all pages, and the pictures; prints the name of each that changed."""
    texts = {page: fill(page.read_text()) for page in PAGES}
    texts[PICTURE] = picture()
    texts |= {FOLDER / f"{name}.svg": draw() for name, draw in PICTURES.items()}
    changed = [path for path, text in texts.items() if write(path, text)]
    for path in changed:
        print(f"wrote {path.relative_to(ROOT)}")
    if not changed:
        print(f"all {len(PAGES)} pages and the pictures say what the results say")


def write(path: Path, text: str) -> bool:
    """Writes `text` to a file, and returns whether this changed it."""
    if path.exists() and path.read_text() == text:
        return False
    path.write_text(text)
    return True
