"""A run's prepared session, and its stages: vision tower and projector first, then the language model.

Where the tower is quantized, the language model is calibrated on the image features of the quantized one,
read from what was written.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...base.errors import BadInput
from ...base.progress import Progress
from ..plan.journal import Journal, digest_of
from ..plan.plan import QuantizePlan
from ..plan.request import QuantizeRequest
from ..stream.calibration import Calibration, with_images
from ..stream.layer_stream import LayerStream
from .cached_calibration import CachedCalibration, StatisticsFolder
from .online_calibration import NoCalibration, OnlineCalibration, Tuning
from .quantized_layer import WrittenWeights


@dataclass(frozen=True, slots=True)
class Session:
    """A prepared request.

    Attributes:
        notes: choices that were made for the user.
        vision: layers of a tower that is quantized too.
        facts: everything that the result's bytes depend on, for JSON; empty for a run that is only predicted.
        statistics: folder of cached statistics of the float model.
    """

    request: QuantizeRequest
    plan: QuantizePlan
    calibration: Calibration
    notes: tuple[str, ...]
    stream: LayerStream
    vision: LayerStream | None
    facts: dict[str, Any] = field(default_factory=dict)
    statistics: StatisticsFolder | None = None

    @property
    def signature(self) -> str:
        return digest_of(self.facts)


class LayerProgress:
    """Progress within a layer: each step of its work (a linear that is solved, a batch that is run) counts as
    the share of the layer's time that it had passed in the layer before."""

    def __init__(self, progress: Progress, clock: Callable[[], float] = time.perf_counter) -> None:
        self._progress, self._clock = progress, clock
        self._shares: list[float] = []
        self.begin()

    def begin(self) -> None:
        self._began, self._steps, self._shown = self._clock(), list[float](), 0.0

    def step(self) -> None:
        self._steps.append(self._clock() - self._began)
        number = len(self._steps)
        if not self._shares:
            self._progress.status(f"step {number} of the first layer")
        elif number <= len(self._shares):
            self._progress.advance(self._shares[number - 1] - self._shown)
            self._shown = self._shares[number - 1]

    def end(self) -> None:
        passed = max(self._clock() - self._began, 1e-9)
        self._shares = [seconds / passed for seconds in self._steps]
        self._progress.advance(1 - self._shown)


def shard_folder(checkpoint: Path, plan: QuantizePlan, number: int) -> Path:
    return checkpoint / plan.formats[number].name if len(plan.formats) > 1 else checkpoint


def layer_folder(journal: Journal, plan: QuantizePlan, number: int) -> Path:
    """The folder of a format's layer shards; for GGUF a temporary one, merged into one file at the end."""
    if plan.formats[number].name == "gguf":
        return journal.folder / "layers-gguf"
    return shard_folder(journal.checkpoint, plan, number)


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers that follow each other in one stream; `start` is the number of layers in earlier stages."""

    stream: LayerStream
    start: int
    vision: bool

    @property
    def end(self) -> int:
        return self.start + self.stream.num_layers


def stages_of(session: Session) -> tuple[Stage, ...]:
    if session.vision is None:
        return (Stage(session.stream, 0, False),)
    first = Stage(session.vision, 0, True)
    return first, Stage(session.stream, first.end, False)


def source_of(
    session: Session, stage: Stage, journal: Journal, saved: Path | None, progress: Progress
) -> NoCalibration:
    """Cached statistics, measured where missing, or online calibration, from `saved` states where given."""
    folder, calibration, plan = session.statistics, session.calibration, session.plan
    kv = plan.kv_cache is not None and not stage.vision
    if not session.request.measures:
        return NoCalibration()
    if stage.vision:
        calibration = of_images(calibration)
    elif stage.start:  # the weights of the finished vision side, in the first format
        done = journal.layers[: stage.start]
        written = WrittenWeights(
            layer_folder(journal, plan, 0),
            [record["shards"][plan.format.name] for record in done],
            plan.format,
            plan.config_in(plan.format),
        )
        stage.stream.read_instead(written)
    if folder is None:
        return online(session, stage.stream, calibration, saved, progress, kv=kv)
    if not folder.complete:
        folder.measure(stage.stream, calibration, progress, head=plan.lm_head, kv=kv)
    return CachedCalibration(folder, stage.stream)


def online(
    session: Session,
    stream: LayerStream,
    calibration: Calibration,
    saved: Path | None,
    progress: Progress,
    *,
    kv: bool,
) -> OnlineCalibration:
    """Online calibration as the plan needs it; the statistics of a folder are not measured here."""
    plan = session.plan
    return OnlineCalibration(
        stream,
        calibration,
        saved,
        sequential=plan.sequential and session.statistics is None,
        kv=kv,
        asymmetric=bool(plan.options.asymmetric),
        tuning=Tuning(session.request.seed, progress.status) if plan.blockwise else None,
    )


def of_images(calibration: Calibration) -> Calibration:
    """The samples with images alone, for the tower; BadInput where there are none."""
    token_ids, images = with_images(*calibration.samples)
    held_out, held_out_images = with_images(*calibration.held_out_samples)
    if not images:
        raise BadInput(
            f"--quantize-vision: calibration data {calibration.source} has no images: give image-text "
            "pairs with --calibration, or leave it out for the bundled pictures"
        )
    return replace(
        calibration,
        token_ids=token_ids,
        images=images,
        held_out=held_out,
        held_out_images=held_out_images,
    )
