"""A request of `kvjax generate`, with everything that is known before weights are loaded."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvjax.cli.options import capacity_over, without_weights

if TYPE_CHECKING:
    from jax import Array

    from kvjax import Cache, CacheSpec, Placement
    from kvjax.generation.drafts import PromptLookup, SelfDraft
    from kvjax.generation.sampling import Sampling
    from kvjax.models import Checkpoint
    from kvjax.policies import PerLayer

# New tokens up to which to compile a program of all layers takes longer than to call one of a
# single layer again and again.
SHORT = 256


@dataclass(frozen=True, kw_only=True)
class Job:
    """One prompt, and how it is answered."""

    checkpoint: Checkpoint  # without weights
    tokens: list[int]  # of the prompt
    policy: PerLayer
    placement: Placement | None
    dtype: str
    max_new_tokens: int
    stop_tokens: tuple[int, ...]
    sampling: Sampling
    key: Array | None  # None for greedy decoding
    own_draft: PromptLookup | SelfDraft | None  # of --speculate, without a second model
    draft_directory: Path | None  # of --draft, a model that drafts
    sparse_prompt: float | None

    @property
    def short(self) -> bool:
        """True if the answer is so short that decode steps run one layer at a time: they are
        slower, and less has to compile.
        """
        return self.max_new_tokens <= SHORT

    @property
    def compiles_ahead(self) -> bool:
        """True if its programs can compile while weights are read. Those with drafts or a
        sparse prompt, and those on several devices, compile when they first run.
        """
        drafts = self.own_draft is not None or self.draft_directory is not None
        return not drafts and self.sparse_prompt is None and self.placement is None

    @property
    def spec(self) -> CacheSpec:
        """The sizes of the cache that it needs."""
        from kvjax.spec import round_capacity

        config = self.checkpoint.config
        needed = len(self.tokens) + self.max_new_tokens
        capacity = round_capacity(needed, positions=config.max_positions)
        return config.spec(1, capacity_over(capacity, self.placement), self.dtype)

    def empty(self) -> Cache:
        """An empty cache."""
        import kvjax

        layers = self.checkpoint.config.layers
        return kvjax.init(self.policy, self.spec, layers=layers, placement=self.placement)

    def check(self) -> None:
        """Raises ValueError for a policy that cannot hold this model, or a draft that fits
        neither.
        """
        import jax

        from kvjax.generation.prefilling import check_sparse, steps_of

        shapes = jax.eval_shape(self.empty)
        self.checkpoint.config.check_cache(shapes)
        if self.sparse_prompt is not None:
            steps = steps_of(self.checkpoint.config, shapes)
            check_sparse(shapes, self.sparse_prompt, steps)
        if self.draft_directory is not None:
            self._check_tokenizer_of_draft(self.draft_directory)
        self._check_takes_drafts(shapes)

    def _check_tokenizer_of_draft(self, directory: Path) -> None:
        from kvjax.generation.drafts import check_tokenizers

        with suppress(FileNotFoundError):  # one without a tokenizer has nothing to compare
            small = without_weights(directory).tokenizer
            check_tokenizers(small, self.checkpoint.tokenizer)

    def _check_takes_drafts(self, shapes: Cache) -> None:
        from kvjax.generation.drafts import DraftModel, check_draft, check_takes_drafts

        if self.draft_directory is not None:
            check_takes_drafts(shapes, DraftModel.tokens)
        elif self.own_draft is not None:
            check_draft(self.own_draft, shapes)
