"""HTTP load driver: sends a workload through the worker processes and returns request traces.

Request bodies (prompts, chats, conversations, pooling inputs) are encoded as JSON before the clock starts.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ...base.errors import BadInput
from ...base.progress import Progress
from ..metrics.trace import LoadPass, RequestTrace
from ..options.options import DEFAULT_CONCURRENCY, BenchOptions
from ..options.values import BACKENDS, CHAT, COMPLETIONS, RERANK, TRANSFORMERS
from ..workloads.workload import ConversationTurn, Message, Workload, WorkloadItem, cycle_seconds
from .address import KNOWN_OWNERS, Address, ServedModel
from .exchange import MARK, EncodedRequest, EncodedTurn, Exchange, PassWindow, encoded_message
from .fleet import ClientError, Fleet, FleetPass, default_workers, judge, measure_client
from .load import adapter_of, request_id, window_duration
from .stream import SHARE_READ, chunk_tokens

# Where `MARK` goes: a text and a number that no prompt holds, until the JSON is written.
_MARK_TEXT, _MARK_NUMBER = "\ue002", 10**15 + 1
_MESSAGES = "\ue003"


@dataclass(frozen=True, slots=True)
class Body:
    """Encodes workload items as request bodies, with `MARK` in the place of a prompt's first token.

    Attributes:
        backend: `CHAT` sends the prompt as the text of one user message, or the messages of a conversation;
            `COMPLETIONS` as token ids; `TRANSFORMERS` as text, with the length set through
            `generation_config`. The backends of `pooling` send several inputs (`encode_inputs`).
        sends_both_lengths: send a chat's length as `max_tokens` too, for servers that ignore
            `max_completion_tokens`; OpenAI's API refuses the two together.
        extra: fields to add or replace; a field set to None is left out.
    """

    model: str
    backend: str
    decode: Callable[[Sequence[int]], str]
    ignore_eos: bool = True
    temperature: float = 0.0
    seed: int = 0
    sends_both_lengths: bool = False
    extra: tuple[tuple[str, Any], ...] = ()

    def encode(self, item: WorkloadItem) -> EncodedRequest:
        name, due = item.request_id, item.arrival_seconds
        if item.images and self.backend != CHAT:
            raise BadInput(f"images are sent with --backend {CHAT} alone, not {self.backend}")
        if item.turns or (item.messages and self.backend == CHAT):
            opened = item.messages[0]
            content = opened.content.removeprefix(self.decode(item.prompt_token_ids[:1]))
            marked = Message(opened.role, _MARK_TEXT + content)
            messages = _marked(_written(marked, *item.messages[1:]))
            head, tail = self._around(item.output_len)
            turns = tuple(map(self._turn, item.turns))
            return EncodedRequest(name, head + messages + tail, due, messages, turns)
        if self.backend == TRANSFORMERS:
            fields = self._plain(self._marked_text(item), item.output_len)
        elif self.backend == CHAT:
            text: Any = self._marked_text(item)
            if item.images:  # after the text, as vLLM's benchmark sends them
                parts = [{"type": "image_url", "image_url": {"url": url}} for url in item.images]
                text = [{"type": "text", "text": text}, *parts]
            fields = self._chat([{"role": "user", "content": text}], item.output_len)
        else:
            ids = [_MARK_NUMBER, *item.prompt_token_ids[1:]]
            prompt = {"prompt": ids, "max_tokens": item.output_len}
            fields = self._streamed(prompt, item.output_len)
        return EncodedRequest(name, _marked(self._json(fields)), due)

    def encode_inputs(self, batch: Sequence[WorkloadItem]) -> EncodedRequest:
        """One embedding or pooling request of token ids, or a rerank of a query and documents, as text."""
        if self.backend == RERANK:
            query, *documents = map(self._marked_text, batch)
            inputs: dict[str, Any] = {"query": query, "documents": documents}
        else:
            ids = [[_MARK_NUMBER, *item.prompt_token_ids[1:]] for item in batch]
            inputs = {"input": ids[0] if len(ids) == 1 else ids}
        body = _marked(self._json({"model": self.model, **inputs}), len(batch))
        return EncodedRequest(batch[0].request_id, body, batch[0].arrival_seconds)

    def mark(self, token: int) -> bytes:
        """Text or id that replaces `MARK`, so that prompts begin with this token."""
        if self.backend in (CHAT, TRANSFORMERS, RERANK):
            return json.dumps(self.decode([token]))[1:-1].encode()
        return b"%d" % token

    def _turn(self, turn: ConversationTurn) -> EncodedTurn:
        head, tail = self._around(turn.output_len)
        answer = None if turn.answer is None else encoded_message("assistant", turn.answer)
        messages = _written(*turn.messages)
        return EncodedTurn(head, messages, tail, turn.think_seconds, turn.due_seconds, answer)

    def _around(self, output_len: int) -> tuple[bytes, bytes]:
        fields = self._chat([_MESSAGES], output_len)
        head, _, tail = self._json(fields).partition(json.dumps(_MESSAGES).encode())
        return head, tail

    def _marked_text(self, item: WorkloadItem) -> str:
        first, text = self.decode(item.prompt_token_ids[:1]), self.decode(item.prompt_token_ids)
        if text.startswith(first):
            return _MARK_TEXT + text[len(first) :]
        return _MARK_TEXT + self.decode(item.prompt_token_ids[1:])

    def _chat(self, messages: list[Any], output_len: int) -> dict[str, Any]:
        names = ("max_completion_tokens", "max_tokens")[: 1 + self.sends_both_lengths]
        return self._streamed(
            {"messages": messages, **dict.fromkeys(names, output_len)}, output_len
        )

    def _streamed(self, prompt: dict[str, Any], output_len: int) -> dict[str, Any]:
        fields = self._sampled(prompt)
        if self.ignore_eos:
            # Some servers suppress only one of several EOS tokens under ignore_eos, hence the second field.
            fields |= {"ignore_eos": True, "min_tokens": output_len}
        usage = {"include_usage": True, "continuous_usage_stats": True}
        return fields | {"stream": True, "stream_options": usage}

    def _plain(self, prompt: str, output_len: int) -> dict[str, Any]:
        """The fields for `transformers serve`, which rejects unknown ones."""
        fields = self._sampled({"prompt": prompt, "max_tokens": output_len}) | {"stream": True}
        if self.ignore_eos:
            fixed = {
                "max_new_tokens": output_len,
                "min_new_tokens": output_len,
                "do_sample": self.temperature > 0,
            }
            fields["generation_config"] = json.dumps(fixed)
        return fields

    def _sampled(self, prompt: dict[str, Any]) -> dict[str, Any]:
        fields = {"model": self.model, **prompt, "temperature": self.temperature}
        return fields | ({"seed": self.seed} if self.temperature > 0 else {})

    def _json(self, fields: Mapping[str, Any]) -> bytes:
        kept = {k: v for k, v in {**fields, **dict(self.extra)}.items() if v is not None}
        return json.dumps(kept, separators=(",", ":")).encode()


def _written(*messages: Message) -> bytes:
    return b",".join(encoded_message(message.role, message.content) for message in messages)


def _marked(body: bytes, count: int = 1) -> bytes:
    """JSON with `MARK` in the place of the first `count` marks, all texts or all numbers."""
    for mark in (json.dumps(_MARK_TEXT)[1:-1].encode(), b"%d" % _MARK_NUMBER):
        if mark in body:
            return body.replace(mark, MARK, count)
    return body


def batches(
    items: Sequence[WorkloadItem], backend: str, batch_size: int
) -> list[tuple[WorkloadItem, ...]]:
    """Items of each request: `batch_size` inputs, or a query and its documents. BadInput: too few."""
    size = batch_size + (backend == RERANK)
    groups = [tuple(items[start : start + size]) for start in range(0, len(items), size)]
    groups = [group for group in groups if len(group) > (backend == RERANK)]
    if not groups:
        raise BadInput(f"--backend {backend} needs 2 prompts or more: a query and a document")
    return groups


# Cycles of a pass of fixed duration that get first tokens of their own; then they are used again.
CYCLES = 256


class HttpDriver:
    """Sends passes to one endpoint and accumulates client overhead (lags, late connections)."""

    def __init__(
        self, options: BenchOptions, address: Address, served: ServedModel, progress: Progress
    ) -> None:
        self._options = options
        self._progress = progress
        self._tokenizer = served.tokenizer
        self._body = Body(
            served.model,
            BACKENDS[options.backend],
            served.tokenizer.decode,
            options.ignore_eos,
            options.temperature,
            options.seed,
            served.owner not in KNOWN_OWNERS,
            tuple(options.extra_body.items()),
        )
        self._endpoint = address.endpoint(options.request_timeout)
        self._streams = options.concurrency or DEFAULT_CONCURRENCY
        self.num_workers = options.client_workers or default_workers(self._streams)
        # The warm-up, and the most passes that a session measures, rejected ones included.
        num_passes = 1 + options.num_runs + options.max_redone_passes
        cycles = CYCLES if options.duration else 1
        self._first_tokens = first_tokens(served.tokenizer, num_passes, cycles)
        self._error: ClientError | None = None
        self._reset_account()
        self._fleet = Fleet(self.num_workers)

    def close(self) -> None:
        self._fleet.__exit__()

    def check(self) -> None:
        self._error = measure_client(
            self._fleet,
            self.num_workers,
            self._streams,
            burden=self._options.client_burden_ms / 1000,
            progress=self._progress,
        )

    def warm_up(self, workload: Workload, description: str) -> LoadPass:
        load, _, _ = self.drive(workload, 0, description)
        self._reset_account()
        return load

    def drive(
        self, workload: Workload, number: int, description: str, window: float | None = None
    ) -> tuple[LoadPass, float | None, float]:
        """Pass `number` over the workload, 0 being the warm-up; its share of prompt tokens from the server's
        prefix cache, in responses that report it, and the workers' CPU time. The cache cannot be emptied from
        here. A different first token per pass, and per cycle within a `window`, makes every prompt miss it,
        while prefixes shared within the cycle stay shared."""
        seconds = self._fleet.cpu_seconds()
        seen = self._fleet.run(
            self._endpoint,
            self._encoded(workload),
            self._options.concurrency,
            marks=[self._body.mark(token) for token in self._first_tokens[number]],
            window=None if window is None else PassWindow(window, cycle_seconds(workload)),
            burden=self._options.client_burden_ms / 1000,
            progress=self._progress,
            description=description,
        )
        self._lags.append(seen.lag_ms)
        self._late_connections += seen.late_connections
        used = self._fleet.cpu_seconds() - seconds
        load = self._load_pass(workload, seen, window)
        return load, prefix_cache_hit_rate(seen.exchanges), used

    def client_part(self, metrics: Mapping[str, Any], passes: Sequence[LoadPass]) -> dict[str, Any]:
        """`llmopt.client` of a result: client overhead and certification."""
        lag = {key: max(lags[key] for lags in self._lags) for key in ("p99", "max")}
        lag = {"mean": float(np.mean([lags["mean"] for lags in self._lags])), **lag}
        error, late = self._error, None
        if self._options.concurrency is None:  # under a limit, waiting is part of the load
            queued = [trace.queued * 1000 for load in passes for trace in load.traces]
            late = float(np.median(queued or [0]))
        reasons = judge(error, metrics, loop_lag_ms=lag["mean"], send_lag_ms=late)
        return {
            "certified": not reasons,
            "reasons": reasons,
            "workers": self.num_workers,
            "client_ttft_error_ms": error.client_ttft_error_ms if error else None,
            "client_itl_error_ms": error.client_itl_error_ms if error else None,
            "check": asdict(error) if error else None,
            "loop_lag_ms": lag,
            "late_connections": self._late_connections,
            "burden_ms": self._options.client_burden_ms,
            "request_timeout_s": self._options.request_timeout,
            "token_counts_by": dict(self._counters),
            "first_token_of_pass": [tokens[0] for tokens in self._first_tokens],
        }

    def doubts(self) -> list[str]:
        """Signs of another model under the name, and unknown fields of the stream."""
        known = {self._body.model, *self._options.loras, ""}
        doubts = [
            f"{count} answers are signed {name!r}, not {self._body.model!r}: another model may be behind "
            "the name"
            for name, count in self._models.items()
            if name not in known
        ]
        if self._num_recounted:
            doubts.append(
                f"{self._num_recounted} answers count other prompt tokens than were sent as ids: the "
                "server's tokenizer, or its model, is another"
            )
        if self._num_cut:
            doubts.append(
                f"{self._num_cut} prompts were read to less than {SHARE_READ:.0%} of their tokens: the "
                "server may cut them to its context"
            )
        if self._unread:
            fields = ", ".join(f"{name} ({count} chunks)" for name, count in self._unread.items())
            doubts.append(
                f"the stream has fields that are not known here: {fields}; output in them was not counted"
            )
        return doubts

    def _reset_account(self) -> None:
        self._counters: Counter[str] = Counter()
        self._models: Counter[str] = Counter()
        self._unread: Counter[str] = Counter()
        self._num_recounted = self._num_cut = 0
        self._lags: list[dict[str, float]] = []
        self._late_connections = 0

    def _batches(self, workload: Workload) -> list[tuple[WorkloadItem, ...]]:
        if not self._endpoint.is_pooled:
            return [(item,) for item in workload.items]
        return batches(workload.items, self._body.backend, self._options.random_batch_size)

    def _encoded(self, workload: Workload) -> list[EncodedRequest]:
        """The requests that open the workload, each with those that wait for it."""
        waiting: dict[str, list[tuple[int, EncodedRequest]]] = {}
        opening = []
        # A request stands after the one that it waits for.
        for batch in reversed(self._batches(workload)):
            item = batch[0]
            adapter = self._adapter(item.request_id)
            body = replace(self._body, model=adapter) if adapter else self._body
            request = body.encode_inputs(batch) if self._endpoint.is_pooled else body.encode(item)
            followers = tuple(waiting.pop(request.request_id, ()))
            request = replace(request, cancel=item.cancel_seconds, waiting=followers)
            if item.after is None:
                opening.append(request)
                continue
            before, turn = item.after
            request = replace(request, due=item.gap_seconds)
            waiting.setdefault(before, []).append((turn, request))
        return opening[::-1]

    def _adapter(self, name: str) -> str | None:
        options = self._options
        return adapter_of(name, tuple(options.loras), options.lora_assignment, options.seed)

    def _load_pass(self, workload: Workload, seen: FleetPass, window: float | None) -> LoadPass:
        by_id = {batch[0].request_id: batch for batch in self._batches(workload)}
        position = {name: number for number, name in enumerate(by_id)}
        ordered = sorted(seen.exchanges, key=lambda e: (e.cycle, position[e.request_id], e.turn))
        whole = [exchange for exchange in ordered if not exchange.cancelled]
        traces = [self._trace(by_id[e.request_id], e, seen.origin) for e in whole]
        began_at = time.time() - (time.perf_counter() - seen.origin)
        seconds = seen.ended - seen.origin
        load = LoadPass(traces, seconds, [], seen.interrupted, began_at)
        load.cancelled = len(ordered) - len(traces)
        if window is not None:
            load.duration = load.window = window_duration(window, seconds, seen.interrupted)
            load.drain_seconds = max(0.0, seconds - load.duration)
        return load

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def _trace(
        self, batch: tuple[WorkloadItem, ...], exchange: Exchange, origin: float
    ) -> RequestTrace:
        item, answer, is_pooled = batch[0], exchange.answer, self._endpoint.is_pooled
        recount = None
        if answer.total is None and answer.times:
            recount = self._count(answer.text)
        tokens, source = chunk_tokens(answer, recount)
        if not answer.error and not is_pooled:
            self._counters[source] += 1
            self._models[answer.model] += 1
            self._unread.update(answer.unread)
            # Token ids are counted alike by every server, but for a token that begins the text.
            known = (None, len(item.prompt_token_ids), len(item.prompt_token_ids) + 1)
            is_ids = self._body.backend == COMPLETIONS
            self._num_recounted += is_ids and answer.prompt_tokens not in known
            is_cut = (answer.prompt_tokens or known[1]) < SHARE_READ * known[1]
            self._num_cut += not is_ids and exchange.turn == 0 and is_cut
        trace = RequestTrace(
            request_id(item.request_id, exchange.cycle, exchange.turn),
            answer.prompt_tokens or sum(input.prompt_lens[exchange.turn] for input in batch),
            0 if is_pooled else item.output_lens[exchange.turn],
            scheduled=exchange.due,
            sent=exchange.sent - origin,
            chunk_times=[time - origin for time in answer.times],
            chunk_tokens=tokens,
            text=answer.text,
            cached_tokens=answer.cached_tokens,
            conversation=item.request_id,
            turn=exchange.turn,
            cycle=exchange.cycle,
            lora=self._adapter(item.request_id),
            hidden_tokens=answer.hidden_tokens,
        )
        if item.turns and answer.content != answer.text:
            trace.history_tokens = self._count(answer.content)
        trace.error, expected = answer.error, len(batch) - (self._body.backend == RERANK)
        if not trace.error and is_pooled and answer.num_results != expected:
            trace.error = f"the response has {answer.num_results} results for {expected} inputs"
        elif not trace.error and not is_pooled and not trace.output_len:
            hidden = answer.hidden_tokens
            reasoning = f" but {hidden} of reasoning" if hidden else ""
            trace.error = f"the response has no token{reasoning}"
        trace.success = not trace.error
        return trace


def prefix_cache_hit_rate(exchanges: Sequence[Exchange]) -> float | None:
    """The share of all prompt tokens; vLLM counts cached ones only in answers with some (its issue 44377)."""
    answers = [exchange.answer for exchange in exchanges]
    tokens = sum(answer.prompt_tokens or 0 for answer in answers)
    hits = [answer.cached_tokens for answer in answers if answer.cached_tokens is not None]
    return sum(hits) / tokens if hits and tokens else None


def first_tokens(tokenizer: Any, num_passes: int, num_cycles: int) -> list[list[int]]:
    """For every pass, different non-special token ids for its cycles, random in every run and recorded.
    Seeded ones would still be in the prefix cache of a server that has run this benchmark before. Where the
    vocabulary is small, a pass has fewer."""
    special = set(tokenizer.all_special_ids)
    ordinary = [token for token in range(len(tokenizer)) if token not in special]
    count = max(1, min(num_cycles, len(ordinary) // num_passes))
    tokens = random.SystemRandom().sample(ordinary, num_passes * count)
    return [tokens[number * count :][:count] for number in range(num_passes)]
