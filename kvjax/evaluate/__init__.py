"""Measures on a model what each method keeps and loses: tasks, perplexity, recall of selectors,
throughput, reports.
"""

from kvjax.evaluate.comparison import Comparison, compare
from kvjax.evaluate.tasks import Example, Task

__all__ = ["Comparison", "Example", "Task", "compare"]
