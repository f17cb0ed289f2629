"""Importance matrices: llama.cpp's two formats, and what a given one changes."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.quant.gguf.container import GgufFile, TensorToWrite, write_gguf
from llmopt.quant.gguf.imatrix import ImportanceMatrix, read_imatrix, write_imatrix
from llmopt.quant.kinds.ggml.tensor import quantize_blocks
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.request import QuantizeRequest
from llmopt.quant.source.models import open_checkpoint

from ...support.gguf_support import STORIES, linears_of

QUICK = {"method": "rtn", "format": "gguf", "num_samples": 4, "held_out": 1, "seq_len": 32}


def matrix() -> ImportanceMatrix:
    """Two tensors, one of three experts, of which the last saw no token."""
    return ImportanceMatrix(
        means={
            "blk.0.attn_q.weight": torch.rand(1, 8) + 0.1,
            "blk.0.ffn_down_exps.weight": torch.cat([torch.rand(2, 6) + 0.1, torch.ones(1, 6)]),
        },
        counts={
            "blk.0.attn_q.weight": torch.tensor([1024.0]),
            "blk.0.ffn_down_exps.weight": torch.tensor([700.0, 324.0, 0.0]),
        },
        dataset="some text",
        chunk_size=512,
        chunks=2,
    )


@pytest.mark.parametrize("name", ["m.gguf", "m.dat"])
def test_what_is_written_is_read(tmp_path: Path, name: str) -> None:
    given = matrix()
    write_imatrix(tmp_path / name, given)
    read = read_imatrix(tmp_path / name)
    assert read.means.keys() == given.means.keys() and read.dataset == "some text"
    assert read.chunks == 2
    for tensor, means in given.means.items():
        assert torch.allclose(read.means[tensor].flatten(), means.flatten(), rtol=1e-6)
    assert read.of("model.layers.0.self_attn.q_proj") is not None
    assert read.of("model.layers.1.self_attn.q_proj") is None


EXPERTS = {f"model.layers.0.mlp.experts.{number}.down_proj": (4, 6) for number in range(3)}


def test_both_formats_give_the_same_entries_of_experts(tmp_path: Path) -> None:
    whole = matrix()
    given = whole.means["blk.0.ffn_down_exps.weight"]
    for name in ("m.gguf", "m.dat"):
        write_imatrix(tmp_path / name, whole)
        read = read_imatrix(tmp_path / name).for_modules(EXPERTS, "qwen3moe")
        assert read.keys() == EXPERTS.keys()
        for module, expected in zip(EXPERTS, given, strict=True):
            torch.testing.assert_close(read[module], expected)


def test_llama_cpps_old_file_of_a_mixture(tmp_path: Path) -> None:
    """The bytes of `save_imatrix_legacy`: one number of calls, the values of all experts in one list."""
    name, calls = b"blk.0.ffn_down_exps.weight", 3
    values = torch.arange(1.0, 19.0)
    head = struct.pack("<ii", 1, len(name)) + name + struct.pack("<ii", calls, 18)
    (tmp_path / "m.dat").write_bytes(head + (values * calls).numpy().tobytes())
    read = read_imatrix(tmp_path / "m.dat").for_modules(EXPERTS, "qwen3moe")
    assert [entry.tolist() for entry in read.values()] == values.view(3, 6).tolist()


@pytest.mark.parametrize("name", ["m.gguf", "m.dat"])
def test_a_matrix_of_other_experts_is_refused(tmp_path: Path, name: str) -> None:
    write_imatrix(tmp_path / name, matrix())
    read = read_imatrix(tmp_path / name)
    two = dict(list(EXPERTS.items())[:2])
    with pytest.raises(BadInput, match="belongs to another model"):
        read.for_modules(two, "qwen3moe")
    four = EXPERTS | {"model.layers.0.mlp.experts.3.down_proj": (4, 6)}
    with pytest.raises(BadInput, match="experts there and of 4 in the model"):
        read.for_modules(four, "qwen3moe")


def test_the_names_and_shapes_are_llama_cpps(tmp_path: Path) -> None:
    write_imatrix(tmp_path / "m.gguf", matrix())
    file = GgufFile(tmp_path / "m.gguf")
    assert file.metadata["general.type"] == "imatrix"
    assert file.metadata["imatrix.datasets"] == ["some text"]
    shapes = {name: info.shape for name, info in file.tensors.items()}
    assert shapes["blk.0.ffn_down_exps.weight.in_sum2"] == (3, 6)
    assert shapes["blk.0.ffn_down_exps.weight.counts"] == (3, 1)
    write_imatrix(tmp_path / "m.dat", matrix())
    data = (tmp_path / "m.dat").read_bytes()
    length = len("blk.0.attn_q.weight")
    assert struct.unpack("<ii", data[:8]) == (2, length)
    assert data[8 : 8 + length] == b"blk.0.attn_q.weight"
    assert struct.unpack("<ii", data[8 + length : 16 + length]) == (2, 8)  # calls, values
    assert data[-17:] == struct.pack("<ii", 2, 9) + b"some text"


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.dat"
    write_imatrix(path, matrix())
    whole = path.read_bytes()
    for broken in (b"", whole[:30], whole[:60], b"\xff" * 64, b"text that is none"):
        path.write_bytes(broken)
        with pytest.raises(BadInput, match="no importance matrix"):
            read_imatrix(path)
    write_gguf(tmp_path / "other.gguf", {"general.type": "model"}, [])
    with pytest.raises(BadInput, match="no importance matrix"):
        read_imatrix(tmp_path / "other.gguf")
    sums = TensorToWrite("a.in_sum2", (1, 2), "F32", lambda: [bytes(8)])
    write_gguf(tmp_path / "half.gguf", {"general.type": "imatrix"}, [sums])
    with pytest.raises(BadInput, match=r"lacks a\.counts"):
        read_imatrix(tmp_path / "half.gguf")
    with pytest.raises(BadInput, match="cannot be read"):
        read_imatrix(tmp_path / "none.gguf")


def test_a_matrix_of_another_model_is_refused() -> None:
    modules = {"model.layers.0.self_attn.q_proj": (8, 16)}
    with pytest.raises(BadInput, match="8 inputs there and 16 in the model"):
        matrix().for_modules(modules, "llama")
    with pytest.raises(BadInput, match="no entry for any linear"):
        matrix().for_modules({"model.layers.9.self_attn.q_proj": (8, 8)}, "llama")
    assert matrix().for_modules(
        {"model.layers.0.self_attn.q_proj": (8, 8), "lm_head": (8, 8)}, "llama"
    )


def test_it_is_measured_where_it_is_not_there_and_weighs_the_errors(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    quantize(QuantizeRequest(STORIES, tmp_path / "a", imatrix=path, gguf_type="Q4_0", **QUICK))
    measured = read_imatrix(path)
    source = Checkpoint(STORIES)
    assert len(measured.means) == len(linears_of(source))
    # No calibration now: what is given decides.
    options = {**QUICK, "errors": False}
    quantize(QuantizeRequest(STORIES, tmp_path / "b", imatrix=path, gguf_type="Q4_0", **options))
    read = open_checkpoint(tmp_path / "b")
    module = "model.layers.1.mlp.up_proj"
    weight, importance = source.tensor(f"{module}.weight").float(), measured.of(module)
    assert importance is not None
    importance = (importance / importance.mean()).clamp(min=1e-4)
    expected = quantize_blocks(weight, "Q4_0", importance)
    assert torch.equal(read.tensor(f"{module}.gguf_blocks"), expected)
    assert not torch.equal(expected, quantize_blocks(weight, "Q4_0"))
    with pytest.raises(BadInput, match=r"--no-errors: .*x\.gguf is measured"):
        QuantizeRequest(STORIES, tmp_path / "c", imatrix=tmp_path / "x.gguf", **options)
    with pytest.raises(BadInput, match="--imatrix weighs the errors of ggml's blocks"):
        quantize(QuantizeRequest(STORIES, tmp_path / "c", method="rtn", imatrix=path))
