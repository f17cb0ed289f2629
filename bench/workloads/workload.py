"""Workload: requests with fixed token ids, lengths and arrival times, their hash, and cycles over them.

In a run of fixed duration every cycle after the first gets a first token of its own: its prompts miss what
earlier cycles left in a prefix cache, and still share what they share among themselves.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from ...base.errors import BadInput

Row = TypeVar("Row")


class Tokenizer(Protocol):
    """The tokenizer interface needed by workloads."""

    @property
    def all_special_ids(self) -> Sequence[int]: ...

    def __len__(self) -> int: ...

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> Any: ...


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class ConversationTurn:
    """A later turn of a conversation: the part that is appended to the answer before it.

    Attributes:
        messages: the new messages, for servers that apply the chat template themselves.
        think_seconds: pause between the end of the answer before and this turn.
        due_seconds: time from the start of the conversation, but not before the end of the answer before;
            None: the think time decides.
        answer_token_ids, answer: the data set's answer to the turn before; None repeats the model's own.
    """

    token_ids: tuple[int, ...]
    output_len: int
    messages: tuple[Message, ...]
    think_seconds: float
    answer_token_ids: tuple[int, ...] | None = None
    answer: str | None = None
    due_seconds: float | None = None

    @property
    def record(self) -> dict[str, Any]:
        """The turn as it is written and hashed; `due_seconds` is left out where it is not set."""
        return {key: value for key, value in asdict(self).items() if key != "due_seconds" or value}

    def prompt(self, before: Sequence[int], answer: Sequence[int]) -> tuple[int, ...]:
        """This turn's prompt: the one `before`, the model's `answer` or the data set's, and what is new."""
        history = answer if self.answer_token_ids is None else self.answer_token_ids
        return (*before, *history, *self.token_ids)


@dataclass(frozen=True, slots=True)
class WorkloadItem:
    """One request or conversation: its exact prompt tokens, how many tokens to generate, when it is due.

    A conversation has later `turns`, and the `messages` of its first prompt. `images` are URLs, mostly data
    URLs; they stand after the text.

    Attributes:
        after: the id and turn of the item whose end this one waits for, and `gap_seconds` more.
        cancel_seconds: time after which the client leaves the last turn.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    output_len: int
    arrival_seconds: float = 0.0
    messages: tuple[Message, ...] = ()
    turns: tuple[ConversationTurn, ...] = ()
    images: tuple[str, ...] = ()
    after: tuple[str, int] | None = None
    gap_seconds: float = 0.0
    cancel_seconds: float | None = None

    def cancels(self, turn: int) -> float | None:
        return self.cancel_seconds if turn == len(self.turns) else None

    @property
    def output_lens(self) -> tuple[int, ...]:
        return (self.output_len, *(turn.output_len for turn in self.turns))

    @property
    def prompt_lens(self) -> tuple[int, ...]:
        """Prompt tokens of every turn, history included, if each answer of the model has its length."""
        lengths = [len(self.prompt_token_ids)]
        for turn, answered in zip(self.turns, self.output_lens, strict=False):
            history = answered if turn.answer_token_ids is None else len(turn.answer_token_ids)
            lengths.append(lengths[-1] + history + len(turn.token_ids))
        return tuple(lengths)


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests or conversations of a run, in the order of their arrival.

    Attributes:
        notes: caveats for reports, such as how many prompts were left out.
        is_stand_in: True if the prompts are the bundled ones and not the data set of that name.
        is_timed: True if the arrival times come from the data, and none are sampled at a rate.
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
        """Identity of the requests: prompt ids, output lengths, arrival times, and later turns."""
        digest = hashlib.sha256()
        for item in self.items:
            tokens = np.asarray(item.prompt_token_ids, dtype="<i8")
            head = f"{len(tokens)} {item.output_len} {item.arrival_seconds:.9f}\n"
            digest.update(head.encode())
            digest.update(tokens.tobytes())
            if item.images:
                digest.update(json.dumps(item.images).encode())
            if item.turns:
                messages = [asdict(message) for message in item.messages]
                later = [turn.record for turn in item.turns]
                digest.update(json.dumps([messages, later], sort_keys=True).encode())
            if item.after is not None or item.cancel_seconds is not None:
                linked = [item.after, item.gap_seconds, item.cancel_seconds]
                digest.update(json.dumps(linked).encode())
        return digest.hexdigest()

    @property
    def is_multi_turn(self) -> bool:
        return any(item.turns for item in self.items)

    @property
    def num_images(self) -> int:
        return sum(len(item.images) for item in self.items)

    @property
    def history(self) -> str:
        """Whose answers the prompts of conversations repeat: `model` or `dataset`."""
        later = [turn for item in self.items for turn in item.turns]
        return "dataset" if any(turn.answer_token_ids is not None for turn in later) else "model"

    @property
    def mean_think_seconds(self) -> float:
        pauses = [turn.think_seconds for item in self.items for turn in item.turns]
        return sum(pauses) / len(pauses) if pauses else 0.0

    @property
    def num_requests(self) -> int:
        return sum(1 + len(item.turns) for item in self.items)

    @property
    def prompt_tokens(self) -> int:
        return sum(sum(item.prompt_lens) for item in self.items)

    @property
    def output_tokens(self) -> int:
        return sum(sum(item.output_lens) for item in self.items)

    def with_arrivals(self, offsets: Sequence[float]) -> Workload:
        pairs = zip(self.items, offsets, strict=True)
        items = tuple(replace(item, arrival_seconds=float(offset)) for item, offset in pairs)
        return replace(self, items=items)


def shared_tokens(workload: Workload) -> float | None:
    """Share of prompt tokens in common with another prompt from the first on; None of conversations."""
    if workload.is_multi_turn or workload.num_images:
        return None
    prompts = sorted(item.prompt_token_ids for item in workload.items)
    shared = [0, *(_common(prompt, other) for prompt, other in pairwise(prompts)), 0]
    return sum(map(max, pairwise(shared))) / workload.prompt_tokens


def _common(prompt: Sequence[int], other: Sequence[int]) -> int:
    same = (position for position, (a, b) in enumerate(zip(prompt, other, strict=False)) if a != b)
    return next(same, min(len(prompt), len(other)))


def numbered(pairs: Sequence[tuple[Sequence[int], int]]) -> tuple[WorkloadItem, ...]:
    return tuple(
        WorkloadItem(f"bench-{number}", tuple(prompt), output_len)
        for number, (prompt, output_len) in enumerate(pairs)
    )


def read_text(path: Path) -> str:
    """The text of a data set's file. Raises BadInput: no such file, or no UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (FileNotFoundError, IsADirectoryError) as error:
        raise BadInput(f"dataset {path} is not a file") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"dataset {path} is not UTF-8 text: {error.reason}") from error


def oversampled(
    rows: list[Row], count: int, seed: int, notes: list[str], what: str = "prompts"
) -> list[Row]:
    """`rows`, with random repeats where they are fewer than `count`; then a note is appended."""
    missing = count - len(rows)
    if missing <= 0:
        return rows
    notes.append(f"{missing} of {count} {what} are repeats: the file has too few")
    return rows + random.Random(seed).choices(rows, k=missing)


def fit_lengths(
    given: Mapping[str, int | None], defaults: Mapping[str, int], max_model_len: int, flags: str
) -> tuple[dict[str, int], list[str]]:
    """Lengths (in tokens) that together fit the context, and a note if a default was reduced.

    `asked` has None for options that are not set: there the default applies, reduced in proportion when the
    context is too small. `flags` is the common prefix of the options. Raises BadInput: a length below 1 (a
    prefix may be 0), or explicit lengths that do not fit.
    """
    fixed = {name: length for name, length in given.items() if length is not None}
    for name, length in fixed.items():
        if length < (0 if name == "prefix" else 1):
            raise BadInput(f"{flags}{name}-len comes to {length}: it must be positive")
    free = {name: defaults[name] for name in given if name not in fixed}
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
    lengths = " + ".join(f"{name} {length}" for name, length in shrunk.items())
    note = f"default lengths cut to {lengths} to fit the context of {max_model_len}"
    return {**shrunk, **fixed}, [note]


def arrival_offsets(
    count: int, request_rate: float, *, burstiness: float = 1.0, seed: int = 0
) -> np.ndarray:
    """Seconds from the start of the run at which each of `count` requests is due, ascending.

    Gaps are drawn from Gamma(shape = burstiness, scale = 1/(rate·burstiness)): 1 is Poisson, less is
    burstier, infinity is one request every 1/rate seconds. As in vLLM the sum is then rescaled so that the
    last request is due at exactly `count / rate`: the rate is the one asked for, and the process is a Poisson
    process conditioned on its end.
    """
    if math.isinf(request_rate):
        return np.zeros(count)
    if math.isinf(burstiness):
        return np.arange(1, count + 1) / request_rate
    rng = np.random.default_rng(seed)
    due = np.cumsum(rng.gamma(shape=burstiness, scale=1 / (request_rate * burstiness), size=count))
    return due * (count / request_rate / due[-1])


def ramp_offsets(
    count: int,
    strategy: str,
    start_rps: float,
    end_rps: float,
    *,
    burstiness: float = 1.0,
    seed: int = 0,
) -> np.ndarray:
    """Seconds at which each of `count` requests is due while the rate climbs (or falls).

    The rate is a function of the request's index, not of time, as in vLLM: at p = i/(n - 1) it is
    start + (end - start)·p (`linear`) or start·(end/start)^p (`exponential`); gaps are drawn around its
    inverse. Nothing is rescaled.
    """
    rates = ramp_rates(count, strategy, start_rps, end_rps)
    if math.isinf(burstiness):
        return np.cumsum(1 / rates)
    rng = np.random.default_rng(seed)
    return np.cumsum(rng.gamma(shape=burstiness, scale=1 / (rates * burstiness)))


def ramp_rates(count: int, strategy: str, start_rps: float, end_rps: float) -> np.ndarray:
    """The rate for each of `count` requests of a ramp, `linear` or `exponential`."""
    done = np.arange(count) / max(count - 1, 1)
    if strategy == "linear":
        return start_rps + (end_rps - start_rps) * done
    return start_rps * (end_rps / start_rps) ** done


class Opening(NamedTuple):
    """An item that begins `due` seconds after the start of the pass."""

    cycle: int
    item: WorkloadItem
    due: float


def openings(workload: Workload, *, endless: bool) -> Iterator[Opening]:
    """Items by arrival, but those that wait for others; `endless`: again, shifted by a period per cycle."""
    opening = [item for item in workload.items if item.after is None]
    ordered = sorted(opening, key=lambda item: item.arrival_seconds)
    period = cycle_seconds(workload)
    names = first_tokens_of_cycles(workload) if endless else ()
    for cycle in count():
        for item in ordered:
            due = item.arrival_seconds + cycle * period
            yield Opening(cycle, in_cycle(item, cycle, names), due)
        if not endless:
            return


def in_cycle(item: WorkloadItem, cycle: int, names: Sequence[int]) -> WorkloadItem:
    if not cycle:
        return item
    prompt = (names[cycle % len(names)], *item.prompt_token_ids[1:])
    return replace(item, prompt_token_ids=prompt)


def cycle_seconds(workload: Workload) -> float:
    """Seconds from one cycle's arrivals to the next one's; 0 in a closed loop."""
    last = max(item.arrival_seconds for item in workload.items)
    first = min(item.arrival_seconds for item in workload.items)
    if first > 0 or len(workload.items) == 1:
        return last  # sampled arrivals: the first waits for one gap too
    return last * len(workload.items) / (len(workload.items) - 1)


def check_endless(workload: Workload, max_concurrency: int | None) -> None:
    if max_concurrency is None and cycle_seconds(workload) == 0:
        raise BadInput(
            "--duration repeats the workload, and nothing limits it: give --max-concurrency or a finite "
            "--request-rate"
        )


def first_tokens_of_cycles(workload: Workload) -> list[int]:
    """Token ids for the cycles, taken from within the prompts; the first is not used."""
    first = {item.prompt_token_ids[0] for item in workload.items}
    inner = {token for item in workload.items for token in item.prompt_token_ids[1:]}
    return [min(first), *(sorted(inner - first) or sorted(first))]
