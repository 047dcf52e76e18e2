"""What each method keeps and loses, shown on a model: tasks, measurements of selectors, throughput, reports."""

from kvjax.evaluate.task import Example, Task

__all__ = ["Example", "Task"]
