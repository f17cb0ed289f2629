"""Chats as items of tasks, and the task `answers`: how long answers are, and how they end.

Length is the number of answer tokens, without the reasoning; two models are compared by the ratio of the sums
over the same prompts, with a paired bootstrap over them. An answer is cut at the limit, ended by an end
token, or ended otherwise; it loops if its end is one unit, repeated.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from ...base.json_lines import json_lines
from ...recipes import DATA

TOOL_CALLS, ANSWERS, SAMPLED = CHAT_TASKS = ("tool_calls", "answers", "answers_sampled")
VERSION = 1.0
MAX_ANSWER_TOKENS = 512
# A loop: a unit at least four times at the end, over enough characters that a table's rule or dots are none.
LOOP_REPEATS, LOOP_CHARACTERS = 4, 100


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation to continue.

    Attributes:
        messages: turns in OpenAI's form.
        tools: functions that may be called, in OpenAI's form.
        seed: seed of the sampling at the model's recommended temperature; None: greedy.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    max_tokens: int = MAX_ANSWER_TOKENS
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """The continuation of a chat, parsed.

    Attributes:
        calls: name and arguments, a JSON text, of each tool call.
        finish: "stop" after an end token or with calls, "length" at the limit.
        takes_tools: False if the template or the server leaves the tools out of the prompt.
        logprobs: log-probabilities of the tokens, where they were asked for; None is no number.
    """

    text: str
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    finish: str | None = "stop"
    num_tokens: int = 0
    num_reasoning: int = 0
    takes_tools: bool = True
    logprobs: tuple[float | None, ...] = ()

    @classmethod
    def of(cls, completion: Mapping[str, Any], takes_tools: bool = True) -> Self:
        """Parse a completion or a chat completion of OpenAI, vLLM or llama.cpp. Raises LookupError, TypeError
        or AttributeError: it is none."""
        choice, usage = completion["choices"][0], completion.get("usage") or {}
        message = choice["message"] if "message" in choice else {"content": choice["text"]}
        scores = choice.get("logprobs") or {}
        by_token = [token.get("logprob") for token in scores.get("content") or ()]
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        details = usage.get("completion_tokens_details") or {}
        finish = choice.get("finish_reason")
        return cls(
            message.get("content") or "",
            message.get("reasoning_content") or message.get("reasoning") or "",
            tuple((call["name"], call.get("arguments") or "") for call in functions),
            "stop" if finish in ("tool_calls", "function_call") else finish,
            usage.get("completion_tokens") or 0,
            details.get("reasoning_tokens") or 0,
            takes_tools,
            tuple(scores.get("token_logprobs") or by_token),
        )


@dataclass(slots=True)
class TaskScoring:
    """Rows and samples of a task, in the form in which lm-eval logs them."""

    task: str
    version: float
    rows: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)

    def add_item(
        self,
        number: int,
        item: Any,
        response: Any,
        target: str,
        filter_name: str = "none",
        **scores: float,
    ) -> None:
        """Add the scores of an item; a metric may be of some items alone."""
        known = hashlib.sha256(json.dumps(item).encode()).hexdigest()
        ids = {"filter": filter_name, "doc_id": number, "doc_hash": known}
        self.samples.append({**ids, "filtered_resps": response, "target": target, **scores})

    def add_metric(
        self, metric: str, higher_is_better: bool | None = True, filter_name: str = "none"
    ) -> None:
        """Add the row of a metric, the mean over its items of a filter; none if no item has it."""
        samples = [sample for sample in self.samples if sample["filter"] == filter_name]
        values = [sample[metric] for sample in samples if metric in sample]
        if not values:
            return
        deviation = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
        row = metric, filter_name, math.fsum(values) / len(values), len(values)
        self.add_row(*row, deviation / math.sqrt(len(values)), higher_is_better)

    def add_row(
        self,
        metric: str,
        filter_name: str,
        value: float,
        count: int,
        stderr: float,
        higher_is_better: bool | None = True,
    ) -> None:
        """Add the row of a metric over `count` items."""
        self.rows.append(
            {
                "task": self.task,
                "is_group": False,
                "version": self.version,
                "num_fewshot": 0,
                "num_samples": count,
                "metric": metric,
                "filter": filter_name,
                "value": value,
                "stderr": stderr,
                "higher_is_better": higher_is_better,
            }
        )


def answer_chats(name: str, limit: int | None = None) -> list[Chat]:
    """The bundled prompts of a task, greedy, or each with its number as the seed."""
    rows = [row for _, row in json_lines(DATA / "answers.jsonl.xz")][:limit]
    seeds = [number if name == SAMPLED else None for number in range(len(rows))]
    return [
        Chat(({"role": "user", "content": row["prompt"]},), seed=seed)
        for row, seed in zip(rows, seeds, strict=True)
    ]


def scored_answers(name: str, chats: Sequence[Chat], answers: Sequence[ChatAnswer]) -> TaskScoring:
    scoring = TaskScoring(name, VERSION)
    for number, (chat, answer) in enumerate(zip(chats, answers, strict=True)):
        scoring.add_item(
            number,
            [*map(dict, chat.messages)],
            answer.reasoning + answer.text,
            "",
            tokens=float(answer.num_tokens - answer.num_reasoning),
            reasoning_tokens=float(answer.num_reasoning),
            at_limit=float(answer.finish == "length"),
            no_end=float(answer.finish != "stop"),
            loop=float(loops(answer.reasoning + answer.text)),
        )
    for metric in ("tokens", "reasoning_tokens"):
        scoring.add_metric(metric, None)
    for metric in ("at_limit", "no_end", "loop"):
        scoring.add_metric(metric, False)
    return scoring


def loops(text: str) -> bool:
    """True if the text ends with a unit that is repeated, by the Z function of the reversed text: the length
    of the common prefix with itself, shifted by the unit."""
    reverse = text.rstrip()[::-1]
    common = [0] * len(reverse)
    left = right = 0
    for shift in range(1, len(reverse)):
        length = min(right - shift, common[shift - left]) if shift < right else 0
        while shift + length < len(reverse) and reverse[length] == reverse[shift + length]:
            length += 1
        common[shift] = length
        if shift + length > right:
            left, right = shift, shift + length
        if shift + length >= max(LOOP_REPEATS * shift, LOOP_CHARACTERS):
            return True
    return False
