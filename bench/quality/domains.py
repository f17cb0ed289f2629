"""Quality where users feel it: the distance by domain of text, and flips, the answers to items that change.

The mean KL divergence says least near the original. Therefore the bundled texts of six domains, which no
calibration saw, are scored too, and cloze items over bundled texts: the context of a word, and four words to
choose from. A model's answer is the option of the highest log-likelihood after the context (teacher-forced);
an item flips if it differs from the reference's answer. Both models score the same windows in one pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from ...base.json_lines import json_lines
from ...quant.stream.sources import Document, plain_text
from ...recipes import DATA
from ..metrics.statistics import CONFIDENCE, POWER
from .chat_items import TaskScoring
from .passage import DOMAINS, Passage, PassageWindow
from .positions import QualitySeries
from .summary import distance
from .task_items import Interval, mcnemar_exact, root_of, tango_interval

DOMAIN_TEXTS = DATA / "domains.jsonl.xz"
TOKENS_PER_DOMAIN = 4000
DOMAIN_WINDOW = 1024
# Bundled multiple-choice tasks, in lm-eval's format, each with its items next to it.
BUNDLED_TASKS = {path.stem: path for path in sorted(DATA.glob("cloze_*.yaml"))}
STORY_TASK = "cloze_stories"
PREDICTION_CONFIDENCE = 0.9
LOSSES = (0.005, 0.01, 0.02, 0.05)
EncodePair = Callable[[str, str], tuple[list[int], list[int]]]
"""A context and a continuation as tokens."""
LogLikelihoods = Callable[[Sequence[tuple[str, str]]], list[tuple[float, bool]]]
"""Per (context, continuation): log-probability in nats, and whether it is the greedy continuation."""


class ChoiceItem(NamedTuple):
    """A context with its options; the one numbered `answer` is right."""

    context: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True, slots=True)
class ChoiceTask:
    """A bundled multiple-choice task."""

    name: str
    version: float
    items: tuple[ChoiceItem, ...]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return [(item.context, f" {choice}") for item in self.items for choice in item.choices]


def domain_texts() -> dict[str, list[Document]]:
    texts: dict[str, list[Document]] = {domain: [] for domain in DOMAINS}
    for _, row in json_lines(DOMAIN_TEXTS):
        texts[row["domain"]].append(row.get("text") or row["messages"])
    return texts


@cache
def bundled_task(name: str) -> ChoiceTask:
    import yaml

    path = BUNDLED_TASKS[name]
    task = yaml.safe_load(path.read_text(encoding="utf-8"))
    items = tuple(
        ChoiceItem(row["context"], tuple(row["choices"]), row["answer"])
        for _, row in json_lines(path.parent / task["dataset_kwargs"]["data_files"]["test"])
    )
    return ChoiceTask(name, task["metadata"]["version"], items)


@dataclass(frozen=True, slots=True)
class FullPassage:
    """Windows over the texts of the domains, one domain each, then over each option of the items of `tasks`.
    `options` are the number and length in tokens of each option, in the order of the scored positions."""

    passage: Passage
    domains: tuple[str, ...]
    tasks: tuple[ChoiceTask, ...]
    options: tuple[tuple[int, int], ...]

    @classmethod
    def of(
        cls,
        tokenizer: Any,
        encode_pair: EncodePair,
        max_model_len: int,
        *,
        stories_only: bool,
        share: bool = True,
    ) -> FullPassage:
        """The passage for a tokenizer and a context. `stories_only` takes the items over stories alone, for a
        model that read nothing else; with `share` options of one token share the window of their context."""
        named = [
            (domain, window)
            for domain, texts in domain_texts().items()
            for window in _domain_windows(tokenizer, texts, min(max_model_len, DOMAIN_WINDOW))
        ]
        names = [STORY_TASK] if stories_only else list(BUNDLED_TASKS)
        tasks = tuple(bundled_task(name) for name in names)
        windows = [window for _, window in named]
        options: list[tuple[int, int]] = []
        pairs = [encode_pair(*pair) for task in tasks for pair in task.pairs]
        for item in by_item(np.arange(len(pairs)), tasks):
            alone = list(map(int, item))
            single = [number for number in alone if len(pairs[number][1]) == 1]
            if share and len(single) > 1:
                first, *others = single
                tokens = tuple(pairs[number][1][0] for number in others)
                windows.append(_option_window(*pairs[first], max_model_len, tokens))
                options += [(number, 1) for number in single]
                alone = [number for number in alone if number not in single]
            windows += [_option_window(*pairs[number], max_model_len) for number in alone]
            options += [(number, len(pairs[number][1])) for number in alone]
        passage = Passage(
            tuple(windows),
            DOMAIN_TEXTS.name,
            "domains v1",
            f"at most {TOKENS_PER_DOMAIN:,} tokens of each domain in windows of {DOMAIN_WINDOW}, and "
            "each option behind its context",
        )
        return cls(passage, tuple(domain for domain, _ in named), tasks, tuple(options))

    def log_likelihoods(self, nll: np.ndarray) -> list[np.ndarray]:
        """Sum each option's column of the series, by item."""
        begin = sum(window.num_scored for window in self.passage.windows[: len(self.domains)])
        numbers, lengths = np.array(self.options).T
        sums = np.zeros(len(numbers))
        starts = begin + np.cumsum(lengths) - lengths
        sums[numbers] = -np.add.reduceat(nll.astype(np.float64), starts)
        return by_item(sums, self.tasks)

    def summary(self, series: QualitySeries, seed: int = 0) -> dict[str, Any]:
        """`domains` and `flips` of the quality record: KL and top-1 agreement by domain, and the answers that
        change."""
        window = series.needed("window")
        domain = np.array([*self.domains, ""])[np.minimum(window, len(self.domains))]
        by_domain = {name: distance(series, domain == name, seed) for name in DOMAINS}
        reference, flips = series.column("reference_nll"), None
        if reference is not None:
            before, after = map(self.log_likelihoods, (reference, series.needed("nll")))
            answers = [item.answer for task in self.tasks for item in task.items]
            flips = flips_between(before, after, answers)
            flips["tasks"] = [task.name for task in self.tasks]
        return {"domains": by_domain, "flips": flips}


def by_item(values: np.ndarray, tasks: Sequence[ChoiceTask]) -> list[np.ndarray]:
    ends = np.cumsum([len(item.choices) for task in tasks for item in task.items])
    return np.split(values, ends[:-1])


def _option_window(
    before: Sequence[int], targets: Sequence[int], max_model_len: int, others: tuple[int, ...] = ()
) -> PassageWindow:
    """An option after its context, which is truncated on the left as lm-eval does."""
    tokens = (*before, *targets)[-max_model_len:]
    return PassageWindow(tokens, len(tokens) - len(targets), alternatives=others)


def _domain_windows(tokenizer: Any, texts: Sequence[Document], window: int) -> list[PassageWindow]:
    """Windows without overlap over texts, each tokenized by itself, conversations in the model's template."""
    windows: list[PassageWindow] = []
    left = TOKENS_PER_DOMAIN
    for number, text in enumerate(texts):
        if isinstance(text, str) or not getattr(tokenizer, "chat_template", None):
            ids = tokenizer.encode(plain_text(text), verbose=False)
        else:
            chat = tokenizer.apply_chat_template(text, tokenize=False)
            ids = tokenizer.encode(chat, add_special_tokens=False, verbose=False)
        for begin in range(0, len(ids), window):
            tokens = tuple(ids[begin : begin + min(window, left)])
            if len(tokens) >= 2:
                windows.append(PassageWindow(tokens, document=number))
                left -= len(tokens)
    return windows


def flips_between(
    before: Sequence[Sequence[float] | np.ndarray],
    after: Sequence[Sequence[float] | np.ndarray],
    answers: Sequence[int],
) -> dict[str, Any]:
    """The answers that change between two models, by the log-likelihoods of the options of each item before
    and after, and the right options. The share of flips has its exact interval (Clopper and Pearson, 1934)
    and the prediction for as many other items; the change of accuracy has Tango's interval and McNemar's
    p-value, the number of items that tell a loss from none, and the smallest loss that these tell. Models of
    equal scores differ by exactly 0."""
    chosen = [np.array([int(np.argmax(item)) for item in side]) for side in (before, after)]
    right = [side == np.asarray(answers) for side in chosen]
    count = len(answers)
    flipped = int((chosen[0] != chosen[1]).sum())
    lost, gained = int((right[0] & ~right[1]).sum()), int((~right[0] & right[1]).sum())
    alike = all(np.array_equal(old, new) for old, new in zip(before, after, strict=True))
    changed = (lost + gained) / count
    ordered = [np.sort(np.asarray(item)) for item in before]
    none = (0.0, 0.0)
    return {
        "num_items": count,
        "count": flipped,
        "share": flipped / count,
        "lost": lost,
        "gained": gained,
        "reference_accuracy": float(right[0].mean()),
        "accuracy": float(right[1].mean()),
        "accuracy_change": (gained - lost) / count,
        "p_value": mcnemar_exact(lost, gained),
        "median_margin_nats": float(np.median([item[-1] - item[-2] for item in ordered])),
        "intervals": {
            "share": none if alike else exact_interval(flipped, count),
            "accuracy_change": none if alike else tango_interval(lost, gained, count),
        },
        "as_many_others": {
            "share": none if alike else predicted_share(flipped, count, count),
            "accuracy_change": none if alike else predicted_change(lost, gained, count, count),
        },
        "items_for_loss": {str(loss): items_for_loss(loss, changed) for loss in LOSSES},
        "smallest_loss": smallest_loss(count, changed),
    }


def exact_interval(count: int, total: int) -> Interval:
    """Interval of a proportion that misses low, and high, with at most half of its error each."""
    from scipy.stats import beta

    tail = (1 - CONFIDENCE) / 2
    low = float(beta.ppf(tail, count, total - count + 1)) if count else 0.0
    high = float(beta.ppf(1 - tail, count + 1, total - count)) if count < total else 1.0
    return low, high


def predicted_share(count: int, total: int, others: int) -> Interval:
    """Interval of the share that `others` further items would show: the beta-binomial distribution after
    Jeffreys' prior."""
    from scipy.stats import betabinom

    tail = (1 - PREDICTION_CONFIDENCE) / 2
    ahead = betabinom(others, count + 0.5, total - count + 0.5)
    return float(ahead.ppf(tail)) / others, float(ahead.ppf(1 - tail)) / others


def predicted_change(lost: int, gained: int, total: int, others: int) -> Interval:
    """Interval of the change of accuracy that `others` further items would show: normal, with one more
    changed item, because no change so far does not rule one out."""
    z = NormalDist().inv_cdf((1 + PREDICTION_CONFIDENCE) / 2)
    change = (gained - lost) / total
    variance = (lost + gained + 1) / (total + 1) - change**2
    reach = z * math.sqrt(variance * (1 / total + 1 / others))
    return max(-1.0, change - reach), min(1.0, change + reach)


def items_for_loss(loss: float, changed: float) -> int:
    """Items that tell a loss of accuracy from none: McNemar's test at 95 %, power 80 % (Connor, 1987).
    `changed` is the share of the items that one model alone has right; at least `loss`, which is a part of
    it."""
    changed = max(changed, loss)
    normal = NormalDist()
    reach = normal.inv_cdf((1 + CONFIDENCE) / 2) * math.sqrt(changed)
    reach += normal.inv_cdf(POWER) * math.sqrt(max(0.0, changed - loss**2))
    return math.ceil((reach / loss) ** 2)


def smallest_loss(count: int, changed: float) -> float:
    """The smallest loss of accuracy that `count` items tell from none."""
    return root_of(lambda loss: items_for_loss(loss, changed) <= count, 1e-6, 1.0)


def items_for_limit(share: float, limit: float) -> int:
    """Items that tell a share from a limit, if the share stays; for a share at the limit, from none."""
    gap = abs(share - limit) or limit or 1.0
    worst = max(share, limit)
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    return math.ceil(z * z * worst * (1 - worst) / gap**2) or 1


def scored_bundled(
    tasks: Sequence[ChoiceTask], loglikelihoods: LogLikelihoods, limit: int | None = None
) -> list[TaskScoring]:
    scored = []
    for task in tasks:
        items = task.items[:limit]
        scores = iter(loglikelihoods(replace(task, items=items).pairs))
        scoring = TaskScoring(task.name, task.version)
        for number, item in enumerate(items):
            answers = [next(scores) for _ in item.choices]
            likeliest = max(range(len(answers)), key=lambda index: answers[index][0])
            acc = float(likeliest == item.answer)
            scoring.add_item(number, item, answers, str(item.answer), acc=acc)
        scoring.add_metric("acc")
        scored.append(scoring)
    return scored
