"""Mixtures of schemes whose KL divergence is predicted and measured, without quantizing a checkpoint.

    python -m tools.mixtures recipes/models/stories3M --mixtures 60

prints the rank correlation of random mixtures of about one size, plain and with the solver's scales of
blocks of layers, which are measured on other text than the mixtures, and the KL divergence of what is
chosen by either: the solver takes the one of less on its own text.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from llmopt.base.progress import Silent
from llmopt.quant.pipeline.cached_calibration import StatisticsFolder
from llmopt.quant.pipeline.candidates import Choice, measure_choices, search_of
from llmopt.quant.pipeline.mixed_precision import Allocation, Lane
from llmopt.quant.pipeline.pipeline import prepare
from llmopt.quant.pipeline.sensitivity import Sensitivities
from llmopt.quant.plan.request import QuantizeRequest


@dataclass(frozen=True)
class Measured:
    """A model's choices, and what measures a mixture of them."""

    lane: Lane

    @property
    def choices(self) -> list[Choice]:
        return self.lane.choices

    @classmethod
    def of(
        cls, model: Path, folder: Path, bpw: float, kept: int | None = None, **options: Any
    ) -> Measured:
        """Search a model with gptq's codes, on `kept` evenly spaced candidates; half of the held-out samples
        are for sensitivities, mixtures are measured on the others."""
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
        sensitivities, half = Sensitivities(statistics.folder), len(calibration.held_out) // 2
        sensitivities.measure(session.stream, calibration.held_out[:half], (), Silent())
        choices = measure_choices(search, sensitivities, statistics, Silent())
        others = calibration.held_out[half:], ()
        return cls(Lane(search, choices, statistics, session.stream, others))

    def divergences(self, mixtures: Sequence[tuple[int, ...]]) -> list[float]:
        """Measured KL divergence of mixtures, on text that calibration did not see."""
        schemes = [
            self.lane.schemes_of(Allocation(mixture, 0, 0.0, 0.0, 0)) for mixture in mixtures
        ]
        return self.lane.divergences(schemes, Silent())

    def expected(self, mixture: tuple[int, ...]) -> float:
        """Predicted KL divergence."""
        return self.lane.expected(mixture)

    def random_mixtures(self, count: int, tilt: float = 0.0) -> list[tuple[int, ...]]:
        """Mixtures with any candidate for each choice that no other beats in both bytes and cost.

        Args:
            tilt: 0: all are as likely, so that mixtures of many choices are about as large; else each mixture
                is drawn towards small or large candidates, by up to a factor of `exp(tilt)` a candidate.
        """
        draw, mixtures = random.Random(0), []
        for _ in range(count):
            power = draw.uniform(-tilt, tilt)
            mixtures.append(
                tuple(
                    draw.choices(c.efficient, [exp(power * n) for n in range(len(c.efficient))])[0]
                    for c in self.choices
                )
            )
        return mixtures


def rank_correlation(measured: Measured, count: int, tilt: float = 0.0) -> float:
    """Correlate the ranks of predicted and measured divergences of random mixtures."""
    mixtures = measured.random_mixtures(count, tilt)
    expected = [measured.expected(mixture) for mixture in mixtures]
    losses = measured.divergences(mixtures)
    return float(pd.Series(expected).corr(pd.Series(losses), method="spearman"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Rank correlation of predicted and measured KL.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--mixtures", type=int, default=40)
    parser.add_argument("--bpw", type=float, default=3.5)
    parser.add_argument("--bits", type=float, nargs="*", default=[2.75, 3.25, 3.5, 4.25, 5])
    parser.add_argument("--samples", type=int, default=64, help="calibration, and held out")
    parser.add_argument("--seq-len", type=int, default=128)
    given = parser.parse_args()
    shape = {"num_samples": given.samples, "seq_len": given.seq_len, "held_out": given.samples}
    with tempfile.TemporaryDirectory() as folder:
        measured = Measured.of(given.model, Path(folder), given.bpw, **shape)
        token_ids = prepare(
            QuantizeRequest(given.model, Path(folder) / "text", method="gptq", **shape)
        ).calibration.held_out[: given.samples // 2]
        lane = replace(measured.lane, samples=(token_ids, ())).scaled(Silent())
        mixtures = measured.random_mixtures(given.mixtures)
        losses = pd.Series(measured.divergences(mixtures))
        both = {"plain": measured, "scaled": Measured(lane)}
        for name, one in both.items():
            expected = [one.expected(mixture) for mixture in mixtures]
            rank = pd.Series(expected).corr(losses, method="spearman")
            print(f"{name}: rank correlation {rank:.3f} over {len(mixtures)} mixtures")
        for bits in given.bits:
            bound = int(bits * lane.search.num_weights / 8)
            proposals = lane.proposals(bound)
            on_own = lane.divergences([lane.schemes_of(one) for one in proposals], Silent())
            losses = measured.divergences([one.chosen for one in proposals])
            taken = losses[on_own.index(min(on_own))]
            print(
                f"{bits:g} bits: KL {losses[0]:.5f} by plain costs, {losses[-1]:.5f} by scaled ones; the one "
                f"taken has {taken / losses[0]:.3f} of the first"
            )


if __name__ == "__main__":
    main()
