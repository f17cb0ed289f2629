"""Answers of the probe by config hash: those of the bundled models, and a cache in the user's folder.

An answer is valid for one transformers version: its modules define the cache. The bundled ones are read
whatever is installed, so that planning a bundled model imports neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...quant.base.atomic_io import write_atomically
from ...quant.base.errors import BadInput
from .facts import ProbedModel

FORMAT = 1
"""Raised whenever the probe measures something else: answers of another format are not read."""
# Fields that name files, tokens and versions and change no size.
_NO_SIZE = frozenset({"_name_or_path", "transformers_version", "architectures"})


def probed(
    raw: Mapping[str, Any], folder: Path | None = None, *, trust_remote_code: bool = False
) -> ProbedModel:
    """The bundled or cached answer for this config; else the model is probed and the answer kept.

    Raises:
        BadInput: the model cannot be probed.
    """
    key = config_hash(raw)
    if (entry := _bundled().get(key)) is not None:
        return ProbedModel.from_dict(entry)
    path = cache_folder() / f"{key}-{version('transformers')}.json"
    if (answer := _read(path)) is not None:
        return answer
    from .oracle import probe

    answer = probe(raw, folder, trust_remote_code=trust_remote_code)
    _keep(path, answer)
    return answer


def config_hash(raw: Mapping[str, Any]) -> str:
    """SHA-256 of a config's fields, whatever their order."""
    sized = {key: value for key, value in raw.items() if key not in _NO_SIZE}
    text = json.dumps([FORMAT, sized], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def cache_folder() -> Path:
    """Folder of the kept answers: llmopt/probe in `XDG_CACHE_HOME` or `~/.cache`."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "llmopt" / "probe"


@cache
def _bundled() -> Mapping[str, Any]:
    return json.loads(Path(__file__).with_name("bundled.json").read_text(encoding="utf-8"))


def _read(path: Path) -> ProbedModel | None:
    """A kept answer; None if there is none, or it is damaged."""
    try:
        return ProbedModel.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(path: Path, answer: ProbedModel) -> None:
    """Write an answer; a folder that cannot be written costs the next call its time, not this one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(answer.as_dict()).encode())
    except (OSError, BadInput):
        return
