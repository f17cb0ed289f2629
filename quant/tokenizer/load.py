"""Loading the tokenizer of a folder (transformers) or of a GGUF file (its own keys)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..base.errors import BadInput
from ..families.registry import model_family, type_of
from ..gguf.container import GgufFile
from ..gguf.read_tokenizer import read_tokenizer
from ..model.checkpoint import gguf_file_of


def load_tokenizer(model: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model from `resolve_model`; code of the checkpoint runs only where it is trusted.

    A GGUF file's is the tokenizer.json beside it, else what its own keys describe.

    Raises:
        BadInput: it does not load.
    """
    file = gguf_file_of(model)
    folder = model if file is None else file.parent
    try:
        if file is not None and not (folder / "tokenizer.json").is_file():
            tokenizer = read_tokenizer(GgufFile(file))
        else:
            tokenizer = _from_folder(folder, trust_remote_code)
    except BadInput:
        raise
    except Exception as error:  # transformers and tokenizers raise many types for a broken file
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BadInput(f"{model}: the tokenizer does not load: {reason}") from error
    # Callers check lengths; silence the tokenizer's warning.
    tokenizer.model_max_length = int(1e30)
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")


def _from_folder(folder: Path, trust_remote_code: bool) -> Any:
    arguments: dict[str, Any] = {}
    if config := _tokenizer_config(folder):
        if _is_plain(folder, config):
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        arguments["config"] = config
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=trust_remote_code, **arguments
    )


def _is_plain(folder: Path, config: Any) -> bool:
    """Whether its tokenizer.json is all of a tokenizer, so that no model's class need be imported.

    `AutoTokenizer` reads the sources of all models for it: half a second of every start.
    """
    family = model_family(type_of(config))
    if family is None or not family.plain_tokenizer or not (folder / "tokenizer.json").is_file():
        return False
    if hasattr(config, "model_name"):
        return False  # some names have classes replaced, as some types have
    declared = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    return declared["tokenizer_class"] in _PLAIN_CLASSES


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
