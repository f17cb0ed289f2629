"""Standard output and error that decide no exit code: a reader that leaves, or an encoding that lacks a
character, changes what is shown and not what the command found."""

from __future__ import annotations

import errno
import os
import sys
from io import TextIOWrapper
from pathlib import Path

_GONE = (errno.EPIPE, errno.EIO)
"""Errors of writing where a pipe's reader, or the terminal, is gone."""


class Screen(TextIOWrapper):
    """A stream whose output goes nowhere once its reader is gone; characters that it cannot encode become
    question marks."""

    def __init__(self, stream: TextIOWrapper) -> None:
        encoding, by_line, through = stream.encoding, stream.line_buffering, stream.write_through
        self.failure: OSError | None = None
        super().__init__(
            stream.detach(), encoding, "replace", line_buffering=by_line, write_through=through
        )

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self._outlive(error)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._outlive(error)
            super().flush()  # what is left in the buffer

    def _outlive(self, error: OSError) -> None:
        """Send further output to the null device; an error of another kind, such as a full disk, is kept."""
        if error.errno not in _GONE:
            self.failure = error
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())
        os.close(null)


def install() -> None:
    """Replace `sys.stdout` and `sys.stderr`, unless something else than the interpreter has replaced them."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the caller (`>&-`)
            null = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
            setattr(sys, name, null)
        elif type(stream) is TextIOWrapper:
            setattr(sys, name, Screen(stream))


def check_shown(code: int) -> int:
    """The exit code of a command that ends with `code`: 2 in place of 0 where its output was not written."""
    sys.stdout.flush()
    failure = getattr(sys.stdout, "failure", None)
    if failure is None:
        return code
    print(f"error: cannot write the output: {failure.strerror}", file=sys.stderr)
    return code or 2
