"""Traces replayed: the times, lengths and shared blocks of the file, read here by other means."""

from __future__ import annotations

import csv
import json
from decimal import Decimal
from pathlib import Path

import pytest
from llmopt.base.errors import BadInput
from llmopt.bench.options.options import BenchOptions
from llmopt.bench.session.target_sessions import EngineSession
from llmopt.bench.workloads.datasets import build_workload, resolved_options
from llmopt.bench.workloads.traces import BUNDLED, read_trace, trace_workload

SHARED = Path(__file__).parents[4] / "shared" / "data" / "traces"
AZURE = SHARED / "AzureLLMInferenceTrace_conv_2023.csv"
MOONCAKE = SHARED / "mooncake_conversation_trace.jsonl"


class Vocabulary:
    all_special_ids = (0, 1, 2)

    def __len__(self) -> int:
        return 32000

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]:
        raise AssertionError("a trace has no text")


IDS = Vocabulary()


def azure_offsets(path: Path) -> list[Decimal]:
    """Seconds after the first request, from the digits of the clock column alone."""
    with path.open(newline="") as lines:
        clocks = [row["TIMESTAMP"].split()[1].split(":") for row in csv.DictReader(lines)]
    seconds = [int(h) * 3600 + int(m) * 60 + Decimal(s) for h, m, s in clocks]
    return [second - seconds[0] for second in seconds]


def needs(path: Path) -> None:
    if not path.is_file():
        pytest.skip(f"needs the real trace {path}, which is not shipped")


def test_azure_slice_keeps_times_and_lengths() -> None:
    found = trace_workload(IDS, "azure", num_prompts=400, max_model_len=32768)
    expected = azure_offsets(BUNDLED["azure"])
    assert len(found.items) == len(expected) == 400
    for item, seconds in zip(found.items, expected, strict=True):
        assert abs(item.arrival_seconds - float(seconds)) < 1e-6
    with BUNDLED["azure"].open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [(len(i.prompt_token_ids), i.output_len) for i in found.items] == [
        (int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in rows
    ]
    assert found.is_timed and len(found.notes) == 1


def test_whole_azure_trace() -> None:
    needs(AZURE)
    rows = read_trace("azure", AZURE)
    expected = azure_offsets(AZURE)
    assert len(rows) == len(expected) == 19366
    worst = max(
        abs(row.seconds - rows[0].seconds - float(seconds))
        for row, seconds in zip(rows, sorted(expected), strict=True)
    )
    assert worst < 1e-6


def test_replay_keeps_the_times_of_the_file_within_the_reported_lag() -> None:
    options = BenchOptions(
        dataset="azure", num_prompts=12, trace_speed=96.0, num_runs=1, num_threads=1, quality=False
    )
    session = EngineSession(options)
    assert session.run_pass()
    run = session.finish()
    lag_ms = run.result["llmopt"]["client_lag_ms"]
    expected = [float(seconds) / 96.0 for seconds in azure_offsets(BUNDLED["azure"])[:12]]
    late = [
        (trace.sent - seconds) * 1000
        for trace, seconds in zip(run.passes[0].traces, expected, strict=True)
    ]
    assert all(-0.001 <= one <= lag_ms["max"] + 0.001 for one in late)
    assert max(late) == pytest.approx(lag_ms["max"], abs=0.001)
    load = run.result["llmopt"]["identity"]["load"]
    assert load["arrivals"] == "replayed" and load["max_concurrency"] is None
    assert run.result["request_rate"] == pytest.approx(12 / expected[-1])
    assert run.result["completed"] == 12


def test_speed_and_start() -> None:
    whole = trace_workload(IDS, "azure", num_prompts=100, max_model_len=32768)
    later = trace_workload(
        IDS, "azure", num_prompts=20, max_model_len=32768, start_seconds=10.0, speed=4.0
    )
    first = next(n for n, item in enumerate(whole.items) if item.arrival_seconds >= 10.0)
    begun = whole.items[first].arrival_seconds
    for item, same in zip(later.items, whole.items[first:], strict=False):
        assert item.arrival_seconds == pytest.approx((same.arrival_seconds - begun) / 4.0)
        assert item.output_len == same.output_len
    assert any("4 times" in note for note in later.notes)
    with pytest.raises(BadInput, match="lasts"):
        trace_workload(IDS, "azure", num_prompts=1, max_model_len=512, start_seconds=1e6)


def test_clipping_is_counted() -> None:
    found = trace_workload(IDS, "azure", num_prompts=200, max_model_len=512)
    whole = trace_workload(IDS, "azure", num_prompts=200, max_model_len=32768)
    changed = sum(
        (len(a.prompt_token_ids), a.output_len) != (len(b.prompt_token_ids), b.output_len)
        for a, b in zip(found.items, whole.items, strict=True)
    )
    assert changed > 20
    assert f"{changed} of 200 requests cut to the context of 512" in found.notes
    assert all(len(i.prompt_token_ids) + i.output_len <= 512 for i in found.items)
    same = [i.arrival_seconds for i in whole.items]
    assert [i.arrival_seconds for i in found.items] == same


def shared_tokens(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def test_mooncake_shares_what_its_hashes_share() -> None:
    rows = [json.loads(line) for line in BUNDLED["mooncake"].read_text().splitlines()][:150]
    found = trace_workload(IDS, "mooncake", num_prompts=150, max_model_len=200_000)
    assert [(len(i.prompt_token_ids), i.output_len) for i in found.items] == [
        (row["input_length"], row["output_length"]) for row in rows
    ]
    assert [i.arrival_seconds for i in found.items] == [row["timestamp"] / 1000 for row in rows]
    deepest = 0
    for n, row in enumerate(rows):
        for m in range(n):
            blocks = shared_tokens(tuple(row["hash_ids"]), tuple(rows[m]["hash_ids"]))
            tokens = shared_tokens(found.items[n].prompt_token_ids, found.items[m].prompt_token_ids)
            lengths = row["input_length"], rows[m]["input_length"]
            # Behind the last shared block two random tokens may be equal by chance.
            assert min(512 * blocks, *lengths) <= tokens <= min(512 * blocks + 3, *lengths)
            deepest = max(deepest, blocks)
    assert deepest >= 2


def test_mooncake_scaled_keeps_its_blocks_apart() -> None:
    found = trace_workload(IDS, "mooncake", num_prompts=48, max_model_len=512)
    assert any("scaled by" in note for note in found.notes)
    assert all(len(i.prompt_token_ids) + i.output_len <= 512 for i in found.items)
    assert len({i.prompt_token_ids for i in found.items}) == 48
    # 512 tokens of a block became as many as the note's factor leaves, rounded up.
    factor = next(float(n.split()[4]) for n in found.notes if "scaled by" in n)
    block = int(-(-512 * factor // 1))
    assert len({i.prompt_token_ids[:block] for i in found.items}) == 1


def test_the_prefix_cache_finds_shared_blocks(tmp_path: Path) -> None:
    path = tmp_path / "shared.jsonl"
    rows = [
        {"timestamp": 5000 * n, "input_length": 4096, "output_length": 200, "hash_ids": ids}
        for n, ids in enumerate(([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 9, 10]))
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    options = BenchOptions(
        dataset="mooncake",
        dataset_path=path,
        trace_speed=10.0,
        num_runs=1,
        num_warmups=0,
        num_threads=1,
        block_size=16,
    )
    session = EngineSession(options)
    assert session.run_pass()
    first, second = session.workload.items
    shared = shared_tokens(first.prompt_token_ids, second.prompt_token_ids)
    # Six of eight blocks, each 512 · 512/4296 tokens rounded up, in whole blocks of the cache.
    assert shared >= 6 * 62
    trace = session.passes[0].traces[1]
    assert trace.cached_tokens == shared // 16 * 16
    both = len(first.prompt_token_ids) + len(second.prompt_token_ids)
    hit_rate = session.measured.prefix_cache_hit_rate
    assert hit_rate == pytest.approx(shared // 16 * 16 / both, abs=0.01)


def test_whole_mooncake_trace_is_read() -> None:
    needs(MOONCAKE)
    rows = read_trace("mooncake", MOONCAKE)
    assert len(rows) == 12031
    assert sum(row.prompt_len for row in rows) == sum(
        json.loads(line)["input_length"] for line in MOONCAKE.read_text().splitlines()
    )


def test_burstgpt(tmp_path: Path) -> None:
    path = tmp_path / "BurstGPT_1.csv"
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n"
        "45,ChatGPT,1087,0,1087,API log\n"
        "118.5,GPT-4,417,276,693,Conversation log\n"
    )
    found = trace_workload(IDS, "burstgpt", num_prompts=9, max_model_len=4096, path=path)
    assert [(len(i.prompt_token_ids), i.output_len, i.arrival_seconds) for i in found.items] == [
        (472, 18, 0.0),
        (417, 276, 113.5),
    ]
    said = " ".join(found.notes)
    assert "1 requests left out: no prompt, no answer" in said and "2 of 9" in said
    with pytest.raises(BadInput, match="needs --dataset-path"):
        trace_workload(IDS, "burstgpt", num_prompts=1, max_model_len=512)


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("azure", "TIMESTAMP,ContextTokens\n", "no column 'GeneratedTokens'"),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,2\n", "line 2: 'noon'"),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6,1\n", "too few"),
        (
            "azure",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6,-1,2\n",
            "below 0",
        ),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no request"),
        ("burstgpt", "Timestamp,Request tokens,Response tokens\nx,1,2\n", "line 2"),
        ("mooncake", '{"timestamp": 0\n', "line 1: not JSON"),
        ("mooncake", '\n{"timestamp": "x"}\n', "line 2.*timestamp"),
        (
            "mooncake",
            '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}\n',
            "1 blocks of 512 for 600 tokens",
        ),
        ("mooncake", '{"timestamp": 0, "input_length": 5.5, "output_length": 1}\n', "input_length"),
        (
            "mooncake",
            '{"timestamp": 0, "input_length": 5, "output_length": 1}\n'
            '{"timestamp": 0.25, "input_length": 5, "output_length": 1}\n',
            "line 2.*seconds are not read",
        ),
    ],
)
def test_bad_traces(tmp_path: Path, kind: str, text: str, said: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(BadInput, match=said):
        trace_workload(IDS, kind, num_prompts=5, max_model_len=512, path=path)


def test_a_trace_takes_no_rate() -> None:
    with pytest.raises(BadInput, match="arrival times of its own"):
        build_workload(BenchOptions(dataset="azure", request_rate=2.0), IDS, 4096)
    options = BenchOptions(dataset="azure", num_prompts=50)
    workload = build_workload(options, IDS, 4096)
    out = resolved_options(options, workload)
    assert out.concurrency is None
    assert out.rate == pytest.approx(50 / workload.items[-1].arrival_seconds)
