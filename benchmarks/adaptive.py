"""Perplexity with budgets that adapt to heads, compared with equal budgets that read as many tokens.

    python benchmarks/adaptive.py [MODEL] --text book.txt [--length 1024] [--budget 113]

FIER selects `budget` tokens in each head. With `AdaptiveHeads` the heads of a layer share the same total, and a head
may take twice its part. `Nucleus` selects the tokens that hold a share of the attention, up to twice the budget. Each
is measured with a sink and without. No layer is dense. "tokens_read" is the tokens that a step read, mean over steps,
heads and layers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from kvjax import AdaptiveHeads, Fier, Full, Nucleus, PerLayer, Retrieval, Selector, models
from kvjax.evaluate import perplexity
from kvjax.evaluate.provenance import replace_file
from kvjax.spec import default_dtype


def caches(budget: int) -> dict[str, PerLayer]:
    """Each selection, without a sink and with a sink of four tokens, which every step reads and no share counts."""
    selectors: dict[str, tuple[Selector, int]] = {
        "fier": (Fier(), budget),
        "adaptive heads": (AdaptiveHeads(selector=Fier(), mean=0.5), 2 * budget),
        "nucleus p=0.8": (Nucleus(selector=Fier(), p=0.8), 2 * budget),
    }
    found = {"full": PerLayer((), Full())}
    for name, (selector, most) in selectors.items():
        for sink in (0, 4):
            policy = Retrieval(selector=selector, budget=most, sink=sink, local=1)
            found[f"{name}, sink {sink}"] = PerLayer((), policy)
    return found


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", nargs="?", type=Path, default=None, help="default: the shipped model")
    parser.add_argument("--text", type=Path, required=True, help="UTF-8 file with a long text")
    parser.add_argument("--length", type=int, default=1024, help="tokens of context")
    parser.add_argument("--budget", type=int, default=113, help="tokens that a step reads in a head, on average")
    parser.add_argument("--steps", type=int, default=128, help="tokens scored in each passage")
    parser.add_argument("--passages", type=int, default=8)
    parser.add_argument("--dtype", default=default_dtype())
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "adaptive.json")
    given = parser.parse_args(args)
    checkpoint = models.load(given.model_dir or models.shipped(), dtype=given.dtype)
    sizes = {"lengths": (given.length,), "steps": given.steps, "passages": given.passages, "batch": given.passages}
    text = given.text.read_text(encoding="utf-8")
    cells = perplexity.perplexity(checkpoint, text, caches(given.budget), perplexity.Setting(**sizes), dense_layers=0)
    print(perplexity.markdown(cells))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    found = {"text": given.text.name, **perplexity.document(cells)}
    replace_file(given.out, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
