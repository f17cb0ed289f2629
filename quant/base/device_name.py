"""The names that `--device` takes, checked without torch; `device` looks for the devices themselves."""

from __future__ import annotations

import re

from .errors import BadInput

KINDS = ("cpu", "cuda")


def device_names(asked: str) -> tuple[str, ...]:
    """The names in `--device`, which has commas between them.

    Raises:
        BadInput: one of them is the name of no device.
    """
    names = tuple(name.strip() for name in asked.split(","))
    for name in names:
        if not re.fullmatch(rf"({'|'.join(KINDS)})(:(0|[1-9][0-9]?))?", name):
            raise BadInput(f"--device {name}: choose cpu, cuda or cuda:N")
    return names
