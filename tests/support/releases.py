"""Skips of what the installed transformers lacks or computes wrongly; docs/compatibility.md has the releases."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import transformers
from llmopt.base.errors import BadInput
from llmopt.quant.model.auto import check_grouped_norm
from packaging.version import Version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


def skip_before(release: str, reason: str) -> None:
    if Version(transformers.__version__).release < Version(release).release:
        pytest.skip(f"transformers {transformers.__version__}: {reason}")


def skip_unknown_type(model_type: str) -> None:
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")


def skip_without_torchvision(family: str) -> None:
    """Skip image processors whose module imports torchvision in releases before 5.23."""
    if family in ("idefics3", "smolvlm", "llama-4", "gemma-4") and find_spec("torchvision") is None:
        skip_before("5.23", f"the image processor of {family} needs torchvision")


def skip_wrong_modules(model: Any) -> None:
    """Skip a comparison with a model that the installed transformers computes wrongly."""
    try:
        check_grouped_norm(model.config, "transformers")
    except BadInput as error:
        pytest.skip(str(error))
