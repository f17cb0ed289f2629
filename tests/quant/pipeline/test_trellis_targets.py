"""Trellis widths under a target that is no whole number: what is stored keeps to it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.cli.main import main
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.pipeline.preflight import preflight
from llmopt.quant.pipeline.prepare import prepare
from llmopt.quant.plan.request import QuantizeRequest
from safetensors.torch import load_file

from ...support.model_families import save_model
from ...support.native_paths import needs_compiler

pytestmark = needs_compiler  # the search of trellis codes

SHAPE = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 256,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("targets") / "model"
    save_model(folder, "LlamaConfig", SHAPE)
    return folder


def request_for(model: Path, output: Path, **target: Any) -> QuantizeRequest:
    return QuantizeRequest(
        model, output, method="trellis", num_samples=4, seq_len=32, held_out=2, **target
    )


def stored_bytes(folder: Path, part: str = "") -> int:
    """Bytes of the tensors whose names hold `part`."""
    total = 0
    for shard in folder.glob("*.safetensors"):
        tensors = load_file(shard)
        total += sum(tensor.nbytes for name, tensor in tensors.items() if part in name)
    return total


@pytest.mark.parametrize("target", [1.5, 2.5, 3.5, 7.9])
def test_the_widths_stay_within_a_mean(model: Path, tmp_path: Path, target: float) -> None:
    session = prepare(request_for(model, tmp_path / "out", target_bpw=target))
    answer = preflight(session)
    weights = sum(rows * columns for rows, columns in session.plan.modules.values())
    assert target - 0.5 < answer.bits_per_weight <= target
    assert weights == 4 * 128 * 128 + 3 * 128 * 256


def test_the_files_keep_to_a_mean_and_to_a_size(model: Path, tmp_path: Path) -> None:
    weights = 4 * 128 * 128 + 3 * 128 * 256
    request = request_for(model, tmp_path / "bpw", target_bpw=1.5)
    quantize(request)
    linears = stored_bytes(request.output, "proj.")
    assert 1.2 * weights < 8 * linears <= 1.5 * weights
    size = stored_bytes(request.output) + 4096  # that of another run, and a little
    request = replace(request, output=tmp_path / "size", target_bpw=None, target_bytes=size)
    quantize(request)
    assert size - 8192 < stored_bytes(request.output) <= size


def test_less_than_the_fewest_bits_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="the target is too small"):
        prepare(request_for(model, tmp_path / "out", target_bpw=1.0))


@pytest.mark.parametrize("bits", ["1.5", "2.5"])
def test_a_width_that_is_no_whole_number_names_the_target(
    bits: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["quantize", "--method", "trellis", "--bits", bits])
    assert end.value.code == 2
    told = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert f"{bits} is not a whole number of bits" in told and "--target-bpw" in told
