"""Data set selection: `--dataset` and its options to a workload."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...quant.base.errors import BadInput
from ...quant.model.models import load_tokenizer, resolve_model
from ...quant.open import open_checkpoint
from ..options.options import BenchOptions
from .arrivals import arrival_offsets, ramp_offsets
from .custom import custom_workload
from .freeze import is_frozen, read_frozen, write_frozen
from .hub import download_sharegpt, hub_rows, hub_workload
from .prefix import prefix_repetition_workload
from .random_workload import random_workload
from .sharegpt import sharegpt_workload
from .sonnet import sonnet_workload
from .traces import trace_workload
from .workload import Tokenizer, Workload, numbered

TRACES = ("azure", "burstgpt", "mooncake")
NAMES = (
    "sharegpt",
    "random",
    "prefix_repetition",
    "sonnet",
    "custom",
    "hf",
    *TRACES,
    "frozen",
)
# The value of `--dataset-path` that downloads ShareGPT's file.
HUB = "hub"


def locate_dataset(dataset: str, path: Path | None) -> tuple[str, Path | None]:
    """Resolve (name, path) from a name, a name with a path, or a path alone.

    A path alone is a frozen workload if it begins with its header, else `custom` when it ends
    in `.jsonl`, else `sharegpt`.

    Raises:
        BadInput: neither a name nor a file, or a name that needs a path without one.
    """
    if dataset in NAMES:
        if dataset in ("custom", "frozen") and path is None:
            raise BadInput(f"--dataset {dataset} needs --dataset-path FILE.jsonl")
        if dataset == "hf" and path is None:
            raise BadInput("--dataset hf needs --dataset-path OWNER/NAME, the data set on the hub")
        if dataset == "frozen" and path is not None and not is_frozen(path):
            raise BadInput(f"{path} is not a frozen workload: llmopt bench freeze writes them")
        return dataset, path
    given = Path(dataset).expanduser()
    if not given.is_file():
        raise BadInput(f"no dataset {dataset!r}: give one of {', '.join(NAMES)}, or a file")
    if path is not None:
        raise BadInput(f"two datasets: {dataset} and {path}; give one")
    if is_frozen(given):
        return "frozen", given
    return ("custom" if given.suffix == ".jsonl" else "sharegpt"), given


def build_workload(options: BenchOptions, tokenizer: Tokenizer, max_model_len: int) -> Workload:
    """Build the requests of `options`, with their arrival times.

    Raises:
        BadInput: the data set is unusable, or it has arrival times and a rate is given too.
    """
    name, path = locate_dataset(options.dataset, options.dataset_path)
    workload = requests_of(name, path, options, tokenizer, max_model_len)
    held = len(workload.items)
    asked = options.num_prompts if "num_prompts" in options.model_fields_set else held
    if name == "frozen" and asked != held:
        raise BadInput(
            f"{workload.source} has {held} requests and is used whole: leave --num-prompts away"
        )
    if workload.is_timed:
        if options.request_rate is not None or options.ramp_up_strategy is not None:
            raise BadInput(
                f"{workload.source} has arrival times of its own: leave --request-rate and "
                "--ramp-up-strategy away"
            )
        return workload
    if options.ramp_up_strategy is not None:
        assert options.ramp_up_start_rps is not None and options.ramp_up_end_rps is not None
        offsets = ramp_offsets(
            held,
            options.ramp_up_strategy,
            options.ramp_up_start_rps,
            options.ramp_up_end_rps,
            burstiness=options.burstiness,
            seed=options.seed,
        )
    else:
        offsets = arrival_offsets(
            held, options.rate, burstiness=options.burstiness, seed=options.seed
        )
    return workload.with_arrivals(offsets.tolist())


def freeze_workload(options: BenchOptions, path: Path) -> Workload:
    """Write the workload of `options` to a file, for the tokenizer and the context of their model.

    Raises:
        BadInput: the model, the data set or the output path is unusable.
    """
    folder = resolve_model(options.model)
    context = open_checkpoint(folder).config.get("max_position_embeddings")
    limit = options.max_model_len or context
    if type(limit) is not int or (type(context) is int and limit > context):
        raise BadInput(f"--max-model-len {limit}: the context of {folder.name} is {context}")
    workload = build_workload(options, load_tokenizer(folder), limit)
    write_frozen(workload, path, model=options.model or folder.name)
    return workload


@dataclass(frozen=True, slots=True)
class _Request:
    """A requested data set, with its options, tokenizer and context length."""

    name: str
    path: Path | None
    options: BenchOptions
    tokenizer: Tokenizer
    max_model_len: int

    @property
    def shuffle(self) -> bool:
        return not self.options.disable_shuffle


def requests_of(
    name: str, path: Path | None, options: BenchOptions, tokenizer: Tokenizer, max_model_len: int
) -> Workload:
    """The requests of one kind of data set; only timed kinds have arrival times."""
    return _BUILDERS[name](_Request(name, path, options, tokenizer, max_model_len))


def _random(asked: _Request) -> Workload:
    options = asked.options
    return random_workload(
        asked.tokenizer,
        num_prompts=options.num_prompts,
        max_model_len=asked.max_model_len,
        input_len=options.random_input_len,
        output_len=options.random_output_len or options.output_len,
        prefix_len=options.random_prefix_len,
        range_ratio=options.random_range_ratio,
        seed=options.seed,
    )


def _prefix_repetition(asked: _Request) -> Workload:
    options = asked.options
    return prefix_repetition_workload(
        asked.tokenizer,
        num_prompts=options.num_prompts,
        max_model_len=asked.max_model_len,
        prefix_len=options.prefix_repetition_prefix_len,
        suffix_len=options.prefix_repetition_suffix_len,
        output_len=options.prefix_repetition_output_len or options.output_len,
        num_prefixes=options.prefix_repetition_num_prefixes,
        seed=options.seed,
        shuffle=asked.shuffle,
    )


def _sonnet(asked: _Request) -> Workload:
    options = asked.options
    return sonnet_workload(
        asked.tokenizer,
        num_prompts=options.num_prompts,
        max_model_len=asked.max_model_len,
        input_len=options.sonnet_input_len,
        output_len=options.sonnet_output_len or options.output_len,
        prefix_len=options.sonnet_prefix_len,
        seed=options.seed,
    )


def _trace(asked: _Request) -> Workload:
    options = asked.options
    return trace_workload(
        asked.tokenizer,
        asked.name,
        num_prompts=options.num_prompts,
        max_model_len=asked.max_model_len,
        path=asked.path,
        start_seconds=options.trace_start,
        speed=options.trace_speed,
        lengths=options.trace_lengths,
        seed=options.seed,
    )


def _hub(asked: _Request) -> Workload:
    options = asked.options
    rows = hub_rows(
        str(asked.path),
        subset=options.hf_subset,
        split=options.hf_split,
        seed=options.seed,
        shuffle=asked.shuffle,
    )
    return hub_workload(
        asked.tokenizer,
        rows,
        source=f"hub data set {asked.path}",
        num_prompts=options.num_prompts,
        max_model_len=asked.max_model_len,
        output_len=options.output_len,
    )


def _frozen(asked: _Request) -> Workload:
    assert asked.path is not None
    return read_frozen(asked.path, asked.tokenizer, max_model_len=asked.max_model_len)


def _custom(asked: _Request) -> Workload:
    assert asked.path is not None
    options = asked.options
    return custom_workload(
        asked.tokenizer,
        asked.path,
        num_prompts=options.num_prompts,
        max_model_len=asked.max_model_len,
        output_len=options.output_len,
        seed=options.seed,
        shuffle=asked.shuffle,
        oversample=not options.no_oversample,
    )


def _sharegpt(asked: _Request) -> Workload:
    options, path = asked.options, asked.path
    if path is not None and str(path) == HUB and not path.exists():
        path = download_sharegpt()
    return sharegpt_workload(
        asked.tokenizer,
        num_prompts=options.num_prompts,
        max_model_len=asked.max_model_len,
        path=path,
        seed=options.seed,
        output_len=options.output_len,
        shuffle=asked.shuffle,
        oversample=not options.no_oversample,
    )


_BUILDERS: Mapping[str, Callable[[_Request], Workload]] = {
    "sharegpt": _sharegpt,
    "custom": _custom,
    "random": _random,
    "prefix_repetition": _prefix_repetition,
    "sonnet": _sonnet,
    "hf": _hub,
    **dict.fromkeys(TRACES, _trace),
    "frozen": _frozen,
}


def resolved_options(options: BenchOptions, workload: Workload) -> BenchOptions:
    """`options` with the actual number of requests and, for timed workloads, the mean rate of the arrival
    times, without a concurrency limit unless one was set."""
    count = len(workload.items)
    changes: dict[str, object] = {"num_prompts": count}
    if workload.is_timed:
        last = max(item.arrival_seconds for item in workload.items)
        changes["request_rate"] = count / last if last > 0 else float("inf")
    return options.model_copy(update=changes)


def arrival_words(options: BenchOptions, workload: Workload) -> dict[str, Any]:
    """The source of the arrival times, where they are not sampled at a rate."""
    if workload.is_timed:
        return {"arrivals": "replayed"}
    if options.ramp_up_strategy is None:
        return {}
    return {
        "ramp_up_strategy": options.ramp_up_strategy,
        "ramp_up_start_rps": options.ramp_up_start_rps,
        "ramp_up_end_rps": options.ramp_up_end_rps,
    }


def warmup_workload(
    workload: Workload, count: int, tokenizer: Tokenizer, *, seed: int
) -> Workload | None:
    """`count` requests with the lengths of the first of `workload` but different tokens, so that the
    measurement gets no prefix-cache hits from the warm-up. None when `count` is 0."""
    if count == 0:
        return None
    pairs = []
    for number in range(count):
        like = workload.items[number % len(workload.items)]
        length = len(like.prompt_token_ids)
        twin = random_workload(
            tokenizer,
            num_prompts=1,
            max_model_len=length + like.output_len,
            input_len=length,
            output_len=like.output_len,
            seed=seed + 1 + number,
        )
        pairs.append((twin.items[0].prompt_token_ids, like.output_len))
    return Workload("random", "warm-up prompts", numbered(pairs))
