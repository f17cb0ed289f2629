"""Errors of GGUF's block types: this package's search beside llama.cpp's quantizer.

    python tools/gguf_errors.py --library LIBGGML [--model DIR] [--types Q2_K,IQ4_XS]

`LIBGGML` is libggml-base of a llama.cpp, such as `llama_cpp/lib/libggml-base.so` of an environment with
llama-cpp-python. Weights are the `down_proj` of a model's first, middle and last layer, or normal numbers
with some outliers. Each type is tried with and without importance, which is log-normal (a stand-in for mean
squares of inputs). The error is the weighted sum of squared differences over the weighted sum of squares.
Ends with 1 where ours is beyond theirs by 0.5 %.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from pathlib import Path

import torch
from llmopt.quant.gguf.container import TYPE_NUMBERS
from llmopt.quant.kinds.ggml.blocks import dequantize_blocks, quantize_blocks
from llmopt.quant.kinds.ggml.scheme import GGUF_BLOCKS
from llmopt.quant.model.checkpoint import Checkpoint

NEEDS_IMPORTANCE = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS")


class Library:
    """llama.cpp's `ggml_quantize_chunk`."""

    def __init__(self, path: Path) -> None:
        self._quantize = ctypes.CDLL(str(path)).ggml_quantize_chunk
        pointer = ctypes.c_void_p
        self._quantize.restype = ctypes.c_size_t
        self._quantize.argtypes = [ctypes.c_int, pointer, pointer, *[ctypes.c_int64] * 3, pointer]

    def __call__(
        self, weight: torch.Tensor, type_name: str, importance: torch.Tensor | None
    ) -> torch.Tensor:
        rows, width = weight.shape
        per_block, size = GGUF_BLOCKS[type_name]
        packed = torch.zeros(rows, width // per_block * size, dtype=torch.uint8)
        weigh = None if importance is None else importance.data_ptr()
        number = TYPE_NUMBERS[type_name]
        self._quantize(number, weight.data_ptr(), packed.data_ptr(), 0, rows, width, weigh)
        return packed


def weights(model: Path | None) -> list[torch.Tensor]:
    """Matrices to quantize, float32."""
    if model is None:
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(512, 1024, generator=generator)
        return [weight * torch.randn(512, 1024, generator=generator).mul(0.4).exp()]
    checkpoint = Checkpoint(model)
    layers = int(checkpoint.config["num_hidden_layers"])
    names = (f"model.layers.{i}.mlp.down_proj.weight" for i in (0, layers // 2, layers - 1))
    return [checkpoint.tensor(name).float()[:256].contiguous() for name in names]


def error(
    weight: torch.Tensor, packed: torch.Tensor, type_name: str, importance: torch.Tensor | None
) -> float:
    """Weighted squared error over the weighted squares."""
    weigh = torch.ones(weight.shape[1]) if importance is None else importance
    off = (dequantize_blocks(packed, type_name) - weight).square() * weigh
    return float(off.sum() / (weight.square() * weigh).sum())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--types", default=",".join(GGUF_BLOCKS))
    given = parser.parse_args()
    library, matrices = Library(given.library), weights(given.model)
    beyond = 0
    print(f"{'type':9}{'importance':>12}{'ours':>12}{'llama.cpp':>12}{'ratio':>8}{'seconds':>9}")
    for type_name in given.types.split(","):
        for weighed in (False, True):
            sums, seconds = [0.0, 0.0], 0.0
            if not weighed and type_name in NEEDS_IMPORTANCE:
                continue
            for index, weight in enumerate(matrices):
                generator = torch.Generator().manual_seed(index)
                spread = torch.randn(weight.shape[1], generator=generator).mul(1.0).exp()
                importance = spread if weighed else None
                start = time.perf_counter()
                mine = quantize_blocks(weight, type_name, importance)
                seconds += time.perf_counter() - start
                theirs = library(weight, type_name, importance)
                sums[0] += error(weight, mine, type_name, importance)
                sums[1] += error(weight, theirs, type_name, importance)
            ours, other = (total / len(matrices) for total in sums)
            beyond += ours > 1.005 * other
            print(
                f"{type_name:9}{'yes' if weighed else 'no':>12}{ours:12.3e}{other:12.3e}"
                f"{ours / other:8.3f}{seconds:9.2f}",
                flush=True,
            )
    print(f"{beyond} beyond llama.cpp's" if beyond else "all at or below llama.cpp's")
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())
