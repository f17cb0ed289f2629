"""Values of options as a command line writes them: names, durations, think times, pairs, lists, loads."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ...base.atomic_io import expanded
from ...base.errors import BadInput
from ...base.option import Limit, offer
from ...engine.base.units import parse_tokens

if TYPE_CHECKING:
    import numpy as np

TRACES = ("azure", "burstgpt", "mooncake", "trace")
DATASETS = {
    "sharegpt": "datasets.sharegpt",
    "agentic": "conversations.agentic_workload",
    "random": "synthetic.random_workload",
    "random-mm": "datasets.random_images",
    "prefix_repetition": "synthetic.prefix_repetition_workload",
    "sonnet": "synthetic.sonnet_workload",
    "custom": "custom.custom_workload",
    "custom_image": "custom.custom_workload",
    "hf": "datasets.hub",
    **dict.fromkeys(TRACES, "datasets.trace"),
    "frozen": "datasets.read_frozen",
}
"""{name of `--dataset`: builder, in `bench/workloads`}; a builder's module is loaded at its use."""

CHAT, COMPLETIONS, TRANSFORMERS = "openai-chat", "openai", "transformers"
EMBEDDINGS, RERANK, POOLED = "openai-embeddings", "vllm-rerank", "vllm-pooling"
# These answer once and generate no tokens: their only latency is E2EL.
POOLING = (EMBEDDINGS, RERANK, POOLED)
# The request format of each backend; two are vLLM's and our own names for one.
BACKENDS = {
    "openai": COMPLETIONS,
    "vllm": COMPLETIONS,
    "llmopt": COMPLETIONS,
    "openai-chat": CHAT,
    "transformers": TRANSFORMERS,
    **{name: name for name in POOLING},
}
Kind = Literal["concurrency", "rate"]
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def check_dataset(dataset: str) -> None:
    path = expanded(dataset)
    if dataset in DATASETS or path.is_file():
        return
    if path.suffix or path.name != dataset:
        hub = "" if path.suffix else f"; one of the hub is --dataset hf --dataset-path {dataset}"
        raise BadInput(f"no dataset {dataset!r}: there is no such file here{hub}")
    raise BadInput(f"no dataset {dataset!r}: {offer(dataset, [*DATASETS])}, or give a file")


def parse_duration(text: str) -> float:
    """Seconds of `90`, `90s`, `1.5m` or `1h`. Raises ValueError: not a positive number with one of the
    units."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([smh]?)\s*", text)
    seconds = math.nan
    with suppress(ValueError):
        seconds = float(match[1]) * _UNITS[match[2]] if match else math.nan
    if not 0 < seconds < math.inf:
        raise ValueError("write a duration such as 60s, 1.5m or 1h")
    return seconds


def http_url(text: str) -> str:
    """The URL of a server; `host:port` stands for `http://host:port`."""
    return text if "://" in text else f"http://{text}"


def parse_nats(text: str) -> float:
    """Nats of `0.05`. Raises BadInput: no number, such as a share."""
    try:
        return float(text)
    except ValueError:
        share = ": a share is one of --min-top1, such as 95%" if text.endswith("%") else ""
        raise BadInput(f"--max-kl {text}: give nats a token, such as 0.05{share}") from None


def pairs(flag: str, texts: Sequence[str]) -> dict[str, str]:
    values = {}
    for word in texts:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise BadInput(f"{flag} {word!r}: write KEY=VALUE")
        values[key] = value
    return values


def json_object(text: str) -> dict[str, Any]:
    """The object of `--extra-body`."""
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise BadInput(f"--extra-body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadInput("--extra-body is not a JSON object")
    return value


def listed(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def parse_depths(text: str) -> list[int]:
    """`4k,32k` as numbers of tokens, ascending."""
    return sorted({parse_tokens(word) for word in listed(text)})


def each(limit: Limit) -> Limit:
    return lambda values: next(filter(None, map(limit, values)), None)


def parse_loads(text: str, kind: Kind) -> list[float] | None:
    """`1,2,4` as numbers, ascending; None for `auto`. Raises BadInput: neither numbers nor `auto`, or an
    invalid load."""
    if text.strip() == "auto":
        return None
    flag = f"--sweep-{kind}"
    try:
        values = sorted({float(word) for word in text.split(",")})
    except ValueError as error:
        raise BadInput(f"{flag} {text!r}: write auto, or numbers such as 1,2,4") from error
    for value in values:
        if not 0 < value < math.inf or (kind == "concurrency" and value != int(value)):
            raise BadInput(f"{flag} {text!r}: {value:g} is no {kind} to measure at")
    return values


# Parameters of each distribution, in seconds.
SHAPES = {
    "constant": ("SECONDS",),
    "exponential": ("MEAN",),
    "uniform": ("LOW", "HIGH"),
    "normal": ("MEAN", "STD"),
    "lognormal": ("MEAN", "STD"),
}
SPELLINGS = ", ".join(":".join((name, *parameters)) for name, parameters in SHAPES.items())
SPELLINGS = SPELLINGS.removeprefix("constant:")


@dataclass(frozen=True, slots=True)
class ThinkTime:
    """A distribution of seconds; a sample below 0 (of the normal one) counts as 0. The parameters of
    `lognormal` are mean and standard deviation of the times, not of their logarithms."""

    shape: str = "constant"
    seconds: tuple[float, ...] = (0.0,)

    @classmethod
    def parse(cls, text: str) -> ThinkTime:
        """`2`, `2s`, `exponential:2`, `uniform:1:5`, `normal:3:1` or `lognormal:3:2`. Raises BadInput: none
        of these, or a parameter that is negative or not a number."""
        shape, *numbers = text.strip().split(":")
        if shape not in SHAPES:
            shape, numbers = "constant", [shape, *numbers]
        try:
            seconds = [float(word.removesuffix("s")) for word in numbers]
        except ValueError:
            seconds = []
        legal = len(seconds) == len(SHAPES[shape]) and all(0 <= s < math.inf for s in seconds)
        disordered = shape == "uniform" and legal and seconds[0] > seconds[1]
        if not legal or disordered or (shape == "lognormal" and not seconds[0]):
            raise BadInput(f"--think-time {text!r}: write {SPELLINGS}, in seconds")
        return cls(shape, tuple(seconds))

    def sample(self, rng: np.random.Generator, count: int) -> list[float]:
        """`count` pauses in seconds."""
        first, *others = self.seconds
        if self.shape == "constant":
            return [first] * count
        if self.shape == "lognormal":
            variance = math.log1p((others[0] / first) ** 2)
            first, others = math.log(first) - variance / 2, [math.sqrt(variance)]
        values = getattr(rng, self.shape)(first, *others, count)
        return values.clip(min=0.0).tolist()
