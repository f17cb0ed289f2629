"""Stages of `doctor --gpu` on the pretended card: findings, machines that they refuse, and the cold budget."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.bench.gpu_check import models, stages
from llmopt.bench.gpu_check.models import TimedModel, decode_seconds
from llmopt.bench.gpu_check.run import MOST_PROCESSES, STAGES, Finding
from llmopt.bench.gpu_check.stages import CASES, TIMED
from llmopt.bench.machine.roofline import copy_bandwidth
from llmopt.engine.kernels.common.verdicts import VARIABLE, current_verdicts
from llmopt.engine.planner.catalog import find_model
from llmopt.quant.methods.registry import METHODS
from llmopt.quant.plan.request import QuantizeRequest

from ...support.pretended_cuda.card import Card
from ...support.pretended_cuda.command import small_shapes
from ...support.pretended_cuda.runtime import load_guard, pretended_cuda

ROOT = Path(__file__).resolve().parents[3]
IMPORT_SECONDS, KERNEL_SECONDS, CORES = 13.0, 1.6, 16
"""Of a cold process, and of a kernel that one core compiles, measured with torch 2.11 and Triton 3.6."""


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither kernels are tried nor roofs measured; shapes are small."""
    monkeypatch.setenv(VARIABLE, "off")
    with small_shapes():
        yield


def found(stage: str, card: Card, folder: Path) -> list[Finding]:
    """Findings of a stage on the card, which computes nothing; what its cases raise is raised."""
    with pretended_cuda(card):
        return [finding for case in CASES[stage](folder) for finding in case.run()]


def verdicts(findings: list[Finding]) -> list[bool | None]:
    return [each.met for each in findings]


def test_every_stage_has_cases() -> None:
    assert [*CASES] == [stage.name for stage in STAGES]


def test_times_are_held_against_the_plan_of_the_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that takes the planned time holds, one of many times that does not."""
    model = TIMED["llama-int4"]
    with pretended_cuda(Card()):
        model.open(tmp_path / "model").close()
        stored = find_model(str(tmp_path / "model"))
        planned = model.planned(stored, "decode", 32, 4096)
        assert 0 < planned < model.planned(stored, "decode", 32, 8192)
        engine: Any = SimpleNamespace(memory=SimpleNamespace(weight_bytes=3 << 20))
        told = []
        for factor in (1, 9):
            monkeypatch.setattr(models, "decode_seconds", lambda *_: [planned * factor])  # noqa: B023
            told += model.time(tmp_path / "model", engine, "decode", 32, 4096)
    assert verdicts(told) == [True, False]
    assert told[0].numbers["expected_seconds"] == planned
    assert told[0].numbers["weights"] == "int4 g128"
    assert told[0].expected.startswith(f"{1e3 * planned:.2f} ms, at most ")


@pytest.mark.parametrize(
    "stage",
    [pytest.param(stage, marks=() if "int4" in stage else pytest.mark.whole) for stage in TIMED],
)
def test_a_model_is_measured_alone_with_many_sequences_and_in_prefill(
    stage: str, tmp_path: Path
) -> None:
    numbers = [each.numbers for each in found(stage, Card(), tmp_path)]
    cases = [(each["phase"], each["batch"], each["context"]) for each in numbers]
    assert cases == [("decode", 1, 8), ("decode", 3, 24), ("prefill", 1, 24)]
    assert all(each["seconds"] > 0 and each["share"] > 0 for each in numbers)


def test_layers_of_a_dense_model_are_equal_and_those_of_a_hybrid_are_not(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    for name, layers, count in (("llama-3.1-8b", None, 4), ("qwen3.5-27b", 4, 4)):
        folder = tmp_path / name
        TimedModel(name, layers=layers).write(folder)
        shards = [load_file(folder / f"layer-{index}.safetensors") for index in range(count)]
        norms = [next(shard[n] for n in shard if "gate_proj" in n) for shard in shards]
        assert torch.equal(norms[0], norms[3]) == (layers is None)


def refusal(card: Card, folder: Path) -> str:
    with pytest.raises(BadInput) as raised:
        found("environment", card, folder)
    return str(raised.value)


def test_an_old_card_and_one_in_use_are_refused_with_what_to_do(tmp_path: Path) -> None:
    told = found("environment", Card(), tmp_path)
    assert {each.met for each in told} == {True, None}
    assert [each.numbers["rate"] for each in told if "rate" in each.numbers] == [3e12, 8e14]
    assert told[0].numbers["environment"]["gpu"]["name"] == "NVIDIA H100 80GB HBM3"
    old = refusal(Card(name="Tesla T4", capability=(7, 5)), tmp_path)
    assert "Tesla T4 has compute capability 7.5, and 8.0 is needed" in old
    assert "CUDA_VISIBLE_DEVICES" in old
    busy = Card(name="NVIDIA L4", memory_bytes=24 << 30)
    busy.held[0] = busy.memory_bytes // 2  # of another process
    said = refusal(busy, tmp_path)
    assert "NVIDIA L4 is in use: 12.0 of 24.0 GiB are free" in said and "nvidia-smi" in said


def test_why_there_is_no_card_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_old() -> bool:
        warnings.warn(
            "The NVIDIA driver on your system is too old (found 11040). Update", stacklevel=1
        )
        return False

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(BadInput, match=r"this torch .* sees no CUDA device: it is built without"):
        next(CASES["environment"](Path()))
    monkeypatch.setattr(torch.cuda, "is_available", too_old)
    with pytest.raises(
        BadInput, match=r"device: The NVIDIA driver on your system is too old \(found 11040"
    ):
        next(CASES["environment"](Path()))


def test_a_missing_triton_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "refuses_triton", lambda _: "Triton is not installed")
    told = {each.what: each for each in found("environment", Card(), tmp_path)}
    lacking = told["Triton"]
    assert (lacking.seen, lacking.met) == ("Triton is not installed", False)


def test_a_batch_that_the_cache_does_not_hold_is_no_measurement() -> None:
    """It would be preempted, and its steps would be those of fewer sequences."""

    class Full:
        vocab_size = 16

        def __init__(self) -> None:
            self.names: list[str] = []

        def add_request(self, name: str, *_: Any) -> None:
            self.names.append(name)

        @property
        def stats(self) -> Any:
            return SimpleNamespace(num_waiting=max(0, len(self.names) - 2))

        def step(self) -> list[Any]:
            return [SimpleNamespace(request_id=name) for name in self.names]

        def abort(self, name: str) -> None:
            self.names.remove(name)

    engine = cast(Any, Full())
    with pytest.raises(RuntimeError, match="1 of 3 sequences do not fit into the KV cache"):
        decode_seconds(engine, 3, 8)
    assert not engine.names, "the next case begins with an empty engine"
    assert len(decode_seconds(engine, 2, 8)) == models.STEPS


def test_copying_is_measured_on_a_card_of_any_size() -> None:
    with pretended_cuda(Card(memory_bytes=32 << 20)):
        assert copy_bandwidth(torch.device("cuda")) > 0


def test_a_copy_counts_bytes_read_and_written() -> None:
    assert copy_bandwidth(torch.device("cpu")) > 1e8


@pytest.mark.whole
def test_the_bundled_model_is_quantized_by_every_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu = lambda *given, **named: QuantizeRequest(*given, **named | {"device": "cpu"})  # noqa: E731
    monkeypatch.setattr(stages, "QuantizeRequest", on_cpu)
    cases = [*stages.quantizers(tmp_path)]
    assert [case.name for case in cases] == [*METHODS]
    assert [verdicts([*case.run()]) for case in cases] == [[True]] * len(cases)


def test_a_card_that_the_planner_does_not_know_is_planned_by_its_roofs() -> None:
    with pretended_cuda(Card(name="NVIDIA L9")):
        device = models.planned_device()
    assert (device.name, device.bandwidth, device.peaks) == ("NVIDIA L9", 3e12, {"bf16": 8e14})


def test_trials_on_a_busy_card_are_not_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE)
    with pretended_cuda(Card()):
        next(iter(CASES["kernels"](tmp_path)))
        verdicts = current_verdicts()
        assert verdicts is not None and verdicts.path.parent == tmp_path


def test_the_real_shapes_are_those_of_the_table() -> None:
    layers = {name: find_model(model.name).shape.num_layers for name, model in TIMED.items()}
    assert layers["llama-bf16"] == 32


@pytest.mark.whole
@pytest.mark.timeout(600)
def test_a_cold_start_compiles_within_its_limits() -> None:
    """Kernels of each case, by the seconds of each, on sixteen cores: a free core takes the next case."""
    pytest.importorskip("triton", reason="Triton is for Linux alone")
    load_guard()  # here, as a skip within the process below would be its failure
    environment = {name: value for name, value in os.environ.items() if "TRITON" not in name}
    environment[VARIABLE] = "on"
    command = [sys.executable, "-m", "tests.support.pretended_cuda.command", "--count"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    assert len(counts) > 30 and min(counts[: len(TIMED)]) > 20
    free = [IMPORT_SECONDS] * min(CORES, MOST_PROCESSES)
    for count in counts:
        free[free.index(min(free))] += count * KERNEL_SECONDS
    limits = {stage.name: stage.seconds for stage in STAGES}
    assert max(free) <= 0.9 * limits["kernels"]
    assert sum(counts) * KERNEL_SECONDS / CORES <= limits["kernels"]
    assert all(limit > 2 * IMPORT_SECONDS for limit in limits.values())
