"""Request bodies: prompts, chats, conversations, pooling inputs as JSON, encoded before the clock starts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...quant.base.errors import BadInput
from ..workloads.workload import ConversationTurn, Message, WorkloadItem
from .address import CHAT, RERANK, TRANSFORMERS
from .exchange import MARK, EncodedRequest, EncodedTurn, encoded_message

# Where `MARK` goes: a text and a number that no prompt holds, until the JSON is written.
_MARK_TEXT, _MARK_NUMBER = "\ue002", 10**15 + 1
_MESSAGES = "\ue003"


@dataclass(frozen=True, slots=True)
class Body:
    """Encodes workload items as request bodies, with `MARK` in the place of a prompt's first token.

    Attributes:
        model: the model's name on the server.
        backend: `CHAT` sends the prompt as the text of one user message, or the messages of a conversation;
            `COMPLETIONS` as token ids; `TRANSFORMERS` as text, with the length set through
            `generation_config`. The backends of `pooling` send several inputs (`encode_inputs`).
        decode: token ids to text.
        extra: fields to add or replace; a field set to None is left out.
    """

    model: str
    backend: str
    decode: Callable[[Sequence[int]], str]
    ignore_eos: bool = True
    temperature: float = 0.0
    seed: int = 0
    extra: tuple[tuple[str, Any], ...] = ()

    def encode(self, item: WorkloadItem) -> EncodedRequest:
        """The request, or all turns of the conversation."""
        name, due = item.request_id, item.arrival_seconds
        if item.images and self.backend != CHAT:
            raise BadInput(f"images are sent with --backend {CHAT} alone, not {self.backend}")
        if item.turns or (item.messages and self.backend == CHAT):
            opened = item.messages[0]
            marked = Message(opened.role, _MARK_TEXT + opened.content)
            messages = _marked(_written(marked, *item.messages[1:]))
            head, tail = self._around(item.output_len)
            turns = tuple(map(self._turn, item.turns))
            return EncodedRequest(name, head + messages + tail, due, messages, turns)
        if self.backend == TRANSFORMERS:
            fields = self._plain(self._marked_text(item), item.output_len)
        elif self.backend == CHAT:
            text: Any = self._marked_text(item)
            if item.images:  # behind the text, as vLLM's benchmark sends them
                parts = [{"type": "image_url", "image_url": {"url": url}} for url in item.images]
                text = [{"type": "text", "text": text}, *parts]
            spoken = [{"role": "user", "content": text}]
            fields = self._streamed({"messages": spoken}, "max_completion_tokens", item.output_len)
        else:
            prompt = {"prompt": _marked_ids(item)}
            fields = self._streamed(prompt, "max_tokens", item.output_len)
        return EncodedRequest(name, _marked(self._json(fields)), due)

    def encode_inputs(self, batch: Sequence[WorkloadItem]) -> EncodedRequest:
        """One embedding or pooling request, inputs as token ids, or a rerank: a query and its documents, as
        text."""
        if self.backend == RERANK:
            query, *documents = map(self._marked_text, batch)
            inputs: dict[str, Any] = {"query": query, "documents": documents}
        else:
            ids = [_marked_ids(item) for item in batch]
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
        return EncodedTurn(head, _written(*turn.messages), tail, turn.think_seconds, answer)

    def _around(self, output_len: int) -> tuple[bytes, bytes]:
        """The body of a chat before and behind its messages."""
        fields = self._streamed({"messages": [_MESSAGES]}, "max_completion_tokens", output_len)
        head, _, tail = self._json(fields).partition(json.dumps(_MESSAGES).encode())
        return head, tail

    def _marked_text(self, item: WorkloadItem) -> str:
        """The prompt's text with the mark in the place of its first token."""
        first, text = self.decode(item.prompt_token_ids[:1]), self.decode(item.prompt_token_ids)
        if text.startswith(first):
            return _MARK_TEXT + text[len(first) :]
        return _MARK_TEXT + self.decode(item.prompt_token_ids[1:])

    def _streamed(self, prompt: dict[str, Any], length: str, output_len: int) -> dict[str, Any]:
        fields = {"model": self.model, **prompt, length: output_len}
        fields["temperature"] = self.temperature
        if self.temperature > 0:
            fields["seed"] = self.seed
        if self.ignore_eos:
            # Some servers suppress only one of several EOS tokens under ignore_eos, hence the second field.
            fields |= {"ignore_eos": True, "min_tokens": output_len}
        fields |= {
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        return fields

    def _plain(self, prompt: str, output_len: int) -> dict[str, Any]:
        """The fields for `transformers serve`, which rejects unknown ones."""
        fields: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": output_len,
            "temperature": self.temperature,
            "stream": True,
        }
        if self.temperature > 0:
            fields["seed"] = self.seed
        if self.ignore_eos:
            fixed = {
                "max_new_tokens": output_len,
                "min_new_tokens": output_len,
                "do_sample": self.temperature > 0,
            }
            fields["generation_config"] = json.dumps(fixed)
        return fields

    def _json(self, fields: Mapping[str, Any]) -> bytes:
        kept = {k: v for k, v in {**fields, **dict(self.extra)}.items() if v is not None}
        return json.dumps(kept, separators=(",", ":")).encode()


def _written(*messages: Message) -> bytes:
    return b",".join(encoded_message(message.role, message.content) for message in messages)


def _marked_ids(item: WorkloadItem) -> list[int]:
    return [_MARK_NUMBER, *item.prompt_token_ids[1:]]


def _marked(body: bytes, count: int = 1) -> bytes:
    """JSON with `MARK` in the place of the first `count` marks, all texts or all numbers."""
    for mark in (json.dumps(_MARK_TEXT)[1:-1].encode(), b"%d" % _MARK_NUMBER):
        if mark in body:
            return body.replace(mark, MARK, count)
    return body


def batches(
    items: Sequence[WorkloadItem], backend: str, batch_size: int
) -> list[tuple[WorkloadItem, ...]]:
    """The items of each request: `batch_size` inputs; of a rerank a query and that many documents.

    The last request may have fewer, but a rerank has a document.

    Raises:
        BadInput: too few prompts for one request.
    """
    size = batch_size + (backend == RERANK)
    groups = [tuple(items[start : start + size]) for start in range(0, len(items), size)]
    groups = [group for group in groups if len(group) > (backend == RERANK)]
    if not groups:
        raise BadInput(f"--backend {backend} needs 2 prompts or more: a query and a document")
    return groups
