"""Column `awq`: discovered folds hold the logits, and what awq writes is what transformers loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from llmopt.quant.base.errors import BadInput
from llmopt.quant.convert.read import quantized_modules, read_quantized, tensor_names
from llmopt.quant.convert.verify import verify
from llmopt.quant.model.architecture import Architecture, architecture_of
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.request.request import QuantizeRequest
from llmopt.quant.smoothing.proof import fold_layer
from llmopt.quant.smoothing.smoothing_map import with_smoothing
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from .case import Case, Verdict

SAME = 1e-5  # of logits, relative to the largest
WORDS, LENGTH, SAMPLES = 64, 16, 8
# 4 bits in groups where a group divides every width, else 8 bits per channel.
GRIDS: tuple[dict[str, Any], ...] = ({"bits": 4, "group_size": 32}, {"bits": 8, "group_size": -1})


class AwqColumn:
    """Exact: folds leave the logits, and the written checkpoint has those of our reader's weights.

    Where transformers cannot load it, `verify` must prove it.
    """

    name = "awq"

    def verdict(self, case: Case) -> Verdict:
        """Discover, fold, quantize, and load with transformers."""
        assert case.raw
        source = case.folder / "awq-source"
        _write_source(case, source)
        checkpoint = Checkpoint(source)
        try:
            architecture = with_smoothing(checkpoint, architecture_of(checkpoint))
            folds, folded = _folded(checkpoint, architecture, case.folder / "awq-folded")
            if not folds:
                return Verdict("missed", "no pair can be folded")
            change = _distance(case, _load(case, source), _load(case, folded))
            if not change < SAME:
                return Verdict("wrong", f"{folds} folds change the logits by {change:.1e}")
            written = _quantized(source, case.folder / "awq")
        except BadInput as error:
            return Verdict("refused", str(error).replace(str(case.folder), "")[:160])
        return _read_back(case, written, folds)


def _read_back(case: Case, written: Path, folds: int) -> Verdict:
    """What transformers reads from the written checkpoint; where it cannot, what our second reader does."""
    plain = _load(case, _dequantized(written, case.folder / "awq-plain"))
    try:
        loaded = _load(case, written)
    except Exception as error:  # transformers fails on packed weights in many ways
        report = verify(written)
        if report.failures:
            return Verdict("wrong", report.failures[0])
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return Verdict("exact", f"{folds} folds; proven by verify, not loaded: {reason}"[:160])
    change = _distance(case, plain, loaded)
    if not change < SAME:
        return Verdict("wrong", f"transformers loads logits that differ by {change:.1e}")
    return Verdict("exact", f"{folds} folds")


def _write_source(case: Case, folder: Path) -> None:
    """The plain checkpoint with a tokenizer and a calibration text; its norms are not 1."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in case.model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    case.model.save_pretrained(folder)
    words = {f"w{index}": index for index in range(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    ids = torch.randint(3, WORDS, (2 * SAMPLES, LENGTH), generator=generator)
    text = "\n\n".join(" ".join(f"w{index}" for index in row) for row in ids.tolist())
    (folder / "calibration.txt").write_text(text)


def _folded(checkpoint: Checkpoint, architecture: Architecture, folder: Path) -> tuple[int, Path]:
    """A copy with random scales in every fold, and how many there are."""
    state = {name: checkpoint.tensor(name) for name in checkpoint.names}
    folds = 0
    for index, family in enumerate(architecture.layers):
        start = architecture.layer_prefix(index) + "."
        tensors = {n.removeprefix(start): t for n, t in state.items() if n.startswith(start)}
        folds += fold_layer(family, tensors, index)
        state |= {start + name: tensor for name, tensor in tensors.items()}
    return folds, _write(folder, state, checkpoint.config)


def _quantized(source: Path, output: Path) -> Path:
    refused = BadInput("")
    for grid in GRIDS:
        request = QuantizeRequest(
            source,
            output,
            method="awq",
            format="compressed-tensors",
            symmetric=True,
            calibration=str(source / "calibration.txt"),
            num_samples=SAMPLES,
            seq_len=LENGTH,
            **grid,
        )
        try:
            return quantize(request).output
        except BadInput as error:
            refused = error
            if "group" not in str(error):
                break
    raise refused


def _dequantized(written: Path, folder: Path) -> Path:
    """A plain checkpoint with the weights that the quantized one stands for, as our reader has them."""
    checkpoint = Checkpoint(written)
    modules = quantized_modules(checkpoint)
    packed = set().union(*(tensor_names(checkpoint, module) for module in modules))
    state = {name: checkpoint.tensor(name) for name in checkpoint.names if name not in packed}
    state |= {f"{name}.weight": read_quantized(checkpoint, name).dequantize() for name in modules}
    config = {k: v for k, v in checkpoint.config.items() if k != "quantization_config"}
    return _write(folder, state, config)


def _write(folder: Path, state: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    folder.mkdir()
    tensors = {name: tensor.contiguous() for name, tensor in state.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _load(case: Case, folder: Path) -> Any:
    """transformers' model of a folder, of the class that the case has, its codes decompressed.

    Some modules read their weight without a call, which is when transformers would decompress it.
    """
    from compressed_tensors.compressors import decompress_module
    from compressed_tensors.quantization import QuantizationStatus

    kind = type(case.model)
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    for module in model.modules():
        if getattr(module, "quantization_status", None) == QuantizationStatus.COMPRESSED:
            decompress_module(module)
    return model.eval()


@torch.no_grad()
def _distance(case: Case, first: Any, second: Any) -> float:
    """Largest difference of the logits of two models, relative to the largest logit."""
    ids = torch.randint(3, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    one, other = (model(input_ids=ids, use_cache=False).logits for model in (first, second))
    return float((one - other).abs().max() / one.abs().max())
