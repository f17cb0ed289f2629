"""Pooling parameters of a request: its result is a vector of its prompt's hidden states, as in vLLM."""

from __future__ import annotations

from dataclasses import dataclass

from ...quant.base.errors import BadInput

POOLING_MODES = ("last", "mean", "cls", "max")


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """How the final hidden states of a prompt become one vector.

    Attributes:
        mode: the last token's states, their mean, the first token's (cls), or their maximum.
        token_ids: instead of the states, the logits of these tokens after the prompt; for mode last.

    Raises:
        BadInput: an unknown mode, or token ids with another mode than last.
    """

    mode: str
    token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.mode not in POOLING_MODES:
            raise BadInput(f"pooling {self.mode!r}: known are {', '.join(POOLING_MODES)}")
        if self.token_ids and self.mode != "last":
            raise BadInput(f"logits of tokens come from the last state, not from {self.mode!r}")

    @property
    def reads_all(self) -> bool:
        """Whether states before the last token are needed, so that a cached prefix is of no use."""
        return self.mode != "last"
