"""Gate keys of tasks: `task.NAME.METRIC`, and `task.NAME.METRIC.FILTER` where a task has several filters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...quant.base.errors import BadInput

PREFIX = "task."


@dataclass(frozen=True, slots=True)
class TaskScored:
    """The score of a task, under `llmopt.tasks`."""

    key: str
    unit: str = ""

    @property
    def label(self) -> str:
        return self.key.removeprefix(PREFIX)

    @classmethod
    def named(cls, name: str) -> TaskScored:
        """The quantity of a gate key.

        Raises:
            BadInput: no task or no metric in it.
        """
        if name.count(".") < 2 or name.endswith("."):
            raise BadInput(
                f"gate: {name!r}: write task.NAME.METRIC, such as task.gsm8k.exact_match"
            )
        return cls(name)

    def row(self, record: Mapping[str, Any]) -> dict[str, Any] | str:
        """The row of this score in a record of tasks, or why there is none."""
        rows: Sequence[dict[str, Any]] = record["metrics"]
        names = {id(row): f"{row['task']}.{row['metric']}" for row in rows}
        matches = [
            row
            for row in rows
            if self.label in (names[id(row)], f"{names[id(row)]}.{row['filter']}")
        ]
        if len(matches) == 1:
            return matches[0]
        if matches:
            filters = ", ".join(row["filter"] for row in matches)
            return f"has several filters, name one behind the metric: {filters}"
        keys = ", ".join(dict.fromkeys(PREFIX + name for name in names.values()))
        return f"there are {keys}" if keys else "no task was scored"
