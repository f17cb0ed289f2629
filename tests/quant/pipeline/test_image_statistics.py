"""The check of mixed precision sees the images of its samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from llmopt.base.progress import Silent
from llmopt.quant.methods.options import MethodOptions
from llmopt.quant.pipeline.divergence import divergences
from llmopt.quant.pipeline.pipeline import prepare, quantize
from llmopt.quant.plan.request import QuantizeRequest
from torch.nn import functional

from ...support.dequantized import dequantized_model
from ...support.vision_checkpoints import image_pairs_file, save_wrapped


@torch.no_grad()
def test_the_divergence_of_a_mix_is_that_behind_images(tmp_path: Path) -> None:
    model = save_wrapped(tmp_path / "model", "qwen2_5_vl")
    request = QuantizeRequest(
        tmp_path / "model",
        tmp_path / "out",
        method="rtn",
        bits=3,
        group_size=32,
        seq_len=128,
        num_samples=2,
        held_out=0,
        compute="float32",
        calibration=image_pairs_file(tmp_path),
        options=MethodOptions(ranges="minmax"),
    )
    session = prepare(request)
    rounded = dequantized_model(quantize(request).output)
    samples = session.calibration.token_ids, session.calibration.images
    schemes = [session.plan.schemes]
    ours = divergences(
        session.plan, session.stream, samples[0], schemes, Silent(), samples[1]
    ).mean()
    losses = []
    for row, images in enumerate(samples[1]):
        ids = samples[0][row : row + 1]
        before, after = (
            functional.log_softmax(each(input_ids=ids, **images.tensors).logits, dim=-1)
            for each in (model, rounded)
        )
        losses.append((before.exp() * (before - after)).sum(-1).mean())
    assert ours == pytest.approx(float(torch.stack(losses).mean()), rel=1e-3)
