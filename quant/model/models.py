"""Resolving a model argument (folder, bundled name, hub id) to a local path; loading tokenizers."""

from __future__ import annotations

import json
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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


def tokenizer_arguments(model: Path, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """Arguments of `AutoTokenizer.from_pretrained` for a model from `resolve_model`.

    Raises:
        BadInput: a GGUF file without a tokenizer.json beside it, and the `gguf` package is missing.
    """
    file = gguf_file_of(model)
    folder = model if file is None else file.parent
    arguments: dict[str, Any] = {
        "pretrained_model_name_or_path": folder,
        "local_files_only": True,
        "trust_remote_code": trust_remote_code,
    }
    if file is not None and not (folder / "tokenizer.json").is_file():
        if find_spec("gguf") is None:
            raise BadInput(
                f"{file} has no tokenizer.json beside it, and the tokenizer inside is read with a "
                "package that is not installed: pip install 'llmopt[gguf]'"
            )
        arguments["gguf_file"] = file.name
    elif config := _tokenizer_config(folder):
        arguments["config"] = config
    return arguments


def _tokenizer_config(folder: Path) -> Any:
    """What `AutoTokenizer` reads of a model's configuration, where the tokenizer names its class; else None.

    Without it, it imports the model type's configuration class, and with that torch's compiler: two seconds
    of every start, for a class that the tokenizer does not need.
    """
    try:
        declared = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        model = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # transformers says what is wrong
    if "tokenizer_class" not in declared or "auto_map" in declared or "auto_map" in model:
        return None
    from transformers import PreTrainedConfig

    keys = ("model_type", "model_name", "tokenizer_class")
    config = PreTrainedConfig.from_dict({key: model[key] for key in keys if key in model})
    config.name_or_path = str(folder)
    return config


def load_tokenizer(model: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model from `resolve_model`; code of the checkpoint runs only where it is trusted.

    Raises:
        BadInput: it does not load.
    """
    from transformers import AutoTokenizer

    arguments = tokenizer_arguments(model, trust_remote_code=trust_remote_code)
    try:
        tokenizer = AutoTokenizer.from_pretrained(**arguments)
    except Exception as error:  # transformers raises many types for a broken file
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BadInput(f"{model}: the tokenizer does not load: {reason}") from error
    # Callers check lengths; silence the tokenizer's warning.
    tokenizer.model_max_length = int(1e30)
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


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
