"""Measures on a model what each method keeps and loses: tasks, perplexity, recall of selectors,
throughput, reports.
"""

from kvjax.evaluate.answers import Answer, side_by_side
from kvjax.evaluate.comparison import Comparison, compare
from kvjax.evaluate.drafting import Acceptance, acceptance
from kvjax.evaluate.passages import Setting, perplexity
from kvjax.evaluate.tasks import Example, Task

__all__ = [
    "Acceptance",
    "Answer",
    "Comparison",
    "Example",
    "Setting",
    "Task",
    "acceptance",
    "compare",
    "perplexity",
    "side_by_side",
]
