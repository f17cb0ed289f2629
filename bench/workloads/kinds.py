"""The kinds of data sets: each name's builder, called with the options that its parameters name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

from ..options.dataset_names import TRACES
from ..options.options import BenchOptions
from ..options.think_time import ThinkTime
from .agentic import agentic_workload
from .conversations import ConversationRules
from .custom import custom_workload
from .freeze import read_frozen
from .hub import download_sharegpt, hub_rows, hub_workload
from .prefix import prefix_repetition_workload
from .random_mm import random_mm_workload
from .random_workload import random_workload
from .sharegpt import sharegpt_workload
from .sharegpt_threads import sharegpt_threads_workload
from .sonnet import sonnet_workload
from .traces import trace_workload
from .workload import Tokenizer, Workload

# The value of `--dataset-path` that downloads ShareGPT's file.
HUB = "hub"

Built = TypeVar("Built")


@dataclass(frozen=True, slots=True)
class Asked:
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
        shared: dict[str, Any] = {
            "tokenizer": self.tokenizer,
            "path": self.path,
            "max_model_len": self.max_model_len,
            "num_prompts": options.num_prompts,
            "output_len": options.output_len,
            "seed": options.seed,
            "shuffle": not options.disable_shuffle,
            "oversample": not options.no_oversample,
            "rules": self.rules,
        }
        arguments = dict(known)
        for name in signature(builder).parameters.keys() - known.keys():
            value = getattr(options, f"{self.name.replace('-', '_')}_{name}", None)
            if value is not None:
                arguments[name] = value
            elif name in shared:
                arguments[name] = shared[name]
        return builder(**arguments)

    @property
    def rules(self) -> ConversationRules:
        options = self.options
        return ConversationRules(
            self.max_model_len,
            options.multi_turn_history,
            ThinkTime.parse(options.think_time),
            options.multi_turn_min_turns,
            options.multi_turn_max_turns,
            options.seed,
        )


def _sharegpt(asked: Asked) -> Workload:
    path = asked.path
    if path is not None and str(path) == HUB and not path.exists():
        path = download_sharegpt()
    builder = sharegpt_threads_workload if asked.options.multi_turn else sharegpt_workload
    return asked.build(builder, path=path)


def _trace(asked: Asked) -> Workload:
    options = asked.options
    return asked.build(
        trace_workload,
        kind=asked.name,
        start_seconds=options.trace_start,
        speed=options.trace_speed,
        lengths=options.trace_lengths,
    )


def _random_mm(asked: Asked) -> Workload:
    """Its texts have the options of `random`, as in vLLM."""
    names = ("input_len", "output_len", "prefix_len", "range_ratio")
    given = {name: getattr(asked.options, f"random_{name}") for name in names}
    return asked.build(random_mm_workload, **given)


def _hub(asked: Asked) -> Workload:
    rows = asked.build(hub_rows, name=str(asked.path), subset=asked.options.hf_subset)
    return asked.build(hub_workload, rows=rows, source=f"hub data set {asked.path}")


def _simple(builder: Callable[..., Workload]) -> Callable[[Asked], Workload]:
    return lambda asked: asked.build(builder)


_BUILDERS: Mapping[str, Callable[[Asked], Workload]] = {
    "sharegpt": _sharegpt,
    "agentic": _simple(agentic_workload),
    "random": _simple(random_workload),
    "random-mm": _random_mm,
    "prefix_repetition": _simple(prefix_repetition_workload),
    "sonnet": _simple(sonnet_workload),
    "custom": _simple(custom_workload),
    "custom_image": _simple(custom_workload),
    "hf": _hub,
    **dict.fromkeys(TRACES, _trace),
    "frozen": _simple(read_frozen),
}


def requests_of(
    name: str, path: Path | None, options: BenchOptions, tokenizer: Tokenizer, max_model_len: int
) -> Workload:
    """The requests of one kind of data set; only timed kinds have arrival times."""
    return _BUILDERS[name](Asked(name, path, options, tokenizer, max_model_len))
