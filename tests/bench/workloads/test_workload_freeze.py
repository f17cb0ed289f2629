"""Frozen workloads: written, read back, refused when they were changed, and named in results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from llmopt.base.errors import BadInput
from llmopt.bench.options.options import BenchOptions
from llmopt.bench.session.target_sessions import EngineSession
from llmopt.bench.workloads.datasets import (
    build_workload,
    freeze_workload,
    locate_dataset,
    read_frozen,
    write_frozen,
)
from llmopt.bench.workloads.workload import (
    ConversationTurn,
    Message,
    Workload,
    WorkloadItem,
    numbered,
)
from llmopt.cli.main import main
from llmopt.quant.source.load_processor import load_tokenizer
from llmopt.recipes import MODELS

TOKENIZER = load_tokenizer(MODELS / "stories3M")


@pytest.mark.parametrize(
    "options",
    [
        BenchOptions(num_prompts=20),
        BenchOptions(num_prompts=20, request_rate=3.3, burstiness=0.7, seed=5),
        BenchOptions(dataset="azure", num_prompts=30, trace_speed=3.0),
        BenchOptions(dataset="mooncake", num_prompts=30),
        BenchOptions(dataset="prefix_repetition", num_prompts=20),
    ],
)
def test_round_trip_keeps_the_hash(tmp_path: Path, options: BenchOptions) -> None:
    path = tmp_path / "frozen.jsonl"
    written = freeze_workload(options, path)
    assert locate_dataset(str(path), None) == ("frozen", path)
    again = build_workload(BenchOptions(dataset=str(path)), TOKENIZER, 512)
    assert again.sha256 == written.sha256
    assert again.items == written.items
    assert again.is_stand_in == written.is_stand_in
    head = json.loads(path.read_text().splitlines()[0])
    assert head["sha256"] == written.sha256 and head["num_requests"] == len(written.items)
    assert again.is_timed == any(item.arrival_seconds for item in written.items)


def test_the_hash_of_a_conversation_is_that_of_earlier_releases() -> None:
    """Frozen files and recorded runs name it: it changes only with what is sent."""
    turn = ConversationTurn((4, 5), 6, (Message("user", "go on"),), think_seconds=0.5)
    spoken = (Message("user", "hi"),)
    item = WorkloadItem("r0", (1, 2, 3), 7, 0.25, messages=spoken, turns=(turn,))
    assert (
        Workload("sharegpt", "here", (item,)).sha256
        == "e216d236e3a4767f529ae9b894b9cd515556a8c74d90175047501e15859a59fd"
    )


def test_the_result_names_the_hash(tmp_path: Path) -> None:
    path = tmp_path / "frozen.jsonl"
    frozen = freeze_workload(BenchOptions(num_prompts=5, output_len=6), path)
    options = BenchOptions(dataset=str(path), num_runs=1, num_threads=1, quality=False)
    session = EngineSession(options)
    assert session.run_pass()
    result = session.finish().result
    assert result["llmopt"]["identity"]["workload_sha256"] == frozen.sha256
    assert result["num_prompts"] == result["completed"] == 5
    assert result["max_concurrency"] == 8


def test_untimed_requests_take_a_rate_and_timed_ones_do_not(tmp_path: Path) -> None:
    path = tmp_path / "frozen.jsonl"
    freeze_workload(BenchOptions(num_prompts=5), path)
    paced = build_workload(BenchOptions(dataset=str(path), request_rate=2.0), TOKENIZER, 512)
    assert paced.items[-1].arrival_seconds == pytest.approx(2.5)
    freeze_workload(BenchOptions(num_prompts=5, request_rate=1.0), path)
    with pytest.raises(BadInput, match="of its own"):
        build_workload(BenchOptions(dataset=str(path), request_rate=2.0), TOKENIZER, 512)


def test_a_frozen_workload_is_whole_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "frozen.jsonl"
    write_frozen(Workload("random", "x", numbered([((5, 6, 7), 4), ((8,), 6)])), path, model="some")
    with pytest.raises(BadInput, match="used whole"):
        build_workload(BenchOptions(dataset=str(path), num_prompts=1), TOKENIZER, 512)
    with pytest.raises(BadInput, match="exceed the context of 6"):
        read_frozen(path, TOKENIZER, max_model_len=6)
    lines = path.read_text().splitlines()
    for changed, said in (
        ([lines[0], lines[1]], "was changed"),
        ([lines[0], lines[2], lines[1]], "was changed"),
        ([lines[0], lines[1].replace("5", "6"), lines[2]], "was changed"),
        ([lines[0], lines[1].replace("5", "600"), lines[2]], "vocabulary of 512"),
        ([lines[0], lines[1].replace("output_len", "length"), lines[2]], "line 2: wants"),
        ([lines[0], lines[1], "{"], "line 3: not JSON"),
        ([lines[0].replace('"llmopt_workload": 1', '"llmopt_workload": 9')], "format 9"),
    ):
        path.write_text("\n".join(changed) + "\n")
        with pytest.raises(BadInput, match=said):
            read_frozen(path, TOKENIZER, max_model_len=512)
    plain = tmp_path / "plain.jsonl"
    plain.write_text('{"prompt": "x"}\n')
    with pytest.raises(BadInput, match="not a frozen workload"):
        locate_dataset("frozen", plain)
    with pytest.raises(BadInput, match="not a folder"):
        freeze_workload(BenchOptions(num_prompts=2), tmp_path / "none" / "x.jsonl")


@pytest.mark.parametrize("words", [["bench", "freeze"], ["freeze"]])
def test_command(tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "frozen.jsonl"
    more = ["stories260K", "--num-prompts", "6", "-o", str(path), "--json"]
    with pytest.raises(SystemExit) as stop:
        main([*words, *more])
    assert stop.value.code == 0
    said = json.loads(capsys.readouterr().out)
    assert said["num_requests"] == 6
    assert said["sha256"] == build_workload(BenchOptions(dataset=str(path)), TOKENIZER, 512).sha256
