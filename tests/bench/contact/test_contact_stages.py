"""Stages of a contact, on the pretended card and on a CPU: what they find, and machines that they refuse."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from llmopt.bench.contact import models, stages
from llmopt.bench.contact.models import (
    FULL,
    MODELS,
    SMALL,
    Model,
    World,
    decoding,
    largest,
    planned_seconds,
)
from llmopt.bench.contact.record import STAGES, Finding
from llmopt.bench.contact.run import Refused
from llmopt.bench.contact.stages import CASES, INT4, first_difference
from llmopt.bench.machine.roofline import copy_bandwidth
from llmopt.engine.kernels.common.verdicts import VARIABLE
from llmopt.engine.planner.devices import find_device

from ...support.pretended_cuda.card import Card
from ...support.pretended_cuda.command import measuring_nothing
from ...support.pretended_cuda.runtime import pretended_cuda


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither kernels are tried nor roofs measured."""
    monkeypatch.setenv(VARIABLE, "off")
    with measuring_nothing():
        yield


def found(stage: str, card: Card, folder: Path) -> list[Finding]:
    """Findings of a stage on the card, which computes nothing; what its cases raise is raised."""
    with pretended_cuda(card):
        cases = CASES[stage](World("cuda", SMALL, folder))
        return [finding for case in cases for finding in case.run()]


def verdicts(findings: list[Finding]) -> list[bool | None]:
    return [each.met for each in findings]


def test_every_stage_has_cases() -> None:
    assert [*CASES] == [stage.name for stage in STAGES]


@pytest.mark.whole
def test_graphs_and_a_second_card_give_the_tokens_of_eager_steps(tmp_path: Path) -> None:
    told = found("graphs", Card(), tmp_path)
    assert verdicts(told) == [True] * 4
    assert told[1].seen == told[1].expected.removeprefix("all of ") != "0"
    with pretended_cuda(Card(count=2)):
        first, *_ = stages.two_cards(World("cuda", SMALL, tmp_path))
        assert first.name == "cuda:1" and verdicts([*first.run()]) == [True]


@pytest.mark.whole
def test_a_card_on_which_capturing_fails_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr("llmopt.engine.execution.graph_setting.CudaGraph", refuse)
    told = found("graphs", Card(), tmp_path)
    assert verdicts(told) == [True, False] * 2 and told[1].seen == "0"


def test_tokens_may_differ_behind_a_near_tie_alone() -> None:
    eager = {"0": [(5, 2.0), (6, 0.01), (7, 2.0)]}

    def answers(*tokens: int) -> dict[str, list[tuple[int, float]]]:
        return {"0": [(token, 0.0) for token in tokens]}

    assert first_difference(eager, answers(5, 6, 7)) is None
    assert first_difference(eager, answers(5, 9, 1)) is None
    assert (
        first_difference(eager, answers(5, 6, 1)) == "token 2 of prompt 0 is 1, not 7 by 2.00 nats"
    )


@pytest.mark.whole
def test_two_ranks_and_an_all_reduce_are_right(tmp_path: Path) -> None:
    """Two processes of a CPU, by gloo; NCCL is the same code with another name."""
    cases = [*stages.two_cards(World("cpu", SMALL, tmp_path))]
    assert [case.name for case in cases] == ["two ranks", "all-reduce of 4 KiB"]
    assert [verdicts([*case.run()]) for case in cases] == [[True]] * 2


def test_times_are_held_against_the_plan_of_the_card(tmp_path: Path) -> None:
    """A step that takes the planned time holds, one of many times that does not."""
    with pretended_cuda(Card()):
        model = Model(World("cuda", SMALL, tmp_path), "llama-3.1-8b", INT4)
        model._world = World("cuda", FULL, tmp_path)
        assert model._world.planned_device is find_device("H100 SXM")
        assert model.weights == "int4 g128 sym"
        planned, most = planned_seconds(
            model._deployment, find_device("H100 SXM"), "llama-3.1-8b", "decode", 32, 4096
        )
        assert 0 < planned < most
        told = [model.finding("decode", 32, 4096, [planned * factor]) for factor in (1, 9)]
        prefill = model.finding("prefill", 1, 8192, [9.0])
    assert verdicts(told) == [True, False] and prefill.met is False
    assert told[0].numbers["expected_seconds"] == planned
    assert told[0].expected == f"{1e3 * planned:.2f} ms, at most {1e3 * most:.2f}"


def test_a_model_is_measured_alone_and_with_many_sequences(tmp_path: Path) -> None:
    told = found("llama-8b", Card(), tmp_path)
    assert [each.numbers["phase"] for each in told if each.numbers] == [
        "decode", "decode", "prefill", "sampled decode", "sampled decode",
    ]  # fmt: skip
    assert {each.numbers["batch"] for each in told if each.numbers} == {1, 3}
    assert [each.seen for each in told if each.what == "kernel _attend"] == [
        "1.0 µs, 1.0 launches a step"
    ] * 2


@pytest.mark.whole
@pytest.mark.parametrize("stage", ["experts", "hybrid", "llama-8b-int4", "llama-8b-fp8"])
def test_other_shapes_and_weights_are_measured(stage: str, tmp_path: Path) -> None:
    phases = [each.numbers["phase"] for each in found(stage, Card(), tmp_path)]
    assert phases == ["decode", "decode", "prefill"]


def test_the_same_model_runs_in_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a stand-in of its documented offline interface."""
    made: list[Any] = []

    class LLM:
        def __init__(self, **options: Any) -> None:
            assert Path(options["model"], "config.json").exists()
            made.append(options["max_model_len"])

        def generate(self, prompts: list[Any], params: Any, use_tqdm: bool) -> None:
            made.append((len(prompts), len(prompts[0]["prompt_token_ids"]), params.max_tokens))

    module = SimpleNamespace(LLM=LLM, SamplingParams=lambda **given: SimpleNamespace(**given))
    monkeypatch.setitem(sys.modules, "vllm", cast(Any, module))
    told = found("vllm", Card(), tmp_path)
    assert [each.numbers["engine"] for each in told] == ["vLLM"] * 2
    assert made == [32, (1, 8, 2), (1, 8, 1), (1, 8, 3), (3, 24, 2), (3, 24, 1), (3, 24, 3)]


def refusal(card: Card, folder: Path) -> str:
    with pytest.raises(Refused) as raised:
        found("machine", card, folder)
    return str(raised.value)


def test_an_old_card_and_one_in_use_are_refused_with_what_to_do(tmp_path: Path) -> None:
    told = found("machine", Card(), tmp_path)
    assert {each.met for each in told} == {True, None}
    assert [each.numbers["rate"] for each in told if each.numbers] == [3e12, 8e14]
    old = refusal(Card(name="Tesla T4", capability=(7, 5)), tmp_path)
    assert "Tesla T4 has compute capability 7.5, and 8.0 is needed" in old
    assert "CUDA_VISIBLE_DEVICES" in old
    busy = Card(name="NVIDIA L4", memory_bytes=24 << 30)
    busy.held[0] = busy.memory_bytes // 2  # of another process
    said = refusal(busy, tmp_path)
    assert "NVIDIA L4 is in use: 12.0 of 24.0 GiB are free" in said and "nvidia-smi" in said


def test_why_there_is_no_card_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_old() -> bool:
        warnings.warn(
            "The NVIDIA driver on your system is too old (found 11040). Update", stacklevel=1
        )
        return False

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    world = World("cuda", FULL, tmp_path)
    with pytest.raises(
        Refused, match=r"this torch .* sees no CUDA device: it is built without CUDA: .*small"
    ):
        stages.refuse_machine(world)
    monkeypatch.setattr(torch.cuda, "is_available", too_old)
    with pytest.raises(
        Refused, match=r"device: The NVIDIA driver on your system is too old \(found 11040"
    ):
        stages.refuse_machine(world)
    with pytest.raises(Refused, match="the real shapes need a GPU; add --small"):
        stages.refuse_machine(World("cpu", FULL, tmp_path))


def test_what_torch_or_triton_lack_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "refuses_triton", lambda _: "Triton is not installed")
    told = {each.what: each for each in found("machine", Card(), tmp_path)}
    lacking = told["a Triton kernel"]
    assert (lacking.seen, lacking.met) == ("Triton is not installed", False)


def test_the_model_is_the_largest_that_the_card_has_room_for() -> None:
    alone, many = FULL.decode
    chosen = {gib: largest(FULL, gib << 30) for gib in (79, 24, 16, 2)}
    assert chosen[79] == (MODELS[0], [alone, many])
    assert chosen[24] == (MODELS[0], [alone, (8, 4096)])
    assert chosen[16] is not None and chosen[16][0] == MODELS[1]
    assert chosen[2] is None


@pytest.mark.whole
def test_on_a_small_card_a_smaller_model_decodes_and_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "largest", lambda *_: (MODELS[1], [(1, 8), (1, 24)]))
    told, *_ = found("llama-8b-fp8", Card(), tmp_path)
    assert told.expected == f"{MODELS[0]}, 3 sequences" and told.met is None
    assert told.seen.startswith(f"{MODELS[1]}, 1 sequences, in 8")
    monkeypatch.setattr(stages, "largest", lambda *_: None)
    (none,) = found("llama-8b", Card(), tmp_path)
    assert none.seen.startswith("none, in 8")


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
    with (
        pytest.raises(RuntimeError, match="1 of 3 sequences do not fit into the KV cache"),
        decoding(engine, 3, 8, 2),
    ):
        pass
    with decoding(engine, 2, 8, 2) as step:
        assert step() >= 0


def test_copying_is_measured_on_a_card_of_any_size() -> None:
    with pretended_cuda(Card(memory_bytes=32 << 20)):
        assert copy_bandwidth(torch.device("cuda")) > 0


def test_a_copy_counts_bytes_read_and_written() -> None:
    assert copy_bandwidth(torch.device("cpu")) > 1e8


@pytest.mark.whole
def test_a_layer_is_quantized_by_every_method(tmp_path: Path) -> None:
    cases = [*stages.quantizers(World("cpu", SMALL, tmp_path))]
    assert len(cases) > 10
    assert all(verdicts([*case.run()]) == [True] for case in cases)


def test_a_card_that_the_planner_does_not_know_is_planned_by_its_roofs(tmp_path: Path) -> None:
    with pretended_cuda(Card(name="NVIDIA L9")):
        device = World("cuda", FULL, tmp_path).planned_device
    assert (device.name, device.bandwidth, device.peaks) == ("NVIDIA L9", 3e12, {"bf16": 8e14})
    assert models.SMALL.config
