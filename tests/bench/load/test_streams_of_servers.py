"""Streams of other servers and gateways: each shape with its right tokens, times and errors.

Usage in every chunk means four different things, errors come in eight shapes, and reasoning in three fields.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from typing import Any

import pytest
from llmopt.bench.load.driver import prefix_cache_hit_rate
from llmopt.bench.load.exchange import Answer, Exchange, Response
from llmopt.bench.load.stream import AT_END, PER_CHUNK, PER_EVENT, chunk_tokens, read_stream
from llmopt.bench.load.worker import _read
from llmopt.bench.metrics.metrics import count_good
from llmopt.bench.metrics.run_statistics import silent_failures
from llmopt.bench.metrics.trace import LoadPass, RequestTrace

from .test_client_parsing import DONE, at

NUM = 10
ENDPOINT: Any = type("Endpoint", (), {"is_pooled": False})


def usage(tokens: int, **more: Any) -> dict[str, Any]:
    return {"prompt_tokens": 12, "completion_tokens": tokens, "total_tokens": 12 + tokens, **more}


def event(delta: dict | None, finish: str | None = None, **fields: Any) -> bytes:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    return b"data: " + json.dumps({"model": "m", "choices": choices, **fields}).encode() + b"\n\n"


ROLE = event({"role": "assistant", "content": ""})


def stream(counts: Sequence[int | None], final: bytes = b"", finish: bytes = b"") -> Answer:
    """A role, a word with each count, and an end; every event is a read of its own."""
    words = [
        event(
            {"content": f" w{number}"}, None, **({} if count is None else {"usage": usage(count)})
        )
        for number, count in enumerate(counts)
    ]
    return read_stream(
        at(ROLE, *words, finish or event({}, "length"), *filter(None, [final]), DONE)
    )


def total_event(tokens: int, **more: Any) -> bytes:
    return event(None, usage=usage(tokens, **more))


@pytest.mark.parametrize(
    ("answer", "tokens", "source"),
    [
        pytest.param(
            stream(range(1, 11), finish=event({}, "length", usage=usage(10))),
            [1] * NUM, PER_CHUNK, id="running count",
        ),
        pytest.param(
            stream([2, 5, 6, 10], finish=event({}, "stop", usage=usage(10))),
            [2, 3, 1, 4], PER_CHUNK, id="running count of several tokens",
        ),
        pytest.param(
            stream([0] * NUM, finish=event({}, "length", usage=usage(NUM))),
            [1] * NUM, AT_END, id="zero until the last chunk (DeepSeek)",
        ),
        pytest.param(
            stream([1] * NUM, finish=event({}, "length", usage=usage(NUM))),
            [1] * NUM, PER_CHUNK, id="one until the last chunk",
        ),
        pytest.param(
            stream([NUM] * NUM, finish=event({}, "length", usage=usage(NUM))),
            [1] * NUM, AT_END, id="the total in each chunk",
        ),
        pytest.param(
            stream([2, 1, 4, 3], total_event(10)), [2, 1, 4, 3], PER_CHUNK, id="tokens of each chunk"
        ),
        pytest.param(
            stream([1] * NUM, finish=event({}, "length", usage=usage(0))),
            [1] * NUM, PER_CHUNK, id="tokens of each chunk without a total",
        ),
        pytest.param(
            stream([None] * NUM, total_event(0)), [1] * NUM, PER_EVENT, id="a total of zero"
        ),
        pytest.param(
            stream([*range(1, 10), 9], total_event(10)),
            [1] * NUM, AT_END, id="a running count that ends before the total",
        ),
    ],
)  # fmt: skip
def test_usage_in_chunks(answer: Answer, tokens: list[int], source: str) -> None:
    assert answer.error == ""
    assert chunk_tokens(answer, NUM) == (tokens, source)
    assert answer.times == [round(1.1 + n / 10, 1) for n in range(len(tokens))]


ERRORS = {
    "error object": b'data: {"error": {"message": "boom", "code": 500}}\n\n',
    "object error": b'data: {"object": "error", "message": "boom", "code": 500}\n\n',
    "type error": b'data: {"type": "error", "choices": [], "error": {"message": "boom"}}\n\n',
    "event: error": b'event: error\ndata: {"message": "boom"}\n\n',
    "event: error without JSON": b"event: error\ndata: boom\n\n",
    "error: field (llama.cpp)": b'error: {"code": 500, "message": "boom"}\n\n',
    "detail": b'data: {"detail": "boom"}\n\n',
    "in the choice": b'data: {"choices": [{"delta": {}, "error": {"message": "boom"}}]}\n\n',
}


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
def test_errors_within_a_stream(error: bytes) -> None:
    answer = read_stream(at(ROLE, event({"content": "a"}), error, DONE))
    assert "boom" in answer.error and answer.text == "a"


@pytest.mark.parametrize("reason", ["abort", "error", "cancelled", "preempted"])
def test_other_finish_reasons_are_failures(reason: str) -> None:
    assert repr(reason) in read_stream(at(event({"content": "a"}), event({}, reason), DONE)).error


@pytest.mark.parametrize(
    "reason", ["stop", "length", "tool_calls", "function_call", "content_filter"]
)
def test_finish_reasons_of_the_api_are_ends(reason: str) -> None:
    first = event({"content": "a"}, "")  # some gateways write "" for null
    assert read_stream(at(first, event({}, reason), DONE)).error == ""


def test_an_event_without_choices_is_no_error_where_it_holds_a_usage_or_a_filter() -> None:
    azure = b'data: {"choices": [], "prompt_filter_results": [{"prompt_index": 0}]}\n\n'
    answer = read_stream(
        at(azure, event({"content": "a"}), event({}, "stop"), total_event(1), DONE)
    )
    assert (answer.error, answer.times, answer.unread) == ("", [1.1], {})


@pytest.mark.parametrize("lead", [{"content": ""}, {}, {"content": None}, {"role": "assistant"}])
def test_an_empty_first_delta_is_no_first_token(lead: dict) -> None:
    several = [event({"content": " two words"}) for _ in range(3)]
    answer = read_stream(at(event(lead), *several, event({}, "stop"), total_event(7), DONE))
    assert answer.times == [1.1, 1.2, 1.3] and sum(chunk_tokens(answer, None)[0]) == 7
    counted = [event({"content": " a"}, usage=usage(n)) for n in (1, 2)]
    end = event({}, "stop", usage=usage(2))
    answer = read_stream(at(event(lead, usage=usage(1)), *counted, end, DONE))
    assert (answer.times, answer.tokens) == ([1.1, 1.2], [1, 1])


@pytest.mark.parametrize(
    "thinking",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"reasoning": "hm", "reasoning_content": "hm"},
        {"reasoning": "hm", "reasoning_details": [{"type": "reasoning.text", "text": "hm"}]},
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}]},
    ],
)
def test_reasoning_counts_once_and_is_not_sent_back(thinking: dict) -> None:
    parts = event({"content": [{"type": "text", "text": "yes"}]})
    ends = [event({}, "stop"), total_event(3, completion_tokens_details={"reasoning_tokens": 1})]
    answer = read_stream(at(event(thinking), event({"content": "no, "}), parts, *ends, DONE))
    assert (answer.text, answer.content) == ("hmno, yes", "no, yes")
    assert (answer.total, answer.hidden_tokens, len(answer.times)) == (3, 0, 3)


@pytest.mark.parametrize("running", [False, True])
def test_hidden_reasoning_takes_no_part_in_rates(running: bool) -> None:
    details = {"completion_tokens_details": {"reasoning_tokens": 100}}
    counts = range(101, 106) if running else [None] * 5
    end = event({}, "stop", usage=usage(105, **details)) if running else b""
    answer = stream(counts, b"" if running else total_event(105, **details), end)
    assert (answer.total, answer.hidden_tokens) == (5, 100)
    assert chunk_tokens(answer, None)[0] == [1] * 5
    trace = trace_of(answer, wanted=105)
    assert trace.tpot == pytest.approx(0.1)
    (line,) = failures(trace)
    assert "100 reasoning tokens that it did not stream" in line


def test_a_summary_of_the_reasoning_is_not_the_reasoning() -> None:
    """OpenRouter's models with hidden reasoning stream a summary of it, of other tokens than are counted."""
    summary = {"reasoning": "**Plan**", "reasoning_details": [{"type": "reasoning.summary"}]}
    end = total_event(105, completion_tokens_details={"reasoning_tokens": 100})
    answer = read_stream(
        at(event(summary), *[event({"content": "a"})] * 5, event({}, "stop"), end, DONE)
    )
    assert (answer.text, answer.total, answer.hidden_tokens) == ("aaaaa", 5, 100)
    assert chunk_tokens(answer, None)[0] == [1] * 5


def test_reasoning_that_the_server_counts_apart_is_not_taken_off() -> None:
    apart = {"total_tokens": 12 + 5 + 100, "completion_tokens_details": {"reasoning_tokens": 100}}
    answer = stream([None] * 5, total_event(5, **apart))
    assert (answer.total, answer.hidden_tokens) == (5, 0)


def test_unknown_filled_fields_are_counted() -> None:
    strange = {"content": "a", "thoughts": "so", "empty": None}
    events = [event(strange, vendor={"a": 1}) for _ in range(2)]
    answer = read_stream(at(*events, event({}, "stop"), DONE))
    assert answer.unread == {"choices[].delta.thoughts": 2, "vendor": 2} and answer.error == ""


def trace_of(answer: Answer, wanted: int = NUM, sent: float = 0.5) -> RequestTrace:
    trace = RequestTrace("bench-0", 12, wanted, sent, sent, answer.times, success=not answer.error)
    trace.chunk_tokens = chunk_tokens(answer, None)[0]
    trace.hidden_tokens = answer.hidden_tokens
    return trace


def failures(*traces: RequestTrace) -> list[str]:
    return silent_failures(
        [LoadPass(list(traces), 10.0)],
        concurrency=None, fixed_lengths=True, gauges={}, hit_rate=None, shared=None,
    )  # fmt: skip


def in_one_piece(document: bool) -> Answer:
    """An answer through a proxy that buffers, or from a server that ignores `stream`."""
    if document:
        choice = {"message": {"content": " w" * NUM}, "finish_reason": "length"}
        body = json.dumps({"choices": [choice], "usage": usage(NUM)}).encode()
    else:
        words = [event({"content": " w"}) for _ in range(NUM)]
        body = b"".join([ROLE, *words, event({}, "length"), total_event(NUM), DONE])
    response = Response()
    kind = b"application/json" if document else b"text/event-stream"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n" % (kind, len(body))
    response.feed(1.0, head + body[:100])
    response.feed(1.0001, body[100:])  # a second read of what lay in the buffer
    return _read(response, ENDPOINT)


@pytest.mark.parametrize("document", [False, True])
def test_an_answer_in_one_piece_has_no_tpot(document: bool) -> None:
    trace = trace_of(in_one_piece(document))
    assert (trace.output_len, trace.tpot, trace.itls, trace.token_gaps) == (NUM, None, [], [])
    assert trace.ttft == pytest.approx(0.5, abs=1e-3)
    assert count_good([trace], {"tpot": 1e9}) == 0 and count_good([trace], {"ttft": 600}) == 1
    (line,) = failures(trace)
    assert line.startswith("1 of 1 answers came at once")


def test_longer_answers_are_reported_as_shorter_ones_are() -> None:
    answer = stream(range(1, 11), finish=event({}, "length", usage=usage(10)))
    assert "6 tokens longer than asked" in failures(trace_of(answer, wanted=4))[0]
    assert "2 tokens shorter than asked" in failures(trace_of(answer, wanted=12))[0]
    assert failures(trace_of(answer)) == []


# Streams and documents of public reports against other clients and gateways.
HELLO = [event({"content": text}) for text in ("Hel", "lo")]


def responded(body: bytes, *headers: str, status: int = 200, size: int = 1 << 20) -> Answer:
    """The reading of a response whose body comes in reads of `size` bytes."""
    response = Response()
    head = [f"HTTP/1.1 {status} -", f"Content-Length: {len(body)}", *headers, "", ""]
    response.feed(1.0, "\r\n".join(head).encode())
    for begin in range(0, len(body), size):
        response.feed(1.1 + begin, body[begin : begin + size])
    assert response.is_whole
    return _read(response, ENDPOINT)


@pytest.mark.parametrize(
    "kept",
    [
        b": ping - 2026-07-26 19:11:49\n\n",  # llama.cpp b9478 (ollama/ollama#16443)
        b"data:\n\n",  # modelcontextprotocol/python-sdk#1670
        b"data: \r\n\r\n",  # stacklok/mecatl#309
        b"retry: 1000\n\n",  # openai/openai-python#3833
        b"id: 7\nevent: message\n\n",
        b"event: ping\n\n",  # langgenius/dify-docs#937
        b'event: ping\ndata: {"type": "ping"}\n\n',  # Wei-Shaw/sub2api#7097
        b'data: {"type": "ping"}\n\n',  # openai-php/client#556
        b"data: null\n\n",  # Kilo-Org/kilocode#3083
        b'data: {"choices": []}\n\n',  # BerriAI/litellm#27969
    ],
)
def test_what_keeps_a_connection_open_is_no_token_and_no_error(kept: bytes) -> None:
    reads = [kept, ROLE, kept, HELLO[0], kept, HELLO[1], event({}, "stop"), total_event(2), DONE]
    answer = read_stream(at(*reads))
    assert (answer.error, answer.text, answer.unread) == ("", "Hello", {})
    assert (answer.times, chunk_tokens(answer, None)) == ([1.3, 1.5], ([1, 1], AT_END))


def test_a_ping_with_an_error_is_an_error() -> None:
    failing = b'data: {"type": "ping", "error": {"message": "boom"}}\n\n'
    assert "boom" in read_stream(at(*HELLO, failing, DONE)).error


@pytest.mark.parametrize("reason", ["eos", "eos_token", "stop_sequence"])
def test_other_names_of_a_stop_are_ends(reason: str) -> None:
    # huggingface/text-generation-inference#2344, vespa-engine/vespa#33327
    assert read_stream(at(*HELLO, event({}, reason))).error == ""


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
@pytest.mark.parametrize("lead", [b" ", b"\n\n\n", b" " * 300])
def test_white_space_before_a_document(lead: bytes, size: int) -> None:
    # jundot/omlx#2066, inferencerlabs/inferencer-feedback#158
    choice = {"message": {"content": "Hello"}, "finish_reason": "stop"}
    body = lead + json.dumps({"choices": [choice], "usage": usage(2)}).encode()
    answer = responded(body, size=size)
    assert (answer.error, answer.text, answer.total) == ("", "Hello", 2)


@pytest.mark.parametrize("size", [1, 1 << 20])
@pytest.mark.parametrize(
    "body",
    [
        b"<html><head><title>502 Bad Gateway</title></head></html>",
        b"upstream connect error or disconnect/reset before headers",
        b'{"error": {"message": "502 upstream connect error"}}',
    ],
)
def test_an_error_page_with_status_200_is_an_error_that_shows_it(body: bytes, size: int) -> None:
    # kubernetes-sigs/inference-perf#713
    error = responded(body, "Content-Type: text/event-stream", size=size).error
    assert "502" in error or "upstream connect error" in error


@pytest.mark.parametrize("status", [200, 500])
def test_a_compressed_body_is_refused_by_name(status: int) -> None:
    # Anionex/agent-vision-toolkit#36: gateways that compress whatever the request accepts
    body = gzip.compress(b"".join([ROLE, *HELLO, event({}, "stop"), DONE]))
    error = responded(body, "Content-Encoding: gzip", status=status).error
    assert f"HTTP {status}: the body is compressed (gzip)" in error


def test_a_limit_of_requests_has_its_status_and_message() -> None:
    body = b'{"error": {"message": "rate limit exceeded"}}'
    answer = responded(body, "Retry-After: 30", status=429)
    assert answer.error == "HTTP 429: rate limit exceeded"


@pytest.mark.parametrize("size", range(1, 9))
def test_characters_cut_between_reads(size: int) -> None:
    # vllm-project/vllm#38717, and U+2028 within a line: vllm-project/vllm#54628
    text = "中文🙂\u2028é"
    data = json.dumps({"choices": [{"text": text, "finish_reason": "stop"}]}, ensure_ascii=False)
    answer = responded(b"data: " + data.encode() + b"\r\n\r\n" + DONE, size=size)
    assert (answer.error, answer.text) == ("", text)


def test_a_choice_after_the_end_is_no_token() -> None:
    # BerriAI/litellm#28735: the usage comes in a choice of its own. The first chunk has two tokens.
    def text(data: dict[str, Any], **more: Any) -> bytes:
        return (
            b"data: " + json.dumps({"choices": [{"index": 0, **data}], **more}).encode() + b"\n\n"
        )

    ends = [text({"finish_reason": "length"}), text({}, usage=usage(4))]
    answer = read_stream(at(text({"text": "a b"}), text({"text": " c"}), *ends, DONE))
    assert (answer.error, answer.total, answer.times) == ("", 4, [1.0, 1.1])


@pytest.mark.parametrize(
    ("totals", "tokens"), [((3, 3), 6), ((6,), 6)], ids=["of each choice", "of all"]
)
def test_two_choices(totals: tuple[int, ...], tokens: int) -> None:
    # llama.cpp sends a usage for each choice, vLLM one for all.
    def of(index: int, text: str, reason: str | None = None) -> bytes:
        choice = {"index": index, "delta": {"content": text}, "finish_reason": reason}
        return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"

    words = [of(number % 2, "a") for number in range(6)]
    whole = [*words, of(0, "", "length"), of(1, "", "length"), *map(total_event, totals), DONE]
    answer = read_stream(at(*whole))
    assert (answer.error, answer.total) == ("", tokens)
    assert chunk_tokens(answer, None) == ([1] * 6, AT_END)
    assert "without a finish_reason" in read_stream(at(*words, of(0, "", "length"))).error
    assert read_stream(at(*words, of(1, "", "length"), of(0, "", "length"))).error == ""


def test_a_usage_that_is_sent_twice_counts_once() -> None:
    answer = read_stream(at(*HELLO, event({}, "stop"), total_event(2), total_event(2), DONE))
    assert (answer.error, answer.total) == ("", 2)


@pytest.mark.parametrize("field", ["content", "reasoning_content"])
def test_a_cumulative_stream_is_refused_by_name(field: str) -> None:
    # QwenLM/qwen-code#3896: DashScope's deltas that hold the whole text so far
    text = "The quick brown fox jumps"
    whole = [event({field: text[:end]}) for end in (3, 9, 15, 19, 25)]
    answer = read_stream(at(ROLE, *whole, event({}, "stop"), DONE))
    assert answer.error == "each chunk repeats the text of the chunks before it"
    same = [event({field: "a"}) for _ in range(9)]
    answer = read_stream(at(ROLE, *same, event({}, "stop"), DONE))
    assert (answer.error, chunk_tokens(answer, 9)) == ("", ([1] * 9, PER_EVENT))


def test_an_answer_without_cached_tokens_had_none() -> None:
    """vLLM leaves the details out of the usage of a prompt that missed its prefix cache."""
    hit = stream(range(1, 11), total_event(10, prompt_tokens_details={"cached_tokens": 9}))
    missed = stream(range(1, 11), total_event(10, prompt_tokens_details=None))
    sent = [Exchange(str(number), 0.0, 1.0, a) for number, a in enumerate([hit, *[missed] * 3])]
    assert prefix_cache_hit_rate(sent) == 9 / 48
    assert prefix_cache_hit_rate(sent[1:]) is None
