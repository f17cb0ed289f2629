"""The exceptions that the command line and the server report without a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class BadInput(ValueError):
    """Invalid input: the request cannot be carried out as given.

    The message is one line: what is wrong, where, and what to do about it. The command line prints it
    without a traceback and exits with 2; the server answers with status 400."""


class ContextOverflow(BadInput):
    """A prompt, or a prompt with `num_new` tokens after it, is longer than the context of `limit` tokens.

    Where the whole prompt was not counted, `num_prompt` is the `least` that it has."""

    def __init__(self, num_prompt: int, num_new: int, limit: int, *, least: bool = False) -> None:
        count = f"at least {num_prompt}" if least else num_prompt
        new = f" and {num_new} new ones" if num_new else ""
        super().__init__(f"{count} prompt tokens{new} exceed the context length of {limit} tokens")
        self.num_prompt, self.num_new, self.limit = num_prompt, num_new, limit


class DoesNotFit(BadInput):
    """Invalid input on this device alone: its memory is too small, or others hold it."""


class Failure(RuntimeError):
    """An external failure, not the user's mistake: a process or a device is gone.

    The message is one line: what is gone and what to do. The command line prints it without a traceback
    and exits with 3: nothing was decided."""


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def reported_as(
    what: str, only: type[Exception] = Exception, *, keeping: type[Exception] | tuple[()] = ()
) -> Iterator[None]:
    """A context whose exceptions, of the many types that libraries raise, become BadInput: `what`, and the
    first line. Those that are not `only` of a type, or are of the type `keeping`, stay as they are."""
    try:
        yield
    except keeping:
        raise
    except only as error:
        raise BadInput(f"{what}: {first_line(error)}") from error
