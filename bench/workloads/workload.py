"""Workload: requests with fixed token ids, lengths and arrival times, and their hash."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from ...quant.base.errors import BadInput


class Tokenizer(Protocol):
    """The tokenizer interface needed by workloads."""

    @property
    def all_special_ids(self) -> Sequence[int]: ...

    def __len__(self) -> int: ...

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> Any: ...


@dataclass(frozen=True, slots=True)
class WorkloadItem:
    """One request: its exact prompt tokens, how many tokens to generate, and when it is due."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    output_len: int
    arrival_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of a run, in the order of their arrival.

    Attributes:
        name: the kind of data set, such as `sharegpt` or `random`.
        source: description of its origin, for reports.
        items: the requests.
        notes: caveats for reports, such as how many prompts were left out.
        is_stand_in: the prompts are the bundled ones and not the data set of that name.
        is_timed: the arrival times come from the data, and none are sampled at a rate.
    """

    name: str
    source: str
    items: tuple[WorkloadItem, ...]
    notes: tuple[str, ...] = ()
    is_stand_in: bool = False
    is_timed: bool = False

    def __post_init__(self) -> None:
        if not self.items:
            raise BadInput(f"{self.source} gives no request: nothing to measure")

    @property
    def sha256(self) -> str:
        """Identity of the requests: ids of every prompt, output lengths and arrival times."""
        digest = hashlib.sha256()
        for item in self.items:
            tokens = np.asarray(item.prompt_token_ids, dtype="<i8")
            head = f"{len(tokens)} {item.output_len} {item.arrival_seconds:.9f}\n"
            digest.update(head.encode())
            digest.update(tokens.tobytes())
        return digest.hexdigest()

    @property
    def prompt_tokens(self) -> int:
        return sum(len(item.prompt_token_ids) for item in self.items)

    @property
    def output_tokens(self) -> int:
        return sum(item.output_len for item in self.items)

    def with_arrivals(self, offsets: Sequence[float]) -> Workload:
        """The same requests, due at `offsets` seconds from the start of the run."""
        items = tuple(
            replace(item, arrival_seconds=float(offset))
            for item, offset in zip(self.items, offsets, strict=True)
        )
        return replace(self, items=items)


def numbered(pairs: Sequence[tuple[Sequence[int], int]]) -> tuple[WorkloadItem, ...]:
    """Items from (prompt token ids, output length) pairs, with ids by position."""
    return tuple(
        WorkloadItem(f"bench-{number}", tuple(prompt), output_len)
        for number, (prompt, output_len) in enumerate(pairs)
    )


def fit_lengths(
    asked: Mapping[str, int | None],
    defaults: Mapping[str, int],
    max_model_len: int,
    flags: str,
) -> tuple[dict[str, int], list[str]]:
    """Lengths (in tokens) that together fit the context, and a note if a default was reduced.

    `asked` has None for options that are not set: there the default applies, reduced in proportion when
    the context is too small. `flags` is the common prefix of the options.

    Raises:
        BadInput: a length below 1 (a prefix may be 0), or explicit lengths that do not fit.
    """
    fixed = {name: length for name, length in asked.items() if length is not None}
    for name, length in fixed.items():
        if length < (0 if name == "prefix" else 1):
            raise BadInput(f"{flags}{name}-len comes to {length}: it must be positive")
    free = {name: defaults[name] for name in asked if name not in fixed}
    max_free_tokens = max_model_len - sum(fixed.values())
    if max_free_tokens < len(free):
        raise BadInput(
            f"prompt and output reach {max_model_len - max_free_tokens + len(free)} tokens or more, but the "
            f"model's context is {max_model_len}: lower {flags}*-len"
        )
    wanted = sum(free.values())
    if wanted <= max_free_tokens:
        return {**free, **fixed}, []
    shrunk = {name: max(1, length * max_free_tokens // wanted) for name, length in free.items()}
    words = " + ".join(f"{name} {length}" for name, length in shrunk.items())
    note = f"default lengths cut to {words} to fit the context of {max_model_len}"
    return {**shrunk, **fixed}, [note]
