"""Which KV heads of a model attend to distant tokens: saved and loaded, and turned into
policies.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvjax.policies import Full, PerLayer, Policy
from kvjax.policies.per_head import PerHead
from kvjax.received import read_object
from kvjax.spec import require_int
from kvjax.validation import short_repr


@dataclass(frozen=True)
class Heads:
    """KV heads by layer, of a model with `kv_heads` KV heads per layer.

    >>> heads = Heads(kv_heads=4, layers=((), (1, 3)))
    >>> heads.count
    2
    """

    kv_heads: int
    layers: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        require_int("Heads(kv_heads=...)", self.kv_heads, at_least=1)
        for i, layer in enumerate(self.layers):
            for head in layer:
                require_int(
                    f"Heads(layers=...)[{i}]", head, at_least=0, at_most=self.kv_heads - 1
                )
        object.__setattr__(
            self, "layers", tuple(tuple(sorted(set(layer))) for layer in self.layers)
        )

    @property
    def count(self) -> int:
        """KV heads in all layers."""
        return sum(map(len, self.layers))

    def policies(self, others: Policy, selected: Policy | None = None) -> PerLayer:
        """Policies with `selected` (default `Full()`) for these heads and `others` for all
        others, in each layer.
        """
        selected = Full() if selected is None else selected

        def one(heads: tuple[int, ...]) -> Policy:
            if len(heads) == self.kv_heads:
                return selected
            return PerHead(heads=heads, selected=selected, others=others) if heads else others

        policies = PerLayer.of([one(heads) for heads in self.layers])
        return ByHeads(policies.first, policies.rest, heads=self)

    def as_json(self) -> dict[str, Any]:
        """The content of the file that `save` writes, for `json.dumps`."""
        return {"kv_heads": self.kv_heads, "layers": self.layers}

    def save(self, path: str | Path) -> None:
        """Writes a JSON file that `load` reads; an interrupted call leaves the old one."""
        part = Path(f"{path}.part")
        part.write_text(json.dumps(self.as_json()) + "\n", encoding="utf-8")
        part.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> Heads:
        """The heads in a file that `save` wrote.

        Raises:
          FileNotFoundError: no such file.
          ValueError: a file that `save` did not write.
        """
        cure = "kvjax.presets.Heads.save writes one"
        if not Path(path).is_file():
            raise FileNotFoundError(f"{path} is not a file of a model's heads; {cure}")
        try:
            found = read_object(path, cure=cure)
            return cls(found["kv_heads"], tuple(tuple(layer) for layer in found["layers"]))
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"{path} holds no heads of a model ({type(error).__name__}: {error}); {cure}"
            ) from error


@dataclass(frozen=True)
class ByHeads(PerLayer):
    """Policies for the heads of one model, which do not fit a model with other layers or KV
    heads.
    """

    heads: Heads = field(kw_only=True)

    def check(self, layers: int, kv_heads: int | None = None) -> None:
        own = self.heads
        for what, theirs, this in (
            ("layers", len(own.layers), layers),
            ("KV heads", own.kv_heads, kv_heads),
        ):
            if this is not None and this != theirs:
                raise ValueError(
                    f"the heads are those of a model of {theirs} {what} and this one has {this}; find its own with "
                    "kvjax heads MODEL --out heads.json"
                )


def by_heads(name: str, others: Policy, heads: str | Heads | None) -> PerLayer:
    """Policies of a preset: retrieval heads keep every token, and `others` is for all others.

    Args:
      name: of the preset, for error messages.
      heads: the retrieval heads, or a file of them; None: no head is one.
    """
    if heads is None:
        return PerLayer((), others)
    if isinstance(heads, str):
        heads = Heads.load(heads)
    if not hasattr(heads, "policies"):
        raise ValueError(
            f"{name}(heads=...) takes a kvjax.presets.Heads or a file of them, got {short_repr(heads)}; "
            "kvjax.evaluate.heads.retrieval_heads finds those of a model"
        )
    return heads.policies(others)
