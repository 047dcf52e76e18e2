"""What an evaluation asks: one file a family of tasks, and the protocol that they share."""

from kvjax.evaluate.tasks.protocol import Example, Task

__all__ = ["Example", "Task"]
