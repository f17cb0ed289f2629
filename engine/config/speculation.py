"""Options of speculative decoding: proposer, number of draft tokens, acceptance rule."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, ClassVar

from ...quant.base.errors import BadInput
from ...quant.base.option import option

METHODS = ("ngram", "draft", "medusa", "eagle")
TREE_METHODS = ("medusa", "eagle")
"""Methods that draft token trees."""
DEFAULT_TREE_WIDTH = 2
ACCEPTANCES = ("coupled", "rejection")


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Options of speculative decoding; each field's metadata is its definition.

    "coupled" acceptance samples each token as without speculation, and accepts a draft token that is the
    same, so that seeded sampling gives the same tokens with and without speculation. "rejection" is the
    rejection sampling of Leviathan et al. (2023), which accepts more of a draft model's tokens and keeps the
    distribution. For greedy decoding they are the same.

    Raises:
        BadInput: an unknown name, a number out of range, or a draft model that is missing or unused.
    """

    PANEL: ClassVar = "Speculative decoding"

    method: str = option(
        MISSING,
        "Draft-token proposer: ngram (prompt lookup in the sequence itself), draft (a smaller model), "
        "medusa or eagle (heads that were trained for the model).",
        flag="--speculative",
        hidden_flags=("--spec-method",),
    )
    draft_model: str | Path | None = option(
        None,
        "Draft model with the same vocabulary, or the folder of the heads: a folder, a bundled model's "
        "name, or a hub id.",
        hidden_flags=("--spec-model",),
        word=str,
    )
    num_tokens: int = option(
        4,
        "Maximum number of draft tokens per sequence and step; fewer at a low acceptance rate.",
        flag="--num-speculative-tokens",
        hidden_flags=("--spec-tokens",),
    )
    ngram_min: int = option(
        2, "ngram: minimum length of a match, in tokens.", flag="--prompt-lookup-min"
    )
    ngram_max: int = option(
        4,
        "ngram: maximum length of a match, in tokens; the longest is tried first.",
        flag="--prompt-lookup-max",
    )
    acceptance: str = option(
        "coupled",
        "coupled (seeded sampling gives the same tokens as without) or rejection (rejection sampling).",
        flag="--speculative-acceptance",
    )
    tree_width: int | None = option(
        None,
        "medusa, eagle: draft tokens per position of the tree, on average.",
        flag="--speculative-tree-width",
        show_default="2",
    )

    @classmethod
    def asked(
        cls, method: str | None = None, draft_model: str | Path | None = None, **others: Any
    ) -> SpeculationConfig | None:
        """The config of command-line options; a draft model alone selects the method `draft`."""
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
        if self.method in TREE_METHODS and self.draft_model is None:
            raise BadInput(
                f"{self.method} speculation needs the folder of the heads: give it as --draft-model"
            )
        if self.method == "ngram" and self.draft_model is not None:
            raise BadInput("a draft model has no use in ngram speculation: leave one out")
        if self.tree_width is not None and not 1 <= self.tree_width <= 16:
            raise BadInput(f"speculative_tree_width = {self.tree_width}: need 1 to 16")
        if self.width > 1 and self.method not in TREE_METHODS:
            raise BadInput(
                f"speculative_tree_width = {self.tree_width}: the draft tokens of {self.method} are a chain; "
                f"trees are for {' and '.join(TREE_METHODS)}"
            )

    @property
    def width(self) -> int:
        """Draft tokens per position."""
        if self.tree_width is not None:
            return self.tree_width
        return DEFAULT_TREE_WIDTH if self.method in TREE_METHODS else 1
