"""Results of a step: sampled tokens on the device at once, and on the host once it is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..base.transfer import packed
from ..scheduling.outputs import TokenLogprobs
from ..scheduling.step_plan import DecodeBatch


@dataclass(slots=True)
class StepResult:
    """Sampled tokens of a step, by sequence.

    Attributes:
        tokens: `num_samples` of the row, or the accepted draft tokens and the bonus token.
        logprobs: one entry per token; None where the request asks for no logprobs.
        prompt_logprobs: (position, logprobs) of prompt tokens that this step scored.
        pooled: shares of the vectors of pooled prompts.
        num_draft_tokens: verified draft tokens.
        draft_depths: their speculative positions.
        replayed: whether the forward pass replayed a captured graph.
    """

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs | None]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[tuple[int, TokenLogprobs]]] = field(default_factory=dict)
    pooled: dict[str, list[float]] = field(default_factory=dict)
    num_draft_tokens: dict[str, int] = field(default_factory=dict)
    draft_depths: dict[str, int] = field(default_factory=dict)
    replayed: bool = False


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Sampled tokens on the device, which the next step reads before the host knows them.

    Attributes:
        token_ids: int64 [tokens].
        indices: index of the first one of each sequence.
    """

    token_ids: torch.Tensor
    indices: Mapping[str, int]

    def of(self, batch: DecodeBatch) -> torch.Tensor:
        """Those of each row of a decode batch, int64 [rows]."""
        if self.indices is batch.places:
            return self.token_ids
        sources = [self.indices[name] for name in batch.names]
        return self.token_ids.index_select(0, packed([sources], self.token_ids.device)[0])

    def fill_placeholders(self, token_ids: torch.Tensor, placeholders: Mapping[str, int]) -> None:
        """Write them to `token_ids` [tokens] at the index of each sequence's output placeholder."""
        sources = [self.indices[name] for name in placeholders]
        to, source = packed([list(placeholders.values()), sources], token_ids.device)
        token_ids.index_copy_(0, to, self.token_ids.index_select(0, source))


class LaunchedStep(NamedTuple):
    """A step whose kernels are launched.

    Attributes:
        wait: waits until the tokens are on the host; returns the result.
        sampled: the sampled tokens on the device; None: there are none, or the host knows them.
    """

    wait: Callable[[], StepResult]
    sampled: SampledTokens | None = None
