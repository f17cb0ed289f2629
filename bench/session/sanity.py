"""Sanity of a server: a few requests that every sound server answers soundly, without a reference.

A check is broken where the answer is one that no sound kernel or server gives: log-probabilities that are no
numbers, text that is no likelier than its words in random order, the same token from the first on, tokens
without a limit. An answer that a small sound model may give is weak, a note. What a server does not offer is
not asked.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from ...base.errors import BadInput
from ..load.address import PATHS, Address
from ..load.json_http import JsonClient, RequestFailed
from ..options.values import CHAT, COMPLETIONS
from ..quality.chat_items import ChatAnswer
from ..quality.passage import EVALUATION_TEXT
from ..quality.tool_calls import BUNDLED, item_scores, read_tool_items

REQUEST_SECONDS = 60.0
CONCURRENCY = 4
MAX_TOKENS = 32
PROMPTS = "log-probabilities"
PASSAGES, PASSAGE_CHARACTERS = 4, 300
# A model that knows the frequencies of words alone needs about 2 bits a byte of this text. The bundled models
# need 0.6, and 3 if its words are shuffled (this module, in float32).
BROKEN_BITS, WEAK_BITS = 3.0, 1.6
BROKEN_RATIO, WEAK_RATIO = 0.9, 0.7
# Random order cannot be predicted: log-probabilities that are all near 0 are not computed from the logits.
LEAST_SHUFFLED_BITS = 0.3
OPENINGS = (
    "Once upon a time, there was a little girl named Lily. She loved to",
    "Tom and his dog went to the park. There they saw a big",
    "It was a hot day, so Mia and her mom wanted to",
    "A small bird fell from the tree. It could not fly, and",
)
# The share of these words is about 0.4 in English prose, and near 0.02 in random tokens.
FREQUENT = re.compile(
    r"the|an?|and|to|of|in|was|were|it|is|s?he|they|his|h?er|him|them|with|that|this|for|on|you|i|not|but|"
    r"ha[ds]|have|be|at|by|as|so|we|my|their|there"
)
BROKEN_FREQUENT, WEAK_FREQUENT, LEAST_CHARACTERS = 0.06, 0.2, 120
LONGEST_UNIT = 8
SUMS = {"3 + 4": "7", "12 + 5": "17", "9 - 6": "3", "6 * 7": "42"}
COPIES = ("river stone lamp", "blue seven chair", "apple moon door", "green paper boat")


class Outcome(StrEnum):
    """Results of a check."""

    SANE = "sane"
    WEAK = "weak"
    BROKEN = "broken"
    NOT_ASKED = "not asked"


@dataclass(frozen=True, slots=True)
class SanityCheck:
    """One check with what was seen."""

    name: str
    outcome: Outcome
    evidence: str


@dataclass(frozen=True, slots=True)
class SanityReport:
    """All checks of a server."""

    url: str
    model: str
    checks: tuple[SanityCheck, ...]

    @property
    def is_sane(self) -> bool:
        return all(check.outcome is not Outcome.BROKEN for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "sane": self.is_sane}


@dataclass(frozen=True, slots=True)
class SanityServer:
    """Requests to one model of a server."""

    client: JsonClient
    url: str
    model: str

    def ask(self, backend: str, bodies: Iterable[Mapping[str, Any]]) -> list[ChatAnswer]:
        """Replies at temperature 0, in order. Raises RequestFailed: one failed."""
        usual = {"model": self.model, "temperature": 0, "max_tokens": MAX_TOKENS}
        sent = [{**usual, **body} for body in bodies]
        answers = self.client.post_each(self.url + PATHS[backend], sent, CONCURRENCY)
        try:
            return [ChatAnswer.of(answer) for answer in answers]
        except (LookupError, TypeError, AttributeError) as error:
            raise RequestFailed("the answer is no completion") from error

    def chat(self, questions: Iterable[str], **fields: Any) -> list[ChatAnswer]:
        messages = ([{"role": "user", "content": question}] for question in questions)
        return self.ask(CHAT, ({"messages": turns, **fields} for turns in messages))

    def continued(self) -> list[ChatAnswer]:
        """Continuations of the openings: completions, or chats where a server has no completions."""
        try:
            return self.ask(
                COMPLETIONS, [{"prompt": opening, "logprobs": 1} for opening in OPENINGS]
            )
        except RequestFailed as error:
            if error.status not in (400, 404, 405, 422, 501):
                raise
            return self.chat(f"Continue this story: {opening}" for opening in OPENINGS)


def check_sanity(
    address: Address, model: str | None = None, timeout: float = REQUEST_SECONDS
) -> SanityReport:
    """Ask a server and judge its answers. Raises BadInput: it is unreachable, or answers nothing at all."""
    try:
        name = address.model_card(model).get("id", model)
    except BadInput as error:
        if model is None or getattr(error.__cause__, "is_unreachable", False):
            raise
        name = model
    client = address.json_client(min(timeout, REQUEST_SECONDS))
    server = SanityServer(client, address.url, model or name)
    kinds: list[tuple[str, Callable[[SanityServer], list[SanityCheck]]]] = [
        (PROMPTS, _check_prompts),
        ("text", _check_text),
        ("questions", _check_questions),
        ("JSON mode", _check_json),
        ("tool call", _check_call),
    ]
    checks: list[SanityCheck] = []
    for label, check in kinds:
        try:
            checks += check(server)
        except RequestFailed as error:
            checks.append(_failed(label, error))
    if all(check.outcome is Outcome.NOT_ASKED for check in checks):
        raise BadInput(f"{address.url} offers nothing to check: {checks[1].evidence}")
    return SanityReport(address.url, server.model, tuple(checks))


def _failed(label: str, error: RequestFailed) -> SanityCheck:
    """The check of a request without an answer: a refusal is not asked, silence and a crash are broken."""
    if error.is_unreachable:
        return SanityCheck(label, Outcome.BROKEN, f"no answer: {error}")
    is_crash = (error.status or 0) >= 500 and label in (PROMPTS, "text")
    return SanityCheck(label, Outcome.BROKEN if is_crash else Outcome.NOT_ASKED, str(error))


def _judged(name: str, is_broken: bool, is_weak: bool, evidence: str) -> SanityCheck:
    weak = Outcome.WEAK if is_weak else Outcome.SANE
    return SanityCheck(name, Outcome.BROKEN if is_broken else weak, evidence)


def passages() -> list[tuple[str, str]]:
    """Bundled texts, each with its words in random order."""
    stories = EVALUATION_TEXT.read_text(encoding="utf-8").split("\n\n")
    texts = [story[:PASSAGE_CHARACTERS].rpartition(" ")[0] for story in stories[:PASSAGES]]
    shuffler = random.Random(0)
    return [(text, " ".join(shuffler.sample(text.split(), len(text.split())))) for text in texts]


def _finite(name: str, values: Sequence[float | None]) -> SanityCheck:
    bad = [value for value in values if value is None or not -1e4 < value < 1e-3]
    evidence = f"{len(bad)} of {len(values)} are no finite log-probabilities"
    return _judged(name, bool(bad), False, evidence + (f": {bad[0]}" if bad else ""))


def _check_prompts(server: SanityServer) -> list[SanityCheck]:
    """Log-probabilities of prompts: finite, and likelier in the order of the text."""
    prompts = [text for pair in passages() for text in pair]
    how = {"echo": True, "logprobs": 1, "max_tokens": 1}
    replies = server.ask(COMPLETIONS, [{"prompt": prompt, **how} for prompt in prompts])
    # Nothing predicts the first token, and the last is a new one.
    scores = [reply.logprobs[1:-1] for reply in replies]
    if any(len(values) < 5 for values in scores):
        reason = "the server gives no log-probabilities of prompts"
        return [SanityCheck(PROMPTS, Outcome.NOT_ASKED, reason)]
    finite = _finite(PROMPTS, [value for values in scores for value in values])
    if finite.outcome is Outcome.BROKEN:
        return [finite]
    nats = [-math.fsum(value or 0.0 for value in values) for values in scores]
    sizes = [len(prompt.encode()) * math.log(2) for prompt in prompts]
    bits, shuffled = (sum(nats[side::2]) / sum(sizes[side::2]) for side in (0, 1))
    perplexity = math.exp(sum(nats[::2]) / sum(map(len, scores[::2])))
    evidence = f"{bits:.2f} bits per byte of text (perplexity {perplexity:.1f}), "
    evidence += f"{shuffled:.2f} of its words in random order"
    is_broken = bits > min(BROKEN_BITS, BROKEN_RATIO * shuffled) or shuffled < LEAST_SHUFFLED_BITS
    is_weak = bits > min(WEAK_BITS, WEAK_RATIO * shuffled)
    return [finite, _judged("perplexity", is_broken, is_weak, evidence)]


def _check_text(server: SanityServer) -> list[SanityCheck]:
    """Greedy continuations: English, no loop, at most the tokens asked for, the same when asked again."""
    replies = server.continued()
    texts = [reply.reasoning + reply.text for reply in replies]
    checks = [_check_words(texts), _check_lengths(replies), _check_again(server, texts)]
    if scores := [value for reply in replies for value in reply.logprobs]:
        checks.append(_finite("log-probabilities of new tokens", scores))
    return checks


def _check_words(texts: Sequence[str]) -> SanityCheck:
    english = re.findall(r"[a-z']+", " ".join(texts).lower())
    share = sum(FREQUENT.fullmatch(word) is not None for word in english) / max(1, len(english))
    repeated = [text for text in texts if repeats_from_start(text)]
    is_short = sum(map(len, texts)) < LEAST_CHARACTERS
    fault = ""
    if not any(text.strip() for text in texts):
        fault = "no continuation has any text"
    elif 2 * len(repeated) >= len(texts):
        fault = f"{len(repeated)} of {len(texts)} continuations repeat one unit"
        fault += f": {repeated[0][:24]!r}"
    elif len(set(texts)) == 1:
        fault = f"all {len(texts)} openings have the same continuation: {texts[0][:40]!r}"
    evidence = f"{share:.0%} of {len(english)} words are frequent ones: {texts[0][:50]!r}"
    is_broken = bool(fault) or (share < BROKEN_FREQUENT and not is_short)
    return _judged("text", is_broken, is_short or share < WEAK_FREQUENT, fault or evidence)


def repeats_from_start(text: str) -> bool:
    """True if the text is a unit of a few characters over and over, such as `!!!!`."""
    text = text.strip()
    units = range(1, min(LONGEST_UNIT, len(text) // 4) + 1)
    return any(text == (text[:size] * len(text))[: len(text)] for size in units)


def _check_lengths(replies: Sequence[ChatAnswer]) -> SanityCheck:
    counts = [reply.num_tokens for reply in replies if reply.num_tokens]
    longest = max((len(reply.text) for reply in replies), default=0)
    is_broken = max(counts, default=0) > MAX_TOKENS or longest > 40 * MAX_TOKENS
    shown = f"{max(counts)} tokens" if counts else f"{longest} characters"
    return _judged("length", is_broken, False, f"at most {shown} of {MAX_TOKENS} tokens asked for")


def _check_again(server: SanityServer, texts: Sequence[str]) -> SanityCheck:
    """The same continuations at temperature 0. Kernels may depend on the batch, which moves a near tie now
    and then: a difference in most continuations is not that."""
    again = [reply.reasoning + reply.text for reply in server.continued()]
    differ = [pair for pair in zip(texts, again, strict=True) if pair[0] != pair[1]]
    evidence = f"{len(differ)} of {len(texts)} continuations differ when asked again"
    if differ:
        evidence += f": {differ[0][0][:30]!r} and {differ[0][1][:30]!r}"
    return _judged("same at temperature 0", 2 * len(differ) > len(texts), bool(differ), evidence)


def _check_questions(server: SanityServer) -> list[SanityCheck]:
    """Sums and copies, in chats. A small model fails many, so that no count of them is broken."""
    questions = [f"What is {sum_}? Answer with the number alone." for sum_ in SUMS]
    questions += [f"Repeat exactly these words: {text}" for text in COPIES]
    replies = server.chat(questions)
    right = [
        re.search(rf"(?<!\d){value}(?!\d)", reply.text) is not None
        for value, reply in zip(SUMS.values(), replies, strict=False)
    ]
    copied = [
        text in " ".join(re.findall(r"\w+", reply.text.lower()))
        for text, reply in zip(COPIES, replies[len(SUMS) :], strict=True)
    ]
    ended = [reply for reply in replies if reply.finish not in ("length", None)]
    shown = f"{len(ended)} of {len(replies)} chats ended before {MAX_TOKENS} tokens"
    return [
        _judged("sums", False, not all(right), f"{sum(right)} of {len(right)} right"),
        _judged("copies", False, not all(copied), f"{sum(copied)} of {len(copied)} right"),
        _judged("end of answers", False, not ended, shown),
    ]


def _answered(server: SanityServer, question: str, **fields: Any) -> tuple[ChatAnswer, str]:
    """An answer, given again with more tokens where it is cut, and a note if it still is."""

    def answered(limit: int) -> tuple[ChatAnswer, str]:
        (reply,) = server.chat([question], **fields, max_tokens=limit)
        is_cut = reply.finish == "length" or reply.num_tokens >= limit
        return reply, f", cut at {limit} tokens" if is_cut else ""

    reply, note = answered(4 * MAX_TOKENS)
    with suppress(RequestFailed):  # a slow server has no time for more tokens
        return answered(16 * MAX_TOKENS) if note else (reply, note)
    return reply, note


def _check_json(server: SanityServer) -> list[SanityCheck]:
    question = 'Answer in JSON: {"city": the capital of France}'
    reply, note = _answered(server, question, response_format={"type": "json_object"})
    try:
        is_object = isinstance(json.loads(reply.text), dict)
    except ValueError:
        is_object = False
    evidence = f"{reply.text[:60]!r}{note}"
    return [_judged("JSON mode", not is_object and not note, not is_object, evidence)]


def _check_call(server: SanityServer) -> list[SanityCheck]:
    item = read_tool_items(BUNDLED)[0]
    how = {"tools": list(item.chat.tools), "tool_choice": "required"}
    reply, note = _answered(server, item.messages[0]["content"], **how)
    if not reply.calls:
        evidence = f"no call although one was required: {reply.text[:60]!r}{note}"
        return [SanityCheck("tool call", Outcome.WEAK, evidence)]
    scores = item_scores(item, reply)
    is_valid = scores["valid_json"] and scores["declared_name"]
    evidence = "{}({})".format(*reply.calls[0]) + note
    return [_judged("tool call", not is_valid and not note, not scores["correct"], evidence)]
