"""KL divergence of a quantized image-text model from the plain one, on texts behind pictures.

    python tools/image_quality.py --model DIR --quantized DIR [--quantized DIR …] [--pairs pairs.jsonl]

Pairs are rows with `text` or `messages` and `images`, by default the bundled pictures (which models are also
calibrated on by default: give others where it matters). Both models are transformers' in float32, with
dequantized weights. Of each pair the positions of text behind its first picture count, those of placeholders
do not. Printed are the mean KL in nats with a 95 % interval over pairs, and how often the likeliest token is
the same.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from llmopt.quant.base.errors import BadInput
from llmopt.quant.convert.convert import dequantized_model
from llmopt.quant.load_processor import load_processor, load_tokenizer
from llmopt.quant.stream.image_samples import PICTURES, Pair, PairEncoder, read_pairs


@dataclass(frozen=True, slots=True)
class ImageQuality:
    """How a quantized model differs behind pictures.

    Attributes:
        kl, kl_margin: mean in nats over all positions, and half of its 95 % interval, pairs as units.
        same_top: share of positions with the same likeliest token.
    """

    model: str
    pairs: int
    positions: int
    kl: float
    kl_margin: float
    same_top: float


def sequences(
    folder: Path, pairs: Sequence[Pair]
) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """Of each pair the arguments of the model's forward, and the positions that count."""
    tokenizer = load_tokenizer(folder)
    processor = load_processor(folder, tokenizer, trust_remote_code=False)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    placeholder = config.get("image_token_id", config.get("image_token_index"))
    encoder = PairEncoder(processor, tokenizer)
    for pair in pairs:
        sample = encoder.encode([pair])
        ids = torch.tensor([sample.token_ids])
        images = (ids[0] == placeholder).nonzero().flatten()
        if not len(images):
            raise BadInput(f"{pair.where}: its prompt has no token {placeholder} for an image")
        counts = torch.arange(ids.shape[1]) > images[0]
        counts &= ids[0] != placeholder
        yield {"input_ids": ids, **sample.images.tensors}, counts


@torch.no_grad()
def image_quality(plain: Any, quantized: Any, folder: Path, pairs: Sequence[Pair]) -> ImageQuality:
    """Compare two models of transformers; `folder` has the processor."""
    sums, counts, same = [], [], 0
    for inputs, positions in sequences(folder, pairs):
        left, right = (
            model(**inputs).logits[0][positions].float().log_softmax(-1)
            for model in (plain, quantized)
        )
        sums.append(float((left.exp() * (left - right)).sum()))
        counts.append(len(left))
        same += int((left.argmax(-1) == right.argmax(-1)).sum())
    total = sum(counts)
    mean = sum(sums) / total
    # A ratio of sums over pairs: positions of one pair depend on each other.
    spread = sum((s - mean * n) ** 2 for s, n in zip(sums, counts, strict=True))
    units = len(sums)
    error = math.sqrt(spread * units / max(1, units - 1)) / total
    return ImageQuality("", units, total, mean, 1.96 * error, same / total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--quantized", type=Path, action="append", required=True)
    parser.add_argument("--pairs", type=Path, default=PICTURES)
    parser.add_argument("--json", type=Path, help="file")
    given = parser.parse_args()
    read = read_pairs(given.pairs)
    if read is None:
        parser.error(f"{given.pairs} has no rows with images")
    plain, rows = dequantized_model(given.model), []
    for folder in given.quantized:
        result = image_quality(plain, dequantized_model(folder), given.model, read[0])
        rows.append(asdict(result) | {"model": folder.name})
        print(
            f"{folder.name}: KL {result.kl:.3g} ± {result.kl_margin:.2g} nats, same top token "
            f"{result.same_top:.1%}, {result.positions} positions behind pictures of {result.pairs} pairs",
            flush=True,
        )
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
