"""Options of speculative decoding: who proposes draft tokens, how many, and how they are accepted."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...quant.base.errors import BadInput
from .option import option

METHODS = ("ngram", "draft", "medusa", "eagle")
GROWING = ("medusa", "eagle")
"""Methods whose guesses form a tree."""
DEFAULT_TREE_WIDTH = 2
ACCEPTANCES = ("coupled", "rejection")


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Options of speculative decoding; each field's metadata says what it is and how it is spelled.

    "coupled" acceptance draws each token as it would be drawn without draft tokens, and accepts a draft
    token that is the same, so that seeded sampling gives the same tokens with and without speculation.
    "rejection" is the rule of Leviathan et al. (2023), which accepts more of a draft model's tokens and
    gives the same distribution. Greedy decoding does not tell them apart.

    Raises:
        BadInput: an unknown name, a number out of range, or a draft model that is missing or idle.
    """

    method: str = field(
        metadata=option(
            "Draft-token proposer: ngram (prompt lookup in the sequence itself), draft (a smaller model), "
            "medusa or eagle (heads that were trained for the model).",
            flag="--speculative",
            hidden_flags=("--spec-method",),
        )
    )
    draft_model: str | Path | None = field(
        default=None,
        metadata=option(
            "Draft model with the same vocabulary, or the folder of the heads: a folder, a bundled model's "
            "name, or a hub id.",
            hidden_flags=("--spec-model",),
            word=str,
        ),
    )
    num_tokens: int = field(
        default=4,
        metadata=option(
            "Draft tokens of a sequence in a step, at most; fewer where few are accepted.",
            flag="--num-speculative-tokens",
            hidden_flags=("--spec-tokens",),
        ),
    )
    ngram_min: int = field(
        default=2,
        metadata=option(
            "ngram: tokens that a match has, at least.",
            flag="--prompt-lookup-min",
        ),
    )
    ngram_max: int = field(
        default=4,
        metadata=option(
            "ngram: tokens that a match has, at most; the longest is tried first.",
            flag="--prompt-lookup-max",
        ),
    )
    acceptance: str = field(
        default="coupled",
        metadata=option(
            "coupled (seeded sampling gives the same tokens as without) or rejection (rejection sampling).",
            flag="--speculative-acceptance",
        ),
    )
    tree_width: int | None = field(
        default=None,
        metadata=option(
            "medusa, eagle: draft tokens for each position, on average; they form a tree.",
            flag="--speculative-tree-width",
            show_default="2",
        ),
    )

    @classmethod
    def asked(
        cls, method: str | None = None, draft_model: str | Path | None = None, **others: Any
    ) -> SpeculationConfig | None:
        """What options beside each other ask for; a draft model alone asks for its use."""
        if method is None and draft_model is None:
            return None
        return cls(method or "draft", draft_model, **others)

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
