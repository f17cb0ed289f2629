"""Quantizing in several workers: the bytes of one, whatever their number, and whatever ends them."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from socket import socket
from typing import Any

import pytest
import torch
from llmopt.cli.main import main
from llmopt.quant.base import workers
from llmopt.quant.base.lanes import LANES, LaneSums, share_of
from llmopt.quant.plan.request import work_folder
from llmopt.recipes import MODELS
from transformers import DeepseekV3Config

from tools.hollow_models import write
from tools.scale_table import table

from ...support.quant_support import llmopt_environment

STORIES, TINY = str(MODELS / "stories3M"), str(MODELS / "stories260K")
SMALL = ("--num-samples", "12", "--seq-len", "64")
PER_CHANNEL = ("--group-size", "-1", "--format", "compressed-tensors")
METHODS = {
    "rtn": (),
    "gptq": (),
    "awq": (),
    "autoround": ("--iters", "6"),
    "smoothquant": (),
    "awq-judged": ("--method", "awq", "--judge", "layer"),
    "quip": ("--finetune-steps", "4", "--ignore", "[qo]_proj|mlp"),
    "stored": ("--method", "gptq", "--stats", "stats"),
    "cache": ("--method", "gptq", "--kv-cache", "fp8", "--format", "compressed-tensors"),
    "auto": ("--target-bpw", "4.5"),
}


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
    }


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """`llmopt quantize` in a folder."""
    return subprocess.Popen(
        [sys.executable, "-m", "llmopt", "quantize", *words, "-o", "out"],
        cwd=folder,
        env=llmopt_environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def made(folder: Path, number: int, *words: str, model: str = STORIES) -> dict[str, str]:
    """The files that so many workers write."""
    folder.mkdir()
    with start(folder, model, "--nproc", str(number), *words) as process:
        printed, said = process.communicate(timeout=900)
    assert process.returncode == 0, said
    assert (printed + said).count("written to") == 1
    return digests(folder / "out")


@pytest.mark.whole
def test_workers_write_the_same_bytes_by_names_alone(tmp_path: Path) -> None:
    words = ("--method", "fp8", "--model-free")
    assert made(tmp_path / "one", 1, *words) == made(tmp_path / "two", 2, *words)


@pytest.mark.parametrize("count", [1, 5, 12, 16])
@pytest.mark.parametrize("number", [1, 2, 3, 4, 7, 16, 20])
def test_every_number_of_workers_adds_in_one_order(
    count: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.randn(count, 64, generator=torch.Generator().manual_seed(0))
    alone = LaneSums()
    for lane, value in enumerate(values):
        alone.add(lane, [value.clone(), None])
    joined = LaneSums()
    monkeypatch.setattr(workers, "together", lambda: True)
    monkeypatch.setattr(workers, "count", lambda: number)
    seen: list[int] = []
    for rank in range(number):
        monkeypatch.setattr(workers, "rank", lambda rank=rank: rank)
        share, own = share_of(count, 1), LaneSums()
        assert share is not None
        seen += range(count)[share.own]
        for lane in share.lanes:
            own.add(lane, [values[lane].clone(), None])
        for level, place, parts in own.branches:
            joined.add(place, parts, level)
    assert seen == list(range(count))
    (ours, nothing), (theirs, _) = joined.total(), alone.total()
    assert nothing is None
    assert ours is not None and theirs is not None and torch.equal(ours, theirs)
    assert not torch.equal(theirs, values.sum(dim=0)) or count == 1


@pytest.mark.parametrize("samples", [1, 3, 64, 515])
def test_lanes_are_whole_batches_and_end_where_they_say(
    samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "together", lambda: True)
    monkeypatch.setattr(workers, "count", lambda: 3)
    lanes: list[int] = []
    counts: set[int] = set()
    for rank in range(3):
        monkeypatch.setattr(workers, "rank", lambda rank=rank: rank)
        share = share_of(samples, 2)
        assert share is not None and share.own.start % 2 == 0
        counts.add(share.count)
        own = share.own.stop - share.own.start
        ended = [share.ended(start + 2) for start in range(0, own, 2)]
        lanes += [lane for lane in ended if lane is not None]
        assert [share.rows(lane).stop for lane in share.lanes] == [
            min(2 * place, own) for place, lane in enumerate(ended, 1) if lane is not None
        ]
    assert lanes == list(range(*counts)) and len(lanes) <= LANES


@pytest.mark.whole
def test_two_workers_write_the_bytes_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--method", "gptq", "--asymmetric-calibration", *PER_CHANNEL, *SMALL)
    two = made(tmp_path / "two", 2, *words, model=TINY)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    environment = {"TORCHELASTIC_RUN_ID": "one", "RANK": "0", "WORLD_SIZE": "1"}
    environment["MASTER_ADDR"] = "localhost"
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with socket() as free:
        free.bind(("localhost", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    before = torch.get_num_threads()
    try:
        with pytest.raises(SystemExit) as end:
            main(["quantize", TINY, *words, "-o", str(tmp_path / "one")])
    finally:
        torch.set_num_threads(before)
    assert end.value.code in (0, None)
    assert digests(tmp_path / "one") == two
    assert "model-layer-00000.safetensors" in two


@pytest.mark.whole
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", METHODS)
def test_any_number_of_workers_writes_the_bytes_of_one(tmp_path: Path, name: str) -> None:
    method = () if "--method" in METHODS[name] else ("--method", name)
    words = (*method, *METHODS[name], "--num-samples", "16")
    one = made(tmp_path / "1", 1, *words)
    for number in (2, 4):
        assert made(tmp_path / str(number), number, *words) == one


@pytest.mark.whole
def test_what_is_wrong_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text("{}\n")
    with start(tmp_path, STORIES, "--nproc", "2", "--calibration", "text.jsonl") as process:
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert errors.count("error:") == 1 and "Traceback" not in errors


def test_no_workers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["quantize", TINY, "--nproc", "0"])
    said = capsys.readouterr().err
    assert end.value.code == 2 and "--nproc" in said and said.count("\n") == 1


FULL_DISK = """
import errno, os
from llmopt.cli.main import main
from llmopt.base import atomic_io
from llmopt.quant.pipeline import pipeline

def full(file):
    raise OSError(errno.ENOSPC, "No space left on device")

def write_shard(*arguments):
    atomic_io.os.fsync = full
    return write(*arguments)

write = pipeline.write_tensors
if os.environ["RANK"] == "1":
    pipeline.write_tensors = write_shard
main()
"""


@pytest.mark.whole
def test_a_full_disk_of_one_worker_is_said_once_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = (STORIES, "--method", "smoothquant", *SMALL)
    (tmp_path / "full_disk.py").write_text(FULL_DISK)
    paths = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    for name, value in {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    assert workers.launch(2, "full_disk", ["quantize", *words, "-o", "out"]) == 2
    said = capfd.readouterr().err
    assert said.count("error:") == 1 and "space" in said and "Traceback" not in said
    with start(tmp_path, *words, "--nproc", "1") as process:
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 0 and "going on after layer 1" in errors
    assert digests(tmp_path / "out") == made(tmp_path / "other", 1, *words[1:])


@pytest.mark.whole
def test_ctrl_c_ends_all_workers_and_is_said_once(tmp_path: Path) -> None:
    words = ("--method", "gptq", "--num-samples", "64", "--seq-len", "256")
    with start(tmp_path, STORIES, "--nproc", "2", *words) as process:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("out*/hidden-00001-*")) and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        found = children(process.pid)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert errors.count("interrupted") == 1 and "Traceback" not in errors, errors
    assert found and not any(Path(f"/proc/{worker}").exists() for worker in found)


def children(process: int) -> list[int]:
    """The workers that a launcher started."""
    listed = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [int(word) for word in listed]


def kill_a_worker(folder: Path, number: int, words: tuple[str, ...], seconds: float) -> bool:
    """Kill one of so many workers at a random moment; whether the run ended for it."""
    with start(folder, STORIES, "--nproc", str(number), *words) as process:
        deadline = time.monotonic() + 60
        while len(found := children(process.pid)) < number and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(random.uniform(0, seconds))
        if process.poll() is None and (found := children(process.pid)):
            os.kill(random.choice(found), signal.SIGKILL)
        _, errors = process.communicate(timeout=120)
    if process.returncode:
        assert process.returncode == 3
        assert errors.count("error:") == 1 and "SIGKILL" in errors, errors
        assert "Traceback" not in errors, errors
    return process.returncode != 0


@pytest.mark.whole
@pytest.mark.timeout(3600)
def test_workers_killed_at_random_are_resumed_by_any_number_to_the_same_bytes(
    tmp_path: Path,
) -> None:
    words = ("--method", "gptq", "--num-samples", "32", "--seq-len", "128")
    expected = made(tmp_path / "whole", 1, *words)
    (tmp_path / "killed").mkdir()
    random.seed(0)
    kills = 0
    while kills < 20:
        killed = kill_a_worker(tmp_path / "killed", random.choice((1, 2, 4)), words, 8)
        kills += killed
        out = tmp_path / "killed" / "out"
        assert killed or out.exists()
        if out.exists() and not work_folder(out).exists():  # some are killed behind the last file
            assert digests(out) == expected
            out.rename(tmp_path / f"early-{time.monotonic_ns()}")
    with start(tmp_path / "killed", STORIES, "--nproc", "3", *words) as process:
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert digests(tmp_path / "killed" / "out") == expected


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def torchrun(folder: Path, number: int, *words: str) -> subprocess.CompletedProcess[str]:
    """A program in so many workers."""
    return subprocess.run(
        [*TORCHRUN, str(number), *words],
        cwd=folder,
        env=llmopt_environment(),
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.mark.whole
def test_torchrun_starts_workers_that_speak_once(tmp_path: Path) -> None:
    """Three workers of two samples, and a dry run before."""
    words = ("--method", "gptq", "--num-samples", "2", "--seq-len", "64", *PER_CHANNEL)
    command = ("-m", "llmopt", "quantize", TINY, *words, "-o", "out")
    planned = torchrun(tmp_path, 3, *command, "--dry-run", "--json")
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["workers"] == 3 and not (tmp_path / "out").exists()
    done = torchrun(tmp_path, 3, *command)
    assert done.returncode == 0 and (done.stdout + done.stderr).count("written to") == 1
    assert digests(tmp_path / "out") == made(tmp_path / "one", 1, *words, model=TINY)


NARROWER: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "moe_intermediate_size": 256,
    "first_k_dense_replace": 0,
    "n_routed_experts": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 384,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "vocab_size": 512,
}
"""DeepSeek-V3 with its 61 layers, each of experts that a machine of tests holds."""


@pytest.mark.whole
@pytest.mark.timeout(1800)
def test_a_worker_has_the_memory_that_was_planned_for_one_layer_of_many(tmp_path: Path) -> None:
    size = write(tmp_path / "model", DeepseekV3Config(**NARROWER, dtype="bfloat16"))
    script = Path(__file__).parents[3] / "tools" / "one_layer.py"
    samples = ("--num-samples", "32", "--seq-len", "512", "--held-out", "4")
    words = ("--method", "gptq", "--format", "compressed-tensors", "--group-size", "64", *samples)
    done = torchrun(tmp_path, 2, str(script), "quantize", "model", *words, "-o", "out")
    facts = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(facts) == 2, done.stderr
    (planned,) = {fact["planned"] for fact in facts if "planned" in fact}
    for fact in facts:
        assert 0.85 * planned < fact["used"] < 1.15 * planned
        assert fact["used"] < size / 3


@pytest.mark.whole
def test_the_table_of_large_models_is_the_present_plan() -> None:
    assert table() in (Path(__file__).parents[3] / "docs" / "scale.md").read_text()
