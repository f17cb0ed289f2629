"""EXL3 weights of ours, decoded by GPTQModel's torch code.

    python tools/exl3_owner.py write exl3.safetensors
    GPTQMODEL_ENVIRONMENT/bin/python tools/exl3_owner.py read exl3.safetensors

The first writes weights of every number of bits and codebook with what our reader makes of them; the second,
in an environment with GPTQModel 7.6, prints the largest difference of its own decoder, and ends with 1 where
one is beyond what float16 rounding of the codebook explains.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

OUT, INNER = 128, 256
CASES = [*((bits, "mul1") for bits in range(1, 9)), (2, "mcg"), (3, "3inst")]
LARGEST = 1e-3  # of the largest weight


def write(path: Path) -> None:
    """Write each case under its name, and its dequantized weight as `NAME.dense`."""
    from llmopt.quant.kinds.base.kind import kind_of
    from llmopt.quant.kinds.trellis.formats import Exl3Format
    from llmopt.quant.kinds.trellis.scheme import TrellisScheme

    stored: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    for bits, codebook in CASES:
        weight = torch.randn(OUT, INNER, generator=generator) * torch.rand(
            OUT, 1, generator=generator
        )
        tensor = kind_of(TrellisScheme(bits, codebook)).round(
            weight, torch.float16, name="the weight"
        )
        name = f"{codebook}-{bits}"
        stored |= Exl3Format().pack(name, tensor)
        stored[f"{name}.dense"] = tensor.dequantize().contiguous()
    save_file(stored, path)


def read(path: Path) -> int:
    """Compare GPTQModel's weights with ours."""
    from importlib import import_module

    decoder: Any = import_module("gptqmodel.nn_modules.exllamav3_torch").ExllamaV3TorchLinear
    stored, failed = load_file(path), 0
    for bits, codebook in CASES:
        name = f"{codebook}-{bits}"
        parts = {
            key.split(".")[1]: value for key, value in stored.items() if key.startswith(f"{name}.")
        }
        dense = parts.pop("dense")
        linear = decoder.from_tensors(in_features=INNER, out_features=OUT, name=name, tensors=parts)
        ratio = float((linear.get_weight_tensor().T - dense).abs().max() / dense.abs().max())
        failed |= ratio > LARGEST
        print(f"{name:8} largest difference {ratio:.1e} of the largest weight")
    return failed


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("write", "read"):
        sys.exit(__doc__)
    sys.exit(write(Path(sys.argv[2])) if sys.argv[1] == "write" else read(Path(sys.argv[2])))
