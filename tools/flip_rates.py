"""Error rates of flips: do intervals predicted from half of the items hold the other half, and how often do
equal models break a promise?

    python -m tools.flip_rates -o docs/measured/cpu/flip-rates.md

Thirty pairs of items (six parts of those over the bundled stories) and a quantization of the model.
The items of a pair are split at random many times; the 90 % interval of the share of flips, and of the
change of accuracy, predicted from one half is held against the other. Equal models are the pairs with
each item's two answers swapped at random, so that accuracy truly does not change, and items drawn with a
share of flips that is exactly the promised one. Exit code 1 if an interval holds less than 85 % or more
than 95 %, or a promise at the truth is broken in more than the stated 2.5 % (and two standard errors of
the simulation). Scores are kept in a folder, so that a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from llmopt.bench.page.page import markdown_table
from llmopt.bench.quality.domains import (
    ChoiceTask,
    FullPassage,
    by_item,
    exact_interval,
    predicted_change,
    predicted_share,
)
from llmopt.bench.quality.scoring import score_passage
from llmopt.bench.quality.task_items import tango_interval
from llmopt.bench.session.tasks import encode_pair
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.request import QuantizeRequest
from llmopt.quant.source.models import resolve_model
from llmopt.recipes import DEFAULT_MODEL

QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "rtn 3 bits, g32": {"bits": 3, "group_size": 32},
    "rtn 4 bits, g128": {"bits": 4, "group_size": 128},
    "nf4": {"method": "nf4"},
    "Q2_K": {"format": "gguf", "gguf_type": "Q2_K"},
    "Q4_0": {"format": "gguf", "gguf_type": "Q4_0"},
}
PARTS = 6
SPLITS = 400
HELD = (0.85, 0.95)
STATED = 0.025
HEADER = (
    "items",
    "quantization",
    "count",
    "flips",
    "change of accuracy",
    "flips held",
    "change held",
)
NULL_HEADER = ("promise at the truth", "broken", "stated")


class Answers(NamedTuple):
    """Per item whether it flipped, and whether the original and the quantized model are right."""

    flipped: np.ndarray
    before: np.ndarray
    after: np.ndarray

    @property
    def change(self) -> np.ndarray:
        """1 where an answer was gained, -1 where one was lost."""
        return self.after.astype(int) - self.before

    def at(self, rows: np.ndarray) -> Answers:
        return Answers(*(column[rows] for column in self))


@dataclass(frozen=True, slots=True)
class Pair:
    """A part of the items, answered by the original and a quantization."""

    part: str
    quantization: str
    answers: Answers


def options_alone(full: FullPassage) -> FullPassage:
    """The passage without its domains."""
    windows = full.passage.windows[len(full.domains) :]
    return replace(full, passage=replace(full.passage, windows=windows), domains=())


def scores_of(model: Path, full: FullPassage) -> list[float]:
    """The log-likelihood of every option."""
    engine = Engine(EngineConfig(model, dtype="float32", device="cpu"))
    series, _ = score_passage(full.passage, engine.prompt_pass, what=model.name)
    return np.concatenate(full.log_likelihoods(series.needed("nll"))).tolist()


def kept_scores(keep: Path, name: str, make: Callable[[], list[float]]) -> np.ndarray:
    """The scores in a file, made where there is none."""
    path = keep / f"{name}.json"
    if not path.is_file():
        scores = make()
        keep.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(scores), encoding="utf-8")
        print(f"scored {name}", file=sys.stderr)
    return np.array(json.loads(path.read_text(encoding="utf-8")))


def quantized_scores(model: Path, full: FullPassage, how: dict[str, Any]) -> list[float]:
    with tempfile.TemporaryDirectory() as parent:
        output = Path(parent) / "quantized"
        quantize(QuantizeRequest(model, output, **{"method": "rtn", "errors": False, **how}))
        return scores_of(resolve_model(str(output)), full)


def pairs_of(model: Path, keep: Path) -> Iterator[Pair]:
    tokenizer = Engine(EngineConfig(model, device="cpu")).tokenizer
    encode = partial(encode_pair, tokenizer)
    full = options_alone(FullPassage.of(tokenizer, encode, 512, stories_only=True))
    original = kept_scores(keep, "original", partial(scores_of, model, full))
    for name, how in QUANTIZATIONS.items():
        scores = kept_scores(keep, name, partial(quantized_scores, model, full, how))
        answers = answers_of(original, scores, full.tasks)
        parts = np.array_split(np.arange(len(answers.flipped)), PARTS)
        for number, rows in enumerate(parts, start=1):
            yield Pair(f"stories {number}", name, answers.at(rows))


def answers_of(before: np.ndarray, after: np.ndarray, tasks: Sequence[ChoiceTask]) -> Answers:
    chosen = [
        np.array([item.argmax() for item in by_item(side, tasks)]) for side in (before, after)
    ]
    right = np.array([item.answer for task in tasks for item in task.items])
    return Answers(chosen[0] != chosen[1], chosen[0] == right, chosen[1] == right)


_share, _change = cache(predicted_share), cache(predicted_change)
_exact, _tango = cache(exact_interval), cache(tango_interval)


def held_shares(answers: Answers, rng: np.random.Generator) -> tuple[float, float]:
    """In how many splits the other half lies in the interval: of flips, of the change of accuracy."""
    count = len(answers.flipped)
    half = count // 2
    held = np.zeros(2)
    for _ in range(SPLITS):
        order = rng.permutation(count)
        first, other = answers.at(order[:half]), answers.at(order[half:])
        rest = count - half
        low, high = _share(int(first.flipped.sum()), half, rest)
        held[0] += low <= other.flipped.mean() <= high
        lost, gained = int((first.change < 0).sum()), int((first.change > 0).sum())
        low, high = _change(lost, gained, half, rest)
        held[1] += low <= other.change.mean() <= high
    return float(held[0] / SPLITS), float(held[1] / SPLITS)


def broken_at_the_truth(answers: Answers, rng: np.random.Generator) -> np.ndarray:
    """In how many draws a promise that is exactly true is broken: of flips, of the change of accuracy."""
    count, share = len(answers.flipped), answers.flipped.mean()
    broken = np.zeros(2)
    for _ in range(SPLITS):
        drawn = int(rng.binomial(count, share))
        broken[0] += _exact(drawn, count)[0] > share
        change = answers.change * rng.choice((-1, 1), size=count)
        lost, gained = int((change < 0).sum()), int((change > 0).sum())
        broken[1] += _tango(lost, gained, count)[1] < 0
    return broken / SPLITS


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--keep", type=Path, default=Path("build/flips"))
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    model, rng = resolve_model(given.model), np.random.default_rng(0)
    rows, held, broken = [], [], []
    for pair in pairs_of(model, given.keep / model.name):
        held.append(held_shares(pair.answers, rng))
        broken.append(broken_at_the_truth(pair.answers, rng))
        share, change = pair.answers.flipped.mean(), pair.answers.change.mean()
        values = [f"{value:.1%}" for value in (share, change, *held[-1])]
        values[1] = f"{change:+.1%}"
        rows.append([pair.part, pair.quantization, str(len(pair.answers.flipped)), *values])
    means, rates = np.mean(held, axis=0), np.mean(broken, axis=0)
    allowed = STATED + 2 * np.sqrt(STATED * (1 - STATED) / (SPLITS * len(rows)))
    rows.append(["all", f"{len(rows)} pairs", "", "", "", *(f"{value:.1%}" for value in means)])
    promises = zip(("share of flips", "change of accuracy"), rates, strict=True)
    null = [[name, f"{rate:.2%}", f"at most {STATED:.1%}"] for name, rate in promises]
    text = (
        f"Flips of {model.name}: {SPLITS} splits of each pair, `python -m tools.flip_rates`\n\n"
        + "\n".join([*markdown_table(HEADER, rows), "", *markdown_table(NULL_HEADER, null), ""])
    )
    print(text)
    if given.output:
        given.output.write_text(text, encoding="utf-8")
    right = all(HELD[0] <= mean <= HELD[1] for mean in means) and all(rates <= allowed)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
