"""KL divergence behind pictures: none from the model itself, more with fewer bits, and of the right positions."""

from __future__ import annotations

from pathlib import Path

from llmopt.quant.convert.convert import dequantized_model
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.request import QuantizeRequest
from llmopt.quant.stream.image_samples import Pair

from tools.image_quality import image_quality, sequences

from ..support.vision_checkpoints import save_pictures, save_wrapped


def test_kl_grows_as_bits_go(tmp_path: Path) -> None:
    source = tmp_path / "model"
    save_wrapped(source, "idefics3")
    pictures = save_pictures(tmp_path)
    pairs = [
        Pair("a dog <image> that ran", pictures[:1], "a"),
        Pair("two boats", pictures[1:], "b"),
    ]
    plain, kl = dequantized_model(source), []
    for bits in (8, 3):
        output = tmp_path / f"int{bits}"
        fields = {"method": "rtn", "group_size": 32, "errors": False, "vision": True, "bits": bits}
        quantize(QuantizeRequest(source, output, **fields))
        found = image_quality(plain, dequantized_model(output), source, pairs)
        assert (found.pairs, found.kl > 0, found.kl_margin > 0) == (2, True, True)
        kl.append(found.kl)
    assert kl[1] > 50 * kl[0]
    same = image_quality(plain, plain, source, pairs)
    assert (same.kl, same.same_top) == (0.0, 1.0)
    for inputs, positions in sequences(source, pairs):
        ids = inputs["input_ids"][0]
        first = int((ids == 513).nonzero()[0])
        assert not positions[: first + 1].any() and not (ids[positions] == 513).any()
