"""Mamba norms of several groups, which transformers before 5.23 computes over all channels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.model.adapter.adapter import TransformersModel
from llmopt.engine.model.layers.spec import LoadingOptions
from llmopt.quant.model.architecture import architecture_of
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.stream.layer_stream import LayerStream

from ...support.model_families import STATEFUL, save_model

REFUSAL = (
    r"model: transformers 5\.22\.2 computes the Mamba norm of .* pip install 'transformers>=5\.23'"
)
OLD = "5.22.2"
TOKENS = list(range(3, 19))


def granite(folder: Path, **changes: Any) -> Path:
    config_class, overrides, _ = STATEFUL["granite-4-dense"]
    folder.mkdir()
    save_model(folder, config_class, {**overrides, **changes})
    return folder


def prepare_stream(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    stream = LayerStream(checkpoint, architecture_of(checkpoint))
    stream.prepare(torch.tensor([TOKENS]))


def run_modules(folder: Path) -> None:
    TransformersModel(Checkpoint(folder), LoadingOptions(torch.device("cpu"), torch.float32))


@pytest.mark.parametrize("run", [prepare_stream, run_modules])
def test_modules_of_an_old_transformers_are_refused_for_several_groups(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = granite(tmp_path / "model")
    single = granite(tmp_path / "single", mamba_n_groups=1)
    monkeypatch.setattr("llmopt.quant.model.auto.transformers.__version__", OLD)
    with pytest.raises(BadInput, match=REFUSAL):
        run(several)
    run(single)
    monkeypatch.setattr("llmopt.quant.model.auto.transformers.__version__", "5.23.0")
    run(several)


def test_the_decoder_of_the_engine_runs_several_groups_on_an_old_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = granite(tmp_path / "model")
    monkeypatch.setattr("llmopt.quant.model.auto.transformers.__version__", OLD)
    engine = Engine(EngineConfig(folder, dtype="float32", device="cpu", num_threads=1))
    assert engine.prompt_logits(TOKENS).isfinite().all()
