"""The names of methods and formats, checked without torch."""

from __future__ import annotations

from ..base.errors import BadInput
from ..base.names import offer
from ..methods.settings import FORMAT_NAMES, METHOD_FACTS

AUTO = "auto"


def check_method(name: str) -> None:
    """Raises BadInput for an unknown method; a format is answered with a method that writes it."""
    if name in METHOD_FACTS or name == AUTO:
        return
    if name in FORMAT_NAMES:
        writes = [method for method, facts in METHOD_FACTS.items() if facts.default_format == name]
        method = f"--method {writes[0]} " if writes else ""
        raise BadInput(f"unknown method {name!r}: {name} is a format: {method}--format {name}")
    raise BadInput(f"unknown method {name!r}: {offer(name, sorted((*METHOD_FACTS, AUTO)))}")


def check_format(name: str) -> None:
    """Raises BadInput for an unknown format; a method is answered with its option."""
    if name in FORMAT_NAMES:
        return
    if name in METHOD_FACTS:
        raise BadInput(f"unknown format {name!r}: {name} is a method: --method {name}")
    raise BadInput(f"unknown format {name!r}: {offer(name, FORMAT_NAMES)}")


def format_names(asked: str | None) -> tuple[str, ...]:
    """The formats that `--format` names with commas; none where it is not given.

    Raises:
        BadInput: an unknown one, or one that is named twice.
    """
    if asked is None:
        return ()
    names = tuple(name.strip() for name in asked.split(","))
    if len(set(names)) != len(names):
        raise BadInput(f"--format {asked}: a format is named twice")
    for name in names:
        check_format(name)
    return names
