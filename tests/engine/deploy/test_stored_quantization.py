"""ModelOpt's checkpoints in each engine's words, or refused with the reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.cli.main import main
from llmopt.engine.config.plan_options import PlanRequest
from llmopt.engine.deploy.quantization_words import SGLANG_METHODS, VLLM_METHODS
from llmopt.engine.planner.catalog import StoredQuantization, find_model, stored_quantization_of
from llmopt.engine.planner.plan_request import plan_for
from llmopt.quant.base.scheme import Scheme
from llmopt.quant.formats.modelopt import ALGORITHMS, MIXED, ModelOptFormat, hf_quant_config
from llmopt.recipes import MODELS

from ...support.deployments import deployment

CONFIG = json.loads((MODELS / "stories3M" / "config.json").read_text())
LAYERS: tuple[str, ...] = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj")


def checkpoint(
    folder: Path, *algorithms: str, kv_cache: str | None = None, files: str = "both"
) -> Path:
    """A folder with the two configs that `quantize --format modelopt` writes, the algorithms layer by layer."""
    schemes: dict[str, Scheme] = dict(
        zip(LAYERS, (ALGORITHMS[each] for each in algorithms), strict=False)
    )
    config = ModelOptFormat().full_config(schemes, ["lm_head"], kv_cache)
    folder.mkdir()
    stored = (
        {**CONFIG, "quantization_config": config} if files in ("both", "config.json") else CONFIG
    )
    (folder / "config.json").write_text(json.dumps(stored))
    if files != "config.json":
        (folder / "hf_quant_config.json").write_text(json.dumps(hf_quant_config(config)))
    return folder


def stored_in(folder: Path) -> StoredQuantization | None:
    return stored_quantization_of(find_model(str(folder)))


def words(engine: str, stored: StoredQuantization | None, gpu: str = "B200") -> list[str]:
    """The command line for a plan with the KV cache that the checkpoint has scales for."""
    kv_dtype = stored.kv_dtype if stored else None
    ask = {"model": "llama-3.2-1b", "sequences": 4, "gpus": (gpu,), "kv_dtype": kv_dtype}
    return list(deployment(ask, stored, engine=engine, key_secret=None).command)


def after(command: list[str], option: str) -> str | None:
    return command[command.index(option) + 1] if option in command else None


@pytest.mark.parametrize("files", ["both", "hf_quant_config.json"])
@pytest.mark.parametrize(
    ("algorithm", "vllm", "sglang"),
    [
        ("FP8", "modelopt", "modelopt_fp8"),
        ("NVFP4", "modelopt_fp4", "modelopt_fp4"),
    ],
)
def test_the_checkpoint_says_the_options(
    algorithm: str, vllm: str, sglang: str, files: str, tmp_path: Path
) -> None:
    stored = stored_in(checkpoint(tmp_path / "m", algorithm, kv_cache="fp8", files=files))
    assert stored is not None and (stored.algorithm, stored.kv_dtype) == (algorithm, "fp8")
    command = words("vllm", stored)
    assert (after(command, "--quantization"), after(command, "--kv-cache-dtype")) == (vllm, "fp8")
    command = words("sglang", stored)
    assert after(command, "--quantization") == sglang
    assert after(command, "--kv-cache-dtype") == "fp8_e4m3"
    # TensorRT-LLM finds both in hf_quant_config.json.
    command = words("trtllm", stored)
    assert command[:2] == ["trtllm-serve", "org/model"]
    assert not {"--quantization", "--kv-cache-dtype"} & set(command)


def test_a_plain_checkpoint_needs_no_option() -> None:
    assert stored_in(MODELS / "stories3M") is None
    for engine in ("vllm", "sglang", "trtllm"):
        assert not {"--quantization", "--kv-cache-dtype"} & set(words(engine, None))


def test_mixed_checkpoints(tmp_path: Path) -> None:
    stored = stored_in(checkpoint(tmp_path / "a", "NVFP4", "FP8"))
    assert stored is not None and stored.algorithm == MIXED
    assert stored.layer_algorithms == {"NVFP4", "FP8"}
    assert after(words("vllm", stored), "--quantization") == "modelopt_mixed"
    assert after(words("sglang", stored), "--quantization") == "modelopt_mixed"
    words("trtllm", stored)
    without = stored_in(checkpoint(tmp_path / "b", "FP8", "FP8_PB_WO"))
    with pytest.raises(BadInput, match="mixed checkpoints with NVFP4 layers alone"):
        words("sglang", without)
    with pytest.raises(BadInput, match="it has no FP8_PB_WO"):
        words("trtllm", without)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm", "llmopt"])
@pytest.mark.parametrize("files", ["config.json", "hf_quant_config.json"])
def test_a_plan_has_the_cache_of_the_checkpoint(engine: str, files: str, tmp_path: Path) -> None:
    """NVIDIA's checkpoints with KV scales are served by an fp8 cache without an option, but by our engine."""
    folder = checkpoint(tmp_path / "model", "FP8", kv_cache="fp8", files=files)
    ask = PlanRequest(model=str(folder), gpus=("l40s",), engine=engine)
    assert plan_for(ask).workload.kv_dtype == ("bf16" if engine == "llmopt" else "fp8")
    assert plan_for(replace(ask, kv_dtype="bf16")).workload.kv_dtype == "bf16"


@pytest.mark.parametrize(
    ("engine", "algorithm", "gpu", "reason"),
    [
        ("sglang", "FP8_PB_WO", "H100 SXM", "it loads FP8, NVFP4"),
        ("sglang", "FP8_PER_CHANNEL_PER_TOKEN", "H100 SXM", "it loads FP8, NVFP4"),
        ("sglang", "FP8", "A100 80GB SXM", "on A100 80GB SXM: .* no CUTLASS FP8"),
        ("trtllm", "FP8", "A100 80GB SXM", "on A100 80GB SXM: .* no FP8 GEMM"),
        ("trtllm", "NVFP4", "H100 SXM", "on H100 SXM: .* no NVFP4 GEMM"),
        ("trtllm", "W4A16_NVFP4", "B200", "it has no W4A16_NVFP4"),
        ("trtllm", "FP8_PB_WO", "H100 SXM", "it has no FP8_PB_WO, only FP8"),
    ],
)
def test_what_an_engine_cannot_load_is_refused(
    engine: str, algorithm: str, gpu: str, reason: str, tmp_path: Path
) -> None:
    stored = stored_in(checkpoint(tmp_path / "m", algorithm))
    with pytest.raises(BadInput, match=f"--engine {engine} cannot load .* {algorithm}: {reason}"):
        words(engine, stored, gpu)
    words("vllm", stored, gpu)


def test_tensorrt_llm_needs_the_file_that_it_reads(tmp_path: Path) -> None:
    stored = stored_in(checkpoint(tmp_path / "m", "FP8", files="config.json"))
    with pytest.raises(BadInput, match=r"hf_quant_config\.json, which is missing"):
        words("trtllm", stored)
    assert after(words("sglang", stored), "--quantization") == "modelopt_fp8"


FP8_GROUP = {
    "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "input_activations": {"num_bits": 8, "type": "float", "strategy": "token"},
}


@pytest.mark.parametrize(
    ("config", "is_loaded"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, True),
        ({"quant_method": "fp8"}, False),
        ({"quant_method": "mxfp4"}, True),
        ({"quant_method": "awq", "bits": 4}, False),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": FP8_GROUP}}, True),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {
                        name: {**fields, "type": "int"} for name, fields in FP8_GROUP.items()
                    }
                },
            },
            False,  # int8 would be read as fp8
        ),
    ],
)
def test_other_formats_in_tensorrt_llm(
    config: dict[str, Any], is_loaded: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": config}))
    stored = stored_in(tmp_path)
    gpu = "B200" if config["quant_method"] == "mxfp4" else "H100 SXM"
    command = {*words("vllm", stored, gpu), *words("sglang", stored, gpu)}
    assert "--quantization" not in command
    if is_loaded:
        words("trtllm", stored, gpu)
    else:
        with pytest.raises(BadInput, match="--format modelopt"):
            words("trtllm", stored, gpu)


def test_every_algorithm_that_we_write_has_an_answer_of_vllm() -> None:
    assert {*ALGORITHMS, MIXED} <= set(VLLM_METHODS)
    assert set(SGLANG_METHODS) & {*ALGORITHMS} == {"FP8", "NVFP4", "W4A16_NVFP4"}


def run(capfd: pytest.CaptureFixture[str], *given: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(["deploy", *given])
    out, err = capfd.readouterr()
    return stopped.value.code, out, err


def test_the_command_reads_the_checkpoint_or_ends_with_2(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoint(tmp_path / "m", "FP8", kv_cache="fp8")
    place = ("--ctx", "256", "--output", str(tmp_path / "out"))
    code, out, err = run(capfd, str(folder), "--engine", "sglang", *place, "--json")
    assert code == 0, err
    written = json.loads(out)
    assert "the checkpoint is in modelopt FP8, KV cache fp8" in written["plan"]
    assert "- modelopt_fp8" in written["files"]["kubernetes/deployment.yaml"]
    for given, named in (
        ((str(folder), "--engine", "trtllm", "--gpu", "a100"), "no FP8 GEMM (8.9 and newer)"),
        (
            (str(folder), "--engine", "trtllm", "--kv-dtype", "bf16"),
            "the checkpoint, which has fp8",
        ),
        ((str(folder), "--engine", "orca"), "--engine orca: choose"),
        ((str(tmp_path / "nowhere"), "--engine", "trtllm"), "no model at"),
    ):
        code, out, err = run(capfd, *given, "--ctx", "256", "--output", str(tmp_path / "none"))
        assert (code, out, err.count("\n")) == (2, "", 1) and named in err, err
    (folder / "hf_quant_config.json").write_text("[")
    code, _, err = run(capfd, str(folder), "--engine", "trtllm", *place)
    assert (code, err.count("\n")) == (2, 1) and "hf_quant_config.json" in err
    assert not (tmp_path / "none").exists()
