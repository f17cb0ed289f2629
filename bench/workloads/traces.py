"""Trace replay: arrival times, lengths, shared prefix blocks and dependencies of recorded traffic.

No trace holds prompts, so tokens are random; equal blocks get equal ones. By arrival requests are sent as
they came, but not before an answer that they repeat; by dependency when the answer they were made from has
ended and a gap has passed, as a slower server would meet clients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np

from ...base.errors import BadInput
from ...recipes import DATA
from .conversations import ChatSegments, SourceTurn
from .synthetic import allowed_tokens
from .trace_rows import TraceRow, read_agents, table_rows
from .workload import ConversationTurn, Message, Tokenizer, Workload, WorkloadItem

BUNDLED = {"azure": DATA / "azure_conversations.csv", "mooncake": DATA / "mooncake.jsonl"}
# A quantile, so that one huge request does not scale all others to nothing.
SHARE_TO_FIT = 0.9
# Clipping would make prompts with blocks equal: they differ at their ends.
LENGTH_RULES = {"azure": "clip", "burstgpt": "clip", "mooncake": "scale", "trace": "scale"}
CANDIDATES = 4096
Replay = Literal["arrival", "dependency"]


def trace_workload(
    tokenizer: Tokenizer,
    kind: str,
    *,
    num_prompts: int | None,
    max_model_len: int,
    path: Path | None = None,
    start_seconds: float = 0.0,
    speed: float = 1.0,
    lengths: str | None = None,
    seed: int = 0,
    replay: Replay = "arrival",
    decode: Callable[[Sequence[int]], str] | None = None,
    as_text: bool = False,
) -> Workload:
    """`num_prompts` requests of a trace at their recorded times: the first at 0, gaps divided by `speed`.
    Raises BadInput: no such file, a malformed line (with its number), or no request left.

    Args:
        num_prompts: None is all of them.
        path: the trace; None is the bundled slice of Azure's or Mooncake's.
        lengths: rule for requests longer than the context. `clip` cuts the output to half the context at most
            and then the prompt to the rest; `scale` multiplies all lengths (and the blocks) by one factor
            under which nine requests in ten fit, and cuts the others. Default: `LENGTH_RULES`.
        replay: `dependency` sends a request that has a parent after the parent's end and the recorded gap.
        decode: token ids to text: then a prompt that extends its parent's is a further turn of a
            conversation, with the model's own answer; None repeats a random one.
        as_text: prompts are sent as chat messages: of tokens that the tokenizer reads back from their text,
            and fewer by those that the chat template adds.
    """
    if path is None and kind not in BUNDLED:
        raise BadInput(f"--dataset {kind} needs --dataset-path: no slice of it is bundled")
    rows = read_trace(kind, path or BUNDLED[kind])
    source = f"{kind} trace {path.name}" if path else f"bundled slice of the {kind} trace"
    chosen, left_out = _chosen(rows, source, start_seconds, num_prompts)
    factor, shortened = _factor(chosen, lengths or LENGTH_RULES[kind], max_model_len)
    notes = ["random tokens: a trace holds lengths and times, not text", *left_out, *shortened]
    if speed != 1.0:
        notes.append(f"replayed at {speed:g} times the trace's speed")
    fit = [fitted(row, factor, max_model_len) for row in chosen]
    added = (0, 0)
    if as_text:  # tokens that the chat template adds to a first user message, and to a later one
        turn = SourceTurn((Message("user", ""),), "")
        first, later = map(len, ChatSegments(tokenizer).split([turn, turn]))
        added = (first, later)
    linked = Linked(replay, decode, speed, chosen[0].seconds, added)
    allowed = allowed_tokens(tokenizer)
    texts = BlockTokens(
        read_back(tokenizer, allowed, decode, seed) if as_text and decode else allowed, seed
    )
    for number, row in enumerate(chosen):
        block = math.ceil(row.block_tokens * factor)
        linked.add(fit[number], texts.prompt(number, fit[number], block))
    return Workload(
        kind, source, tuple(linked.items), (*notes, *linked.notes(chosen)), is_timed=True
    )


def _chosen(
    rows: Sequence[TraceRow], source: str, start_seconds: float, num_prompts: int | None
) -> tuple[list[TraceRow], list[str]]:
    """The requests to replay, and notes on the others. Raises BadInput: there is none."""
    origin, empty = rows[0].seconds, 0
    chosen: list[TraceRow] = []
    for row in rows:
        if row.seconds - origin < start_seconds:
            continue
        if row.prompt_len < 1 or row.output_len < 1:
            empty += 1
            continue
        chosen.append(row)
        if len(chosen) == num_prompts:
            break
    if not chosen:
        raise BadInput(
            f"{source} has no request after --trace-start {start_seconds:g}: it lasts "
            f"{rows[-1].seconds - origin:.0f} s"
        )
    notes = []
    if empty:
        notes.append(f"{empty} requests left out: no prompt, no answer, or no generation")
    if num_prompts is not None and len(chosen) < num_prompts:
        notes.append(f"{len(chosen)} of {num_prompts} requests: the trace ends there")
    return chosen, notes


def _factor(chosen: Sequence[TraceRow], rule: str, max_model_len: int) -> tuple[float, list[str]]:
    """The factor of all lengths, at most 1, and notes on the requests that a context makes shorter."""
    totals = sorted(row.prompt_len + row.output_len for row in chosen)
    large = totals[math.ceil(SHARE_TO_FIT * len(totals)) - 1]
    factor = min(1.0, max_model_len / large) if rule == "scale" else 1.0
    notes = []
    if factor < 1.0:
        notes.append(
            f"all lengths scaled by {factor:.4g} so that nine requests in ten, up to {large} "
            f"tokens, fit the context of {max_model_len}"
        )
    if cut := sum(total * factor > max_model_len for total in totals):
        notes.append(f"{cut} of {len(chosen)} requests cut to the context of {max_model_len}")
    return factor, notes


def read_trace(kind: str, path: Path) -> list[TraceRow]:
    """A trace file's requests by time; `trace`: its content tells. BadInput: malformed, or unknown."""
    rows = None
    try:
        if not path.is_dir():
            with path.open(encoding="utf-8-sig", newline="") as lines:
                known = table_rows(kind, lines, path)
                rows = None if known is None else list(known)
        if rows is None:
            files = sorted(path.rglob("*.json*")) if path.is_dir() else [path]
            rows = read_agents(files)
    except FileNotFoundError as error:
        raise BadInput(f"trace {path} is not a file") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"trace {path} is not UTF-8 text: {error.reason}") from error
    if rows is None:
        raise BadInput(f"trace {path} has no known form: docs/measuring.md lists them")
    if not rows:
        raise BadInput(f"trace {path} has no request")
    return sorted(rows, key=lambda row: row.seconds)


def fitted(row: TraceRow, factor: float, max_model_len: int) -> TraceRow:
    prompt = max(1, math.floor(row.prompt_len * factor))
    output = max(1, math.floor(row.output_len * factor))
    if prompt + output > max_model_len:
        output = min(output, max(1, max_model_len // 2))
        prompt = min(prompt, max_model_len - output)
    return replace(row, prompt_len=prompt, output_len=output)


def read_back(
    tokenizer: Tokenizer, allowed: np.ndarray, decode: Callable[[Sequence[int]], str], seed: int
) -> np.ndarray:
    """Tokens whose text, repeated, is read as the same tokens; all, where there are none."""

    def is_read_back(token: int) -> bool:
        text = decode([token] * 3)
        return list(tokenizer.encode(text, add_special_tokens=False)) == [token] * 3

    drawn = np.random.default_rng(seed).permutation(allowed)[:CANDIDATES].tolist()
    kept = sorted(filter(is_read_back, drawn))
    return np.array(kept) if kept else allowed


class BlockTokens:
    """Random tokens of prompts: the same ones for the same block and seed.

    Blocks of unknown size share evenly the tokens that the known blocks of their prompt leave, because text
    of equal bytes has other numbers of tokens in code and in prose. The last block takes as much less as it
    is short of a whole one.
    """

    def __init__(self, allowed: np.ndarray, seed: int) -> None:
        self._allowed, self._seed = allowed, seed
        self._blocks: dict[int, list[int]] = {}

    def prompt(self, number: int, row: TraceRow, block_tokens: int) -> list[int]:
        """The prompt of request `number`, of blocks of `block_tokens` each, or even shares if 0."""
        new = [name for name in row.blocks if name not in self._blocks]
        known = sum(len(self._blocks[name]) for name in row.blocks if name in self._blocks)
        left = max(0, row.prompt_len - known)
        # Where the last block is known, so are all before it.
        bulk = max(row.filled - len(row.blocks) + len(new), len(new) - 0.999, 0.001)
        ends = [math.floor(left * min(1.0, index / bulk)) for index in range(len(new) + 1)]
        if block_tokens:
            ends = [min(left, index * block_tokens) for index in range(len(new) + 1)]
        for name, (start, end) in zip(new, pairwise(ends), strict=True):
            self._blocks[name] = self._drawn(name, end - start, 0)
        tokens = [token for name in row.blocks for token in self._blocks[name]]
        # Requests without blocks have text of their own.
        tokens += self._drawn(number + 1, row.prompt_len - len(tokens), 1)
        return tokens[: row.prompt_len]

    def _drawn(self, name: int, length: int, stream: int) -> list[int]:
        if length <= 0:
            return []
        rng = np.random.default_rng([self._seed, name, stream])
        return self._allowed[rng.integers(0, len(self._allowed), size=length)].tolist()


@dataclass
class Linked:
    """Items linked as the trace's requests; `added`: the chat template's tokens for first, later messages."""

    replay: Replay
    decode: Callable[[Sequence[int]], str] | None
    speed: float
    origin: float
    added: tuple[int, int] = (0, 0)
    items: list[WorkloadItem] = field(default_factory=list)
    _places: dict[str, tuple[int, int]] = field(default_factory=dict)
    _ends: dict[str, int] = field(default_factory=dict)

    def add(self, row: TraceRow, prompt: list[int]) -> None:
        """Append a request as an item, or as a further turn of the item that it extends."""
        parent = self._places.get(row.parent)
        due, gap = (row.seconds - self.origin) / self.speed, row.gap / self.speed
        if parent is not None and self._extend(row, prompt, parent, due, gap):
            number, turn = parent[0], parent[1] + 1
        else:
            number, turn = len(self.items), 0
            if self.replay == "arrival":
                parent = None
            tokens = tuple(prompt[: max(1, len(prompt) - self.added[0])])
            item = WorkloadItem(f"bench-{number}", tokens, row.output_len, due)
            if parent is not None:
                item = replace(item, after=(f"bench-{parent[0]}", parent[1]), gap_seconds=gap)
            self.items.append(item)
        if row.name:
            self._places[row.name] = number, turn
            self._ends[row.name] = len(prompt) + row.output_len

    def _extend(
        self, row: TraceRow, prompt: list[int], parent: tuple[int, int], due: float, gap: float
    ) -> bool:
        """Append to the parent's item; False where the parent is not its last turn, or not extended."""
        if self.decode is None or not row.extends:
            return False
        item, new = self.items[parent[0]], prompt[self._ends[row.parent] :]
        if len(item.turns) != parent[1] or not new:
            return False
        new = new[: max(1, len(new) - self.added[1])]
        messages = item.messages or (Message("user", self.decode(item.prompt_token_ids)),)
        added = (Message("user", self.decode(new)),)
        since = due - item.arrival_seconds if self.replay == "arrival" else None
        turn = ConversationTurn(tuple(new), row.output_len, added, gap, due_seconds=since)
        self.items[parent[0]] = replace(item, messages=messages, turns=(*item.turns, turn))
        return True

    def notes(self, rows: Sequence[TraceRow]) -> list[str]:
        notes = []
        answers = {row.name: row.output_len for row in rows if row.name}
        turns = sum(len(item.turns) for item in self.items)
        repeated = sum(answers.get(row.parent, 0) for row in rows if row.extends)
        if repeated and not turns:
            share = repeated / sum(row.prompt_len for row in rows)
            notes.append(
                f"{share:.1%} of the prompt tokens were answers to requests before, which a server may have "
                "had cached: here they are random tokens, so it has not"
            )
        linked = turns + sum(item.after is not None for item in self.items)
        if linked:
            notes.append(f"{linked} of {len(rows)} requests wait for the one that they came from")
        return notes
