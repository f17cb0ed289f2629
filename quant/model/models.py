"""Resolving a model argument (folder, bundled name, hub id) to a local path."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ...recipes import DEFAULT_MODEL, MODELS
from ..base.errors import BadInput
from .checkpoint import GGUF_SUFFIX, gguf_file_of

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def bundled_models() -> list[str]:
    """Names of the models that ship with the package."""
    return sorted(path.name for path in MODELS.iterdir() if (path / "config.json").is_file())


def resolve_model(name: str | None) -> Path:
    """The local path of a model: a directory, a `.gguf` file, the name of a bundled model, or a hub id.

    Only a hub id (`owner/name` that is no directory here) touches the network, and not even that
    under `HF_HUB_OFFLINE=1`, where the local hub cache must hold it.

    Raises:
        BadInput: no such model here, or the download failed.
    """
    name = name or DEFAULT_MODEL
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file() and gguf_file_of(path) is None:
            raise BadInput(f"{path} is not a model: it has no config.json")
        return path
    if path.is_file() and path.suffix == GGUF_SUFFIX:
        return path
    if name in bundled_models():
        return MODELS / name
    if path.exists():
        raise BadInput(f"{path} is a file: give the folder that holds config.json and the weights")
    if _HUB_ID.fullmatch(name) and not name.startswith((".", "/", "~")):
        return _from_hub(name)
    raise BadInput(
        f"no model {name!r}: it is neither a folder, nor a bundled model "
        f"({', '.join(bundled_models())}), nor a hub id (owner/name)"
    )


def _from_hub(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
    try:
        return Path(
            snapshot_download(
                hub_id,
                allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"],
                local_files_only=offline,
            )
        )
    except Exception as error:  # the hub raises a dozen types; the user needs one line
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        where = "the local hub cache (HF_HUB_OFFLINE is set)" if offline else "the hub"
        raise BadInput(
            f"model {hub_id!r} is no folder here and {where} did not give it: {reason}"
        ) from error
