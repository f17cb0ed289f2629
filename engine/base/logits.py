"""What may change the scores of a request before a token is drawn: processors and token masks.

Both are functions of the tokens so far and of nothing else. That is what makes them right under every
schedule: a preempted sequence asks again and gets the same answer, the completions of one request do not
share a state, and a draft that is rejected leaves nothing to undo.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch

from ...quant.base.errors import BadInput

LogitsProcessor = Callable[[Sequence[int], torch.Tensor], torch.Tensor]
"""(tokens so far, prompt first; float32 scores [vocab]) → scores [vocab].

The scores may be changed in place. The call must be a function of the two.
"""

REMEMBERED_STATES = 256
"""Sequences whose state an automaton keeps: more than the completions of one request, and few enough that
their tokens take no memory worth counting."""


class TokenMask(Protocol):
    """Which tokens may come next: the hook of guided decoding."""

    def allowed(self, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor | None:
        """The tokens that may follow `prompt` and `output`; None: all.

        A boolean mask [vocab], or a packed one, int32 [ceil(vocab / 32)], bit i % 32 of word i // 32
        being set where token i may come (the layout of xgrammar and llguidance). A mask may be shorter
        than the vocabulary: what lies behind its end may not come. Where it leaves nothing, the sequence
        can only end.

        Must be a function of its arguments: it is asked again after a preemption, and about drafts that
        may be rejected.
        """
        ...


State = TypeVar("State")


class TokenAutomaton(Protocol[State]):
    """A grammar as a machine that reads tokens. States are values: they are never changed."""

    @property
    def start(self) -> State: ...

    def advance(self, state: State, token_id: int) -> State:
        """The state behind `token_id`. It may be one that `allowed` has refused."""
        ...

    def allowed(self, state: State) -> torch.Tensor | None:
        """As in `TokenMask`."""
        ...


class AutomatonMask(Generic[State]):
    """A token mask from an automaton that reads the output.

    The state of an output is computed from that of the output without its last token where it is
    remembered, else by reading the whole. So a step reads one token, and rolling back costs nothing.
    """

    def __init__(self, automaton: TokenAutomaton[State]) -> None:
        self._automaton = automaton
        self._states: OrderedDict[tuple[int, ...], State] = OrderedDict()

    def allowed(self, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor | None:
        return self._automaton.allowed(self.state_of(output))

    def state_of(self, output: Sequence[int]) -> State:
        """The automaton's state once it has read `output`."""
        tokens = tuple(output)
        if tokens not in self._states:
            if tokens and tokens[:-1] in self._states:
                state = self._automaton.advance(self._states[tokens[:-1]], tokens[-1])
            else:
                state = self._automaton.start
                for token_id in tokens:
                    state = self._automaton.advance(state, token_id)
            self._states[tokens] = state
            if len(self._states) > REMEMBERED_STATES:
                self._states.popitem(last=False)
        self._states.move_to_end(tokens)
        return self._states[tokens]


def dense_mask(mask: torch.Tensor, vocab_size: int, device: torch.device) -> torch.Tensor:
    """A token mask, packed or not, as booleans [vocab].

    Raises:
        BadInput: it is neither, or longer than the vocabulary.
    """
    _check_mask(mask, vocab_size)
    if mask.dtype is torch.int32:
        # Several times faster than shifting words in torch.
        octets = mask.cpu().numpy().astype("<i4", copy=False).view(np.uint8)
        bits = np.unpackbits(octets, count=min(vocab_size, 8 * len(octets)), bitorder="little")
        mask = torch.from_numpy(bits.view(np.bool_))
    mask = mask.to(device)
    missing = vocab_size - len(mask)
    return torch.nn.functional.pad(mask, (0, missing)) if missing else mask


def packed_mask(mask: torch.Tensor, vocab_size: int) -> np.ndarray:
    """A token mask, packed or not, as int32 [ceil(vocab / 32)] on the host; raises as `dense_mask`."""
    _check_mask(mask, vocab_size)
    words = np.zeros(-(-vocab_size // 32), dtype="<i4")
    own = mask.cpu().numpy()
    if mask.dtype is torch.int32:
        words[: len(own)] = own
    else:
        octets = np.packbits(own, bitorder="little")
        words.view(np.uint8)[: len(octets)] = octets
    return words


def _check_mask(mask: torch.Tensor, vocab_size: int) -> None:
    if mask.dim() != 1 or mask.dtype not in (torch.bool, torch.int32):
        raise BadInput(
            f"a token mask is {mask.dtype} with shape {list(mask.shape)}: need booleans [vocab] or int32 "
            "[vocab / 32]"
        )
    words = -(-vocab_size // 32)
    if mask.dtype is torch.int32 and len(mask) > words:
        raise BadInput(f"a packed token mask has {len(mask)} words: the vocabulary has {words}")
    if mask.dtype is torch.bool and len(mask) > vocab_size:
        raise BadInput(f"a token mask has {len(mask)} tokens: the vocabulary has {vocab_size}")
