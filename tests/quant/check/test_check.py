"""Which engines load checkpoints of other tools, with which kernels, on which cards."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from llmopt.base.errors import BadInput
from llmopt.quant.check.check import check
from llmopt.quant.check.engines import Target
from llmopt.quant.check.kernels import (
    CPU,
    Codes,
    Question,
    codes_of_config,
    engine_rules,
    kernel_for,
    kernel_rows,
)
from llmopt.quant.gguf.container import TYPE_SIZES
from llmopt.recipes import MODELS
from safetensors.torch import load_file, save_file

from tools.loader_table import PAGE, page

STRANGERS = Path(__file__).parents[2] / "strangers" / "checkpoints"
HOPPER, ADA, AMPERE, BLACKWELL, CONSUMER = 90, 89, 80, 100, 120


@pytest.mark.parametrize(
    ("name", "engine", "answer"),
    [
        ("ct-int4-0.9.4", "vllm", "loads"),
        ("ct-overlap-0.20.0", "vllm", "does not"),
        ("bnb-nf4-double-0.50.2", "vllm", "does not"),
        ("bnb-nf4-double-0.50.2", "sglang", "loads"),
        ("bnb-nf4-double-0.50.2", "transformers", "loads"),
        ("gptqmodel-v1-7.7.0", "llama.cpp", "does not"),
        ("gptqmodel-v1-asymmetric-7.7.0", "sglang", "does not"),
        ("autoround-native-0.16.1", "llmopt", "does not"),
        ("autoround-native-0.16.1", "vllm", "loads"),
        ("llmcompressor-fp8-dynamic-0.14.0.1", "trtllm", "loads"),
        ("llmcompressor-mixtral-0.14.0.1", "transformers", "does not"),
        ("llmcompressor-mixtral-0.14.0.1", "llmopt", "does not"),
        ("llmcompressor-mixtral-0.14.0.1", "vllm", "loads"),
    ],
)
def test_checkpoints_of_other_tools_load_where_they_do(name: str, engine: str, answer: str) -> None:
    report = check(STRANGERS / name, [engine])
    assert report.answer == answer
    assert report.exit_code == {"loads": 0, "does not": 1}[answer]


def test_a_card_without_the_kernel_is_refused_in_the_words_of_the_engine() -> None:
    folder = STRANGERS / "llmcompressor-w8a8-0.14.0.1"
    (answer,) = check(folder, ["vllm"], Target(gpu="RTX 5090", capability=CONSUMER)).engines
    assert answer.answer == "does not" and "Int8 not supported on SM100" in answer.reason
    (answer,) = check(folder, ["vllm"], Target(gpu="MI300X")).engines
    assert answer.answer == "unknown" and "not for MI300X" in answer.reason


def test_a_processor_has_kernels_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "llmopt.quant.check.kernels.processor_flags", lambda: frozenset({"avx512f"})
    )
    on_cpu = Target(gpu="cpu", capability=CPU)
    (answer,) = check(STRANGERS / "llmcompressor-w4a16-0.14.0.1", ["vllm"], on_cpu).engines
    assert answer.linears[0].kernel.kernel == "CPU WNA16"
    codes = Codes("fp8-block", "", 128, inputs="fp8")
    refused = kernel_for(Question("vllm", "0.33.0", "fp8", codes, CPU))
    assert refused.answer == "does not" and "amx_tile" in refused.reason


def test_a_plain_head_that_the_config_calls_quantized_is_nan_in_transformers(
    tmp_path: Path,
) -> None:
    shutil.copytree(STRANGERS / "llmcompressor-fp8-dynamic-0.14.0.1", tmp_path, dirs_exist_ok=True)
    assert check(tmp_path, ["transformers"]).answer == "loads"
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["ignore"] = []  # as auto-round 0.16.1 writes it for FP8_STATIC
    (tmp_path / "config.json").write_text(json.dumps(config))
    (answer,) = check(tmp_path, ["transformers"]).engines
    assert answer.answer == "does not" and "lm_head is not quantized" in answer.reason


def test_inputs_that_are_no_whole_groups_do_not_load(tmp_path: Path) -> None:
    shutil.copytree(STRANGERS / "gptqmodel-v1-7.7.0", tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["group_size"] = (
        48  # GPTQModel takes what does not divide the inputs
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    for engine in ("transformers", "llmopt"):
        assert check(tmp_path, [engine]).answer == "does not"


def test_what_is_not_known_is_named(tmp_path: Path) -> None:
    folder = STRANGERS / "ct-int4-0.9.4"
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"architectures": ["NewForCausalLM"]})
    )
    report = check(tmp_path, ["vllm"])
    assert report.exit_code == 3 and "NewForCausalLM" in report.engines[0].reason
    with pytest.raises(BadInput, match=r"rules of vLLM are known for 0\.33\.0"):
        check(folder, ["vllm"], Target("0.1"))


@pytest.mark.parametrize(
    ("codes", "capability", "kernel", "falls_back"),
    [
        (Codes("nvfp4", "", 16, inputs="nvfp4"), CONSUMER, "FlashInfer or CUTLASS FP4", False),
        (Codes("nvfp4", "", 16, inputs="nvfp4"), ADA, "Marlin FP4, weights alone", True),
        (Codes("int4", "", 128), HOPPER, "Machete", False),
        (Codes("int4", "", 32), HOPPER, "Marlin", False),
        (Codes("fp8", "", inputs="fp8"), AMPERE, "Marlin FP8, weights alone", True),
        (Codes("fp8-block", "", 128, inputs="fp8"), BLACKWELL, "DeepGEMM", False),
    ],
)
def test_the_card_chooses_the_kernel(
    codes: Codes, capability: int, kernel: str, falls_back: bool
) -> None:
    question = Question("vllm", "0.33.0", "compressed-tensors", codes, capability)
    answer = kernel_for(question)
    assert (answer.kernel, answer.falls_back) == (kernel, falls_back)


def test_every_rule_has_a_source_and_names_of_its_engine() -> None:
    rules = engine_rules()
    for row in kernel_rows():
        assert row["source"] and (row["kernels"] or row["cpu"])
        if row["engine"] in rules:
            assert {*row["methods"]} & {*rules[row["engine"]].methods}
    assert all(engine.source and len(engine.versions) <= 3 for engine in rules.values())


def test_llama_cpp_has_a_kernel_for_every_type_that_is_read_here() -> None:
    from gguf.constants import GGMLQuantizationType

    known = {code for row in kernel_rows() if row["engine"] == "llama.cpp" for code in row["codes"]}
    assert {*TYPE_SIZES} - {"F32", "F16", "BF16"} <= known
    assert known <= {kind.name for kind in GGMLQuantizationType}


def test_the_values_of_a_gguf_of_another_architecture_are_not_compared(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(path := tmp_path / "t5.gguf", "t5")
    writer.add_tensor("enc.blk.0.ffn_up.weight", np.ones((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    report = check(path, ["llmopt"], values=True)
    (note,) = (finding for finding in report.findings if finding.code == "not-read")
    assert "'t5'" in note.message and report.answer == "does not"


def test_a_config_alone_describes_its_codes() -> None:
    modelopt = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    assert codes_of_config(modelopt)[0].key == "nvfp4+nvfp4"
    block = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert codes_of_config(block)[0].key == "fp8-block+fp8"
    assert codes_of_config({"quant_method": "of tomorrow"})[0].kind == ""


def test_plain_weights_and_an_index_alone_are_answered(tmp_path: Path) -> None:
    report = check(MODELS / "stories3M", ["llmopt", "transformers", "vllm"])
    assert [engine.answer for engine in report.engines] == ["loads"] * 3
    folder = STRANGERS / "ct-int4-0.9.4"
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="np") as file:
        names = dict.fromkeys(file.keys(), "model.safetensors")
    index = {"weight_map": names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    report = check(tmp_path / "config.json", ["vllm"])
    assert report.answer == "loads" and report.linears[0].shape == (32, 64)


def test_the_table_of_the_documents_is_that_of_the_rules() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python tools/loader_table.py"


def test_codes_of_the_head_load_in_vllm_where_a_target_names_it(tmp_path: Path) -> None:
    shutil.copytree(STRANGERS / "llmcompressor-w4a16-0.14.0.1", tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    up = "model.layers.0.mlp.up_proj"
    for ending in ("weight_packed", "weight_scale", "weight_shape"):
        tensors[f"lm_head.{ending}"] = tensors[f"{up}.{ending}"].clone()
    tensors.pop("lm_head.weight", None)
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["ignore"] = []
    groups = config["quantization_config"]["config_groups"].values()
    for targets, answer in ((["Linear"], "does not"), (["Linear", "re:.*lm_head"], "loads")):
        for group in groups:
            group["targets"] = targets
        (tmp_path / "config.json").write_text(json.dumps(config))
        (engine,) = check(tmp_path, ["vllm"]).engines
        assert engine.answer == answer, engine.reason
