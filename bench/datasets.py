"""From `--dataset` and its options to a workload."""

from __future__ import annotations

from pathlib import Path

from ..quant.errors import BadInput
from .arrivals import arrival_offsets
from .custom import custom_workload
from .options import BenchOptions
from .random_workload import random_workload
from .sharegpt import sharegpt_workload
from .workload import Tokenizer, Workload, numbered

NAMES = ("sharegpt", "random", "custom")


def locate_dataset(dataset: str, path: Path | None) -> tuple[str, Path | None]:
    """(name, path) of what was asked for: a name, a name with a path, or a path alone.

    A path alone is `custom` when it ends in `.jsonl`, else `sharegpt`.

    Raises:
        BadInput: neither a name nor a file, or `custom` without a path.
    """
    if dataset in NAMES:
        if dataset == "custom" and path is None:
            raise BadInput("--dataset custom needs --dataset-path FILE.jsonl")
        return dataset, path
    given = Path(dataset).expanduser()
    if not given.is_file():
        raise BadInput(f"no dataset {dataset!r}: give one of {', '.join(NAMES)}, or a file")
    if path is not None:
        raise BadInput(f"two datasets: {dataset} and {path}; give one")
    return ("custom" if given.suffix == ".jsonl" else "sharegpt"), given


def build_workload(options: BenchOptions, tokenizer: Tokenizer, max_model_len: int) -> Workload:
    """The requests that `options` ask for, with their arrival times."""
    name, path = locate_dataset(options.dataset, options.dataset_path)
    if name == "random":
        workload = random_workload(
            tokenizer,
            num_prompts=options.num_prompts,
            max_model_len=max_model_len,
            input_len=options.random_input_len,
            output_len=options.random_output_len or options.output_len,
            prefix_len=options.random_prefix_len,
            range_ratio=options.random_range_ratio,
            seed=options.seed,
        )
    elif name == "custom":
        assert path is not None
        workload = custom_workload(
            tokenizer,
            path,
            num_prompts=options.num_prompts,
            max_model_len=max_model_len,
            output_len=options.output_len,
            seed=options.seed,
            shuffle=not options.disable_shuffle,
            oversample=not options.no_oversample,
        )
    else:
        workload = sharegpt_workload(
            tokenizer,
            num_prompts=options.num_prompts,
            max_model_len=max_model_len,
            path=path,
            seed=options.seed,
            output_len=options.output_len,
            shuffle=not options.disable_shuffle,
            oversample=not options.no_oversample,
        )
    offsets = arrival_offsets(
        len(workload.items), options.rate, burstiness=options.burstiness, seed=options.seed
    )
    return workload.with_arrivals(offsets.tolist())


def warmup_workload(
    workload: Workload, count: int, tokenizer: Tokenizer, *, seed: int
) -> Workload | None:
    """`count` requests as long as the first of `workload` but of other tokens, so that the warm-up
    leaves nothing in the prefix cache that the measurement could find. None when `count` is 0."""
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
