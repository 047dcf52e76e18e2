"""`kvjax methods`."""

from __future__ import annotations

from kvjax.cli.terminal import show


def methods() -> None:
    """Lists the methods: what each keeps, its bytes per token, and its paper."""
    from rich.table import Table

    from kvjax.presets import REGISTRY
    from kvjax.spec import CacheSpec

    spec = CacheSpec(batch=1, q_heads=32, kv_heads=8, head_dim=128, capacity=131072)
    table = Table(
        caption="Bytes a token are those of one layer of Llama-3.1-8B in a long context: 8 KV heads of 128, bfloat16."
    )
    for title in ("name", "what it keeps", "bytes a token", "budget", "paper"):
        table.add_column(title, justify="right" if title == "bytes a token" else "left")
    for preset in REGISTRY.values():
        stored = f"{preset.policy().bytes_per_token(spec):,.0f}"
        table.add_row(preset.name, preset.keeps, stored, "yes" if preset.has_budget else "no", preset.paper)
    show(table)
