"""Image-text models: text layers calibrated on pairs, tower and projector on request, and a report by part."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.quant.convert.convert import convert
from llmopt.quant.convert.verify import PROVEN, verify
from llmopt.quant.formats.registry import quantized_modules
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.pipeline.preflight import preflight
from llmopt.quant.pipeline.prepare import prepare
from llmopt.quant.plan.journal import Journal
from llmopt.quant.plan.request import QuantizeRequest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from ...support.dequantized import dequantized_model
from ...support.quant_support import STORIES
from ...support.vision_checkpoints import image_pairs_file, save_wrapped

NAME = "qwen2_5_vl"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wrapped")
    save_wrapped(folder, NAME)
    return folder


def asked(model: Path, output: Path, **fields: Any) -> QuantizeRequest:
    usual: dict[str, Any] = {"method": "rtn", "group_size": 32, "seq_len": 128, "num_samples": 2}
    if "calibration" not in fields:
        usual["calibration"] = image_pairs_file(output.parent)
    return QuantizeRequest(model, output, **(usual | fields))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def is_text(name: str) -> bool:
    return "visual" not in name


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def test_vision_tensors_stay_byte_equal_and_are_ignored_by_name(
    model: Path, tmp_path: Path
) -> None:
    result = quantize(asked(model, tmp_path / "out", method="gptq", format="compressed-tensors"))
    before, after = tensors(model), tensors(result.output)
    vision = {name for name in before if not is_text(name)}
    assert len(vision) > 20
    for name in vision:
        assert after[name].dtype == before[name].dtype and torch.equal(after[name], before[name])
    linears = {
        n.removesuffix(".weight") for n in vision if n.endswith(("qkv.weight", "mlp.0.weight"))
    }
    config = json.loads((result.output / "config.json").read_text())
    assert linears and linears <= set(config["quantization_config"]["ignore"])
    assert result.manifest["calibration"]["images"] == 4
    parts = {part["part"]: part for part in result.manifest["parts"]}
    assert [(p["quantized"], p["plain"]) for p in parts.values()] == [(14, 0), (0, 10), (0, 2)]
    assert parts["vision"]["bytes"] == parts["vision"]["source_bytes"]
    assert parts["text"]["bits_per_weight"] < 6 < parts["vision"]["bits_per_weight"]
    assert 0 < parts["text"]["error"] < parts["text"]["rtn_error"]
    assert sum(p["source_bytes"] for p in parts.values()) == sum(t.nbytes for t in before.values())
    assert sum(p["bytes"] for p in parts.values()) == sum(t.nbytes for t in after.values())
    assert (result.output / "preprocessor_config.json").is_file()
    assert verify(result.output).status == PROVEN


def test_the_pictures_are_part_of_what_layers_are_calibrated_on(
    model: Path, tmp_path: Path
) -> None:
    source = image_pairs_file(tmp_path)
    gptq = asked(model, tmp_path / "a", method="gptq", calibration=source, held_out=0)
    one = quantize(gptq)
    for path in tmp_path.glob("picture-*.png"):
        path.write_bytes((tmp_path / "picture-0.png").read_bytes())
    sized = prepare(replace(gptq, output=tmp_path / "b"))
    assert sized.calibration.sha256 != one.manifest["calibration"]["sha256"]


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("qwen3_vl", {"method": "awq", "format": "compressed-tensors"}),
        ("llava_onevision", {"method": "awq"}),
        ("idefics3", {"method": "fp8", "group_size": None, "activations": "static"}),
        ("gemma3", {"method": "gptq"}),
    ],
)
def test_tower_and_projector_are_quantized_on_request(
    name: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    save_wrapped(tmp_path / "model", name)
    request = asked(tmp_path / "model", tmp_path / "out", vision=True, seq_len=224, **fields)
    result = quantize(request)
    parts = {part["part"]: part for part in result.manifest["parts"]}
    assert parts["vision"]["quantized"] >= 8 and parts["vision"]["plain"] == 0
    assert parts["projector"]["quantized"] == {"gemma3": 0, "idefics3": 1, "qwen3_vl": 4}.get(
        name, 2
    )
    better = 1.0 if fields["method"] == "fp8" else 0.7
    assert 0 < parts["vision"]["error"] <= better * parts["vision"]["rtn_error"]
    report = verify(result.output)
    assert (report.status, report.failures) == (PROVEN, [])
    expected = len(result.manifest["modules"])
    assert len(quantized_modules(Checkpoint(result.output))) == expected


def test_transformers_loads_what_was_computed(model: Path, tmp_path: Path) -> None:
    request = asked(model, tmp_path / "out", vision=True, bits=8)
    output = quantize(request).output
    logging.getLogger("compressed_tensors").setLevel(logging.ERROR)
    loaded: Any = AutoModelForImageTextToText.from_pretrained(output, dtype=torch.float32).eval()
    ours = dequantized_model(output)
    calibration = prepare(replace(request, output=tmp_path / "again")).calibration
    inputs = {"input_ids": calibration.token_ids[:1], **calibration.images[0].tensors}
    with torch.no_grad():
        torch.testing.assert_close(
            loaded(**inputs).logits, ours(**inputs).logits, atol=1e-4, rtol=1e-4
        )


@pytest.mark.sweep(1)
@pytest.mark.parametrize("layers", [1, 4, 5])
def test_a_killed_run_goes_on_to_the_same_bytes(
    layers: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the tower, at the border to the language model, and inside that."""
    source = image_pairs_file(tmp_path)
    request = asked(model, tmp_path / "whole", method="gptq", vision=True, calibration=source)
    whole = quantize(request).output
    append = Journal.append

    def killed(self: Journal, record: dict[str, Any]) -> None:
        append(self, record)
        if len(self.layers) == layers:
            raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "append", killed)
    with pytest.raises(KeyboardInterrupt):
        quantize(replace(request, output=tmp_path / "cut"))
    monkeypatch.undo()
    result = quantize(replace(request, output=tmp_path / "cut"))
    assert result.resumed_layers == layers
    assert digests(result.output) == digests(whole)


def test_a_tensor_of_whole_numbers_is_counted_by_its_bytes(model: Path, tmp_path: Path) -> None:
    """Some vision towers store their position ids, which are int64."""
    source = tmp_path / "source"
    shutil.copytree(model, source)
    (path,) = source.glob("*.safetensors")
    before = load_file(path) | {"model.visual.position_ids": torch.arange(100)}
    save_file(before, path, {"format": "pt"})
    result = quantize(asked(source, tmp_path / "out", errors=False))
    parts, after = result.manifest["parts"], tensors(result.output)
    assert sum(p["source_bytes"] for p in parts) == sum(t.nbytes for t in before.values())
    assert sum(p["bytes"] for p in parts) == sum(t.nbytes for t in after.values())


def test_the_preflight_tells_the_parts_apart(model: Path, tmp_path: Path) -> None:
    answer = preflight(prepare(asked(model, tmp_path / "out", vision=True)))
    kinds = {(kind.part, kind.name): kind.scheme for kind in answer.kinds}
    assert kinds["vision", "qkv"] == kinds["text", "q_proj"] == "int4 g32 sym"
    assert kinds["vision", "down_proj"] and kinds["projector", "0"]
    assert {row.name for row in answer.loaders if row.loads} == {"llmopt", "transformers", "vLLM"}


@pytest.mark.parametrize(
    ("fields", "tried"),
    [
        ({"format": "compressed-tensors"}, True),
        ({"format": "awq", "symmetric": False}, False),
        ({"format": "compressed-tensors", "symmetric": False}, False),
        ({"method": "smoothquant", "bits": 8, "group_size": None}, False),
    ],
)
def test_vllm_is_named_as_tried_for_what_was_tried_with_images(
    fields: dict[str, Any], tried: bool, model: Path, tmp_path: Path
) -> None:
    answer = preflight(prepare(asked(model, tmp_path / "out", **fields)))
    (reason,) = [row.reason for row in answer.loaders if row.name == "vLLM"]
    assert ("; tried on a CPU" in reason, "; not tried" in reason) == (tried, not tried)


def test_widths_that_no_group_divides_take_a_scale_for_each_output(tmp_path: Path) -> None:
    save_wrapped(tmp_path / "model", NAME)
    request = asked(tmp_path / "model", tmp_path / "out", vision=True, group_size=None)
    plan = prepare(request).plan
    labels = {plan.schemes[name].label for name in plan.schemes if "visual" in name}
    assert labels == {"int4 channel sym", "int4 g128 sym"}
    assert {plan.schemes[n].label for n in plan.schemes if is_text(n)} == {"int4 g128 sym"}
    single = prepare(replace(request, format="awq"))
    assert any("stay as they are" in note for note in single.notes)
    assert any("visual.blocks.0.attn.qkv" in name for name in single.plan.ignored)


def test_conversion_keeps_the_vision_side(model: Path, tmp_path: Path) -> None:
    result = quantize(asked(model, tmp_path / "out", method="gptq", vision=True))
    convert(Checkpoint(result.output), "compressed-tensors", tmp_path / "converted")
    assert verify(tmp_path / "converted").failures == []
    codes = quantized_modules(Checkpoint(tmp_path / "converted"))
    assert codes == quantized_modules(Checkpoint(result.output))
    assert (tmp_path / "converted" / "preprocessor_config.json").is_file()


def test_a_row_of_llava_has_its_picture(model: Path, tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "<image>\nred?"}, {"from": "gpt", "value": "no"}]
    source = image_pairs_file(tmp_path, {"image": "picture-1.png", "conversations": turns})
    calibration = prepare(asked(model, tmp_path / "out", calibration=source)).calibration
    assert calibration.num_images == 5


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a", "images": ["missing.png"]}, "line 4: there is no image .*missing.png"),
        ({"text": "a", "images": ["pairs.jsonl"]}, "line 4: .*pairs.jsonl is no image"),
        ({"text": "a", "images": ["http://x/y.png"]}, "is no path: save the picture"),
        ({"text": "a", "images": ["~no such user/y.png"]}, "home of nobody here"),
        ({"text": "a", "images": "picture-0.png"}, "'images' holds no list of paths"),
        ({"text": "<image><image>", "images": ["picture-0.png"]}, "places more images"),
        ({"images": ["picture-0.png"]}, "has neither 'text' nor 'messages'"),
    ],
)
def test_bad_pairs_are_refused_by_line(
    row: dict[str, Any], message: str, model: Path, tmp_path: Path
) -> None:
    source = image_pairs_file(tmp_path, row)
    with pytest.raises(BadInput, match=message):
        prepare(asked(model, tmp_path / "out", calibration=source))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": "autoround"}, "--quantize-vision: method autoround takes decoder layers alone"),
        ({"method": "rtn", "format": "gguf", "group_size": None}, "GGUF file holds the language"),
        ({"rotations": ("R2",)}, "--rotate turns the language model alone"),
        ({"calibration": str(STORIES / "config.json")}, "holds no array"),
    ],
)
def test_what_does_not_go_with_the_tower_is_refused(
    fields: dict[str, Any], message: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=message):
        prepare(asked(model, tmp_path / "out", vision=True, **fields))
    assert not (tmp_path / "out.partial").exists()


def test_text_alone_calibrates_no_tower(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a dog that ran and ran. " * 60)
    with pytest.raises(BadInput, match="has no images: give image-text pairs"):
        prepare(asked(model, tmp_path / "out", vision=True, calibration=str(text)))
    without = asked(model, tmp_path / "free", vision=True, errors=False, calibration=str(text))
    assert quantize(without).manifest["parts"][1]["quantized"] == 10


def test_a_model_of_text_reads_no_pairs_and_has_no_tower(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"has images, and .* reads text alone"):
        prepare(asked(STORIES, tmp_path / "out"))
    with pytest.raises(BadInput, match=r"--quantize-vision: .* has no vision tower"):
        prepare(asked(STORIES, tmp_path / "out", vision=True))


def test_the_bundled_pictures_are_the_default_of_a_model_that_reads_images(
    model: Path, tmp_path: Path
) -> None:
    session = prepare(asked(model, tmp_path / "out", calibration=None, seq_len=512))
    assert session.calibration.source == "bundled pictures"
    assert session.calibration.num_images > 3


def test_pictures_that_do_not_fit_a_sample_give_way_to_text(model: Path, tmp_path: Path) -> None:
    """A processor that cuts images into many tiles takes more tokens than a sample has."""
    request = asked(model, tmp_path / "out", calibration=None, seq_len=16)
    session = prepare(request)
    assert session.calibration.num_images == 0 and len(session.calibration.token_ids) == 2
    assert any(
        "warning: calibrated on text without images" in note and "larger --seq-len" in note
        for note in session.notes
    )
    with pytest.raises(BadInput, match="larger --seq-len"):
        prepare(replace(request, vision=True))
