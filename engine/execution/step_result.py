"""What comes of a step: tokens on the device at once, and on the host once it is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from ..base.transfer import packed
from ..scheduling.outputs import TokenLogprobs


@dataclass(slots=True)
class StepResult:
    """What a step drew, by sequence.

    Attributes:
        tokens: as many as the row asked for, or the accepted draft tokens and one behind them.
        logprobs: beside them, where the request asks for logprobs.
        prompt_logprobs: (position, logprobs) of prompt tokens that this step could score.
        num_draft_tokens: that were verified.
        draft_depths: how far those reached.
        replayed: whether a captured graph computed the forward pass.
    """

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs | None]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[tuple[int, TokenLogprobs]]] = field(default_factory=dict)
    num_draft_tokens: dict[str, int] = field(default_factory=dict)
    draft_depths: dict[str, int] = field(default_factory=dict)
    replayed: bool = False


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """Tokens that a step draws, on the device, where the next step reads them before the host knows them.

    Attributes:
        token_ids: int64 [tokens].
        places: where the first one of each sequence lies among them.
    """

    token_ids: torch.Tensor
    places: Mapping[str, int]

    def fill_placeholders(self, token_ids: torch.Tensor, placeholders: Mapping[str, int]) -> None:
        """Put them in the place that each sequence's output placeholder has in `token_ids` [tokens]."""
        sources = [self.places[name] for name in placeholders]
        to, source = packed([list(placeholders.values()), sources], token_ids.device)
        token_ids.index_copy_(0, to, self.token_ids.index_select(0, source))


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that the device has been given.

    Attributes:
        wait: its result, once the tokens are on the host.
        drawn: the tokens on the device; None: there are none, or the host knows them.
    """

    wait: Callable[[], StepResult]
    drawn: DrawnTokens | None = None
