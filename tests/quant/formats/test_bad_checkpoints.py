"""Broken checkpoints give a one-line error, in every format, and the files stay unchanged."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.cli.main import run_guarded
from llmopt.quant.base.scheme import Scheme
from llmopt.quant.convert.convert import convert
from llmopt.quant.convert.verify import verify
from llmopt.quant.kinds.codebook.scheme import CodebookScheme
from llmopt.quant.kinds.fp4.scheme import Fp4Scheme
from llmopt.quant.kinds.fp8.scheme import FloatScheme
from llmopt.quant.kinds.vectorwise.scheme import VectorwiseScheme
from llmopt.quant.model.checkpoint import INDEX_NAME, SINGLE_NAME
from llmopt.quant.source.models import open_checkpoint
from safetensors.torch import load_file, save_file

from ...support.format_support import HELD, MODULE, make, stored, write_checkpoint

# A format's scheme, its numbers beside the codes, and the codes.
KINDS: list[tuple[str, Scheme, str, str]] = [
    ("awq", HELD["awq"][0], ".scales", ".qweight"),
    ("gptq", HELD["gptq"][0], ".scales", ".qweight"),
    ("compressed-tensors", HELD["compressed-tensors"][0], ".weight_scale", ".weight_packed"),
    ("compressed-tensors", HELD["compressed-tensors"][-1], ".weight_scale", ".weight"),
    ("compressed-tensors", Fp4Scheme("nvfp4"), ".weight_scale", ".weight_packed"),
    ("compressed-tensors", Fp4Scheme("mxfp4"), ".weight_scale", ".weight_packed"),
    ("modelopt", Fp4Scheme("nvfp4"), ".weight_scale", ".weight"),
    ("modelopt", HELD["modelopt"][4], ".weight_scale", ".weight"),
    ("fp8", HELD["fp8"][0], ".weight_scale_inv", ".weight"),
    ("bitsandbytes", CodebookScheme("nf4"), ".weight.absmax", ".weight"),
    ("bitsandbytes", VectorwiseScheme(), ".SCB", ".weight"),
    ("squeezellm", HELD["squeezellm"][0], ".lookup_table", ".qweight"),
]
Damage = Callable[[Path, str, str], None]


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / SINGLE_NAME)
    change(tensors)
    save_file(tensors, folder / SINGLE_NAME, {"format": "pt"})


def cut_off(folder: Path, numbers: str, codes: str) -> None:
    path = folder / SINGLE_NAME
    path.write_bytes(path.read_bytes()[:-64])


def wrong_shape(folder: Path, numbers: str, codes: str) -> None:
    def shorten(tensors: dict[str, torch.Tensor]) -> None:
        tensors[MODULE + numbers] = tensors[MODULE + numbers][:-1].contiguous()

    edit(folder, shorten)


def missing_scales(folder: Path, numbers: str, codes: str) -> None:
    edit(folder, lambda tensors: tensors.pop(MODULE + numbers))


def numbers_of_another_kind(folder: Path, numbers: str, codes: str) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[MODULE + numbers] = tensors[MODULE + numbers].to(torch.int64)

    edit(folder, spoil)


def codes_of_another_kind(folder: Path, numbers: str, codes: str) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[MODULE + codes] = tensors[MODULE + codes].to(torch.float32)

    edit(folder, spoil)


def wrong_label(folder: Path, numbers: str, codes: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "exl2"
    (folder / "config.json").write_text(json.dumps(config))


def half_written_config(folder: Path, numbers: str, codes: str) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text()[:-9])


def interrupted_download(folder: Path, numbers: str, codes: str) -> None:
    names = load_file(folder / SINGLE_NAME)
    first = (folder / SINGLE_NAME).rename(folder / "model-00001.safetensors").name
    weight_map = dict.fromkeys(names, first) | {"model.norm.weight": "model-00002.safetensors"}
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


DAMAGES: dict[Damage, str] = {
    cut_off: "cut off",
    wrong_shape: "shape|bytes|scales",
    missing_scales: "no tensor|scales are missing",
    numbers_of_another_kind: "holds int64",
    codes_of_another_kind: "float32|holds",
    wrong_label: "exl2",
    half_written_config: "not valid JSON",
    interrupted_download: "model-00002.safetensors is missing",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0]}-{kind[3][1:]}{kind[2]}")
def test_every_damage_of_every_format(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: tuple[str, Scheme, str, str],
    damage: Damage,
) -> None:
    name, scheme, numbers, codes = kind
    tensors, config = stored(name, make(scheme, 256, 256))
    folder = tmp_path / "source"
    write_checkpoint(folder, tensors, config)
    damage(folder, numbers, codes)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    target = "awq" if name == "gptq" else "gptq"
    code = run_guarded(
        lambda: convert(open_checkpoint(folder), target, tmp_path / "out", allow_loss=True),
        debug=False,
    )
    written = capsys.readouterr()
    assert code == 2, written.err
    assert written.err.startswith("error: ") and written.err.count("\n") == 1
    assert re.search(DAMAGES[damage], written.err), written.err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    try:
        assert not verify(folder).ok
    except BadInput as error:
        assert "\n" not in str(error)


def test_zero_codes_under_the_wrong_label_are_read_right_and_reported(tmp_path: Path) -> None:
    tensors, config = stored("gptq", make(HELD["gptq"][0], 64, 64))
    checkpoint = write_checkpoint(tmp_path, tensors, config | {"checkpoint_format": "gptq_v2"})
    (failure,) = verify(checkpoint.folder).failures
    assert failure == f"{MODULE} holds zero codes of gptq, but its config says gptq_v2"


def test_numbers_that_are_none_are_found(tmp_path: Path) -> None:
    """A value of fp8 that is NaN, a table with infinity, a magnitude that is NaN."""
    fp8, config = stored("fp8", make(HELD["fp8"][0], 128, 128))
    fp8[f"{MODULE}.weight"].view(torch.uint8)[3, 4] = 0x7F
    write_checkpoint(tmp_path / "fp8", fp8, config)
    assert verify(tmp_path / "fp8").failures == [f"{MODULE} has weights that are NaN"]
    lookup, config = stored("squeezellm", make(HELD["squeezellm"][0], 128, 128))
    lookup[f"{MODULE}.lookup_table"][0, 0] = float("inf")
    write_checkpoint(tmp_path / "lookup", lookup, config)
    assert verify(tmp_path / "lookup").failures == [f"{MODULE} has table that are NaN or infinite"]
    nf4, config = stored("bitsandbytes", make(CodebookScheme("nf4"), 128, 128))
    nf4[f"{MODULE}.weight.absmax"][5] = float("nan")
    write_checkpoint(tmp_path / "nf4", nf4, config)
    assert verify(tmp_path / "nf4").failures == [f"{MODULE} has absmax that are NaN or infinite"]


def test_a_static_input_scale_must_be_there(tmp_path: Path) -> None:
    scheme = next(
        s
        for s in HELD["compressed-tensors"]
        if isinstance(s, FloatScheme) and s.activations is not None and not s.activations.dynamic
    )
    tensors, config = stored("compressed-tensors", make(scheme, 64, 64))
    del tensors[f"{MODULE}.input_scale"]
    write_checkpoint(tmp_path, tensors, config)
    (failure,) = verify(tmp_path).failures
    assert "input_scale" in failure
