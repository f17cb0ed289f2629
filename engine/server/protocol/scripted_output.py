"""Scripted outputs: texts that a model must generate, to test agents without one that can do their work."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ....quant.base.errors import BadInput


@dataclass(frozen=True, slots=True)
class ScriptedText:
    """The text of an output whose prompt has `after` in it, later than any other entry's."""

    after: str
    text: str


def read_script(path: Path) -> tuple[ScriptedText, ...]:
    """A script from a JSON file: a list of objects with `after` and `text`.

    Raises:
        BadInput: no such file, or something else in it.
    """
    try:
        entries = json.loads(path.read_text())
        return tuple(ScriptedText(str(entry["after"]), str(entry["text"])) for entry in entries)
    except OSError as error:
        raise BadInput(f"--scripted-output {path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise BadInput(
            f"--scripted-output {path}: write a JSON list of objects with after and text"
        ) from error


def scripted_text(script: Sequence[ScriptedText], prompt: str) -> str | None:
    """The text for a prompt; None where no entry fits."""
    places = [(prompt.rfind(entry.after), entry) for entry in script]
    place, entry = max(places, key=lambda pair: pair[0], default=(-1, None))
    return entry.text if entry is not None and place >= 0 else None
