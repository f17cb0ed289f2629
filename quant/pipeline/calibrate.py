"""Calibration and held-out samples of a request: text, or image-text pairs for a model that reads images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from ...recipes import DATA
from ..base.device import HOST
from ..base.errors import BadInput
from ..load_processor import has_processor, load_processor, load_tokenizer
from ..plan.plan import QuantizePlan
from ..plan.request import QuantizeRequest
from ..plan.selection import Shapes
from ..stream.calibration import Calibration, load_calibration
from ..stream.image_samples import PICTURES, Pair, image_calibration, read_pairs
from ..stream.sources import (
    BUNDLED_SAMPLES,
    CPU_SAMPLES,
    MIXED,
    Document,
    bundled_text,
    is_bundled,
    read_documents,
)

BUNDLED_EVALUATION = DATA / "evaluation.txt"


class _Cut(TypedDict):
    """How samples are cut."""

    num_samples: int
    seq_len: int
    seed: int
    held_out: int
    evaluation: Path


@dataclass(frozen=True, slots=True)
class _ImageData:
    """Image-text pairs, texts beside them, and the processor that reads the images."""

    name: str
    pairs: list[Pair]
    texts: list[Document]
    processor: Any


def calibration_of(request: QuantizeRequest, plan: QuantizePlan, notes: list[str]) -> Calibration:
    """The calibration and held-out samples; appends notes where the text gives fewer."""
    usual = plan.method.num_samples
    if is_bundled(request.model):
        usual = BUNDLED_SAMPLES
    elif plan.device == HOST:
        usual = CPU_SAMPLES
    wanted = usual if request.num_samples is None else request.num_samples
    asked = wanted // 8 if request.held_out is None else request.held_out
    tokenizer = load_tokenizer(plan.checkpoint.path, trust_remote_code=request.trust_remote_code)
    cut = _Cut(
        num_samples=wanted,
        seq_len=plan.seq_len,
        seed=request.seed,
        held_out=asked,
        evaluation=Path(request.evaluation) if request.evaluation else BUNDLED_EVALUATION,
    )
    calibration = _with_images(request, plan, tokenizer, cut, notes)
    if calibration is None:
        source = request.calibration or bundled_text(request.model)
        calibration = load_calibration(source, tokenizer, **cut)
    samples, length = calibration.token_ids.shape
    if (samples, length) != (wanted, plan.seq_len):
        notes.append(f"note: the calibration text gives {samples} samples of {length} tokens")
    if len(calibration.held_out) < asked:
        notes.append(
            f"note: the text left gives {len(calibration.held_out)} held-out samples, not {asked}"
        )
    if calibration.duplicates:
        notes.append(f"note: {calibration.duplicates} repeated calibration texts were dropped")
    if calibration.refused:
        notes.append(
            f"note: {calibration.refused} conversations that the chat template refuses were dropped"
        )
    if plan.method.needs_statistics:
        notes += _few_tokens(plan.modules, calibration.token_ids.numel())
    return calibration


def _with_images(
    request: QuantizeRequest, plan: QuantizePlan, tokenizer: Any, cut: _Cut, notes: list[str]
) -> Calibration | None:
    """Samples with images; None where the data has none, or the model cannot use the bundled pictures.

    Raises:
        BadInput: the images that were asked for cannot be used.
    """
    try:
        data = _pairs(request, plan, tokenizer)
        if data is None:
            return None
        calibration = image_calibration(
            data.name, data.pairs, data.texts, data.processor, tokenizer, **cut
        )
    except BadInput as error:
        if request.calibration is not None or request.vision:
            raise
        notes.append(f"warning: calibrated on text without images: {error}")
        return None
    notes.append(f"note: calibration samples hold {calibration.num_images} images")
    return calibration


def _pairs(request: QuantizeRequest, plan: QuantizePlan, tokenizer: Any) -> _ImageData | None:
    """The pairs of the source; by default the bundled pictures, for a model that reads images.

    Raises:
        BadInput: pairs for a model that reads none, or whose processor cannot be built.
    """
    read = None if request.calibration is None else read_pairs(request.calibration)
    if request.calibration is not None and read is None:
        return None
    folder = plan.checkpoint.folder
    if not reads_images(plan):
        if read is None:
            return None
        raise BadInput(
            f"calibration data {request.calibration} has images, and {folder} "
            f"({plan.architecture.family}) reads text alone"
        )
    if read is None and not has_processor(folder):
        return None
    processor = load_processor(folder, tokenizer, trust_remote_code=request.trust_remote_code)
    if read is None:
        pairs, _ = read_pairs(PICTURES) or ([], [])
        return _ImageData("bundled pictures", pairs, read_documents(MIXED)[1], processor)
    return _ImageData(Path(str(request.calibration)).name, *read, processor)


def reads_images(plan: QuantizePlan) -> bool:
    """Whether the model has a part that computes image features."""
    model = plan.architecture.meta_model.model
    return any(callable(getattr(each, "get_image_features", None)) for each in model.modules())


def _few_tokens(modules: Shapes, num_tokens: int) -> list[str]:
    """A warning where the Gram matrix of a linear's inputs is singular for want of tokens."""
    short = {name: shape[1] for name, shape in modules.items() if shape[1] > num_tokens}
    if not short:
        return []
    widest = max(short, key=lambda name: short[name])
    return [
        f"warning: {len(short)} linears such as {widest} ({short[widest]} inputs) have more inputs than "
        f"there are calibration tokens ({num_tokens}): take more with --num-samples or another --calibration"
    ]
