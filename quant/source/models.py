"""Resolving a model argument (folder, GGUF file, bundled name, hub id) to a local path, and opening it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ...base.atomic_io import expanded
from ...base.errors import BadInput, reported_as
from ...base.option import offer
from ...recipes import DEFAULT_MODEL, MODELS
from ..model.checkpoint import (
    GGUF_SUFFIX,
    HF_QUANT_CONFIG,
    MANIFEST_NAME,
    Checkpoint,
    gguf_file_of,
    model_config,
    read_json,
)

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def bundled_models() -> list[str]:
    return sorted(path.name for path in MODELS.iterdir() if (path / "config.json").is_file())


def short_name(path: Path) -> str:
    return (path.name if path.is_file() else path.resolve().name).removesuffix(GGUF_SUFFIX)


def is_local(name: str) -> bool:
    """True if a model of that name is on this machine, without asking the hub."""
    path = expanded(name)
    if name in bundled_models() or (path / "config.json").is_file():
        return True
    return path.exists() and gguf_file_of(path) is not None


def check_local(folder: Path) -> None:
    """Raises BadInput where `folder` is neither a folder nor a GGUF file."""
    if not folder.is_dir() and (not folder.exists() or gguf_file_of(folder) is None):
        raise BadInput(
            f"{folder} is no folder that holds a quantized checkpoint, and no .gguf file: give one of them"
        )


def refuse_plain(folder: Path) -> None:
    """Raises BadInput for safetensors whose config names no quantization. Files with a manifest are left to
    their digests."""
    others = (folder / name for name in (MANIFEST_NAME, HF_QUANT_CONFIG))
    if folder.is_file() or gguf_file_of(folder) or any(other.is_file() for other in others):
        return
    config = folder / "config.json"
    if config.is_file() and model_config(config).get("quantization_config") is None:
        raise BadInput(f"{folder} is not quantized: its config has no quantization_config")


def refuse_mock(path: Path, purpose: str) -> None:
    """Raises BadInput for a checkpoint of `quantize --mock`, or a file in one."""
    manifest = (path if path.is_dir() else path.parent) / MANIFEST_NAME
    if manifest.is_file() and read_json(manifest).get("mock"):
        raise BadInput(
            f"{path} is a mock: its codes are random, and nothing but its loading can be tried; {purpose} "
            "needs the checkpoint that quantize writes without --mock"
        )


def resolve_model(name: str | None, *, local: bool = False) -> Path:
    """Local path of a model: directory, GGUF file, bundled name, or hub id, which alone takes network. A GGUF
    header is read first. BadInput: no such model (`local`: here), unreadable, or no download."""
    name = name or DEFAULT_MODEL
    path = expanded(name)
    file = gguf_file_of(path) if path.exists() else None
    if file is not None:
        from ..gguf.container import GgufFile
        from ..gguf.read_config import stored_config

        stored_config(GgufFile(file))
        return path
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise BadInput(f"{path} is not a model: it has neither a config.json nor a .gguf file")
        return path
    if name in bundled_models():
        return MODELS / name
    if path.exists():
        raise BadInput(
            f"{path} is a file, and no GGUF: give that, or the folder that holds config.json and the weights"
        )
    if path.suffix == GGUF_SUFFIX:
        raise BadInput(f"there is no file {path}")
    if not local and HUB_ID.fullmatch(name) and not name.startswith((".", "/", "~")):
        return _from_hub(name)
    raise BadInput(
        f"no model {name!r}: it is neither a folder, nor a .gguf file, "
        f"{'' if local else 'nor a hub id (owner/name), '}nor a bundled model: "
        f"{offer(name, bundled_models())}"
    )


def hub_is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")


def _from_hub(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    offline = hub_is_offline()
    where = "the local hub cache (HF_HUB_OFFLINE is set)" if offline else "the hub"
    with reported_as(f"model {hub_id!r} is no folder here and {where} did not give it"):
        return Path(
            snapshot_download(
                hub_id,
                allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"],
                local_files_only=offline,
            )
        )


def open_checkpoint(path: Path | str, *, trust_remote_code: bool = False) -> Checkpoint:
    """Open a folder of safetensors, or a `.gguf` file, as a checkpoint; BadInput as `Checkpoint`."""
    file = gguf_file_of(Path(path))
    if file is None:
        return Checkpoint(path, trust_remote_code=trust_remote_code)
    from ..gguf.checkpoint import GgufCheckpoint  # imports torch

    return GgufCheckpoint(file)


def open_plain(path: Path | str, *, trust_remote_code: bool = False) -> Checkpoint:
    """Open a model as `open_checkpoint` does, a quantized `.gguf` file as its dequantized weights."""
    file = gguf_file_of(Path(path))
    if file is None:
        return Checkpoint(path, trust_remote_code=trust_remote_code)
    from ..gguf.checkpoint import DequantizedGguf  # imports torch

    return DequantizedGguf(file)
