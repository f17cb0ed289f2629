"""Data sets: `--dataset` and its options to a workload, by a builder for each kind, and frozen workloads.

A frozen workload is a file of exact token ids, lengths and arrival times, with their hash.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from ...base.atomic_io import expanded, write_atomically
from ...base.errors import BadInput
from ...base.json_lines import json_objects
from ...quant.source.load_processor import load_tokenizer
from ...quant.source.models import open_checkpoint, resolve_model
from ..options.options import BenchOptions
from ..options.values import BACKENDS, CHAT, DATASETS, ThinkTime, check_dataset
from .conversations import ConversationRules
from .workload import (
    Tokenizer,
    Workload,
    WorkloadItem,
    arrival_offsets,
    check_endless,
    ramp_offsets,
)

# The value of `--dataset-path` that downloads ShareGPT's file.
HUB = "hub"
Built = TypeVar("Built")


def locate_dataset(dataset: str, path: Path | None) -> tuple[str, Path | None]:
    """Resolve (name, path) from a name, a name with a path, or a path alone. A path alone is a frozen
    workload if it begins with its header, else `custom` when it ends in `.jsonl`, else `sharegpt`. Raises
    BadInput: neither a name nor a file, or a name that needs a path without one."""
    if dataset in DATASETS:
        if dataset in ("custom", "custom_image", "frozen") and path is None:
            raise BadInput(f"--dataset {dataset} needs --dataset-path FILE.jsonl")
        if dataset == "hf" and path is None:
            raise BadInput("--dataset hf needs --dataset-path OWNER/NAME, the data set on the hub")
        if dataset == "frozen" and path is not None and not is_frozen(path):
            raise BadInput(f"{path} is not a frozen workload: llmopt bench freeze writes them")
        return dataset, path
    check_dataset(dataset)
    given = expanded(dataset)
    if path is not None:
        raise BadInput(f"two datasets: {dataset} and {path}; give one")
    if is_frozen(given):
        return "frozen", given
    return ("custom" if given.suffix == ".jsonl" else "sharegpt"), given


def build_workload(options: BenchOptions, tokenizer: Tokenizer, max_model_len: int) -> Workload:
    """Requests with arrival times. BadInput: unusable data, a rate beside times, or no limit of a run."""
    workload = _arriving(options, tokenizer, max_model_len)
    if options.duration is not None:
        check_endless(workload, resolved_options(options, workload).concurrency)
    return workload


def _arriving(options: BenchOptions, tokenizer: Tokenizer, max_model_len: int) -> Workload:
    name, path = locate_dataset(options.dataset, options.dataset_path)
    if options.trace is not None:
        usual = type(options).model_fields["dataset"].default
        if options.dataset != usual or options.dataset_path is not None:
            raise BadInput(f"--trace {options.trace} is the data set: leave --dataset away")
        name, path = "trace", options.trace
    if options.multi_turn and name not in ("sharegpt", "agentic", "frozen"):
        raise BadInput(
            f"--multi-turn wants conversations, and {name} has none: give sharegpt or agentic"
        )
    module, _, builder = DATASETS[name].partition(".")
    request = DatasetRequest(name, path, options, tokenizer, max_model_len)
    workload: Workload = request.build(getattr(import_module(f"{__package__}.{module}"), builder))
    if options.think_time != "0" and (name == "frozen" or not workload.is_multi_turn):
        raise BadInput(
            "--think-time is drawn when conversations are built: give it with --multi-turn or --dataset "
            "agentic, or to llmopt freeze"
        )
    count = len(workload.items)
    is_partial = "num_prompts" in options.model_fields_set and options.num_prompts != count
    if name == "frozen" and is_partial:
        raise BadInput(
            f"{workload.source} has {count} requests and is used whole: leave --num-prompts away"
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
            count,
            options.ramp_up_strategy,
            options.ramp_up_start_rps,
            options.ramp_up_end_rps,
            burstiness=options.burstiness,
            seed=options.seed,
        )
    else:
        offsets = arrival_offsets(
            count, options.rate, burstiness=options.burstiness, seed=options.seed
        )
    return workload.with_arrivals(offsets.tolist())


def freeze_workload(options: BenchOptions, path: Path) -> Workload:
    """Write the workload of `options` to a file. BadInput: model, data set or output are unusable."""
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
    """`options` with the actual number of requests, and, if timed, their mean rate, without a limit."""
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
    names = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
    is_ramp = options.ramp_up_strategy is not None
    return {name: getattr(options, name) for name in names} if is_ramp else {}


@dataclass(frozen=True, slots=True)
class DatasetRequest:
    """A requested data set, with its options, tokenizer and context length."""

    name: str
    path: Path | None
    options: BenchOptions
    tokenizer: Tokenizer
    max_model_len: int

    def build(self, builder: Callable[..., Built], **known: Any) -> Built:
        """Call a builder. A parameter `x` that is not `known` takes the data set's own option (`NAME_x`)
        if it is set, else the value that all data sets share, else the builder's default."""
        options = self.options
        rules = ConversationRules(
            self.max_model_len,
            options.multi_turn_history,
            ThinkTime.parse(options.think_time),
            options.multi_turn_min_turns,
            options.multi_turn_max_turns,
            options.seed,
        )
        shared: dict[str, Any] = {
            "request": self,
            "tokenizer": self.tokenizer,
            "path": self.path,
            "max_model_len": self.max_model_len,
            "num_prompts": options.num_prompts,
            "output_len": options.output_len,
            "seed": options.seed,
            "shuffle": not options.disable_shuffle,
            "oversample": not options.no_oversample,
            "rules": rules,
        }
        arguments = dict(known)
        for name in signature(builder).parameters.keys() - known.keys():
            value = getattr(options, f"{self.name.replace('-', '_')}_{name}", None)
            if value is not None:
                arguments[name] = value
            elif name in shared:
                arguments[name] = shared[name]
        return builder(**arguments)


def sharegpt(request: DatasetRequest) -> Workload:
    from .custom import download_sharegpt
    from .sharegpt import sharegpt_threads_workload, sharegpt_workload

    path = request.path
    if path is not None and str(path) == HUB and not path.exists():
        path = download_sharegpt()
    builder = sharegpt_threads_workload if request.options.multi_turn else sharegpt_workload
    return request.build(builder, path=path)


def trace(request: DatasetRequest) -> Workload:
    from .traces import trace_workload

    options = request.options
    is_chat = BACKENDS[options.backend] == CHAT
    # A server takes its own answers back as chat messages alone.
    takes_answers = is_chat or (options.base_url is None and options.serve is None)
    whole = request.name == "trace" and "num_prompts" not in options.model_fields_set
    return request.build(
        trace_workload,
        kind=request.name,
        num_prompts=None if whole else options.num_prompts,
        start_seconds=options.trace_start,
        speed=options.trace_speed,
        lengths=options.trace_lengths,
        replay=options.trace_replay,
        decode=getattr(request.tokenizer, "decode", str) if takes_answers else None,
        as_text=is_chat and request.name == "trace",
    )


def random_images(request: DatasetRequest) -> Workload:
    """Random prompts with images; the texts have the options of `random`, as in vLLM."""
    from .synthetic import random_workload, with_random_images

    names = ("input_len", "output_len", "prefix_len", "range_ratio")
    given = {name: getattr(request.options, f"random_{name}") for name in names}
    return request.build(with_random_images, texts=request.build(random_workload, **given))


def hub(request: DatasetRequest) -> Workload:
    from .custom import hub_rows, hub_workload

    rows = request.build(hub_rows, name=str(request.path), subset=request.options.hf_subset)
    return request.build(hub_workload, rows=rows, source=f"hub data set {request.path}")


# Format 2 has conversations, 3 requests that wait for others or are cancelled; others are of format 1.
FORMATS = (1, 2, 3)
KEY = "llmopt_workload"


def write_frozen(workload: Workload, path: Path, *, model: str) -> None:
    """Write JSON lines, a header with hash and `model`, then requests. BadInput: the folder is missing."""
    if workload.num_images:
        raise BadInput(f"cannot write {path}: a frozen workload holds token ids, and no images")
    if not path.parent.is_dir():
        raise BadInput(f"cannot write {path}: {path.parent} is not a folder")
    head = {
        KEY: 3 if any(map(_links, workload.items)) else FORMATS[workload.is_multi_turn],
        "sha256": workload.sha256,
        "name": workload.name,
        "source": workload.source,
        "model": model,
        "num_requests": workload.num_requests,
        "prompt_tokens": workload.prompt_tokens,
        "output_tokens": workload.output_tokens,
        "is_stand_in": workload.is_stand_in,
        "is_timed": workload.is_timed or any(item.arrival_seconds for item in workload.items),
        "notes": list(workload.notes),
    }
    lines = [head] + [
        {
            "prompt_token_ids": item.prompt_token_ids,
            "output_len": item.output_len,
            "arrival_seconds": item.arrival_seconds,
            **({"messages": [asdict(message) for message in item.messages]} if item.turns else {}),
            **({"turns": [turn.record for turn in item.turns]} if item.turns else {}),
            **_links(item),
        }
        for item in workload.items
    ]
    write_atomically(path, "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))


def _links(item: WorkloadItem) -> dict[str, Any]:
    """The request that this one waits for, and its client's patience; empty without either."""
    if item.after is None and item.cancel_seconds is None:
        return {}
    return {key: getattr(item, key) for key in ("after", "gap_seconds", "cancel_seconds")}


def is_frozen(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8-sig") as lines:
            head = json.loads(lines.readline(1 << 20))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError):
        return False
    return isinstance(head, dict) and KEY in head


def read_frozen(path: Path, tokenizer: Tokenizer, *, max_model_len: int) -> Workload:
    """Read a whole file of `write_frozen`. BadInput: a changed or invalid line, or an unfit request."""
    lines = json_objects(path)
    _, head = next(lines)
    if head[KEY] not in FORMATS:
        raise BadInput(
            f"{path}: frozen format {head[KEY]!r}; this version reads {', '.join(map(str, FORMATS))}"
        )
    items, item = [], TypeAdapter(WorkloadItem)
    for position, (where, entry) in enumerate(lines):
        try:
            items.append(item.validate_python(entry | {"request_id": f"bench-{position}"}))
        except ValidationError as error:
            raise BadInput(
                f"{where}: wants prompt_token_ids, output_len and arrival_seconds, and of a conversation its "
                "messages and turns"
            ) from error
        _check_item(items[-1], where, tokenizer, max_model_len, head.get("model"))
    workload = Workload(
        str(head.get("name")),
        f"frozen {path.name}: {head.get('source')}",
        tuple(items),
        tuple(map(str, head.get("notes", ()))),
        is_stand_in=bool(head.get("is_stand_in")),
        is_timed=bool(head.get("is_timed")),
    )
    if workload.sha256 != head.get("sha256"):
        raise BadInput(
            f"{path}: the requests hash to {workload.sha256[:16]}, the header says "
            f"{str(head.get('sha256'))[:16]}: the file was changed"
        )
    return workload


def _check_item(
    item: WorkloadItem, where: str, tokenizer: Tokenizer, max_model_len: int, model: Any
) -> None:
    """Raise BadInput for values or ids out of range, or more tokens than the context holds."""
    pauses = [item.arrival_seconds, item.gap_seconds, item.cancel_seconds or 0.0]
    pauses += [turn.think_seconds + (turn.due_seconds or 0.0) for turn in item.turns]
    ids = [*item.prompt_token_ids]
    for turn in item.turns:
        ids += turn.token_ids + (turn.answer_token_ids or ())
    if (
        not item.prompt_token_ids
        or min(item.output_lens) < 1
        or not all(0 <= seconds < math.inf for seconds in pauses)
    ):
        raise BadInput(f"{where}: a prompt, an output length or a time is out of range")
    if min(ids) < 0 or max(ids) >= len(tokenizer):
        raise BadInput(
            f"{where}: token {max(ids)} is not in this model's vocabulary of {len(tokenizer)}: "
            f"the workload was frozen for {model}"
        )
    prompt, output = item.prompt_lens[-1], item.output_lens[-1]
    if prompt + output > max_model_len:
        raise BadInput(
            f"{where}: {prompt} prompt and {output} output tokens exceed the context of "
            f"{max_model_len}; freeze it again for this model"
        )
