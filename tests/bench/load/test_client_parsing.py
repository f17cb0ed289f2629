"""From bytes to deliveries: HTTP bodies cut anywhere, events cut anywhere, tokens counted by hand."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from llmopt.bench.load.exchange import Answer, NotHttp, Response
from llmopt.bench.load.stream import (
    AT_END,
    PER_CHUNK,
    PER_EVENT,
    chunk_tokens,
    events,
    read_document,
    read_stream,
    refusal,
)
from llmopt.bench.metrics.trace import RequestTrace


def event(
    text: str | None = None, *, usage: dict | None = None, finish: str | None = None
) -> bytes:
    choices = [] if text is None else [{"index": 0, "text": text, "finish_reason": finish}]
    return b"data: " + json.dumps({"choices": choices, "usage": usage}).encode() + b"\n\n"


def delta(finish: str | None = None, **fields: object) -> bytes:
    choice = {"index": 0, "delta": fields, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def at(*reads: bytes) -> list[tuple[float, bytes]]:
    """Reads at 1.0 s, 1.1 s, 1.2 s and so on."""
    return [(round(1 + number / 10, 1), data) for number, data in enumerate(reads)]


DONE = b"data: [DONE]\n\n"


def test_an_event_has_the_time_of_its_last_read() -> None:
    whole = event("ab") + event("cd")
    for cut in range(1, len(whole)):
        found = list(events([(1.0, whole[:cut]), (2.0, whole[cut:])]))
        assert [json.loads(data)["choices"][0]["text"] for _, data, _ in found] == ["ab", "cd"]
        first_ends = len(event("ab"))
        assert [time for time, _, _ in found] == [1.0 if cut >= first_ends else 2.0, 2.0]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_line_ends_comments_fields_and_long_events(end: bytes) -> None:
    stream = end.join(
        [b": ping", b"", b"id: 1", b"event: x", b"data: one", b"data:two", b"", b"data: cut"]
    )
    for cut in range(len(stream)):
        found = list(events([(1.0, stream[:cut]), (2.0, stream[cut:])]))
        assert [data for _, data, _ in found] == [b"one\ntwo", b"cut"]


def trace_of(answer: Answer, sent: float, recount: int | None = None) -> RequestTrace:
    tokens, _ = chunk_tokens(answer, recount)
    return RequestTrace("r", 3, 9, sent, sent, list(answer.times), tokens, not answer.error)


def test_metrics_of_a_hand_made_trace() -> None:
    usage = [{"completion_tokens": n, "prompt_tokens": 7} for n in (1, 4, 5)]
    reads = [
        event("a", usage=usage[0]),
        event("bcd", usage=usage[1]),
        event("e", usage=usage[2], finish="stop"),
    ]
    answer = read_stream(at(*reads, event(usage=usage[2]) + DONE))
    trace = trace_of(answer, sent=0.5)
    assert (answer.error, answer.prompt_tokens, answer.text) == ("", 7, "abcde")
    assert trace.chunk_tokens == [1, 3, 1] and trace.output_len == 5
    assert trace.ttft == pytest.approx(0.5) and trace.e2el == pytest.approx(0.7)
    assert trace.tpot == pytest.approx(0.2 / 4)
    assert trace.itls == pytest.approx([0.1, 0.1])
    assert trace.token_gaps == pytest.approx([0.1 / 3] * 3 + [0.1])


def test_several_events_in_one_read_share_its_time() -> None:
    answer = read_stream(at(event("a") + event("b"), event("c", finish="length"), DONE))
    assert answer.times == [1.0, 1.0, 1.1]


def test_a_role_is_no_token() -> None:
    reads = [delta(role="assistant", content=""), delta(content="hi"), delta("stop"), DONE]
    answer = read_stream(at(*reads))
    assert answer.times == [1.1] and chunk_tokens(answer, 1) == ([1], PER_EVENT)


def test_a_role_with_content_is_a_token() -> None:
    assert read_stream(at(delta(role="assistant", content="hi"), delta("stop"))).times == [1.0]


def test_reasoning_and_tool_calls_are_output() -> None:
    call = [{"function": {"arguments": "{"}}]
    reads = [
        delta(reasoning_content="hm"),
        delta(reasoning="so"),
        delta(tool_calls=call),
        delta("stop"),
    ]
    answer = read_stream(at(*reads))
    assert answer.times == [1.0, 1.1, 1.2] and answer.text.startswith("hmso")


def test_a_token_without_text_counts_when_the_server_says_so() -> None:
    # Half of a character: the server counts two tokens and sends the text with the second.
    total = {"completion_tokens": 2}
    answer = read_stream(
        at(event(""), event("é"), event("", finish="stop"), event(usage=total), DONE)
    )
    assert answer.times == [1.0, 1.1]
    assert chunk_tokens(answer, None) == ([1, 1], AT_END)


def test_a_finish_alone_is_no_delivery() -> None:
    usages = [{"completion_tokens": n} for n in (1, 1)]
    reads = [event("a", usage=usages[0]), event("", usage=usages[1], finish="length")]
    answer = read_stream(at(*reads, DONE))
    assert (answer.times, answer.tokens) == ([1.0], [1])


def test_usage_at_the_end_is_spread_by_length() -> None:
    total = {"completion_tokens": 7}
    answer = read_stream(at(event("a"), event("bbbb", finish="stop"), event(usage=total), DONE))
    assert chunk_tokens(answer, None) == ([2, 5], AT_END)


def test_without_usage_the_text_is_counted_again() -> None:
    answer = read_stream(at(event("a"), event("b", finish="stop")))
    assert answer.total is None
    assert chunk_tokens(answer, 5) == ([3, 2], PER_EVENT)
    assert chunk_tokens(answer, 1) == ([1, 0], PER_EVENT)


def test_one_token() -> None:
    trace = trace_of(
        read_stream(at(event("a", usage={"completion_tokens": 1}, finish="length"), DONE)), 0.9
    )
    assert (
        trace.tpot is None and trace.itls == [] and trace.ttft == trace.e2el == pytest.approx(0.1)
    )


def test_done_may_be_missing_but_not_the_end() -> None:
    assert read_stream(at(event("a", finish="stop"))).error == ""
    assert read_stream(at(event("a"), DONE)).error == ""
    cut = read_stream(at(event("a")))
    assert "without a finish_reason" in cut.error and cut.times == [1.0]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"data: {nonsense\n\n", "not JSON"),
        (b'data: {"error": {"message": "out of memory"}}\n\n', "the server says: out of memory"),
        (b'data: {"error": "gone"}\n\n', "the server says: gone"),
        (b"data: [1]\n\n", "no object"),
        (b'data: {"choices": [3]}\n\n', "no choice that can be read"),
        (b'data: {"choices": {"a": 1}}\n\n', "no choice that can be read"),
    ],
)
def test_a_broken_event_fails_the_request(data: bytes, said: str) -> None:
    answer = read_stream(at(event("a"), data, event("b"), DONE))
    assert said in answer.error and answer.times == [1.0]


def test_a_document_is_one_delivery() -> None:
    body = json.dumps(
        {"choices": [{"text": "abc"}], "usage": {"completion_tokens": 3, "prompt_tokens": 2}}
    ).encode()
    answer = read_document(at(body[:9], body[9:]))
    assert answer.times == [1.1] and chunk_tokens(answer, None) == ([3], PER_CHUNK)
    assert "neither a stream" in read_document(at(b"<html>")).error


def test_refusal_messages() -> None:
    assert refusal(500, at(b'{"error": {"message": "no memory"}}')) == "HTTP 500: no memory"
    assert refusal(404, at(b'{"detail": "Not Found"}')) == "HTTP 404: Not Found"
    assert refusal(502, []) == "HTTP 502"


BODY = b"data: one\n\ndata: two\n\n"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n"
    b"B;ext=1\r\ndata: one\n\n\r\nb\r\ndata: two\n\n\r\n0\r\nTrailer: x\r\n\r\n"
)
COUNTED = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY


@pytest.mark.parametrize("message", [CHUNKED, COUNTED, b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED])
def test_responses_cut_anywhere(message: bytes) -> None:
    for cut in range(1, len(message)):
        response = Response()
        response.feed(1.0, message[:cut])
        assert not response.is_whole
        response.feed(2.0, message[cut:])
        assert response.is_whole and response.keeps_alive and response.status == 200
        assert b"".join(data for _, data in response.chunks) == BODY
    response = Response()
    for number in range(len(message)):
        response.feed(float(number), message[number : number + 1])
    assert response.is_whole and b"".join(data for _, data in response.chunks) == BODY
    assert all(earlier < later for (earlier, _), (later, _) in pairwise(response.chunks))


def test_a_body_until_the_end_of_the_connection() -> None:
    response = Response()
    response.feed(1.0, b"HTTP/1.0 200 OK\r\nConnection: close\r\n\r\n" + BODY)
    assert not response.is_whole and not response.keeps_alive
    response.end_of_stream()
    assert response.is_whole


@pytest.mark.parametrize(
    "message",
    [
        b"\x15\x03\x01\x00\x02\x02\x16",
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 what\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20000,
    ],
)
def test_what_is_no_http(message: bytes) -> None:
    with pytest.raises(NotHttp):
        Response().feed(1.0, message)
