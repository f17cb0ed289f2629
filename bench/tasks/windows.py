"""Token windows of lm-eval's requests, split and truncated as in its `hf` model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...quant.base.errors import BadInput


class Window(NamedTuple):
    """Input tokens, and the targets predicted at the last `len(targets)` positions."""

    inputs: list[int]
    targets: list[int]


def clipped(context: Sequence[int], continuation: Sequence[int], max_inputs: int) -> Window:
    """The continuation with the context truncated on the left to `max_inputs` tokens.

    Raises:
        BadInput: a part is empty, or the continuation alone does not fit.
    """
    if not context or not continuation:
        raise BadInput("a task gives a context or a continuation without any token")
    if len(continuation) > max_inputs:
        raise BadInput(
            f"a continuation of {len(continuation)} tokens exceeds the {max_inputs} that fit"
        )
    whole = [*context, *continuation]
    return Window(whole[-(max_inputs + 1) :][:-1], list(continuation))


def rolling_windows(tokens: Sequence[int], prefix: int, max_inputs: int) -> Iterator[Window]:
    """Windows over a text that predict each token once, the first one after `prefix`.

    Each holds `max_inputs` tokens where the text is long enough; the last one overlaps for context.
    """
    whole = [prefix, *tokens]  # tokens[i] is predicted by whole[: i + 1]
    for begin in range(0, len(tokens), max_inputs):
        end = min(begin + max_inputs, len(tokens))
        yield Window(whole[max(0, end - max_inputs) : end], whole[begin + 1 : end + 1])
