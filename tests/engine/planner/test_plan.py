"""Memory and speed of whole deployments, and the command that prints them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.cli.main import main
from llmopt.engine.planner.cache_size import num_blocks_for
from llmopt.engine.planner.catalog import find_model
from llmopt.engine.planner.devices import Device, find_device
from llmopt.engine.planner.memory import Deployment, Reserve
from llmopt.engine.planner.plan import DeploymentPlan, make_plan
from llmopt.engine.planner.plan_json import plan_as_dict
from llmopt.engine.planner.setup import PlannedWorkload, Setup
from llmopt.engine.planner.weights import BF16, recipe_for

GIB = 2**30


def plan_70b(
    context: int = 131072, sequences: int = 1, kv: str = "bf16", ranks: int | None = None
) -> DeploymentPlan:
    workload = PlannedWorkload(context, sequences, kv)
    return make_plan(
        find_model("llama-70b"), BF16, workload, [find_device("h100")], Setup(tp=ranks)
    )


@pytest.mark.parametrize(
    ("ranks", "kv", "sequences"),
    [(2, "bf16", 0), (4, "bf16", 3), (4, "fp8", 6), (8, "bf16", 9), (8, "fp8", 19)],
)
def test_llama_70b_at_128k_on_h100(ranks: int, kv: str, sequences: int) -> None:
    (device,) = plan_70b(kv=kv, ranks=ranks).devices
    assert device.max_concurrent_sequences == sequences
    assert device.fits == (sequences > 0)


def test_the_solver_takes_as_few_gpus_as_hold_it() -> None:
    (one,) = plan_70b().devices
    (four,) = plan_70b(sequences=4).devices
    (many,) = plan_70b(sequences=1000).devices
    assert (one.deployment.tp, one.gpus_needed, four.gpus_needed) == (4, 4, 8)
    assert (many.deployment.gpus, many.gpus_needed, many.fits, many.decode) == (
        8,
        None,
        False,
        None,
    )


def test_sequences_and_context_agree() -> None:
    """The longest context for n sequences holds n, and one block more does not."""
    (device,) = plan_70b(sequences=9, ranks=8).devices
    assert device.max_context == 131072
    short = plan_70b(sequences=30, ranks=8).devices[0].max_context
    assert plan_70b(short, 30, ranks=8).devices[0].max_concurrent_sequences == 30
    assert plan_70b(short + 1, 30, ranks=8).devices[0].max_concurrent_sequences == 29


def test_memory_adds_up() -> None:
    (device,) = plan_70b().devices
    parts = device.weight_bytes + device.activation_bytes + device.overhead_bytes
    assert parts + device.kv_budget_bytes == int(0.9 * device.device.memory_bytes)
    assert device.kv_bytes * device.max_concurrent_sequences <= device.kv_budget_bytes


def test_weights_that_do_not_fit_are_named() -> None:
    plan = make_plan(
        find_model("llama-405b"), BF16, PlannedWorkload(4096), [find_device("4090")], Setup(tp=8)
    )
    assert plan.devices[0].binding_constraint == "weights"
    assert plan.devices[0].max_context == 0


def test_the_sampler_or_the_chunk_sets_the_activation_peak() -> None:
    """Published start-ups: 4.75 GiB for a vocabulary of 128,256; 2.06 GiB for one step of 20,000."""
    deployment = Deployment(find_model("llama-3.1-8b").shape, BF16)
    assert deployment.activation_bytes(Reserve()) / GIB == pytest.approx(4.75, abs=0.01)
    one_step = Reserve(chunk_tokens=20_000, max_num_seqs=1)
    assert deployment.activation_bytes(one_step) / GIB == pytest.approx(2.06, abs=0.01)


def test_blocks_span_all_layers() -> None:
    shape = find_model("stories3M").shape
    block = 16 * shape.kv_bytes_per_token(4)
    assert num_blocks_for(10 * block, shape, 16, 4) == 10
    assert num_blocks_for(10 * block - 1, shape, 16, 4) == 9


def test_windows_are_not_credited_to_this_engine() -> None:
    model = find_model("gemma-3-27b")
    answer = plan_as_dict(make_plan(model, BF16, PlannedWorkload(131072), [find_device("b200")]))
    assert answer["kv_bytes_total"] / GIB == pytest.approx(10.406, abs=1e-3)
    assert answer["engines"]["llmopt"]["kv_bytes"] == answer["kv_bytes_total_no_window"] == 62 * GIB
    assert answer["gpus"][0]["kv_bytes_per_rank"] * answer["tp"] == 62 * GIB
    assert answer["kv_bytes_per_rank"] * answer["tp"] == answer["kv_bytes_total"]


def test_a_context_beyond_the_model_warns_with_the_scaling_that_it_needs() -> None:
    def warnings(name: str, context: int) -> tuple[str, ...]:
        return make_plan(
            find_model(name), BF16, PlannedWorkload(context), [find_device("h100")]
        ).warnings

    (warning,) = warnings("llama-2-7b", 8192)
    assert "past the 4096 tokens" in warning
    assert '"factor": 2.0, "original_max_position_embeddings": 4096' in warning
    assert '"factor": 3.2,' in warnings("qwen3-8b", 131072)[0]
    assert "learned, so no rope scaling" in warnings("gpt2", 2048)[0]
    assert warnings("llama-2-7b", 4096) == ()


def test_an_a100_has_vllms_smaller_defaults() -> None:
    """`EngineArgs.get_batch_defaults`: 2,048 tokens and 256 sequences, though it has 80 GB."""
    weights = 16 << 30
    for engine, name, expected in (
        ("vllm", "a100", (2048, 256)),
        ("vllm", "h100", (8192, 1024)),
        ("llmopt", "a100", (8192, 1024)),
    ):
        reserve = Setup(engine=engine).reserve(find_device(name), weights)
        assert (reserve.chunk_tokens, reserve.max_num_seqs) == expected


def test_the_fp8_cache_of_sparse_latents_is_another_in_vllm() -> None:
    def warned(name: str, kv_dtype: str, engine: str) -> bool:
        workload = PlannedWorkload(4096, kv_dtype=kv_dtype)
        setup = Setup(engine=engine)
        plan = make_plan(find_model(name), BF16, workload, [find_device("h200")], setup=setup)
        return any("as fp8_ds_mla" in text for text in plan.warnings)

    assert warned("deepseek-v3.2", "fp8", "vllm")
    assert not warned("deepseek-v3.2", "fp8_ds_mla", "vllm")
    assert not warned("deepseek-v3.2", "fp8", "sglang")
    assert not warned("deepseek-v3", "fp8", "vllm")


@pytest.mark.parametrize(
    "changes", [{"sequences": 0}, {"context": 0}, {"kv_dtype": "int3"}, {"block_size": 0}]
)
def test_nonsense_workloads_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        PlannedWorkload(**{"context": 16, **changes})


def test_speed_follows_bytes_and_bandwidth() -> None:
    model = find_model("llama-3.1-8b")
    h100 = find_device("h100")
    (device,) = make_plan(model, BF16, PlannedWorkload(4096), [h100], Setup(tp=1)).devices
    assert device.decode and device.decode_bound and device.prefill and device.prefill_bound
    read = 2 * (8_030_261_248 - 128256 * 4096) + 4096 * 131_072
    assert device.decode_bound.seconds == pytest.approx(read / 3350e9)
    assert (device.decode.bound, device.prefill.bound) == ("bandwidth", "compute")
    assert device.decode.seconds > device.decode_bound.seconds
    faster = replace(h100, bandwidth=6700e9)
    (halved,) = make_plan(model, BF16, PlannedWorkload(4096), [faster], Setup(tp=1)).devices
    assert halved.decode_bound
    assert halved.decode_bound.seconds == pytest.approx(device.decode_bound.seconds / 2)


def test_four_bit_weights_speed_up_decode_and_slow_prefill_down() -> None:
    """They are widened for the tensor cores: one row of decode reads less, a full chunk computes more."""
    model, h100 = find_model("llama-3.1-8b"), find_device("h100")
    plain = make_plan(model, BF16, PlannedWorkload(4096), [h100], Setup(tp=1)).devices[0]
    packed = make_plan(
        model, recipe_for("int4", model.shape), PlannedWorkload(4096), [h100], Setup(tp=1)
    ).devices[0]
    assert plain.decode and packed.decode and plain.prefill and packed.prefill
    assert packed.decode.seconds < plain.decode.seconds
    assert plain.prefill.seconds < packed.prefill.seconds < 1.6 * plain.prefill.seconds


def test_two_gpus_are_less_than_twice_as_fast() -> None:
    one, two = (
        make_plan(
            find_model("llama-8b"), BF16, PlannedWorkload(4096), [find_device("h100")], Setup(tp=n)
        ).devices[0]
        for n in (1, 2)
    )
    assert one.decode and two.decode
    assert one.decode.seconds / 2 < two.decode.seconds


def test_a_card_known_by_memory_alone_has_no_speed() -> None:
    card = Device("own", 80 * GIB)
    (device,) = make_plan(find_model("llama-8b"), BF16, PlannedWorkload(4096), [card]).devices
    assert device.fits
    assert device.decode is None
    assert device.tokens_per_second is None


CONTRACT = [
    "model",
    "param_count",
    "active_param_count",
    "weight_bytes",
    "kv_dtype",
    "context",
    "batch",
    "tp",
    "block_size",
    "kv_bytes_per_token",
    "kv_bytes_per_extra_token",
    "kv_bytes_total",
    "kv_bytes_total_no_window",
    "kv_bytes_paged",
    "kv_bytes_paged_no_window",
    "kv_bytes_per_rank",
    "kv_bytes_all_ranks",
    "engines",
    "fits",
    "max_concurrent_sequences",
    "max_context",
    "gpus_needed",
    "binding_constraint",
    "ttft_ms",
    "tpot_ms",
    "throughput_tokens_per_s",
]


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["kv-plan", *arguments])
    return stop.value.code  # type: ignore[return-value]


def test_command_prints_json_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--model", "llama-70b", "--ctx", "128k", "--json") == 0
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert [key for key in CONTRACT if key not in answer] == []
    assert answer["model"] == "llama-3.1-70b"
    assert answer["kv_bytes_total"] == 40 * GIB
    assert answer["weight_bytes"] == 2 * 70_553_706_496
    assert err == ""


def test_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--model", "llama-70b", "--ctx", "128k") == 0
    out, _ = capsys.readouterr()
    for words in ("131.42 GiB", "40.00 GiB", "320 KiB", "Llama-2-70B stops at 4,096", "H100 SXM"):
        assert words in " ".join(out.split())
    assert "…" not in out  # nothing is cut off at 80 columns


def test_options_reach_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--weights int4 --group-size 64 --kv-dtype fp8 --tp 2 --concurrency 4 --block-size 32"
    options += " --engine vllm"
    assert (
        call("--model", "llama-8b", "--ctx", "1000", "--gpu", "l4", "--json", *options.split()) == 0
    )
    answer = json.loads(capsys.readouterr().out)
    assert (answer["gpu"], answer["tp"], answer["batch"], answer["block_size"]) == ("L4", 2, 4, 32)
    assert answer["engine"] == "vllm"
    assert answer["weights"] == "int4 g64 asymmetric"
    assert answer["kv_bytes_total"] == 4 * 1000 * 65536
    assert answer["kv_bytes_paged"] == 4 * 1024 * 65536


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "lama-70b"], "close: llama-70b"),
        (["--model", "llama-8b", "--engine", "tgi"], "no engine 'tgi'"),
        (["--model", "llama-8b", "--pp", "33"], "32 layers"),
        (["--model", "llama-8b", "--tp", "0"], "--tp 0"),
        (["--model", "llama-8b", "--gpu-hour-price", "-1"], "--gpu-hour-price -1"),
        (["--model", "llama-8b", "--gpu-memory-utilization", "1.5"], "in (0, 1]"),
        (["--model", "llama-8b", "--measured", "nowhere.json"], "nowhere.json is missing"),
        (["--model", "llama-8b", "--gpu", "h101"], "no GPU 'h101'"),
        (["--model", "llama-8b", "--ctx", "lots"], "number of tokens"),
        (["--model", "llama-8b", "--gpu-memory", "80"], "unit"),
        (["--model", "phi-4", "--tp", "4"], "do not divide"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.count("\n") == 1


def test_importing_the_planner_loads_no_torch() -> None:
    script = (
        "import sys, llmopt.engine.planner.plan, llmopt.engine.planner.speed;"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
