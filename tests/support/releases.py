"""Skips of what the installed transformers lacks or computes wrongly; docs/compatibility.md has the releases."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from llmopt.quant.base.errors import BadInput
from llmopt.quant.model.auto import check_grouped_norm
from packaging.version import Version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


def skip_before(release: str, reason: str) -> None:
    if Version(transformers.__version__).release < Version(release).release:
        pytest.skip(f"transformers {transformers.__version__}: {reason}")


def skip_unknown_type(model_type: str) -> None:
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")


def skip_wrong_modules(model: Any) -> None:
    """Skip a comparison with a model that the installed transformers computes wrongly."""
    try:
        check_grouped_norm(model.config, "transformers")
    except BadInput as error:
        pytest.skip(str(error))
