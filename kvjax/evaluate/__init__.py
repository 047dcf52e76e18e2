"""What each method keeps and loses, shown on a model: tasks, perplexity, recall of selectors, throughput, reports."""

from kvjax.evaluate.comparison import Comparison, compare
from kvjax.evaluate.tasks import Example, Task

__all__ = ["Comparison", "Example", "Task", "compare"]
