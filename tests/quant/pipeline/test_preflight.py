"""Preflight predictions against the run itself."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.base.progress import Silent
from llmopt.engine.model.decoder.reader import supported_model_types
from llmopt.quant.check.engines import loaders
from llmopt.quant.check.loaders import CheckpointContents, loads_in
from llmopt.quant.gguf.container import GgufFile
from llmopt.quant.kinds.integer.scheme import IntScheme
from llmopt.quant.methods.options import MethodOptions
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.pipeline import prepare as prepare_module
from llmopt.quant.pipeline.pipeline import predict, quantize
from llmopt.quant.pipeline.preflight import Preflight, preflight
from llmopt.quant.pipeline.prepare import prepare
from llmopt.quant.plan.plan import make_plan, stored
from llmopt.quant.plan.request import QuantizeRequest
from llmopt.quant.plan.selection import split_fusions
from llmopt.quant.plan.sketch import sketched_bytes, sketched_readers

from ...support.quant_support import STORIES


def request(output: Path, **options: Any) -> QuantizeRequest:
    settings: dict[str, Any] = {"num_samples": 4, "seq_len": 32}
    return QuantizeRequest(STORIES, output, **(settings | options))


def timed(answer: Preflight) -> dict[str, Any]:
    """Collect the fields that follow from this machine's speed at the moment."""
    return {name: getattr(answer, name) for name in ("seconds", "quick_seconds", "bare_seconds")}


@pytest.mark.parametrize(
    "options",
    [
        {"method": "awq"},
        {"method": "gptq", "group_size": 32, "format": "gptq,compressed-tensors"},
        {"method": "rtn", "bits": 8, "symmetric": False, "kv_cache": "fp8"},
        {"method": "rtn", "bits": 8, "kv_cache": "fp8", "kv_cache_strategy": "attn_head"},
        {"method": "rtn", "overrides": ("down_proj=bits:3,group_size:64",), "ignore": ("o_proj",)},
        {"method": "fp8"},
        {"method": "fp8", "granularity": "block"},
        {"method": "fp8", "activations": "static"},
        {"method": "nf4"},
        {"method": "int8", "outlier_threshold": 6.0},
        {"method": "squeezellm", "sparse_fraction": 0.0, "bits": 3},
        {"method": "Q4_K_M"},
        {"method": "gptq", "gguf_type": "q8_0", "num_samples": 2},
        {"method": "rtn", "format": "gguf,compressed-tensors", "bits": 4, "group_size": 32},
    ],
    ids=str,
)
def test_predicted_bytes_are_those_written(tmp_path: Path, options: dict[str, Any]) -> None:
    asked = request(tmp_path / "out", **options)
    expected = preflight(prepare(asked))
    result = quantize(asked)
    for name, size in expected.tensor_bytes.items():
        folder = result.output / name if len(expected.tensor_bytes) > 1 else result.output
        if name == "gguf":
            (file,) = folder.glob("*.gguf")
            written, files = sum(one.nbytes for one in GgufFile(file).tensors.values()), [file]
        else:
            index = json.loads((folder / "model.safetensors.index.json").read_text())
            written, files = index["metadata"]["total_size"], [*folder.glob("*.safetensors")]
        assert written == size
        assert sum(file.stat().st_size for file in files) == expected.file_bytes[name]
    assert expected.bits_per_weight == pytest.approx(result.manifest["summary"]["bits_per_weight"])
    assert result.peak_bytes > 0


@pytest.mark.parametrize(
    "options",
    [
        {"method": "awq", "options": MethodOptions(asymmetric=None)},
        {"method": "gptq", "format": "gptq,compressed-tensors", "held_out": 2},
        {"method": "rtn", "errors": False, "kv_cache": "int8"},
        {"method": "Q4_K_M"},
    ],
    ids=str,
)
def test_a_dry_run_reads_config_and_headers_alone(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(tmp_path / "out", **options)
    whole = predict(asked, Silent(), 2)
    session = prepare(asked)
    assert replace(preflight(session, 2), **timed(whole)) == whole

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the text, a weight file or a weight is read")

    monkeypatch.setattr(prepare_module, "load_tokenizer", refuse)
    monkeypatch.setattr(prepare_module, "sha256_of_file", refuse)
    monkeypatch.setattr(Checkpoint, "tensor", refuse)
    assert replace(predict(asked, Silent(), 2), **timed(whole)) == whole
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"method": "awq"}, 0.0),
        ({"method": "rtn", "bits": 8, "group_size": -1}, 0.01),
        ({"method": "fp8"}, 0.01),
        ({"method": "nf4"}, 0.01),
        ({"method": "squeezellm"}, 0.1),  # its sparse weights are not counted
    ],
    ids=str,
)
def test_the_first_line_has_about_the_size_of_the_table(
    tmp_path: Path, options: dict[str, Any], error: float
) -> None:
    asked = QuantizeRequest.of(STORIES, tmp_path / "out", **options)
    size = next(iter(predict(asked, Silent()).tensor_bytes.values()))
    assert sketched_bytes(asked) == pytest.approx(size, rel=error)


@pytest.mark.parametrize(
    "options",
    [
        {"method": "Q4_K_M"},
        {"method": "auto", "target_bpw": 4.0},
        {"ignore": ("o_proj",)},
        {"method": "rtn", "group_size": 512},
    ],
    ids=str,
)
def test_a_size_that_takes_the_model_itself_is_left_out(options: dict[str, Any]) -> None:
    assert sketched_bytes(QuantizeRequest(STORIES, Path("out"), **options)) is None


NEXT = " (each linear is checked next)"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"method": "Q4_K_M"}, f"; gguf has a reader in llmopt, SGLang, llama.cpp{NEXT}"),
        ({"method": "trellis"}, f"; exl3 has a reader in llmopt{NEXT}"),
        ({"method": "rtn", "bits": 3}, ""),
        ({"method": "rtn", "format": "gptq,awq"}, ""),
        ({"method": "auto", "target_bpw": 4.0}, ""),
    ],
    ids=str,
)
def test_the_first_line_names_readers_where_the_format_is_sure(
    options: dict[str, Any], text: str
) -> None:
    assert sketched_readers(QuantizeRequest.of(STORIES, Path("out"), **options)) == text


def test_the_first_line_of_a_dry_run_needs_no_torch(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from llmopt.cli.main import main; main()"
    command = [sys.executable, "-c", code, "quantize", str(STORIES), "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    first, _, rest = done.stderr.partition("\n")
    assert first.startswith("stories3M: llama, 3.08M parameters, bfloat16, 5.88 MiB, context 512; ")
    assert first.endswith(
        "; quantized about 1.72 MiB" + f"; awq has a reader in llmopt, vLLM, SGLang{NEXT}"
    )
    assert not done.stdout
    assert rest == "error: torch is not installed: pip install torch\n"


def test_memory_follows_the_layer_and_not_the_number_of_layers(tmp_path: Path) -> None:
    small = preflight(prepare(request(tmp_path / "out", method="gptq"))).memory
    more = preflight(prepare(request(tmp_path / "out", method="gptq", num_samples=12))).memory
    assert more.hidden == small.hidden * 13 // 4  # one more is held out of twelve, none of four
    assert more.layer == small.layer and more.codes == small.codes
    shapes = make_plan(request(tmp_path / "out", method="rtn")).modules
    weights = sum(out * width for name, (out, width) in shapes.items() if ".layers.0." in name)
    norms = 2 * 256
    assert small.layer == (weights + norms) * (2 + 4)


def test_no_linear_is_forgotten(tmp_path: Path) -> None:
    answer = preflight(prepare(request(tmp_path / "out", method="rtn", ignore=("v_proj",))))
    assert sum(kind.count for kind in answer.kinds) == 36  # lm_head is the embedding
    left = [kind for kind in answer.kinds if kind.scheme is None]
    facts = {kind.name: (kind.count, kind.bits_per_weight) for kind in left}
    assert facts == {"embed_tokens": (1, 16), "v_proj": (5, 16)}


ENGINE_TYPES = {
        "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "phi3",
        "gpt_oss", "llama4_text", "deepseek_v2", "deepseek_v3", "gpt2", "falcon", "cohere", "cohere2",
        "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "gemma", "gemma4_text", "glm", "glm4",
        "glm4_moe", "glm4v_text", "glm4v_moe_text", "granite",
        "granitemoe", "hunyuan_v1_dense", "hunyuan_v1_moe", "minimax_m2", "ministral", "ministral3", "olmo2",
        "olmo3", "qwen2_moe", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text",
        "seed_oss", "smollm3", "gemma3n_text", "granitemoehybrid", "lfm2", "lfm2_moe", "nemotron_h",
        "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
    }  # fmt: skip


def test_the_engine_runs_the_model_types_of_the_table() -> None:
    assert set(supported_model_types()) == ENGINE_TYPES


def verdicts(options: dict[str, Any], ranks: int = 1) -> dict[str, tuple[bool, str]]:
    plan = make_plan(request(Path("out"), **options))
    return {
        one.name.split(",")[0]: (one.loads, one.reason)
        for one in loaders(stored(plan), plan.format.name, ranks)
    }


@pytest.mark.parametrize(
    ("options", "ranks", "loads", "words"),
    [
        ({"method": "gptq"}, 1, True, "Marlin"),
        ({"method": "gptq"}, 4, False, "whole groups of 128 on every rank"),
        ({"method": "gptq", "group_size": 16}, 1, False, "no groups of 16"),
        ({"method": "gptq", "bits": 3}, 1, False, "symmetric 4 and 8 bits"),
        ({"method": "gptq"}, 1, True, "; tried on a CPU"),
        ({"method": "gptq"}, 2, True, "; not tried"),
        ({"method": "gptq", "symmetric": False}, 1, False, "symmetric 4 and 8 bits"),
        (
            {"method": "gptq", "options": MethodOptions(act_order="dynamic")},
            1,
            False,
            "without dynamic",
        ),
        ({"method": "rtn", "symmetric": False}, 1, True, "Marlin; tried on a CPU"),
        ({"method": "rtn", "bits": 8}, 1, True, "Marlin; not tried"),
        ({"method": "smoothquant"}, 1, True, "CUTLASS W8A8; tried on a CPU"),
        ({"method": "fp8", "granularity": "block"}, 1, True, "; not tried"),
        ({"method": "rtn", "bits": 3}, 1, True, "humming), since Marlin has no 3-bit weights"),
        ({"method": "rtn", "bits": 8, "symmetric": False}, 1, True, "zero points with 4 bits"),
        (
            {"method": "rtn", "group_size": 16},
            1,
            True,
            "humming), since Marlin has no groups of 16",
        ),
        (
            {"method": "rtn", "group_size": 256},
            1,
            True,
            "Triton, since Marlin has no groups of 256",
        ),
        ({"method": "awq"}, 1, True, "Marlin"),
        ({"method": "awq", "group_size": 16}, 1, True, "AWQ GEMM"),
        ({"method": "fp8"}, 1, True, "CUTLASS"),
        ({"method": "fp8", "granularity": "block"}, 4, False, "multiples of 128"),
        ({"method": "fp8", "granularity": "block"}, 2, False, "multiples of 128"),
        ({"method": "nf4"}, 1, False, "no quantization method bitsandbytes"),
        ({"method": "nvfp4"}, 1, True, "FP4 Marlin, on a GPU alone; not tried"),
        ({"method": "nvfp4", "format": "modelopt"}, 2, True, "FP4 Marlin, on a GPU alone"),
        ({"method": "nvfp4", "activations": "static"}, 1, True, "W4A4 kernels on Blackwell, else"),
        ({"method": "mxfp4"}, 1, True, "FP4 Marlin, on a GPU alone"),
        ({"method": "squeezellm"}, 1, False, "no quantization method squeezellm"),
        ({"method": "rtn", "format": "gguf"}, 1, False, "plugin"),
        ({"method": "rtn", "overrides": ("v_proj=bits:8",)}, 1, False, "one matrix"),
        ({"method": "rtn", "ignore": ("v_proj",)}, 1, False, "one matrix"),
    ],
    ids=str,
)
def test_a_no_of_vllm_names_the_rule(
    options: dict[str, Any], ranks: int, loads: bool, words: str
) -> None:
    answer, reason = verdicts(options, ranks)["vLLM"]
    assert answer == loads
    assert words in reason


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "rtn"}, "needs compressed-tensors"),
        ({"method": "rtn", "symmetric": False}, "CompressedTensorsConfig(dequantize=True)"),
        ({"method": "rtn", "bits": 2}, "not tried with such widths"),
        ({"method": "gptq"}, "needs optimum and gptqmodel; not tried"),
        ({"method": "awq"}, "not tried"),
        ({"method": "squeezellm"}, "no reader"),
    ],
    ids=str,
)
def test_what_transformers_needs(options: dict[str, Any], words: str) -> None:
    assert words in verdicts(options)["transformers"][1]
    asymmetric = options.get("symmetric") is False
    assert ("dequantize" in verdicts(options)["transformers"][1]) == asymmetric


def test_the_line_names_those_that_load_and_what_they_need() -> None:
    """The same rules for a plan, a finished run and a conversion, the model's type included."""
    plan = make_plan(request(Path("out"), method="rtn"))
    foreign = replace(stored(plan), family="bloom")
    assert loads_in(loaders(foreign, "compressed-tensors")) == (
        "transformers (needs compressed-tensors); vLLM (Marlin; not tried); "
        "SGLang (Marlin (8.0 and newer))"
    )
    assert loads_in(loaders(foreign, "squeezellm")) == "no loader that is known here"
    unknown = replace(foreign, parameters="model type 'bloom' is not known")
    row = next(row for row in loaders(unknown, "gptq") if row.name == "transformers")
    assert (row.loads, row.reason) == (False, "model type 'bloom' is not known")


def test_a_matrix_that_is_quantized_in_part_is_split() -> None:
    query, key = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"
    scheme = IntScheme(4, 128, True)
    part = CheckpointContents(
        "llama", {query: (256, 256)}, {query: scheme}, (key,), (query, key), "not of interest"
    )
    vllm = next(one for one in loaders(part, "gptq") if one.name == "vLLM")
    assert not vllm.loads and "one matrix" in vllm.reason


def test_only_gguf_goes_to_llama_cpp() -> None:
    assert verdicts({"method": "rtn", "format": "gguf"})["llama.cpp"][0]
    assert not verdicts({"method": "rtn"})["llama.cpp"][0]


def test_an_engine_with_a_loader_of_gguf_is_not_said_to_have_none() -> None:
    answers = verdicts({"method": "rtn", "format": "gguf"})
    assert "has a GGUF loader" in answers["SGLang"][1]
    assert "reads no GGUF files" in answers["TensorRT-LLM"][1]


def test_overrides_apply_in_order_and_split_matrices_are_warned_of(tmp_path: Path) -> None:
    texts = ("v_proj=bits:8,group_size:64", r"layers\.0\..*v_proj=bits:3")
    plan = make_plan(request(tmp_path / "out", method="rtn", overrides=texts))
    assert plan.schemes["model.layers.0.self_attn.v_proj"] == IntScheme(3, 64, True)
    assert plan.schemes["model.layers.1.self_attn.v_proj"] == IntScheme(8, 64, True)
    assert plan.schemes["model.layers.1.self_attn.q_proj"] == IntScheme(4, 128, True)
    assert len(split_fusions(plan.architecture, plan.schemes)) == 5
    assert any("vLLM refuses" in note and "4 more" in note for note in plan.notes)
    alike = dict.fromkeys(plan.schemes, IntScheme(4, 128, True))
    assert not split_fusions(plan.architecture, replace(plan, schemes=alike).schemes)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"overrides": ("down_proj",)}, "write REGEX=key:value"),
        ({"overrides": ("down_proj=width:3",)}, "unknown key 'width'"),
        ({"overrides": ("down_proj=bits:three",)}, "'three' is no value for bits"),
        ({"overrides": ("(=bits:3",)}, "no regular expression"),
        ({"overrides": ("c_fc=bits:3",)}, "matches no quantized linear"),
        ({"lm_head": True}, "embedding table (tied)"),
        ({"options": MethodOptions(damp=0.1)}, "--damp belongs to method gptq, not to rtn"),
        ({"options": MethodOptions(ranges="mse")}, "--ranges mse belongs to method gptq"),
        ({"options": MethodOptions(true_sequential=False)}, "--no-true-sequential belongs"),
        (
            {"options": MethodOptions(act_order="none")},
            "--act-order none: method rtn has no such choice",
        ),
        (
            {"method": "gptq", "options": MethodOptions(alpha=0.8)},
            "--alpha belongs to method smoothquant, not to gptq",
        ),
        (
            {"method": "trellis", "options": MethodOptions(lr=0.01)},
            "--lr is of the tuning of scales: give --finetune-steps",
        ),
        ({"format": "gptq,gptq"}, "named twice"),
        ({"gguf_type": "Q8_0", "format": "gptq"}, "belongs to --format gguf, not to gptq"),
        ({"kv_cache": "int4"}, "--kv-cache int4: choose fp8 or int8"),
        ({"kv_cache_strategy": "attn_head"}, "belongs to --kv-cache fp8"),
        ({"kv_cache": "int8", "kv_cache_strategy": "attn_head"}, "belongs to --kv-cache fp8"),
        ({"kv_cache": "fp8", "format": "gptq"}, "can store its scales"),
        ({"target_bpw": 4.5}, "belong to --method auto"),
        ({"method": "auto"}, "needs one of"),
        ({"method": "auto", "target_bpw": 4.0, "bits": 4}, "leave --bits"),
        ({"method": "trellis", "target_bpw": 4.0, "bits": 4}, "leave --bits"),
        ({"method": "auto", "target_bpw": 1.0}, "the target is too small"),
        ({"method": "auto", "target_bpw": float("nan")}, "--target-bpw nan: give bits"),
        ({"method": "trellis", "target_bpw": float("inf")}, "--target-bpw inf: give bits"),
    ],
    ids=str,
)
def test_options_that_cannot_be_met(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput) as caught:
        prepare(replace(request(tmp_path / "out", method="rtn"), **options))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tables_that_a_gguf_file_rounds_are_named_with_their_type(tmp_path: Path) -> None:
    """The embedding of a Q8_0 file is Q8_0, in the table of the dry run, the card and the file."""
    wanted = request(tmp_path / "out", method="Q8_0", errors=False)
    (table,) = [kind for kind in preflight(prepare(wanted)).kinds if kind.name == "embed_tokens"]
    result = quantize(wanted)
    (path,) = result.output.glob("*.gguf")
    stored_table = GgufFile(path).tensors["token_embd.weight"]
    assert (table.scheme, table.bytes) == (stored_table.type, stored_table.nbytes)
    card = (result.output / "README.md").read_text()
    assert f"| model.embed_tokens | {stored_table.type}, as the mix has it |" in card
    assert "| left as they were | none (norms always) |" in card
