"""Many requests from one cache: an engine that reads and answers them, and rows that store once
what their prompts have in common.
"""

from kvjax.serve.engine import Engine
from kvjax.serve.requests import EngineBusy, Request, Stats
from kvjax.serve.scheduler import Stage

__all__ = ["Engine", "EngineBusy", "Request", "Stage", "Stats"]
