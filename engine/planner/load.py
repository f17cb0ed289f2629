"""Loads of a plan: lengths of prompts and answers, clients or arrival rate, shared prefixes, and images.

Image tokens are counted by the family's rule, or by the checkpoint's processor in transformers.
"""

from __future__ import annotations

import csv
import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from ...base.errors import BadInput
from ...base.json_lines import json_lines
from ...quant.families.family import ImageSettings, ImageTokens
from ...quant.families.registry import image_tokens, type_of
from ...quant.model.checkpoint import read_json
from ...recipes import DATA
from ..base.units import SLO_SHARE
from .catalog import PlannedModel
from .devices import Device
from .error_bands import ErrorBand
from .probed_shape import ProbedShape
from .speed import Efficiency
from .step_model import check_counts

Lengths = tuple[int, int]
"""Prompt and output tokens of a request."""

DATASETS = ("sharegpt", "azure", "mooncake")
TOKEN = re.compile(r"\w{1,6}|[^\w\s]")
"""About a token of a vocabulary of 100,000: a word of English, or a piece of a long one."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Prediction for a load: mean TTFT and TPOT in seconds, output tokens per second of the whole
    deployment, and the band of their error; None where nothing is known of it. `clients` is the mean number
    of requests in flight."""

    clients: float
    ttft_seconds: float
    tpot_seconds: float
    throughput: float
    band: ErrorBand | None = None


@cache
def dataset_lengths(name: str) -> tuple[Lengths, ...]:
    """Lengths of the requests of a bundled data set, in its order. Those of the traces are recorded; the text
    of `sharegpt`, the stand-in of `bench`, is counted without a tokenizer. Raises BadInput: no such data
    set."""
    if name == "azure":
        with (DATA / "azure_conversations.csv").open(encoding="utf-8") as file:
            rows = [(r["ContextTokens"], r["GeneratedTokens"]) for r in csv.DictReader(file)]
    elif name == "mooncake":
        lines = json_lines(DATA / "mooncake.jsonl")
        rows = [(row["input_length"], row["output_length"]) for _, row in lines]
    elif name == "sharegpt":
        entries = json.loads((DATA / "sharegpt_stand_in.json").read_text(encoding="utf-8"))
        rows = [
            [max(1, len(TOKEN.findall(turn["value"]))) for turn in entry["conversations"][:2]]
            for entry in entries
        ]
    else:
        close = get_close_matches(name.lower(), DATASETS, n=1, cutoff=0.4) or DATASETS
        raise BadInput(f"--dataset {name!r}: lengths are bundled of {', '.join(close)}")
    return tuple((int(prompt), int(output)) for prompt, output in rows if int(output) > 0)


def check_prefix_share(share: float) -> None:
    if not 0 <= share < 1:
        raise BadInput(
            f"--prefix-hit-rate {share}: a share of the prompt tokens, at least 0 and below 1, is needed"
        )


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that clients send to a server: either `concurrency` (closed loop: so many clients, each with
    one request at a time) or `rate` (open loop: Poisson arrivals, in requests per second). A load longer than
    `lengths` draws from them, by `seed`. `prefix_share` of every prompt is a prefix of one text, which the
    server caches."""

    lengths: tuple[Lengths, ...]
    concurrency: int | None = None
    rate: float | None = None
    prefix_share: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise BadInput("give --concurrency or --request-rate: a load has one of them")
        check_counts(concurrency=self.concurrency)
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise BadInput(f"--request-rate {self.rate}: requests per second, above 0, are needed")
        check_prefix_share(self.prefix_share)

    @property
    def longest(self) -> int:
        return max(map(sum, self.lengths))

    def cached_tokens(self, prompt: int) -> int:
        return min(prompt - 1, round(self.prefix_share * prompt))

    def mean_lengths(self) -> tuple[float, float]:
        prompts, outputs = zip(*self.lengths, strict=True)
        return sum(prompts) / len(prompts), sum(outputs) / len(outputs)

    def requests(self, count: int) -> list[Lengths]:
        if len(self.lengths) == 1:
            return list(self.lengths) * count
        return random.Random(self.seed).choices(self.lengths, k=count)

    def arrivals(self, count: int) -> list[float]:
        """Seconds at which requests arrive; in a closed loop the first wave arrives at once."""
        if self.rate is None:
            return [0.0] * min(count, self.concurrency or count)
        draw = random.Random(self.seed + 1)
        return list(accumulate(draw.expovariate(self.rate) for _ in range(count)))


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Mean and quantiles of a latency, in seconds, by linear interpolation between order statistics."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles:
        """Quantiles of a non-empty sample."""
        from numpy import percentile

        p50, p90, p99 = map(float, percentile(values, (50, 90, 99)))
        return cls(sum(values) / len(values), p50, p90, p99)


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """A request's seconds from its arrival to its first and its last token, and its output tokens."""

    ttft: float
    e2e: float
    output_tokens: int

    def scaled(self, ttft: float, tpot: float) -> RequestTiming:
        answered = tpot * (self.e2e - self.ttft)
        return replace(self, ttft=ttft * self.ttft, e2e=ttft * self.ttft + answered)

    @property
    def tpot(self) -> float:
        return (self.e2e - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Latencies and throughput under a load, as a client of the whole deployment sees them. `requests` are in
    order of arrival, without the first wave of a closed loop, which arrives all at once. `steps` and the
    fields after it count one batch, over all requests."""

    requests: tuple[RequestTiming, ...]
    output_tokens_per_second: float
    requests_per_second: float
    steps: int
    preemptions: int
    most_running: int
    most_waiting: int

    @property
    def in_flight(self) -> float:
        """Mean number of requests in flight, by Little's law."""
        seconds = sum(request.e2e for request in self.requests)
        return self.requests_per_second * seconds / len(self.requests)

    def scaled(self, ttft: float, tpot: float) -> LoadResult:
        return self._with(tuple(request.scaled(ttft, tpot) for request in self.requests))

    def delayed(self, seconds: float) -> LoadResult:
        """The same requests of a closed loop, each so much later."""
        return self._with(
            tuple(replace(r, ttft=r.ttft + seconds, e2e=r.e2e + seconds) for r in self.requests)
        )

    def _with(self, requests: tuple[RequestTiming, ...]) -> LoadResult:
        slower = sum(r.e2e for r in self.requests) / sum(r.e2e for r in requests)
        return replace(self, requests=requests).at_rate(slower * self.requests_per_second)

    def at_rate(self, rate: float) -> LoadResult:
        tokens = sum(request.output_tokens for request in self.requests) / len(self.requests)
        return replace(self, requests_per_second=rate, output_tokens_per_second=rate * tokens)

    @property
    def ttft(self) -> Quantiles:
        return Quantiles.of([request.ttft for request in self.requests])

    @property
    def tpot(self) -> Quantiles:
        several = [request.tpot for request in self.requests if request.output_tokens > 1]
        return Quantiles.of(several or [0.0])

    @property
    def e2e(self) -> Quantiles:
        return Quantiles.of([request.e2e for request in self.requests])


def _meets(limits_ms: Mapping[str, float], ttft: float, tpot: float, e2el: float) -> bool:
    latencies = {"ttft": ttft, "tpot": tpot, "e2el": e2el}
    return all(latencies[metric] <= limit for metric, limit in limits_ms.items())


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits that `share` of the requests meet; the load is varied `by` concurrency or rate."""

    limits_ms: Mapping[str, float]
    by: str = "concurrency"
    share: float = SLO_SHARE

    def __post_init__(self) -> None:
        if self.by not in ("rate", "concurrency"):
            raise BadInput(f"--slo-by {self.by!r}: rate or concurrency")
        if not 0 < self.share <= 1:
            raise BadInput(f"--slo-share {self.share}: it must be above 0 and at most 1")

    @property
    def text(self) -> str:
        return " ".join(f"{name}:{limit:.12g}ms" for name, limit in self.limits_ms.items())

    def kept_by(self, load: Load, result: LoadResult) -> bool:
        """True if a load keeps it; a rate must be kept up with, too."""
        if load.rate is not None and result.requests_per_second < load.rate:
            return False
        return self.share_of(result) >= self.share

    def share_of(self, result: LoadResult) -> float:
        """Share of the requests that keep every limit."""
        good = sum(
            _meets(self.limits_ms, 1e3 * request.ttft, 1e3 * request.tpot, 1e3 * request.e2e)
            for request in result.requests
        )
        return good / len(result.requests)

    def near(self, state: Prediction, output: float) -> bool:
        ttft, tpot = 1e3 * state.ttft_seconds, 1e3 * state.tpot_seconds
        return _meets(self.limits_ms, ttft, tpot, ttft + (output - 1) * tpot)


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """The load that a plan is asked for: `load`, or with an `slo` the highest of its lengths within that."""

    load: Load
    slo: Slo | None = None
    dataset: str | None = None


_ASKED = re.compile(r"(?:(\d+)x)?(\d+)x(\d+)")
ELEMENT_BYTES = 2
"""Towers run in 16 bits."""
MAX_IMAGES = 10_000
MAX_SIDE = 100_000


@dataclass(frozen=True, slots=True)
class ImageLoad:
    """The images of each prompt, sizes in pixels, with the vision tower and the projector after it. `levels`
    is the number of embeddings of a token: one, and deepstack's; `text_hidden_size` is their width."""

    count: int
    width: int
    height: int
    tokens: ImageTokens
    vision_parameters: int
    projector_parameters: int
    layers: int
    hidden_size: int
    intermediate_size: int
    text_hidden_size: int
    levels: int

    @property
    def num_tokens(self) -> int:
        return self.count * self.tokens.num_tokens

    @property
    def weight_bytes(self) -> int:
        return ELEMENT_BYTES * (self.vision_parameters + self.projector_parameters)

    @property
    def embedding_bytes(self) -> int:
        """Embeddings of all images, as the encoder cache keeps them, deepstack's levels included."""
        return ELEMENT_BYTES * self.num_tokens * self.text_hidden_size * self.levels

    @property
    def activation_bytes(self) -> int:
        """Peak of one image in the tower: residual, normed input, q, k, v and the MLP's inner activations."""
        inner = 5 * self.hidden_size + 2 * self.intermediate_size
        return ELEMENT_BYTES * self.tokens.num_patches * inner

    @property
    def flops(self) -> float:
        """FLOP of all images: two per parameter and patch (or token), and attention within each tile."""
        tokens = self.tokens
        per_tile = tokens.num_patches / tokens.num_tiles
        attention = 4 * self.layers * self.hidden_size * per_tile * tokens.num_patches
        linear = self.vision_parameters * tokens.num_patches
        linear += self.projector_parameters * tokens.num_tokens
        return self.count * (2 * linear + attention)

    def encode_seconds(self, device: Device, efficiency: Efficiency) -> float | None:
        """Time to encode the images of one prompt, one after the other, on one device; None if its speed is
        unknown."""
        peak = device.peak_flops(16, "bf16")
        if device.bandwidth is None or not peak:
            return None
        computing = self.flops / (peak * efficiency.compute)
        moving = self.count * self.weight_bytes / (device.bandwidth * efficiency.bandwidth)
        return max(computing, moving) + self.count * self.layers * efficiency.seconds_per_layer


def parse_images(text: str) -> tuple[int, int, int]:
    """Count, width and height of `2x1024x768`; `1024x768` is one image. Raises BadInput: another form, or a
    number out of range."""
    match = _ASKED.fullmatch(text.strip().lower())
    if match is None:
        raise BadInput(f"--images {text}: give COUNTxWIDTHxHEIGHT, such as 2x1024x768")
    count, width, height = int(match[1] or 1), int(match[2]), int(match[3])
    if not (1 <= count <= MAX_IMAGES and 1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE):
        raise BadInput(
            f"--images {text}: 1 to {MAX_IMAGES} images with sides of 1 to {MAX_SIDE} pixels"
        )
    return count, width, height


def image_load(model: PlannedModel, text: str) -> ImageLoad:
    """The load of the images that `--images` asks for, with tokens by the family's rule, or counted by
    the checkpoint's processor. Raises BadInput: an invalid option, or a model without vision tower or
    rule."""
    count, width, height = parse_images(text)
    vision = model.config.get("vision_config")
    if not isinstance(vision, Mapping) or not isinstance(model.shape, ProbedShape):
        raise BadInput(f"--images: {model.name} has no vision_config: it takes text alone")
    folder = Path(model.source).parent
    settings: dict[str, Any] = {}
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (folder / name).is_file():
            read = read_json(folder / name)
            settings |= read | (read.get("image_processor") or {})
    tokens = image_tokens(ImageSettings(model.config, settings), width, height)
    if tokens is None:
        tokens = probed_image_tokens(folder, width, height)
    if tokens is None:
        raise BadInput(
            f"--images: no rule for the image tokens of {type_of(model.config)!r}, and no "
            f"processor of transformers next to {model.source} counts them"
        )
    measured = model.shape.measured
    return ImageLoad(
        count,
        width,
        height,
        tokens,
        measured.num_parameters("vision"),
        measured.num_parameters("projector"),
        _first(vision, "depth", "num_hidden_layers"),
        _first(vision, "hidden_size", "embed_dim"),
        _first(vision, "intermediate_size", "hidden_size"),
        model.shape.hidden_size,
        1 + len(vision.get("deepstack_visual_indexes") or ()),
    )


def _first(config: Mapping[str, Any], *names: str) -> int:
    return next((int(config[name]) for name in names if config.get(name)), 0)


def probed_image_tokens(folder: Path, width: int, height: int) -> ImageTokens | None:
    """Count by the checkpoint's own processor; None if transformers cannot build it, or it cannot count
    without an image."""
    if not (folder / "preprocessor_config.json").is_file():
        return None
    try:
        from transformers import AutoProcessor

        processor = AutoProcessor.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        counted = processor._get_num_multimodal_tokens(image_sizes=[(height, width)])
        count, tiles = counted["num_image_tokens"][0], counted["num_image_patches"][0]
    except Exception:  # transformers may fail in any way here
        return None
    return ImageTokens(count, count, tiles, f"{type(processor).__name__} of transformers")
