"""Build a checkpoint's processor for images alone: transformers' class, on Pillow, without its video part."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ..base.errors import BadInput, first_line
from ..families.registry import type_of

_FILES = ("processor_config.json", "preprocessor_config.json")
"""Either describes the image processor."""


def has_processor(folder: Path) -> bool:
    """Whether a checkpoint has the description of an image processor."""
    return any((folder / name).is_file() for name in _FILES)


def load_processor(folder: Path, tokenizer: Any, *, trust_remote_code: bool) -> Any:
    """The processor of a checkpoint with image processor and tokenizer, and nothing where it takes more.

    Raises:
        BadInput: there is none, or transformers cannot build it here.
    """
    if not has_processor(folder):
        raise BadInput(
            f"{folder} has no {' or '.join(_FILES)}: without them images cannot be processed"
        )
    try:
        image_processor = _image_processor(folder, trust_remote_code)
        kind = _processor_class(folder, trust_remote_code)
        description, _ = kind.get_processor_dict(folder)
        given = {"image_processor": image_processor, "tokenizer": tokenizer}
        parts = [given.get(name) for name in kind.get_attributes()]
        return _without_checks(kind).from_args_and_dict(parts, description)
    except Exception as error:  # transformers may fail in any way here
        raise BadInput(
            f"{folder}: transformers cannot build its image processor: {first_line(error)}"
        ) from error


def _image_processor(folder: Path, trust_remote_code: bool) -> Any:
    """transformers' image processor for Pillow, or ours where it has none."""
    from transformers import AutoImageProcessor, BaseImageProcessor

    from .llama4_processor import Llama4ImageProcessorPil

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
    from transformers.models.auto.processing_auto import (
        PROCESSOR_MAPPING,
        processor_class_from_name,
    )

    from ..model.checkpoint import read_json
    from .pixtral_processor import PixtralProcessor

    for name in (*_FILES, "tokenizer_config.json"):
        if (folder / name).is_file():
            named = read_json(folder / name).get("processor_class")
            if named == "PixtralProcessor":
                return PixtralProcessor
            if named and (kind := processor_class_from_name(named)) is not None:
                return kind
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if type(config) not in PROCESSOR_MAPPING:
        raise ValueError(
            f"transformers {transformers.__version__} has no processor for {type_of(config)!r}"
        )
    kind: Any = PROCESSOR_MAPPING[type(config)]
    return PixtralProcessor if kind.__name__ == "PixtralProcessor" else kind


def _without_checks(kind: Any) -> Any:
    """A subclass that accepts None for the parts that read video and audio, which are not loaded.

    SmolVLM's class asks for a package that writes the numbers of video frames.
    """
    module = sys.modules[kind.__module__]
    if getattr(module, "num2words", True) is None:
        vars(module)["num2words"] = str

    def accept(self: Any, argument_name: str, argument: Any) -> type:
        return type(argument)

    return type(kind.__name__, (kind,), {"check_argument_for_proper_class": accept})
