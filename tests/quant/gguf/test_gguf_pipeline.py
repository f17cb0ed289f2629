"""Quantizing to GGUF's lattice types, a mixture of experts among the models, and proving the files."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.quant.convert.verify import PROVEN, verify
from llmopt.quant.gguf.assemble import planned_bytes
from llmopt.quant.gguf.checkpoint import GgufCheckpoint
from llmopt.quant.gguf.container import GgufFile
from llmopt.quant.gguf.imatrix import read_imatrix
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.pipeline import pipeline
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.request import QuantizeRequest
from llmopt.quant.source.models import open_checkpoint

from ...support.gguf_support import STORIES, random_model, write_model


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("name", "kind"), [("mixtral", "Q2_K"), ("phi", "IQ2_M")])
def test_importance_mix_and_proof(tmp_path: Path, name: str, kind: str) -> None:
    # The old format has no number of matrices: the model's experts tell.
    path = tmp_path / ("m.dat" if name == "mixtral" else "m.gguf")
    source = random_model(tmp_path / name, name)
    request = QuantizeRequest(
        source,
        tmp_path / "out",
        method="rtn",
        format="gguf",
        gguf_type=kind,
        imatrix=path,
        num_samples=4,
        held_out=1,
        seq_len=32,
    )
    quantize(request)
    (file,) = (tmp_path / "out").glob("*.gguf")
    tensors = {name: (info.type, info.shape) for name, info in GgufFile(file).tensors.items()}
    means = read_imatrix(path).means
    if name == "mixtral":
        assert tensors["blk.0.ffn_down_exps.weight"] == ("Q3_K", (4, 256, 512))
        assert tensors["blk.1.ffn_up_exps.weight"] == ("Q2_K", (4, 512, 256))
        assert tensors["blk.0.ffn_gate_inp.weight"][0] == "F32"
        assert means["blk.0.ffn_down_exps.weight"].shape == (1, 4 * 512)
    else:
        assert tensors["blk.0.attn_qkv.weight"][0] == "IQ3_S"
        assert tensors["blk.1.ffn_up.weight"] == ("IQ2_S", (1024, 256))
        assert means["blk.1.ffn_up.weight"].shape == (1, 256)
    assert verify(tmp_path / "out").status == PROVEN


def test_space_is_needed_for_the_file_next_to_its_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers stay until the file that is assembled of them is whole."""
    sizes: list[int] = []

    def measured(journal: pipeline.Journal, output: Path) -> None:
        sizes.append(sum(p.stat().st_size for p in journal.folder.rglob("*") if p.is_file()))
        publish(journal, output)

    publish = pipeline.Journal.publish
    monkeypatch.setattr(pipeline.Journal, "publish", measured)
    options: dict[str, Any] = {"method": "rtn", "format": "gguf", "num_samples": 2, "seq_len": 8}
    quantize(QuantizeRequest(STORIES, tmp_path / "out", **options))
    monkeypatch.setattr(pipeline, "_SLACK_BYTES", 0)
    usage = SimpleNamespace(free=sizes[0] - 2**20)  # without the small files
    monkeypatch.setattr(pipeline.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(BadInput, match="no space for the result"):
        quantize(QuantizeRequest(STORIES, tmp_path / "again", **options))


def test_sampling_goes_over_and_back(model_copy: Path, tmp_path: Path) -> None:
    path = model_copy / "generation_config.json"
    sampling = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
    path.write_text(json.dumps({**sampling, "temperature": 0.6, "min_p": None, "eos_token_id": 2}))
    written = open_checkpoint(write_model(model_copy, tmp_path / "gguf", "Q4_0"))
    assert isinstance(written, GgufCheckpoint)
    assert written.generation_config() == sampling
    keys = GgufFile(written.path).metadata
    assert keys["general.sampling.top_k"] == 20
    assert keys["general.sampling.penalty_repeat"] == pytest.approx(1.05)
    assert json.loads(written.companions()["generation_config.json"]) == sampling
    path.write_text(json.dumps({"top_p": "0.9"}))
    with pytest.raises(BadInput, match=r"top_p is '0.9', not a number"):
        planned_bytes(Checkpoint(model_copy), [], "Q4_0", "model")
