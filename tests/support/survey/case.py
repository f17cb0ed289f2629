"""A surveyed model type: its tiny config, and a random checkpoint of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import transformers
from llmopt.quant.model.auto import auto_class

from .tiny import tiny_config

TYPES = Path(__file__).with_name("types.json")
MOST_PARAMETERS = 50_000_000
SPREAD = 0.1  # standard deviation of weights: with the usual 0.02, attention barely changes a token
Outcome = Literal["exact", "wrong", "refused", "missed", "traceback"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a column says of a type: `missed` cannot be built by transformers itself."""

    outcome: Outcome
    detail: str = ""


@dataclass
class Case:
    """A model type with the changes to its config that make it small, and a folder for its checkpoint."""

    model_type: str
    changes: Mapping[str, Any]
    folder: Path
    notes: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def config(self) -> Any:
        """The tiny config, as a transformers object that was read back from its file."""
        config = tiny_config(self.model_type, self.changes)
        config.dtype = "float32"
        config.save_pretrained(self.folder)
        return transformers.AutoConfig.from_pretrained(self.folder, trust_remote_code=False)

    @cached_property
    def raw(self) -> dict[str, Any]:
        """The raw `config.json`."""
        assert self.config is not None
        return json.loads((self.folder / "config.json").read_text())

    @cached_property
    def model(self) -> Any:
        """The real model with random weights on the CPU, in float32."""
        with torch.device("meta"):
            size = sum(p.numel() for p in self._built().parameters())
        if size > MOST_PARAMETERS:
            raise ValueError(f"its tiny config has {size:,} parameters: shrink it in {TYPES.name}")
        torch.manual_seed(0)
        return self._built().eval()

    def _built(self) -> Any:
        build: Any = auto_class(self.config).from_config
        return build(
            self.config,
            dtype=torch.float32,
            attn_implementation="eager",
            trust_remote_code=False,
        )


def spread_weights(model: Any) -> Any:
    """The model with random weights that are wide enough for every module to matter."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point() or parameter.numel() < 2:
                continue
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            if parameter.dim() < 2:
                parameter.add_(noise * SPREAD)
            elif parameter.std() < SPREAD:
                parameter.copy_(noise * SPREAD)
    return model


class Column(Protocol):
    """A column of the survey."""

    name: str

    def verdict(self, case: Case) -> Verdict:
        """What holds for this type."""
        ...


def surveyed_types() -> dict[str, dict[str, Any]]:
    """The types of the committed list, with their config changes."""
    return json.loads(TYPES.read_text())["types"]


def excluded_types() -> dict[str, str]:
    """The types that are left out, each with its reason."""
    return json.loads(TYPES.read_text())["excluded"]


def unlisted_types() -> Iterator[str]:
    """Causal and image-text types of the installed transformers that the list does not name."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    listed = {*surveyed_types(), *excluded_types()}
    known = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    yield from sorted(known - listed)
