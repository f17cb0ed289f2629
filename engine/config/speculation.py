"""What the user asks of speculation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...quant.base.errors import BadInput

METHODS = ("ngram", "draft", "medusa", "eagle")
GROWING = ("medusa", "eagle")
"""Methods whose guesses form a tree."""
DEFAULT_TREE_WIDTH = 2
ACCEPTANCES = ("coupled", "rejection")


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Options of speculative decoding.

    Attributes:
        method: "ngram" looks the last tokens up in the sequence itself (prompt lookup), "draft" asks a
            smaller model with the same vocabulary, "medusa" and "eagle" ask heads that were trained on the
            model's own hidden states.
        draft_model: the smaller model or the heads: a folder, a bundled model's name, or a hub id.
        num_tokens: places ahead that a step has guesses for, at most. How many it has follows from how many
            were right.
        tree_width: guesses for each place, on average, of heads. They form a tree; those of the other
            methods are a chain, a guess for each place.
        ngram_min, ngram_max: tokens that must agree for a guess; the longest match is tried first.
        acceptance: "coupled" draws each token as it would be drawn without guesses and keeps a guess
            that is the same, so that seeded sampling gives the same tokens with and without speculation;
            "rejection" is the rule of Leviathan et al. (2023), which keeps more guesses of a draft model
            and gives the same distribution. Greedy decoding does not tell them apart.

    Raises:
        BadInput: an unknown name, a number out of range, or a draft model that is missing or idle.
    """

    method: str
    draft_model: str | Path | None = None
    num_tokens: int = 4
    ngram_min: int = 2
    ngram_max: int = 4
    acceptance: str = "coupled"
    tree_width: int | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise BadInput(f"speculation {self.method!r}: choose {', '.join(METHODS)}")
        if self.acceptance not in ACCEPTANCES:
            raise BadInput(
                f"speculative acceptance {self.acceptance!r}: choose {' or '.join(ACCEPTANCES)}"
            )
        if not 1 <= self.num_tokens <= 64:
            raise BadInput(f"num_speculative_tokens = {self.num_tokens}: need 1 to 64")
        if not 1 <= self.ngram_min <= self.ngram_max:
            raise BadInput(
                f"prompt lookup of {self.ngram_min} to {self.ngram_max} tokens: need 1 or more, and "
                "the smaller number first"
            )
        if self.method == "draft" and self.draft_model is None:
            raise BadInput("speculation by a draft model needs one: give --draft-model")
        if self.method in GROWING and self.draft_model is None:
            raise BadInput(
                f"{self.method} speculation needs the folder of the heads: give it as --draft-model"
            )
        if self.method == "ngram" and self.draft_model is not None:
            raise BadInput("a draft model has no use in ngram speculation: leave one out")
        if self.tree_width is not None and not 1 <= self.tree_width <= 16:
            raise BadInput(f"speculative_tree_width = {self.tree_width}: need 1 to 16")
        if self.width > 1 and self.method not in GROWING:
            raise BadInput(
                f"speculative_tree_width = {self.tree_width}: the guesses of {self.method} are a chain; "
                f"trees are for {' and '.join(GROWING)}"
            )

    @property
    def width(self) -> int:
        """Guesses for each place."""
        if self.tree_width is not None:
            return self.tree_width
        return DEFAULT_TREE_WIDTH if self.method in GROWING else 1
