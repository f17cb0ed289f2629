"""From what the user calls a model to its config: the bundled table, an alias, a file or a folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from ...quant.checkpoint import read_json
from ...quant.errors import BadInput
from ...recipes import MODELS as BUNDLED
from .shapes import ModelShape


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model to plan for. `note` says how the name was read, where it is not the user's own word."""

    name: str
    shape: ModelShape
    config: dict[str, Any]
    source: str
    note: str | None = None


@cache
def _table() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("models.json").read_text(encoding="utf-8"))


def model_names() -> list[str]:
    """Names in the bundled table."""
    return list(_table()["models"])


def find_model(name: str) -> PlannedModel:
    """The model of that name: a folder or a config.json, a table name, an alias, or a bundled checkpoint.

    Raises:
        BadInput: nothing has that name (close matches are named), or its config is not understood.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return _from_file(path / "config.json", path.name)
    if path.is_file():
        return _from_file(path, path.parent.name if path.name == "config.json" else path.stem)
    key, models, aliases = name.lower(), _table()["models"], _table()["aliases"]
    note = None
    if alias := aliases.get(key):
        key = alias["means"]
        note = f"{name} means {key}: {alias['because']}"
    if entry := models.get(key):
        shape = ModelShape.from_config(entry["config"])
        return PlannedModel(key, shape, entry["config"], entry["source"], note)
    if (BUNDLED / name / "config.json").is_file():
        return _from_file(BUNDLED / name / "config.json", name)
    raise BadInput(_unknown(name, [*models, *aliases]))


def _from_file(path: Path, name: str) -> PlannedModel:
    config = read_json(path)
    return PlannedModel(name, ModelShape.from_config(config), config, str(path))


def _unknown(name: str, known: list[str]) -> str:
    if name.endswith(".json") or name.startswith((".", "/", "~")):
        return f"no model at {name}: give a folder with a config.json, or the path of one"
    close = get_close_matches(name.lower().rsplit("/", 1)[-1], known, n=4, cutoff=0.5)
    hint = f"close: {', '.join(close)}" if close else f"known: {', '.join(known)}"
    return f"no model {name!r} in the bundled table ({hint}); a folder or a config.json works too"
