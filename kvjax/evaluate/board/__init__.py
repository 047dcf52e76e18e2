"""The board: scores of methods beside the bytes that a step reads and the bytes that a cache
holds, as a page with curves and as JSON.

Rows come from a run of `kvjax eval --board`, or from the summary of an earlier one
(`rows_of_summary`).
"""

from kvjax.evaluate.board.defaults import TASKS, TOKENS, default_budgets, default_caches
from kvjax.evaluate.board.groups import Group, groups, of_memory, of_reads, times_of
from kvjax.evaluate.board.page import document, page, read_rows, write
from kvjax.evaluate.board.rows import Row, rows_of, rows_of_summary

__all__ = [
    "TASKS",
    "TOKENS",
    "Group",
    "Row",
    "default_budgets",
    "default_caches",
    "document",
    "groups",
    "of_memory",
    "of_reads",
    "page",
    "read_rows",
    "rows_of",
    "rows_of_summary",
    "times_of",
    "write",
]
