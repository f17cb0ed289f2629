"""Weights in RAM: sizes, step times, placements, options, and the published set-ups."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from llmopt.base.errors import BadInput
from llmopt.engine.planner.catalog import find_model
from llmopt.engine.planner.devices import find_device
from llmopt.engine.planner.engine_rules import engine_rule
from llmopt.engine.planner.expected import step_model
from llmopt.engine.planner.memory import Deployment
from llmopt.engine.planner.offload import Host, Reached, parse_host, placements
from llmopt.engine.planner.setup import Setup
from llmopt.engine.planner.step_model import StepModel, StepWork

from tools.offload_error import placed

from ...support.plan_command import answer, call

GIB = 2**30
HOST = Host(64 * GIB, 89.6e9)
GPT = find_model("gpt-oss-120b")
EXPERT_BYTES = (3 * 2880 * 2880 * 17) // 32
"""Bytes of an expert of gpt-oss in MXFP4: 4 bits, and an exponent of 8 bits for 32 values."""


def steps_of(flag: str, batch: int = 512, host: Host = HOST) -> StepModel:
    recipe, rule = GPT.as_stored(), engine_rule("llama.cpp")
    offload = placed(GPT.shape, recipe, host, batch, flag)
    deployment = Deployment(GPT.shape, recipe, engine=rule, offload=offload)
    return step_model(deployment, find_device("rtx-4090"), Setup(engine="llama.cpp"), GPT.name)


def in_ram(steps: StepModel, work: StepWork) -> float:
    return {name: seconds for name, seconds, _ in steps.operators(work)}["weights in RAM"]


def test_experts_leave_the_gpu_layer_by_layer() -> None:
    recipe = GPT.as_stored()
    base, more = (placed(GPT.shape, recipe, HOST, 512, f"--n-cpu-moe {n}") for n in (25, 26))
    biases = 128 * 2 * (2 * 2880 + 2880)
    assert more.weight_bytes - base.weight_bytes == pytest.approx(
        128 * EXPERT_BYTES + biases, abs=2
    )
    whole = Deployment(GPT.shape, recipe, engine=engine_rule("llama.cpp"))
    rest = replace(whole, offload=more)
    assert whole.weight_bytes - rest.weight_bytes == more.weight_bytes
    assert rest.kv_bytes(8192) == whole.kv_bytes(8192)


def test_a_token_reads_its_experts_at_the_speed_of_ram() -> None:
    reached = Reached(ram=0.5, layer_seconds=1e-3)
    steps = steps_of("--n-cpu-moe 26", host=replace(HOST, reached=reached))
    read = 26 * 4 * (EXPERT_BYTES + 2 * 3 * 2880)
    expected = read / (0.5 * 89.6e9) + 26 * 1e-3
    assert in_ram(steps, StepWork.of(1, 1000)) == pytest.approx(expected, rel=1e-3)


def test_a_prompt_is_copied_once_for_each_physical_batch() -> None:
    work = StepWork.of(0, 0, 4096)
    few, many = (in_ram(steps_of("--n-cpu-moe 26", batch), work) for batch in (4096, 512))
    assert many == pytest.approx(8 * few, rel=1e-3)
    copied = 26 * 128 * EXPERT_BYTES / (HOST.pcie_bandwidth * Reached().pcie)
    assert few == pytest.approx(copied, rel=0.01)
    # A batch below 32 tokens is computed by the processor, which reads the experts that it needs.
    short = in_ram(steps_of("--n-cpu-moe 26"), StepWork.of(0, 0, 31))
    read = 26 * 128 * EXPERT_BYTES * (1 - (1 - 4 / 128) ** 31)
    seconds = read / (HOST.ram_bandwidth * Reached().ram) + 26 * Reached().layer_seconds
    assert short == pytest.approx(seconds, rel=0.01)


def test_whole_layers_take_their_cache_along() -> None:
    model = find_model("llama-70b")
    recipe, rule = model.as_stored(), engine_rule("llama.cpp")
    offload = placed(model.shape, recipe, HOST, 512, "-ngl 41")
    assert (offload.whole_layers, offload.waits) == (40, 40)
    whole = Deployment(model.shape, recipe, engine=rule)
    half = replace(whole, offload=offload)
    assert half.kv_bytes(8192) == whole.kv_bytes(8192) / 2


def test_vllm_reads_what_it_offloads_over_pcie_in_every_step() -> None:
    model = find_model("llama-8b")
    recipe, rule = model.as_stored(), engine_rule("vllm")
    (four,) = [
        offload
        for offload in placements(model.shape, recipe, HOST, "vllm", 2048)
        if offload.flag == "--cpu-offload-gb 4"
    ]
    deployment = Deployment(model.shape, recipe, engine=rule, offload=four)
    steps = step_model(deployment, find_device("rtx-4090"), Setup(engine="vllm"), model.name)
    seconds = in_ram(steps, StepWork.of(1, 1000)) / steps.parameters.tpot_factor
    assert seconds == pytest.approx(4 * GIB / (32e9 * Reached().pcie), rel=0.01)


def test_gpt_oss_runs_on_one_4090_with_64_gb(capsys: pytest.CaptureFixture[str]) -> None:
    """Published: 32.3 tokens/s on an RTX 3090 with `--n-cpu-moe 26` (tools/offload_setups.json)."""
    question = ("gpt-oss-120b", "--gpu", "rtx-4090", "--ctx", "32k", "--ram", "64GB")
    found = answer(capsys, *question)
    assert (found["engine"], found["tp"], found["pp"], found["fits"]) == ("llama.cpp", 1, 1, True)
    offload = found["offload"]
    assert offload["flag"].startswith("-ngl 99 --n-cpu-moe 2")
    assert offload["weight_bytes"] + found["weight_bytes_per_rank"] == found["weight_bytes"]
    assert 22 < found["throughput_tokens_per_s"] < 43
    assert call(*question) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "of the weights in 64.00 GiB of RAM" in words
    assert f"llama-server -m MODEL.gguf {offload['flag']} -c 32768 -np 1" in words


def test_vllm_says_that_nothing_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    question = ("llama-8b", "--gpu", "rtx-3060", "--ctx", "4k", "--ram", "32GB")
    assert call(*question, "--engine", "vllm") == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "--max-model-len 4096" in words
    assert "not compared with measurements: none of vllm with weights in RAM is known" in words


def test_a_plan_says_that_ram_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("gpt-oss-120b", "--gpu", "rtx-4090", "--ctx", "32k") == 0
    assert "--ram 64GB plans one RTX 4090" in " ".join(capsys.readouterr().out.split())


def test_too_little_ram_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "gpt-oss-120b", "--gpu", "rtx-4090", "--ctx", "32k", "--ram", "32GB")
    assert not found["fits"]
    assert found["offload"]["weight_bytes"] <= 28 * GIB


@pytest.mark.parametrize("gpu", ["rtx-4090", "rtx-5090", "l4", "a100", "h100", "b200", "mi300x"])
def test_mixtures_in_mxfp4_are_planned_on_each_generation(
    gpu: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(capsys, "gpt-oss-20b", "--gpu", gpu, "--ctx", "8k")["fits"]


@pytest.mark.parametrize(
    ("bandwidth", "pcie", "expected"),
    [
        (None, None, (89.6e9, 32e9)),
        ("ddr5-6000", "5x16", (96e9, 64e9)),
        ("8xDDR4-3200", "gen3 x8", (204.8e9, 8e9)),
        ("60", "25GB/s", (60e9, 25e9)),
    ],
)
def test_speeds_of_ram_and_pcie(
    bandwidth: str | None, pcie: str | None, expected: tuple[float, float]
) -> None:
    host = parse_host("64g", bandwidth, pcie)
    assert host is not None
    assert (host.ram_bytes, host.ram_bandwidth, host.pcie_bandwidth) == (64 * GIB, *expected)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("lots", None, None), "--ram 'lots' is no size of memory: write 64GB"),
        (("0GB", None, None), "--ram '0GB' is no size"),
        (("64GB", "fast", None), "--ram-bandwidth 'fast': write GB/s, or modules"),
        (("64GB", None, "x16"), "--pcie 'x16': write the generation and lanes"),
        ((None, "ddr5-6000", None), "--ram-bandwidth needs --ram"),
    ],
)
def test_what_is_not_understood_is_refused(
    words: tuple[str | None, str | None, str | None], expected: str
) -> None:
    with pytest.raises(BadInput) as refusal:
        parse_host(*words)
    assert str(refusal.value).startswith(expected)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--gpu", "rtx-4090", "--tp", "2"), "--ram plans one GPU"),
        (("--gpu", "rtx-4090", "--engine", "sglang"), "llama.cpp and vllm are planned with"),
        (("--gpu", "cpu"), "--ram: cpu has the host's memory already"),
        (("--gpu", "m4"), "--ram: M4 32GB has the host's memory already"),
    ],
)  # fmt: skip
def test_ram_does_not_go_with_everything(
    options: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("gpt-oss-120b", "--ctx", "8k", "--ram", "64GB", *options) == 2
    assert expected in " ".join(capsys.readouterr().err.split())


def test_the_other_loads_of_a_step_stay() -> None:
    """All experts in RAM take bytes and FLOP from the GPU, not the experts' width."""
    steps = steps_of("--n-cpu-moe 36")
    assert steps.offload is not None
    loads = steps.loads(StepWork.of(1, 1000))._asdict()
    rest, _ = steps.offload.divided(loads, 1)
    changed = {name for name, value in rest.items() if value != loads[name]}
    assert {"expert_bytes", "expert_flops"} <= changed
    assert all(re.fullmatch(r"expert_.*(bytes|flops)", name) for name in changed)
