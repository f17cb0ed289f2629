"""Data set selection: `--dataset` and its options to a workload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...quant.base.errors import BadInput
from ...quant.models import resolve_model
from ...quant.open import open_checkpoint
from ...quant.tokenizer.load import load_tokenizer
from ..options.dataset_names import NAMES, check_dataset
from ..options.options import BenchOptions
from .arrivals import arrival_offsets, ramp_offsets
from .cycles import check_endless
from .freeze import is_frozen, write_frozen
from .kinds import requests_of
from .workload import Tokenizer, Workload


def locate_dataset(dataset: str, path: Path | None) -> tuple[str, Path | None]:
    """Resolve (name, path) from a name, a name with a path, or a path alone.

    A path alone is a frozen workload if it begins with its header, else `custom` when it ends
    in `.jsonl`, else `sharegpt`.

    Raises:
        BadInput: neither a name nor a file, or a name that needs a path without one.
    """
    if dataset in NAMES:
        if dataset in ("custom", "custom_image", "frozen") and path is None:
            raise BadInput(f"--dataset {dataset} needs --dataset-path FILE.jsonl")
        if dataset == "hf" and path is None:
            raise BadInput("--dataset hf needs --dataset-path OWNER/NAME, the data set on the hub")
        if dataset == "frozen" and path is not None and not is_frozen(path):
            raise BadInput(f"{path} is not a frozen workload: llmopt bench freeze writes them")
        return dataset, path
    check_dataset(dataset)
    given = Path(dataset).expanduser()
    if path is not None:
        raise BadInput(f"two datasets: {dataset} and {path}; give one")
    if is_frozen(given):
        return "frozen", given
    return ("custom" if given.suffix == ".jsonl" else "sharegpt"), given


def build_workload(options: BenchOptions, tokenizer: Tokenizer, max_model_len: int) -> Workload:
    """Build the requests of `options`, with their arrival times.

    Raises:
        BadInput: the data set is unusable, it has arrival times and a rate is given too, or a run of fixed
            duration has no limit.
    """
    workload = _arriving(options, tokenizer, max_model_len)
    if options.duration is not None:
        check_endless(workload, resolved_options(options, workload).concurrency)
    return workload


def _arriving(options: BenchOptions, tokenizer: Tokenizer, max_model_len: int) -> Workload:
    name, path = locate_dataset(options.dataset, options.dataset_path)
    if options.multi_turn and name not in ("sharegpt", "agentic", "frozen"):
        raise BadInput(
            f"--multi-turn wants conversations, and {name} has none: give sharegpt or agentic"
        )
    workload = requests_of(name, path, options, tokenizer, max_model_len)
    if options.think_time != "0" and (name == "frozen" or not workload.is_multi_turn):
        raise BadInput(
            "--think-time is drawn when conversations are built: give it with --multi-turn or --dataset "
            "agentic, or to llmopt freeze"
        )
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
    tokenizer = load_tokenizer(folder, trust_remote_code=options.trust_remote_code)
    workload = build_workload(options, tokenizer, limit)
    write_frozen(workload, path, model=options.model or folder.name)
    return workload


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
