"""Placeholder tokens of images, video and audio in a text, or that the model itself generates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine

from ...support import image_oracle
from ...support.image_oracle import IMAGE, save_image_model

VIDEO, AUDIO = 505, 506
PROMPT = [7, 41, AUDIO, 12, VIDEO, 99, IMAGE, 3]
FAMILIES = ("gemma-4", "gemma-4-per-layer", "gemma-3")


@dataclass(frozen=True, slots=True)
class Saved:
    folder: Path
    model: Any


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp(request.param)
    kind, text, vision, fields = image_oracle.IMAGE_MODELS[request.param]
    with pytest.MonkeyPatch.context() as patch:
        if request.param.startswith("gemma-4"):
            fields = {**fields, "video_token_id": VIDEO, "audio_token_id": AUDIO}
        patch.setitem(image_oracle.IMAGE_MODELS, request.param, (kind, text, vision, fields))
        return Saved(folder, save_image_model(folder, request.param))


def engine(folder: Path, **options: Any) -> Engine:
    given = {"dtype": "float32", "device": "cpu", "num_threads": 1, "max_model_len": 128}
    return Engine(EngineConfig(folder, block_size=4, num_blocks=60, **{**given, **options}))


def test_a_text_with_placeholders_has_the_logits_of_transformers(saved: Saved) -> None:
    with torch.no_grad():
        expected = saved.model(torch.tensor([PROMPT])).logits[0]
    got = engine(saved.folder).prompt_logits(PROMPT)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("token", [AUDIO, VIDEO, IMAGE])
@pytest.mark.parametrize("enforce_eager", [True, False])
def test_tokens_behind_a_generated_placeholder_are_those_of_transformers(
    saved: Saved, token: int, enforce_eager: bool
) -> None:
    with torch.no_grad():
        ids = saved.model.generate(
            torch.tensor([PROMPT[:2]]), do_sample=False, max_new_tokens=12, min_new_tokens=12, eos_token_id=None,
            pad_token_id=0, sequence_bias={(token,): 10.0},
        )  # fmt: skip
    expected = ids[0, 2:].tolist()
    assert token in expected[:-1], "no placeholder is generated"
    built = engine(saved.folder, enforce_eager=enforce_eager)
    params = SamplingParams(
        temperature=0.0, max_tokens=12, ignore_eos=True, logit_bias={token: 10.0}
    )
    built.add_request("0", PROMPT[:2], params)
    got: list[int] = []
    while built.has_unfinished():
        for output in built.step():
            got.extend(output.new_token_ids)
    assert got == expected
