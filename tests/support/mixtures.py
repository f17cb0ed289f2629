"""Mixtures of schemes whose KL divergence is predicted and measured, without quantizing a checkpoint."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from llmopt.quant.base.progress import Silent
from llmopt.quant.pipeline.allocate import Allocation, Choice
from llmopt.quant.pipeline.cached_calibration import StatisticsFolder
from llmopt.quant.pipeline.candidates import Search, search_of
from llmopt.quant.pipeline.divergence import divergences
from llmopt.quant.pipeline.mixed_precision import measure_choices, schemes_of
from llmopt.quant.pipeline.pipeline import prepare
from llmopt.quant.pipeline.sensitivity import Sensitivities
from llmopt.quant.pipeline.stages import Session
from llmopt.quant.plan.request import QuantizeRequest


@dataclass(frozen=True)
class Measured:
    """A model's choices, and what measures a mixture of them."""

    session: Session
    search: Search
    choices: list[Choice]
    folder: StatisticsFolder

    @classmethod
    def of(
        cls, model: Path, folder: Path, bpw: float, kept: int | None = None, **options: Any
    ) -> Measured:
        """Search a model with gptq's codes, on `kept` evenly spaced candidates."""
        request = QuantizeRequest(
            model, folder / "out", method="gptq", format="compressed-tensors", **options
        )
        session = prepare(request)
        plan, calibration = session.plan, session.calibration
        search = search_of(plan, bpw, None)
        if kept is not None:
            places = torch.linspace(0, len(search.schemes) - 1, kept).long().tolist()
            search = replace(
                search,
                schemes=tuple(search.schemes[place] for place in places),
                sizes=tuple(search.sizes[place] for place in places),
                uniform=0,
            )
        statistics = StatisticsFolder(folder / "statistics", "one")
        statistics.measure(
            session.stream, calibration, Silent(), head=False, kv=False,
            replaced=search.round_uniform,
        )  # fmt: skip
        sensitivities = Sensitivities(statistics.folder)
        sensitivities.measure(session.stream, *calibration.samples, Silent())
        choices = measure_choices(search, sensitivities, statistics, Silent())
        return cls(session, search, choices, statistics)

    def divergences(self, mixtures: Sequence[tuple[int, ...]]) -> list[float]:
        """Measured KL divergence of mixtures, on text that calibration did not see."""
        schemes = [
            schemes_of(self.search, self.choices, Allocation(mixture, 0, 0.0, 0.0))
            for mixture in mixtures
        ]
        session = self.session
        ids, images = session.calibration.held_out_samples
        return divergences(
            session.plan, session.stream, ids, schemes, Silent(), images, self.folder
        )

    def expected(self, mixture: tuple[int, ...]) -> float:
        """Predicted KL divergence."""
        return sum(c.costs[at] for c, at in zip(self.choices, mixture, strict=True))

    def bytes_of(self, mixture: tuple[int, ...]) -> int:
        return sum(c.bytes[at] for c, at in zip(self.choices, mixture, strict=True))

    def random_mixtures(self, count: int) -> list[tuple[int, ...]]:
        """Mixtures with any candidate for each choice that no other beats in both bytes and cost."""
        draw = random.Random(0)
        return [tuple(draw.choice(c.efficient) for c in self.choices) for _ in range(count)]


def rank_correlation(measured: Measured, count: int) -> float:
    mixtures = measured.random_mixtures(count)
    expected = [measured.expected(mixture) for mixture in mixtures]
    losses = measured.divergences(mixtures)
    return float(pd.Series(expected).corr(pd.Series(losses), method="spearman"))
