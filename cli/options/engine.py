"""Options of speculative decoding, for every command that starts an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ...engine.config.speculation import SpeculationConfig

PANEL = "Speculative decoding"
OPTION_NAMES = (
    "speculative",
    "draft_model",
    "num_speculative_tokens",
    "speculative_tree_width",
    "prompt_lookup_min",
    "prompt_lookup_max",
    "speculative_acceptance",
)

Speculative = Annotated[
    str | None,
    typer.Option(
        help="Who guesses the next tokens: ngram (the sequence itself), draft (a smaller model), "
        "medusa or eagle (heads that were trained for the model).",
        rich_help_panel=PANEL,
    ),
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        help="The smaller model, with the same vocabulary, or the folder of the heads.",
        rich_help_panel=PANEL,
    ),
]
NumSpeculativeTokens = Annotated[
    int, typer.Option(help="Places ahead that have guesses, at most.", rich_help_panel=PANEL)
]
SpeculativeTreeWidth = Annotated[
    int | None,
    typer.Option(
        help="medusa, eagle: guesses for each place, on average.",
        show_default="2",
        rich_help_panel=PANEL,
    ),
]
PromptLookupMin = Annotated[
    int, typer.Option(help="ngram: tokens that must agree, at least.", rich_help_panel=PANEL)
]
PromptLookupMax = Annotated[
    int, typer.Option(help="ngram: tokens that are compared, at most.", rich_help_panel=PANEL)
]
SpeculativeAcceptance = Annotated[
    str,
    typer.Option(
        help="coupled (seeded sampling gives the same tokens as without) or rejection.",
        rich_help_panel=PANEL,
    ),
]


def speculation(
    speculative: str | None,
    draft_model: str | None,
    num_speculative_tokens: int,
    speculative_tree_width: int | None,
    prompt_lookup_min: int,
    prompt_lookup_max: int,
    speculative_acceptance: str,
) -> SpeculationConfig | None:
    """What these options ask for; a draft model alone asks for its use."""
    from ...engine.config.speculation import SpeculationConfig

    if speculative is None and draft_model is None:
        return None
    return SpeculationConfig(
        method=speculative or "draft",
        draft_model=draft_model,
        num_tokens=num_speculative_tokens,
        ngram_min=prompt_lookup_min,
        ngram_max=prompt_lookup_max,
        acceptance=speculative_acceptance,
        tree_width=speculative_tree_width,
    )
