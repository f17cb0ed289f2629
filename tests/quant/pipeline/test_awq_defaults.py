"""What the command takes where nothing is asked: GPTAQ's targets, with `awq` R2 too, where they can be had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.cli.main import main
from llmopt.quant.convert.verify import PROVEN, verify
from llmopt.quant.methods.options import MethodOptions
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.manifest import MANIFEST_NAME
from llmopt.quant.plan.request import QuantizeRequest, with_defaults
from llmopt.quant.smoothing.rotate import seen_rotated
from llmopt.quant.source.models import open_plain

from ...support.model_families import save_model

OPEN = MethodOptions(asymmetric=None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("awq") / "model"
    save_model(folder, "LlamaConfig", {"num_hidden_layers": 1, "tie_word_embeddings": True})
    return folder


def decided(model: Path, **given: Any) -> tuple[tuple[str, ...] | None, bool | None]:
    """The rotations, and whether the float model's outputs are the targets."""
    request = QuantizeRequest(model, model / "out", **{"rotations": None, "options": OPEN} | given)
    request = with_defaults(request)
    rotations = request.rotations
    if rotations is None:  # tried on the model
        rotations = seen_rotated(open_plain(model), request.rotations, request.seed)[1]
    return rotations, request.options.asymmetric


def test_awq_takes_both(model: Path) -> None:
    assert decided(model) == (("R2",), True)


@pytest.mark.parametrize("method", ["trellis", "quip"])
def test_codes_between_transforms_take_the_targets(model: Path, method: str) -> None:
    assert decided(model, method=method) == ((), True)
    assert decided(model, method=method, stats=Path("statistics")) == ((), False)


@pytest.mark.parametrize(
    "given",
    [
        {"method": "gptq"},
        {"method": "rtn"},
        {"options": MethodOptions(asymmetric=None, solver="nearest")},
        {"options": MethodOptions(asymmetric=None, true_sequential=False)},
        {"stats": Path("statistics")},
        {"vision": True},
    ],
)
def test_others_take_neither(model: Path, given: dict[str, Any]) -> None:
    assert decided(model, **given) == ((), False)


def test_what_is_asked_stays(model: Path) -> None:
    assert decided(model, method="gptq", rotations=("R2",)) == (("R2",), False)
    assert decided(model, rotations=(), options=MethodOptions()) == ((), False)
    assert decided(model, format="gguf") == ((), True)


def test_a_model_whose_values_cannot_be_turned_is_left_as_it_is(tmp_path: Path) -> None:
    """GPT-2 keeps queries, keys and values in one transposed matrix."""
    save_model(tmp_path / "model", "GPT2Config", {"n_embd": 64, "n_layer": 1, "n_head": 8})
    assert decided(tmp_path / "model") == ((), True)


def test_pairs_that_heads_do_not_divide_prove_nothing(tmp_path: Path) -> None:
    """Gemma 3n's only linear pair beside the MLP has a low rank: R2 would turn nothing."""
    layers = {"num_hidden_layers": 4, "num_kv_shared_layers": 0, "laurel_rank": 4}
    shape = {
        **layers,
        "intermediate_size": [64] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "head_dim": 8,
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 8,
    }
    save_model(tmp_path / "model", "Gemma3nTextConfig", shape)
    assert decided(tmp_path / "model") == ((), True)


def test_a_model_that_does_not_run_in_the_proof_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some models' code runs in no float64, or on no CPU."""
    save_model(tmp_path / "model", "LlamaConfig", {"num_hidden_layers": 1, "hidden_size": 48})

    def fail(*_: object) -> None:
        raise RuntimeError("expected scalar type Half")

    monkeypatch.setattr("llmopt.quant.smoothing.rotate._proven", fail)
    monkeypatch.setattr("llmopt.quant.smoothing.rotate._known", {})
    assert decided(tmp_path / "model") == ((), True)


def test_the_command_leaves_both_to_the_method(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And `--rotate none --no-asymmetric-calibration` gives the plain method."""
    said: dict[str, Any] = {}
    asked = ["quantize", str(model), "--num-samples", "2", "--seq-len", "32", "--group-size", "32"]
    plain = ["--rotate", "none", "--no-asymmetric-calibration"]
    for name, options in {"best": [], "plain": plain}.items():
        folder = tmp_path / name
        given = [*asked, "--format", "compressed-tensors", "--output", str(folder), *options]
        with pytest.raises(SystemExit) as ended:
            main(given)
        assert ended.value.code == 0, capsys.readouterr().err
        assert verify(folder).status == PROVEN
        manifest = json.loads((folder / MANIFEST_NAME).read_text())
        said[name] = manifest["options"].get("rotations", [])
        assert "lm_head.weight" not in (folder / "model.safetensors.index.json").read_text()
    assert said == {"best": ["R2"], "plain": []}


def test_scales_by_the_layers_output(model: Path, tmp_path: Path) -> None:
    """The layer is run with candidates in place, and is as it was behind them."""
    given = {"num_samples": 2, "seq_len": 32, "group_size": 16, "compute": "float32"}
    errors = {}
    for judge in ("linear", "layer"):
        options = MethodOptions(judge=judge, solver="nearest")
        quantize(QuantizeRequest(model, tmp_path / judge, options=options, bits=4, **given))
        assert verify(tmp_path / judge).status == PROVEN
        manifest = json.loads((tmp_path / judge / MANIFEST_NAME).read_text())
        errors[judge] = manifest["summary"]["error"] / manifest["summary"]["rtn_error"]
    assert errors["layer"] != errors["linear"] and max(errors.values()) <= 1
    with pytest.raises(BadInput, match="--stats"):
        options = MethodOptions(judge="layer")
        stats = tmp_path / "stats"
        quantize(QuantizeRequest(model, tmp_path / "out", options=options, stats=stats, **given))
    with pytest.raises(BadInput, match="--judge belongs to method awq"):
        quantize(QuantizeRequest(model, tmp_path / "out", method="gptq", options=options, **given))
