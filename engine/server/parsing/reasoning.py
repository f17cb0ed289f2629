"""Reasoning formats: the markers around what a model thinks before it answers."""

from __future__ import annotations

from dataclasses import dataclass

from ....quant.base.errors import BadInput


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Reasoning between two markers, at the beginning of an output.

    Attributes:
        name: value of `--reasoning-parser`.
        start, end: markers; a prompt that ends with `start` has begun the reasoning itself.
        special: the markers are special tokens.
    """

    name: str
    start: str
    end: str
    special: bool = False

    def is_begun_by(self, prompt_end: str) -> bool:
        """Whether a prompt that ends with this text has begun the reasoning."""
        return prompt_end.rstrip().endswith(self.start)


THINK = ReasoningFormat("think", "<think>", "</think>")
MISTRAL_THINK = ReasoningFormat("mistral", "[THINK]", "[/THINK]", special=True)
SEED_THINK = ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>", special=True)
FORMATS = {form.name: form for form in (THINK, MISTRAL_THINK, SEED_THINK)}


def reasoning_of_template(template: str) -> ReasoningFormat | None:
    """Detect the reasoning format from a chat template."""
    return next((form for form in FORMATS.values() if form.end in template), None)


def reasoning_format(name: str) -> ReasoningFormat:
    """The format of that name. Raises `BadInput` for an unknown one."""
    if name not in FORMATS:
        raise BadInput(f"--reasoning-parser {name}: need one of {', '.join(FORMATS)}")
    return FORMATS[name]
