"""`/v1/completions` through the official client and raw HTTP, against the offline engine."""

from __future__ import annotations

import threading
from typing import Any

import openai
import pytest
from llmopt.engine import LLM, SamplingParams
from llmopt.engine.scheduling.outputs import RequestOutput

from ...support.live_server import RunningServer, events
from ...support.simulated_clock import SimulatedClock

PROMPT = "Once upon a time"
GREEDY = SamplingParams(temperature=0, max_tokens=40)


def test_whole_streamed_and_offline_text_are_equal(server: RunningServer, llm: LLM) -> None:
    expected = llm.generate(PROMPT, GREEDY)[0]
    client = server.openai()
    whole = client.completions.create(model="tiny", prompt=PROMPT, temperature=0, max_tokens=40)
    assert whole.choices[0].text == expected.text
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert whole.usage.completion_tokens == 40

    streamed = list(
        client.completions.create(
            model="tiny",
            prompt=PROMPT,
            temperature=0,
            max_tokens=40,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(c.choices[0].text for c in streamed[:-1]) == expected.text
    assert [c.choices[0].finish_reason for c in streamed[:-1]] == [None] * 39 + ["length"]
    assert streamed[-1].choices == []
    assert streamed[-1].usage is not None
    assert streamed[-1].usage.total_tokens == whole.usage.total_tokens


def test_prompts_of_every_kind(server: RunningServer, llm: LLM) -> None:
    texts = [PROMPT, "The dog", "Lily and Tom"]
    expected = [r.text for r in llm.generate(texts, GREEDY)]
    token_ids = [llm.engine.encode(text) for text in texts]
    client = server.openai()

    def choices(prompt: Any) -> list[str]:
        answer = client.completions.create(
            model="tiny", prompt=prompt, temperature=0, max_tokens=40
        )
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 40 * len(answer.choices)
        return [choice.text for choice in answer.choices]

    assert choices(texts) == expected
    assert choices(token_ids[0]) == expected[:1]
    assert choices(token_ids) == expected


def test_best_of_returns_the_likeliest(server: RunningServer, llm: LLM) -> None:
    params = SamplingParams(n=2, best_of=5, seed=8, max_tokens=12)
    expected = [completion.text for completion in llm.generate(PROMPT, params)[0].completions]
    answer = server.openai().completions.create(
        model="tiny", prompt=PROMPT, n=2, best_of=5, seed=8, max_tokens=12
    )
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1]
    with pytest.raises(openai.BadRequestError, match="best_of is known at the end only"):
        server.openai().completions.create(
            model="tiny", prompt=PROMPT, n=2, best_of=5, max_tokens=12, stream=True
        )


def test_many_clients_at_once_get_their_own_responses(server: RunningServer, llm: LLM) -> None:
    prompts = [f"{name} had a {thing}" for name in ("Tom", "Lily") for thing in ("cat", "red hat")]
    expected = [r.text for r in llm.generate(prompts, GREEDY)]
    answers: dict[int, str] = {}

    def ask(index: int) -> None:
        body = {"prompt": prompts[index], "temperature": 0, "max_tokens": 40}
        parts = events(server, "/v1/completions", body)
        answers[index] = "".join(part["choices"][0]["text"] for part in parts)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[i] for i in range(len(prompts))] == expected
    assert server.wait_until_idle().kv_blocks_used == 0


def test_several_completions_equal_the_offline_ones(server: RunningServer, llm: LLM) -> None:
    params = SamplingParams(temperature=0.8, seed=7, n=3, max_tokens=12, top_k=40, top_p=0.9)
    expected = [c.text for c in llm.generate(PROMPT, params)[0].completions]
    assert len(set(expected)) > 1
    body = {
        "prompt": [PROMPT, PROMPT],
        "temperature": 0.8,
        "seed": 7,
        "n": 3,
        "max_tokens": 12,
        "top_k": 40,
        "top_p": 0.9,
    }
    with server.http() as http:
        answer = http.post("/v1/completions", json=body).json()
    assert [choice["text"] for choice in answer["choices"]] == expected * 2
    assert answer["usage"]["completion_tokens"] == 6 * 12

    texts = [""] * 6
    for event in events(server, "/v1/completions", body):
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == expected * 2


def test_sampling_fields_reach_the_engine(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields: dict[str, Any] = {
        "max_tokens": 8,
        "min_tokens": 5,
        "temperature": 0.9,
        "top_k": 30,
        "top_p": 0.8,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "seed": 3,
        "n": 2,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logprobs": 2,
    }
    seen: list[SamplingParams] = []
    add_request = server.engine.add_request

    def spy(request_id: str, prompt: Any, params: SamplingParams, **options: Any) -> None:
        seen.append(params)
        add_request(request_id, prompt, params, **options)

    monkeypatch.setattr(server.engine, "add_request", spy)
    body = {
        **fields,
        "prompt": PROMPT,
        "stop": "zebra",
        "stop_token_ids": [9],
        "logit_bias": {"7": 5},
    }
    with server.http() as http:
        http.post("/v1/completions", json=body).raise_for_status()
    assert seen == [
        SamplingParams(**fields, stop=("zebra",), stop_token_ids=(9,), logit_bias={7: 5.0})
    ]


def test_a_stop_string_across_tokens_is_never_shown(server: RunningServer, llm: LLM) -> None:
    full = llm.generate(PROMPT, GREEDY)[0].text
    stop = full[12:22]
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 40, "stop": [stop, "zebra"]}
    with server.http() as http:
        whole = http.post("/v1/completions", json=body).json()["choices"][0]
    assert whole["text"] == full[: full.index(stop)]
    assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", stop)
    parts = [event["choices"][0] for event in events(server, "/v1/completions", body)]
    assert "".join(part["text"] for part in parts) == whole["text"]
    assert parts[-1]["finish_reason"] == "stop"
    assert server.wait_until_idle().kv_blocks_used == 0


def test_every_event_counts_its_tokens(server: RunningServer) -> None:
    body = {
        "prompt": PROMPT,
        "temperature": 0,
        "max_tokens": 9,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    counts = [e["usage"]["completion_tokens"] for e in events(server, "/v1/completions", body)]
    assert counts == [*range(1, 10), 9]
    body["stream_options"] = {"include_usage": True}
    usages = [event["usage"] for event in events(server, "/v1/completions", body)]
    assert usages[:-1] == [None] * 9 and usages[-1]["completion_tokens"] == 9
    del body["stream_options"]
    assert all("usage" not in event for event in events(server, "/v1/completions", body))


def test_usage_tells_cached_tokens(server: RunningServer) -> None:
    prompt = "There was a boy who liked to read. " * 8
    with server.http() as http:
        body = {"prompt": prompt, "max_tokens": 1}
        first, second = (http.post("/v1/completions", json=body).json()["usage"] for _ in range(2))
    block = server.engine.scheduler.config.block_size
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    expected = (second["prompt_tokens"] - 1) // block * block
    assert second["prompt_tokens_details"]["cached_tokens"] == expected > 0


def test_the_last_usage_tells_where_the_time_went(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {
        "prompt": [PROMPT, "Lily"],
        "n": 2,
        "max_tokens": 20,
        "ignore_eos": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    clock, step = SimulatedClock(), server.engine.step

    def slow_step() -> list[RequestOutput]:
        clock.advance(0.01)
        return step()

    monkeypatch.setattr("time.perf_counter", clock)
    monkeypatch.setattr(server.engine, "step", slow_step)
    begin = clock.now
    usages = [event["usage"] for event in events(server, "/v1/completions", body)]
    took = clock.now - begin
    monkeypatch.undo()
    assert all("seconds" not in usage for usage in usages[:-1])
    seconds = usages[-1]["seconds"]
    assert list(seconds) == ["queue", "prefill", "decode"]
    assert min(seconds.values()) >= 0 and seconds["decode"] >= 19 * 0.01  # a step a token
    assert sum(seconds.values()) < took
    with server.http() as http:
        whole = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2}).json()
    assert set(whole["usage"]["seconds"]) == set(seconds)


def test_the_clients_own_id_is_part_of_the_responses(server: RunningServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1}
    with server.http() as http:
        by_field = http.post("/v1/completions", json={**body, "request_id": "mine-1"}).json()
        by_header = http.post("/v1/completions", json=body, headers={"X-Request-Id": "a:b"}).json()
        neither = http.post("/v1/completions", json=body, headers={"X-Request-Id": "a b"}).json()
    assert (by_field["id"], by_header["id"]) == ("cmpl-mine-1", "cmpl-a:b")
    assert " " not in neither["id"]


def test_logprobs_have_the_legacy_shape(server: RunningServer, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3)
    expected = llm.generate(PROMPT, params)[0]
    assert expected.logprobs is not None
    answer = server.openai().completions.create(
        model="tiny", prompt=PROMPT, temperature=0, max_tokens=6, logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens and logprobs.token_logprobs and logprobs.top_logprobs
    assert "".join(logprobs.tokens) == expected.text
    assert logprobs.token_logprobs == pytest.approx(
        [t.logprob for t in expected.logprobs], abs=1e-4
    )
    assert [len(top) for top in logprobs.top_logprobs] == [3] * 6
    for token, own, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert top[token] == own == max(top.values())
    assert logprobs.text_offset is not None
    for offset, token in zip(logprobs.text_offset, logprobs.tokens, strict=True):
        assert expected.text[offset:].startswith(token)

    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 6, "logprobs": 3}
    parts = [e["choices"][0]["logprobs"] for e in events(server, "/v1/completions", body)]
    assert [part["tokens"][0] for part in parts] == logprobs.tokens
    assert [part["text_offset"][0] for part in parts] == logprobs.text_offset


def test_a_rare_choice_is_among_its_candidates(server: RunningServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 3.0, "seed": 1, "logprobs": 1}
    with server.http() as http:
        logprobs = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    sizes = {len(top) for top in logprobs["top_logprobs"]}
    assert sizes == {1, 2}
    assert all(
        token in top
        for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True)
    )


def test_echo_shows_and_scores_the_prompt(server: RunningServer, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=1, prompt_logprobs=1)
    expected = llm.generate(PROMPT, params)[0]
    assert expected.prompt_logprobs is not None and expected.logprobs is not None
    body = {
        "prompt": PROMPT,
        "temperature": 0,
        "max_tokens": 3,
        "logprobs": 1,
        "echo": True,
        "n": 2,
    }
    with server.http() as http:
        choices = http.post("/v1/completions", json=body).json()["choices"]
    for choice in choices:
        assert choice["text"] == PROMPT + expected.text
        scores = [None if s is None else s.logprob for s in expected.prompt_logprobs]
        scores += [s.logprob for s in expected.logprobs]
        assert scores[0] is None
        assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(scores[1:], abs=1e-4)
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert choice["logprobs"]["text_offset"][-3] == len(PROMPT)
    parts = [e["choices"][0] for e in events(server, "/v1/completions", body)]
    for index in (0, 1):
        own = [part for part in parts if part["index"] == index]
        assert "".join(part["text"] for part in own) == PROMPT + expected.text
        tokens = [token for part in own for token in part["logprobs"]["tokens"]]
        assert tokens == choices[index]["logprobs"]["tokens"]


def test_scores_of_prompts_are_counted_before_any_is_computed(server: RunningServer) -> None:
    prompts = [[5] * 400] * 200
    with server.http() as http:
        for scores in ({"prompt_logprobs": 20}, {"echo": True, "logprobs": 20, "stream": True}):
            refused = http.post(
                "/v1/completions", json={"prompt": prompts, "max_tokens": 1, **scores}
            )
            assert refused.status_code == 400
            assert "1,680,000 log-probabilities" in refused.json()["error"]["message"]


def test_prompt_logprobs_by_token_id(server: RunningServer, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=4)
    expected = llm.generate(PROMPT, params)[0]
    assert expected.prompt_logprobs is not None
    body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 4}
    with server.http() as http:
        (choice,) = http.post("/v1/completions", json=body).json()["choices"]
        refused = http.post("/v1/completions", json={**body, "stream": True})
    assert choice["logprobs"] is None and choice["text"] == expected.text
    assert refused.status_code == 400 and "prompt_logprobs" in refused.text
    first, *scored = choice["prompt_logprobs"]
    assert first is None and len(scored) == len(expected.prompt_token_ids) - 1
    for entry, wanted in zip(scored, expected.prompt_logprobs[1:], strict=True):
        assert wanted is not None
        mine = entry[str(wanted.token_id)]
        assert (mine["rank"], mine["logprob"]) == (
            wanted.rank,
            pytest.approx(wanted.logprob, abs=1e-4),
        )
        assert [int(token) for token in entry][:4] == [token for token, _ in wanted.top]
        assert len(entry) == (4 if wanted.rank <= 4 else 5)


def test_an_echo_without_generation_scores_the_prompt_alone(server: RunningServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 2, "temperature": 0}
    by_id = {**body, "max_tokens": 1, "return_tokens_as_token_ids": True}
    with server.http() as http:
        (alone,) = http.post("/v1/completions", json=body).json()["choices"]
        (longer,) = http.post("/v1/completions", json=by_id).json()["choices"]
        tokens = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
        mixed = {**body, "logprobs": 0, "prompt_logprobs": 3}
        (both,) = http.post("/v1/completions", json=mixed).json()["choices"]
        refused = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 0})
    assert alone["text"] == PROMPT and len(alone["logprobs"]["tokens"]) == len(tokens)
    assert longer["logprobs"]["tokens"][:-1] == [f"token_id:{token}" for token in tokens]
    assert longer["logprobs"]["token_logprobs"][:-1] == alone["logprobs"]["token_logprobs"]
    assert {len(top) for top in both["logprobs"]["top_logprobs"][1:]} == {1}
    assert refused.status_code == 400 and "max_tokens" in refused.text
    parts = [event["choices"][0] for event in events(server, "/v1/completions", body)]
    assert "".join(part["text"] for part in parts) == PROMPT
