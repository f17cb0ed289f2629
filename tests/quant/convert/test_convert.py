"""Conversion between formats: lossless, refused, or with a reported loss."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.quant.base.scheme import Activations, Scheme
from llmopt.quant.convert.convert import convert
from llmopt.quant.convert.verify import PROVEN, verify
from llmopt.quant.formats.registry import FORMATS, read_quantized
from llmopt.quant.kinds.base.tensor import QuantizedTensor
from llmopt.quant.kinds.codebook.scheme import CodebookScheme
from llmopt.quant.kinds.fp4.scheme import Fp4Scheme
from llmopt.quant.kinds.fp8.scheme import FloatScheme
from llmopt.quant.kinds.integer.kind import IntTensor
from llmopt.quant.kinds.integer.scheme import IntScheme
from llmopt.quant.kinds.lookup.scheme import LookupScheme
from llmopt.quant.model.checkpoint import Checkpoint, read_json
from llmopt.quant.plan.manifest import MANIFEST_NAME, Conversion
from llmopt.quant.source.models import open_checkpoint

from ...support.format_support import MODULE, make, write_checkpoint
from ...support.quant_support import QUICK

SYM, ASYM = IntScheme(4, 32, True), IntScheme(4, 32, False)
BLOCK = FloatScheme("block", Activations("fp8", "group128"))
NVFP4, MXFP4 = Fp4Scheme("nvfp4"), Fp4Scheme("mxfp4")
LOSSLESS: list[tuple[str, Scheme, str, Scheme]] = [
    ("gptq", SYM, "compressed-tensors", SYM),
    ("gptq", SYM, "awq", ASYM),  # every zero code is 8
    ("gptq", ASYM, "awq", ASYM),
    ("gptq", IntScheme(3, 32, True), "compressed-tensors", IntScheme(3, 32, True)),
    ("awq", ASYM, "gptq", ASYM),
    ("awq", ASYM, "compressed-tensors", ASYM),
    ("compressed-tensors", SYM, "gptq", SYM),
    ("compressed-tensors", ASYM, "awq", ASYM),
    ("compressed-tensors", IntScheme(8, -1, True), "gptq", IntScheme(8, -1, True)),
    ("compressed-tensors", BLOCK, "fp8", BLOCK),
    ("compressed-tensors", FloatScheme("tensor", Activations("fp8", "group128")), "fp8", BLOCK),
    ("fp8", BLOCK, "compressed-tensors", BLOCK),
    ("compressed-tensors", NVFP4, "modelopt", NVFP4),
    ("compressed-tensors", MXFP4, "modelopt", NVFP4),
]


def write(
    folder: Path, name: str, tensor: QuantizedTensor, **others: torch.Tensor
) -> tuple[Checkpoint, QuantizedTensor]:
    tensors = FORMATS[name].pack(MODULE, tensor)
    tensors[f"{MODULE}.bias"] = torch.arange(64.0)
    tensors |= {key.replace("__", "."): part for key, part in others.items()}
    config = FORMATS[name].config({MODULE: tensor.scheme}, ["lm_head"])
    checkpoint = write_checkpoint(folder, tensors, config)
    (folder / "tokenizer.json").write_text("{}")
    return checkpoint, tensor


@pytest.mark.parametrize(("name", "scheme", "target", "expected"), LOSSLESS)
def test_the_same_numbers_in_another_format(
    tmp_path: Path, name: str, scheme: Scheme, target: str, expected: Scheme
) -> None:
    checkpoint, tensor = write(tmp_path / "source", name, make(scheme, 64, 256))
    result = convert(checkpoint, target, tmp_path / "result")
    assert result.lossless
    found = Checkpoint(tmp_path / "result")
    read = read_quantized(found, MODULE)
    assert read.scheme == expected
    assert torch.equal(read.dequantize(), tensor.dequantize())
    assert torch.equal(found.tensor(f"{MODULE}.bias"), torch.arange(64.0))
    assert torch.equal(found.tensor("lm_head.weight"), torch.ones(16, 64))
    assert found.config["model_type"] == "single_linear"
    assert (tmp_path / "result" / "tokenizer.json").is_file()
    report = verify(tmp_path / "result")
    assert (report.failures, report.status) == ([], PROVEN)
    manifest = read_json(tmp_path / "result" / MANIFEST_NAME)
    assert manifest["converted_from"]["format"] == name
    assert len(manifest["converted_from"]["sha256"]["model.safetensors"]) == 64


def test_there_and_back_gives_the_same_tensors(tmp_path: Path) -> None:
    checkpoint, _ = write(tmp_path / "source", "awq", make(ASYM, 64, 256))
    convert(checkpoint, "gptq", tmp_path / "gptq")
    convert(Checkpoint(tmp_path / "gptq"), "awq", tmp_path / "awq")
    found = Checkpoint(tmp_path / "awq")
    assert found.names == checkpoint.names
    for name in found.names:
        assert torch.equal(found.tensor(name), checkpoint.tensor(name)), name


def random_scales(scheme: IntScheme, dtype: torch.dtype) -> IntTensor:
    tensor = make(scheme, 64, 256, scale_dtype=dtype)
    assert isinstance(tensor, IntTensor)
    return tensor


def test_bfloat16_scales_go_where_float16_holds_them(tmp_path: Path) -> None:
    tensor = random_scales(SYM, torch.bfloat16)  # 0.01 .. 1: eight bits fit into eleven
    checkpoint, _ = write(tmp_path / "fine", "compressed-tensors", tensor)
    assert convert(checkpoint, "gptq", tmp_path / "fine-gptq").lossless
    tensor.scales[3, 1] = 2.0**-26  # below the least float16
    checkpoint, _ = write(tmp_path / "small", "compressed-tensors", tensor)
    with pytest.raises(BadInput, match=r"bfloat16 scales are not exact in the format's float16"):
        convert(checkpoint, "gptq", tmp_path / "small-gptq")
    assert {path.name for path in tmp_path.iterdir()} == {"fine", "fine-gptq", "small"}


LOSSY: list[tuple[str, Scheme, str, str]] = [
    ("compressed-tensors", IntScheme(8, 32, True), "awq", "4-bit weights only"),
    ("compressed-tensors", IntScheme(5, 32, True), "gptq", "2, 3, 4 or 8 bits"),
    ("gptq", IntScheme(4, 32, True, permuted=True), "compressed-tensors", "permuted"),
    ("bitsandbytes", CodebookScheme("nf4"), "compressed-tensors", "cannot hold nf4"),
    ("gptq", ASYM, "bitsandbytes", "cannot hold int4"),
    ("squeezellm", LookupScheme(3), "gptq", "cannot hold lookup3"),
    ("compressed-tensors", IntScheme(8, -1, True), "bitsandbytes", "cannot hold int8"),
]


@pytest.mark.parametrize(("name", "scheme", "target", "words"), LOSSY)
def test_what_would_change_is_refused_or_measured(
    tmp_path: Path, name: str, scheme: Scheme, target: str, words: str
) -> None:
    checkpoint, tensor = write(tmp_path / "source", name, make(scheme, 64, 256))
    with pytest.raises(BadInput, match=words) as error:
        convert(checkpoint, target, tmp_path / "result")
    assert "--allow-loss" in str(error.value) and "\n" not in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
    result = convert(checkpoint, target, tmp_path / "result", allow_loss=True)
    weight = tensor.dequantize()
    read = read_quantized(Checkpoint(tmp_path / "result"), MODULE).dequantize()
    lost = float((weight - read).square().sum() / weight.square().sum())
    assert not result.lossless
    assert result.modules[MODULE]["error"] == pytest.approx(lost, rel=1e-3)
    assert 0 < lost < 0.1
    assert verify(tmp_path / "result").status == PROVEN


def test_rounding_of_inputs_may_be_left_out_with_the_weights_as_they_are(tmp_path: Path) -> None:
    scheme = IntScheme(8, -1, True, Activations("int8"))
    checkpoint, tensor = write(tmp_path / "source", "compressed-tensors", make(scheme, 64, 256))
    with pytest.raises(BadInput, match="does not quantize activations"):
        convert(checkpoint, "gptq", tmp_path / "result")
    result = convert(checkpoint, "gptq", tmp_path / "result", allow_loss=True)
    assert not result.lossless and result.modules[MODULE]["error"] == 0
    read = read_quantized(Checkpoint(tmp_path / "result"), MODULE)
    assert torch.equal(read.dequantize(), tensor.dequantize())


def test_scales_of_the_cache_stay_where_the_format_has_a_place(tmp_path: Path) -> None:
    scale = {"model__layers__0__self_attn__k_scale": torch.tensor([0.5])}
    checkpoint, _ = write(tmp_path / "source", "compressed-tensors", make(SYM, 64, 256), **scale)
    with pytest.raises(BadInput, match="cannot store the KV cache's scales"):
        convert(checkpoint, "gptq", tmp_path / "result")
    convert(checkpoint, "gptq", tmp_path / "result", allow_loss=True)
    assert "model.layers.0.self_attn.k_scale" not in Checkpoint(tmp_path / "result")
    checkpoint, _ = write(tmp_path / "gptq", "gptq", make(SYM, 64, 256), **scale)
    convert(checkpoint, "compressed-tensors", tmp_path / "back")
    found = Checkpoint(tmp_path / "back")
    assert "model.layers.0.self_attn.k_scale" in found
    assert (found.quantization_config or {})["kv_cache_scheme"]["type"] == "float"
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"]["num_bits"] = 4
    (tmp_path / "back" / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match="cannot store the KV cache's scales"):
        convert(Checkpoint(tmp_path / "back"), "modelopt", tmp_path / "nvfp4")


def test_a_damaged_source_is_refused(quantized: Callable[..., Conversion], tmp_path: Path) -> None:
    source = Path(shutil.copytree(quantized(method="rtn", **QUICK).output, tmp_path / "source"))
    text = (source / MANIFEST_NAME).read_text()
    digest = read_json(source / MANIFEST_NAME)["modules"][0]["sha256"]["scales"]
    (source / MANIFEST_NAME).write_text(text.replace(digest, "0" * 64))
    with pytest.raises(BadInput, match="are not those that were computed"):
        convert(Checkpoint(source), "gptq", tmp_path / "result")


def test_large_results_are_written_in_shards(
    quantized: Callable[..., Conversion], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmopt.quant.convert.plain.SHARD_BYTES", 300_000)
    source = Checkpoint(quantized(method="rtn", **QUICK).output)
    (tmp_path / "result.partial").mkdir()  # an unfinished `quantize`
    convert(source, "gptq", tmp_path / "result")
    shards = sorted((tmp_path / "result").glob("*.safetensors"))
    assert len(shards) > 3
    assert all(path.stat().st_size < 1_000_000 for path in shards)
    assert verify(tmp_path / "result").status == PROVEN
    assert {path.name for path in tmp_path.iterdir()} == {"result", "result.partial"}


@pytest.mark.parametrize("damage", ["exists", "format", "same", "plain"])
def test_bad_requests(tmp_path: Path, damage: str) -> None:
    checkpoint, _ = write(tmp_path / "source", "gptq", make(SYM, 64, 256))
    target, output = "awq", tmp_path / "result"
    if damage == "exists":
        output.mkdir()
    elif damage == "format":
        target = "marlin"
    elif damage == "same":
        target = "gptq"
    else:
        checkpoint.config.pop("quantization_config")
    words = {
        "exists": "exists",
        "format": "unknown format",
        "same": "already",
        "plain": "not quantized",
    }
    with pytest.raises(BadInput, match=words[damage]):
        convert(checkpoint, target, output)


def test_a_whole_model_through_the_command_line(
    quantized: Callable[..., Conversion],
    command: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
) -> None:
    source = quantized(method="rtn", **QUICK).output
    done = command("convert", str(source), "--format", "awq", "-o", "awq")
    assert (done.returncode, done.stderr.count("Traceback")) == (0, 0)
    assert "35 of 35 linears are unchanged" in done.stdout
    before, after = Checkpoint(source), Checkpoint(tmp_path / "awq")
    module = "model.layers.3.self_attn.q_proj"
    assert torch.equal(
        read_quantized(before, module).dequantize(), read_quantized(after, module).dequantize()
    )
    assert verify(tmp_path / "awq").status == PROVEN


def test_a_whole_model_as_gguf_and_back(
    quantized: Callable[..., Conversion], tmp_path: Path
) -> None:
    """Groups of 64 become two blocks each; what comes back has groups of 32."""
    options = {"bits": 8, "group_size": 64}
    source = Checkpoint(quantized(method="rtn", **options, **QUICK).output)
    module = "model.layers.3.self_attn.q_proj"
    assert convert(source, "gguf", tmp_path / "gguf").lossless
    assert [path.name for path in (tmp_path / "gguf").glob("*.gguf")] == ["gguf-Q8_0.gguf"]
    file = open_checkpoint(tmp_path / "gguf")
    weight = read_quantized(source, module).dequantize()
    assert torch.equal(read_quantized(file, module).dequantize(), weight)
    assert verify(tmp_path / "gguf").status == PROVEN
    back = convert(file, "compressed-tensors", tmp_path / "back")
    assert back.lossless and back.scheme == "int8 g32 sym"
    read = read_quantized(Checkpoint(tmp_path / "back"), module)
    assert torch.equal(read.dequantize(), weight)
    assert verify(tmp_path / "back").status == PROVEN
