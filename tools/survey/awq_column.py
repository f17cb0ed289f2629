"""Column `awq`: discovered folds hold the logits, and what awq writes is what transformers loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from llmopt.quant.base.errors import BadInput
from llmopt.quant.convert.verify import verify
from llmopt.quant.formats.registry import quantized_modules, read_quantized, tensor_names
from llmopt.quant.model.architecture import Architecture, architecture_of
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.model.experts import with_experts_apart
from llmopt.quant.smoothing.discover import fold_layer
from llmopt.quant.smoothing.smoothing_map import with_smoothing
from safetensors.torch import save_file

from tests.support.survey.case import Case, Verdict
from tests.support.survey.quantized import LENGTH, WORDS, fused_again, loaded, quantized, source

SAME = 1e-5  # of logits, relative to the largest


class AwqColumn:
    """Exact: folds leave the logits, and the written checkpoint has those of our reader's weights.

    Where transformers cannot load it, `verify` must prove it.
    """

    name = "awq"

    def verdict(self, case: Case) -> Verdict:
        """Discover, fold, quantize, and load with transformers."""
        checkpoint = with_experts_apart(Checkpoint(source(case)))
        try:
            architecture = with_smoothing(checkpoint, architecture_of(checkpoint))
            folds, folded = _folded(checkpoint, architecture, case.folder / "awq-folded")
        except BadInput as error:
            return Verdict("refused", str(error).replace(str(case.folder), "")[:160])
        change = _distance(loaded(case, checkpoint.folder), loaded(case, folded)) if folds else 0.0
        if not change < SAME:
            return Verdict("wrong", f"{folds} folds change the logits by {change:.1e}")
        made = quantized(case, "awq")
        if not made.folder.exists():
            return Verdict("refused", made.refused.replace(str(case.folder), "")[:160])
        return _read_back(case, made.folder, made.needs, folds)


def _read_back(case: Case, written: Path, needs: str | None, folds: int) -> Verdict:
    """What transformers reads from the written checkpoint; where it cannot, what our second reader does."""
    if needs is None:
        return _proven(written, f"{folds} folds; transformers does not load it")
    plain = loaded(case, _dequantized(written, case.folder / "awq-plain"))
    try:
        change = _distance(plain, loaded(case, written, needs))
    except Exception as error:  # transformers fails on packed weights in many ways
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return _proven(written, f"{folds} folds; not loaded: {reason}"[:140])
    if not change < SAME:
        return Verdict("wrong", f"transformers loads logits that differ by {change:.1e}")
    return Verdict("exact", f"{folds} folds")


def _proven(written: Path, detail: str) -> Verdict:
    report = verify(written)
    if report.failures:
        return Verdict("wrong", report.failures[0])
    return Verdict("exact", f"{detail}, verify proves it")


def _folded(checkpoint: Checkpoint, architecture: Architecture, folder: Path) -> tuple[int, Path]:
    """A copy with random scales in every fold, and how many there are."""
    state = {name: checkpoint.tensor(name) for name in checkpoint.names}
    folds = 0
    for index, family in enumerate(architecture.layers):
        start = architecture.layer_prefix(index) + "."
        tensors = {n.removeprefix(start): t for n, t in state.items() if n.startswith(start)}
        folds += fold_layer(family, tensors, index)
        state |= {start + name: tensor for name, tensor in tensors.items()}
    return folds, _write(folder, fused_again(checkpoint, state), checkpoint.config)


def _dequantized(written: Path, folder: Path) -> Path:
    """A plain checkpoint with the weights that the quantized one stands for, as our reader has them."""
    checkpoint = Checkpoint(written)
    modules = quantized_modules(checkpoint)
    packed = set().union(*(tensor_names(checkpoint, module) for module in modules))
    state = {name: checkpoint.tensor(name) for name in checkpoint.names if name not in packed}
    state |= {f"{name}.weight": read_quantized(checkpoint, name).dequantize() for name in modules}
    state = fused_again(checkpoint, state)
    config = {k: v for k, v in checkpoint.config.items() if k != "quantization_config"}
    return _write(folder, state, config)


def _write(folder: Path, state: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    folder.mkdir()
    tensors = {name: tensor.contiguous() for name, tensor in state.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@torch.no_grad()
def _distance(first: Any, second: Any) -> float:
    """Largest difference of the logits of two models, relative to the largest logit."""
    ids = torch.randint(3, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    left, right = (model(input_ids=ids, use_cache=False).logits for model in (first, second))
    return float((left - right).abs().max() / left.abs().max())
