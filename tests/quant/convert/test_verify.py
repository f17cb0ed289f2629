from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from llmopt.base.atomic_io import raw_bytes
from llmopt.base.errors import BadInput
from llmopt.quant.convert.verify import PROVEN, UNPROVEN, verify
from llmopt.quant.formats.registry import FORMATS, quantized_modules, read_quantized
from llmopt.quant.kinds.base.raw import read_headers
from llmopt.quant.kinds.ggml.formats import read_gguf_headers
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.pipeline.pipeline import QuantizeResult
from llmopt.quant.plan.manifest import MANIFEST_NAME
from llmopt.recipes import MODELS
from safetensors.torch import load_file, save_file

from ...support.quant_support import QUICK

Quantized = Callable[..., QuantizeResult]
MODULE = "model.layers.2.mlp.down_proj"
SHARD = "model-layer-00002.safetensors"
OPTIONS = [
    {"method": "awq"},
    {"method": "rtn", **QUICK},
    {"method": "rtn", "symmetric": False, **QUICK},
    {"method": "rtn", "bits": 8, "group_size": -1, **QUICK},
]
OTHERS = [
    {"method": "gptq", "format": "gptq", **QUICK},
    {"method": "fp8", "granularity": "block", **QUICK},
    {"method": "nf4", **QUICK},
    {"method": "int8", **QUICK},
    {"method": "squeezellm", **QUICK},
    {"method": "rtn", "format": "gguf", "gguf_type": "Q4_K_M", **QUICK},
    {"method": "rtn", "format": "gguf", "gguf_type": "Q8_0", **QUICK},
]


def ids(options: dict[str, object]) -> str:
    return "-".join(str(value) for name, value in options.items() if name not in QUICK)


@pytest.fixture
def folder(quantized: Quantized, tmp_path: Path) -> Path:
    output = quantized(method="rtn", format="awq", symmetric=False, **QUICK).output
    return Path(shutil.copytree(output, tmp_path / "checkpoint"))


def forget_manifest(folder: Path) -> None:
    (folder / MANIFEST_NAME).unlink()


def rewrite(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Change one tensor of the shard of layer 2, or drop it where `change` gives None."""
    tensors = load_file(folder / SHARD)
    changed = change(tensors.pop(name))
    if changed is not None:
        tensors[name] = changed
    save_file(tensors, folder / SHARD, {"format": "pt"})


@pytest.mark.sweep(2)
@pytest.mark.parametrize("options", OPTIONS, ids=ids)
def test_what_we_write_is_proven(quantized: Quantized, options: dict[str, object]) -> None:
    report = verify(quantized(**options).output)
    assert report.failures == []
    assert report.status == PROVEN
    assert report.num_modules == 35
    assert report.ratio > (1.8 if options.get("bits") == 8 else 3.7)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("options", OTHERS, ids=ids)
def test_what_we_write_in_other_formats_is_proven(
    quantized: Quantized, options: dict[str, object]
) -> None:
    report = verify(quantized(**options).output)
    assert (report.failures, report.status) == ([], PROVEN)
    assert report.num_modules == 35


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K_M"])
def test_a_gguf_file_alone(quantized: Quantized, tmp_path: Path, kind: str) -> None:
    """Read without a manifest, proven with one, and a scale that is NaN found in it."""
    output = quantized(method="rtn", format="gguf", gguf_type=kind, **QUICK).output
    (file,) = output.glob("*.gguf")
    assert verify(file).status == PROVEN
    alone = Path(shutil.copy(file, tmp_path / "alone.gguf"))
    report = verify(alone)
    assert (report.failures, report.status, report.num_modules) == ([], UNPROVEN, 35)
    entries, _ = read_gguf_headers(alone)
    data = bytearray(alone.read_bytes())
    start = entries["model.layers.2.self_attn.q_proj.gguf_blocks"].start
    data[start : start + 2] = b"\x00\x7e"
    alone.write_bytes(data)
    (failure,) = verify(alone).failures
    assert failure == "model.layers.2.self_attn.q_proj has block scales that are NaN or infinite"
    alone.write_bytes(data[:-1000])
    with pytest.raises(BadInput):
        verify(alone)


@pytest.mark.parametrize("options", OPTIONS, ids=ids)
def test_both_readers_agree(quantized: Quantized, options: dict[str, object]) -> None:
    checkpoint = Checkpoint(quantized(**options).output)
    config = checkpoint.quantization_config or {}
    entries = read_headers(sorted(checkpoint.folder.glob("*.safetensors")))
    reader = FORMATS[config["quant_method"]].read_raw
    for module in sorted(quantized_modules(checkpoint))[:9]:
        ours, raw = read_quantized(checkpoint, module), reader(entries, module, config)
        assert raw.shape == ours.shape
        for name, part in ours.parts().items():
            assert raw.parts[name].tobytes() == raw_bytes(part), name


@pytest.mark.parametrize("seed", range(6))
def test_any_flipped_bit_of_a_shard_fails(folder: Path, seed: int) -> None:
    path = folder / SHARD
    data = bytearray(path.read_bytes())
    generator = np.random.default_rng(seed)
    position = int(generator.integers(8, 2000 if seed < 2 else len(data)))  # header, too
    data[position] ^= 1 << int(generator.integers(8))
    path.write_bytes(data)
    report = verify(folder)
    assert not report.ok
    assert any(SHARD in failure for failure in report.failures)


def test_a_wrong_code_names_its_module(folder: Path) -> None:
    rewrite(folder, f"{MODULE}.qweight", lambda words: words ^ 1)
    report = verify(folder)
    assert f"{MODULE}: its codes are not those that were computed" in report.failures


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_scales_must_be_numbers_even_without_a_manifest(folder: Path, value: float) -> None:
    forget_manifest(folder)

    def spoil(scales: torch.Tensor) -> torch.Tensor:
        scales[0, 3] = value
        return scales

    rewrite(folder, f"{MODULE}.scales", spoil)
    (failure,) = verify(folder).failures
    assert failure.startswith(f"{MODULE} has scales that are")


def test_a_checkpoint_without_manifest_is_read_but_not_proven(folder: Path) -> None:
    forget_manifest(folder)
    report = verify(folder)
    assert report.ok
    assert report.status == UNPROVEN


def test_an_unquantized_linear_is_reported(folder: Path) -> None:
    forget_manifest(folder)
    tensors = load_file(folder / SHARD)
    for suffix in ("qweight", "qzeros", "scales"):
        del tensors[f"{MODULE}.{suffix}"]
    tensors[f"{MODULE}.weight"] = torch.randn(256, 512).to(torch.bfloat16)
    save_file(tensors, folder / SHARD, {"format": "pt"})
    index_path = folder / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    for suffix in ("qweight", "qzeros", "scales"):
        del index["weight_map"][f"{MODULE}.{suffix}"]
    index["weight_map"][f"{MODULE}.weight"] = SHARD
    index_path.write_text(json.dumps(index))
    (failure,) = verify(folder).failures
    assert failure.startswith(f"{MODULE} is not quantized")

    config_path = folder / "config.json"
    config = json.loads(config_path.read_text())
    config["quantization_config"]["modules_to_not_convert"] = [MODULE]
    config_path.write_text(json.dumps(config))
    assert verify(folder).ok


@pytest.mark.parametrize("gone", ["linear", "layer"])
def test_what_is_not_there_at_all_is_noticed(folder: Path, gone: str) -> None:
    forget_manifest(folder)
    part = "model.layers.2.self_attn.k_proj." if gone == "linear" else "model.layers.2."
    index_path = folder / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if not k.startswith(part)}
    index_path.write_text(json.dumps(index))
    failures = verify(folder).failures
    missing = "model.layers.2.self_attn.k_proj.weight of the model is in no file"
    assert any(failure.startswith(missing) for failure in failures)
    assert len(failures) == {"linear": 1, "layer": 9}[gone], failures
    config_path = folder / "config.json"  # a type whose parameters nobody knows
    config_path.write_text(config_path.read_text().replace('"llama"', '"unheard_of"'))
    (failure,) = verify(folder).failures
    assert (
        failure
        == {
            "linear": "layer 2 has no self_attn.k_proj, which all other layers have",
            "layer": "4 decoder layers are there, but config.json says 5",
        }[gone]
    )


def test_a_linear_without_codes_must_be_declared_and_one_with_codes_must_not(
    quantized: Quantized, tmp_path: Path
) -> None:
    """With the manifest, too: transformers would look for codes of the one, and skip those of the other."""
    output = quantized(method="rtn", ignore=("v_proj",), **QUICK).output
    folder = Path(shutil.copytree(output, tmp_path / "checkpoint"))
    assert verify(folder).ok
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]["ignore"][0] == "lm_head"
    config["quantization_config"]["ignore"] = ["lm_head", MODULE]
    (folder / "config.json").write_text(json.dumps(config))
    file, plain, skipped = verify(folder).failures
    assert file == "config.json is not the file that was written: its bytes differ"
    assert plain.startswith("model.layers.*.self_attn.v_proj (5) is not quantized, and the config")
    assert skipped == f"{MODULE} is quantized, but the config tells loaders to skip it"


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_scales_of_the_cache_are_looked_at(folder: Path, value: float) -> None:
    forget_manifest(folder)
    tensors = load_file(folder / SHARD)
    tensors["model.layers.2.self_attn.k_scale"] = torch.tensor([value])
    save_file(tensors, folder / SHARD, {"format": "pt"})
    index_path = folder / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    index["weight_map"]["model.layers.2.self_attn.k_scale"] = SHARD
    index_path.write_text(json.dumps(index))
    (failure,) = verify(folder).failures
    assert failure == "model.layers.2.self_attn.k_scale is no usable scale of the cache"


def test_a_file_that_was_edited_is_named(folder: Path) -> None:
    path = folder / "generation_config.json"
    path.write_text(path.read_text().replace("1", "7"))
    (failure,) = verify(folder).failures
    assert "generation_config.json" in failure


def test_a_cut_shard_is_bad_input(folder: Path) -> None:
    path = folder / SHARD
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(BadInput, match=f"{SHARD} is cut off"):
        verify(folder)
    forget_manifest(folder)
    with pytest.raises(BadInput, match=f"{SHARD} is cut off"):
        verify(folder)


def test_a_missing_shard_is_bad_input(folder: Path) -> None:
    (folder / SHARD).unlink()
    with pytest.raises(BadInput, match=f"{SHARD} is missing"):
        verify(folder)


def test_what_is_no_quantized_checkpoint_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is not quantized"):
        verify(MODELS / "stories3M")
    with pytest.raises(BadInput, match="is no folder"):
        verify(tmp_path / "missing")


def test_a_manifest_of_something_else_is_bad_input(folder: Path) -> None:
    (folder / MANIFEST_NAME).write_text("{}")
    with pytest.raises(BadInput, match="no manifest of llmopt"):
        verify(folder)
