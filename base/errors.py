"""The exceptions that the command line and the server report without a traceback."""

from __future__ import annotations


class BadInput(ValueError):
    """Invalid input: the request cannot be carried out as given.

    The message is one line: what is wrong, where, and what to do about it. The command line prints it
    without a traceback and exits with 2; the server answers with status 400.
    """


class DoesNotFit(BadInput):
    """Invalid input on this device alone: its memory is too small, or others hold it."""


class Failure(RuntimeError):
    """An external failure, not the user's mistake: a process or a device is gone.

    The message is one line: what is gone and what to do. The command line prints it without a traceback
    and exits with 3: nothing was decided.
    """


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
