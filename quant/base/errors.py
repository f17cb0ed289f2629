"""The one exception that means "the input was wrong", for every floor of the house."""

from __future__ import annotations


class BadInput(ValueError):
    """The user asked for something that cannot be done as asked.

    The message is one line: what is wrong, where, and what to do about it. The command line prints it
    without a traceback and exits with 2; the server answers with status 400.
    """


class Failure(RuntimeError):
    """Something that the work needs has gone, and not by the user's mistake: a process, a device.

    The message is one line: what is gone and what to do. The command line prints it without a traceback
    and exits with 3: nothing was decided.
    """
