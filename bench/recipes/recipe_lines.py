"""Line numbers of values in a YAML text, for error messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from yaml.nodes import Node


def line_of(root: Node | None, path: Sequence[int | str]) -> int:
    """The line, from 1, of the value at `path` (keys and indexes), or of its nearest existing ancestor;
    for a key, the line of the key."""
    import yaml

    line, node = 1, root
    for step in path:
        if isinstance(node, yaml.MappingNode):
            pairs = [(key, value) for key, value in node.value if key.value == str(step)]
            if not pairs:
                break
            key, node = pairs[-1]
            line = key.start_mark.line + 1
        elif (
            isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value)
        ):
            node = node.value[step]
            line = node.start_mark.line + 1
        else:
            break
    return line
