"""Loading the tokenizer of a folder or GGUF file, and a checkpoint's processor for images, on Pillow."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...base.errors import BadInput, reported_as
from ...base.extras import require
from ..base.plain_tokenizer import plain_tokenizer, processor_template, quiet
from ..families.registry import model_family, type_of
from ..model.checkpoint import gguf_file_of
from .tokenizer_file import as_in_file


def load_tokenizer(model: Path, *, trust_remote_code: bool = False) -> Any:
    """Tokenizer of a model from `resolve_model`, or a GGUF file's: of its keys, else of a tokenizer.json.
    BadInput: it does not load. Code of the checkpoint runs only where it is trusted."""
    file = gguf_file_of(model)
    folder = model if file is None else file.parent
    with reported_as(f"{model}: the tokenizer does not load", keeping=BadInput):
        if file is not None:
            from ..gguf.container import GgufFile
            from ..gguf.read_tokenizer import own_tokenizer

            if (tokenizer := own_tokenizer(GgufFile(file))) is not None:
                return tokenizer
        tokenizer = _from_folder(folder, trust_remote_code)
        if not getattr(tokenizer, "chat_template", None):
            tokenizer.chat_template = processor_template(folder)
        return tokenizer


_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")


def _from_folder(folder: Path, trust_remote_code: bool) -> Any:
    arguments: dict[str, Any] = {}
    try:
        declared = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        model = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # transformers says what is wrong
        declared = model = {}
    if "tokenizer_class" in declared and "auto_map" not in declared and "auto_map" not in model:
        if _is_plain(folder, declared, model):

            def whole() -> Any:
                from transformers import PreTrainedTokenizerFast

                return quiet(PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True))

            return plain_tokenizer(folder, declared, whole) or whole()
        # The fields that `AutoTokenizer` reads where the tokenizer names its class. Without them it imports
        # the model type's configuration class, and with that torch's compiler: two seconds of every start.
        from transformers import PreTrainedConfig

        keys = ("model_type", "model_name", "tokenizer_class")
        config = PreTrainedConfig.from_dict({key: model[key] for key in keys if key in model})
        config.name_or_path = str(folder)
        arguments["config"] = config
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=trust_remote_code, **arguments
    )
    if "auto_map" in declared or "auto_map" in model:
        return quiet(tokenizer)  # code of its own
    return as_in_file(quiet(tokenizer), folder)


def _is_plain(folder: Path, declared: Mapping[str, Any], model: Mapping[str, Any]) -> bool:
    """True if tokenizer.json is all of a tokenizer: `AutoTokenizer` takes half a second to import."""
    family = model_family(model.get("model_type") or "")
    if family is None or not family.plain_tokenizer or not (folder / "tokenizer.json").is_file():
        return False
    # Some names have classes replaced, as some types have.
    return "model_name" not in model and declared["tokenizer_class"] in _PLAIN_CLASSES


_FILES = ("processor_config.json", "preprocessor_config.json")
"""Either describes the image processor."""


def has_processor(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _FILES)


def load_processor(folder: Path, tokenizer: Any, *, trust_remote_code: bool) -> Any:
    """The processor with image processor and tokenizer. BadInput: there is none, or it cannot be built."""
    if not has_processor(folder):
        raise BadInput(
            f"{folder} has no {' or '.join(_FILES)}: without them images cannot be processed"
        )
    require("a processor of images", "images", "PIL")
    with reported_as(f"{folder}: transformers cannot build its image processor"):
        image_processor = _image_processor(folder, trust_remote_code)
        kind = _processor_class(folder, trust_remote_code)
        description, _ = kind.get_processor_dict(folder)
        tokenizer = getattr(tokenizer, "whole", tokenizer)
        available = {"image_processor": image_processor, "tokenizer": tokenizer}
        parts = [available.get(name) for name in kind.get_attributes()]
        return _without_checks(kind).from_args_and_dict(parts, description)


def _image_processor(folder: Path, trust_remote_code: bool) -> Any:
    """transformers' image processor for Pillow, or ours where it has none."""
    from transformers import BaseImageProcessor

    # Without torchvision `transformers.AutoImageProcessor` of 5.17 is a class that only raises.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    from .own_processors import Llama4ImageProcessorPil

    description, _ = BaseImageProcessor.get_image_processor_dict(folder)
    if str(description.get("image_processor_type")).startswith("Llama4ImageProcessor"):
        return Llama4ImageProcessorPil.from_dict(description)
    return AutoImageProcessor.from_pretrained(
        folder, backend="pil", trust_remote_code=trust_remote_code
    )


def _processor_class(folder: Path, trust_remote_code: bool) -> Any:
    """The processor class that the checkpoint's files name, or else the one of its model type."""
    import transformers
    from transformers import AutoConfig
    from transformers.models.auto import processing_auto

    from ..model.checkpoint import read_json
    from .own_processors import PixtralProcessor

    for name in (*_FILES, "tokenizer_config.json"):
        if (folder / name).is_file():
            named = read_json(folder / name).get("processor_class")
            if named == "PixtralProcessor":
                return PixtralProcessor
            if named and (kind := processing_auto.processor_class_from_name(named)) is not None:
                return kind
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    mapping = processing_auto.PROCESSOR_MAPPING
    if type(config) not in mapping:
        raise ValueError(
            f"transformers {transformers.__version__} has no processor for {type_of(config)!r}"
        )
    kind: Any = mapping[type(config)]
    return PixtralProcessor if kind.__name__ == "PixtralProcessor" else kind


def _without_checks(kind: Any) -> Any:
    """A subclass without parts for video and audio; SmolVLM's asks for a package for frame numbers."""
    module = sys.modules[kind.__module__]
    if getattr(module, "num2words", True) is None:
        vars(module)["num2words"] = str

    def accept(self: Any, argument_name: str, argument: Any) -> type:
        return type(argument)

    return type(kind.__name__, (kind,), {"check_argument_for_proper_class": accept})
