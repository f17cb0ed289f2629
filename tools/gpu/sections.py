"""Sections of `gpu_bench.py`. Each has a process of its own and reports a figure once it is measured."""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from llmopt.bench.machine.roofline import copy_bandwidth, matmul_flops
from llmopt.engine.planner.speed import decode_step_bytes, prefill_flops
from llmopt.quant.families.config import model_shape
from llmopt.quant.kinds.fp8.scheme import FloatScheme
from llmopt.quant.kinds.integer.scheme import IntScheme

from .figure import OURS, PLAIN, Figure, figure
from .ours import Ours, prompts_of
from .peers import Theirs, installed, missing, throughput
from .shapes import FP8, INT4, Scale, config_of, write_checkpoint

COPY, MATRIX = "copy bandwidth", "matrix rate"
KV_BYTES = 2


@dataclass
class World:
    """The machine, the sizes of the run, and a folder for checkpoints. `left_out` lists what failed.

    Attributes:
        ends: of `time.monotonic`: what runs then is cut off.
    """

    device: str
    scale: Scale
    home: Path
    left_out: list[str] = field(default_factory=list)
    ends: float = math.inf

    @cached_property
    def copy_bandwidth(self) -> float:
        """Bytes per second of a large copy, measured when it is first asked for."""
        return copy_bandwidth(torch.device(self.device))

    @cached_property
    def matrix_flops(self) -> float:
        """FLOP per second of a large GEMM, measured when it is first asked for."""
        return matmul_flops(torch.device(self.device), torch.bfloat16)

    @property
    def seconds_left(self) -> float:
        """Until this part is cut off."""
        return self.ends - time.monotonic()

    @contextmanager
    def tried(self, what: str) -> Iterator[None]:
        """Run a peer's measurement; its failure leaves our figures as they are."""
        try:
            yield
        except Exception as error:
            reason = (str(error).strip().splitlines() or [""])[0]
            self.left_out.append(f"{what}: {type(error).__name__}: {reason}")


class Model:
    """A checkpoint of a shape of the planner's table, and what is measured of it."""

    def __init__(
        self,
        world: World,
        name: str,
        scheme: IntScheme | FloatScheme | None = None,
        layers: int | None = None,
    ) -> None:
        self._world = world
        config = config_of(name, world.scale, layers)
        self.shape = model_shape(config)
        weights = PLAIN if scheme is None else scheme.label
        self._named = {"model": name if layers is None else f"{name}, {layers} layers"}
        self._named |= {"weights": weights}
        self.folder = world.home / f"{name} {weights}"
        write_checkpoint(self.folder, config, scheme, world.device)

    @contextmanager
    def opened(self, max_model_len: int, max_num_seqs: int) -> Iterator[Ours]:
        ours = Ours(self.folder, self._world.device, max_model_len, max_num_seqs)
        try:
            yield ours
        finally:
            ours.close()

    def decode(self, ours: Ours, batch: int, context: int, steps: int) -> Iterator[Figure]:
        """Time of a decode step against its bytes at the bandwidth roof, and the device's idle time in it."""
        seconds, busy = ours.decode(batch, context, steps)
        read = decode_step_bytes(
            self.shape, batch, context, ours.engine.memory.weight_bytes, KV_BYTES
        )
        least = 1e3 * read / self._world.copy_bandwidth
        yield self._figure(OURS, "decode", batch, context, "ms", _ms(seconds), least, COPY)
        if busy is not None:
            idle = [max(0.0, one - busy) for one in seconds]
            yield self._figure(OURS, "host", batch, context, "ms", _ms(idle))

    def prefill(self, ours: Ours) -> Figure:
        length = self._world.scale.prefill
        seconds = ours.prefill(length, self._world.scale.repeats)
        least = 1e3 * prefill_flops(self.shape, length) / self._world.matrix_flops
        return self._figure(OURS, "prefill", 1, length, "ms", _ms(seconds), least, MATRIX)

    def answers(self, answer: Callable[..., float], who: str, batch: int, repeats: int) -> Figure:
        """Throughput of one request, or of many of random lengths, in tokens per second."""
        scale, (low, high) = self._world.scale, self._world.scale.lengths
        draw = random.Random(1)
        if batch == 1:
            phase, ins, outs = "stream", [scale.short], [high // 8]
        else:
            phase = "requests"
            ins, outs = ([draw.randint(low, high) for _ in range(batch)] for _ in range(2))
        prompts = prompts_of(ins, self.shape.vocab_size)
        rates = [sum(outs) / answer(prompts, outs) for _ in range(repeats)]
        return self._figure(who, phase, batch, max(outs), "tokens/s", rates)

    def served(self, who: str, name: str) -> Figure:
        """Throughput of a server on many requests, in output tokens per second."""
        scale, (low, high) = self._world.scale, self._world.scale.lengths
        rate = throughput(name, self.folder, scale.num_requests, low, high)
        return self._figure(who, "requests", scale.num_requests, high, "tokens/s", [rate])

    def _figure(
        self,
        who: str,
        phase: str,
        batch: int,
        context: int,
        unit: str,
        values: list[float],
        least: float | None = None,
        roof: str | None = None,
    ) -> Figure:
        what: dict[str, Any] = {"engine": who, "phase": phase, "batch": batch, "context": context}
        return figure(self._named | what, unit, values, least, roof)


def _ms(seconds: list[float]) -> list[float]:
    return [1e3 * one for one in seconds]


def _beside(world: World, model: Model, counts: tuple[int, ...]) -> Iterator[Figure]:
    """transformers on the same requests, once the engine has freed the device."""
    theirs = None
    with world.tried("transformers"):
        theirs = Theirs(model.folder, world.device)
    if theirs is None:
        return
    for batch in counts:
        ways = {"transformers generate": theirs.generate}
        if batch > 1:
            ways = {"transformers continuous batching": theirs.continuous, **ways}
        for who, way in ways.items():
            repeats = world.scale.repeats if batch == 1 else 1
            with world.tried(who):
                yield model.answers(way, who, batch, repeats)
    if theirs.shortcomings:
        lacks = " and ".join(theirs.shortcomings)
        world.left_out.append(f"transformers continuous batching ran without {lacks}")
    del theirs, ways
    gc.collect()


def _servers(world: World, model: Model) -> Iterator[Figure]:
    """vLLM and SGLang, where they are installed, each started for its run, and ours beside them."""
    for who, name in installed().items():
        with world.tried(who):
            yield model.served(who, name)
    if absent := missing():
        world.left_out.append(f"{' and '.join(absent)}: not installed here")


def llama_8b(world: World) -> Iterator[Figure]:
    """Decode at every kind of batch, prefill, and one request beside transformers."""
    model, scale = Model(world, "llama-3.1-8b"), world.scale
    most = max(batch for batch, _, _ in scale.contexts)
    with model.opened(scale.prefill + scale.lengths[1], most) as ours:
        yield from model.decode(ours, 1, scale.short, scale.steps)
        for batch, context, steps in scale.contexts:
            yield from model.decode(ours, batch, context, steps)
        yield model.prefill(ours)
        for batch in scale.batches[1:]:
            yield from model.decode(ours, batch, scale.short, scale.steps)
        yield model.answers(ours.answer, OURS, 1, scale.repeats)
    yield from _beside(world, model, (1,))


def _quantized_8b(world: World, scheme: IntScheme | FloatScheme) -> Iterator[Figure]:
    model, scale = Model(world, "llama-3.1-8b", scheme), world.scale
    with model.opened(scale.prefill + scale.lengths[1], max(scale.batches)) as ours:
        yield from model.decode(ours, 1, scale.short, scale.steps)
        yield model.prefill(ours)
        for batch in scale.batches[1:]:
            yield from model.decode(ours, batch, scale.short, scale.steps)


def requests(world: World) -> Iterator[Figure]:
    """Many requests of many lengths on a small model, beside transformers, static and continuous."""
    model, scale = Model(world, "qwen3-0.6b"), world.scale
    with model.opened(2 * scale.lengths[1], scale.num_requests) as ours:
        yield from model.decode(ours, 1, scale.short, scale.steps)
        warm = [scale.short] * scale.batches[-1]
        ours.answer(prompts_of(warm, model.shape.vocab_size), [2] * len(warm))
        yield model.answers(ours.answer, OURS, scale.num_requests, 2)
        yield model.answers(ours.answer, OURS, 1, scale.repeats)
    yield from _beside(world, model, (scale.num_requests, 1))
    yield from _servers(world, model)


def _some_layers(world: World, name: str, batches: tuple[int, ...]) -> Iterator[Figure]:
    model, scale = Model(world, name, layers=world.scale.layers), world.scale
    with model.opened(scale.prefill + scale.lengths[1], max(batches)) as ours:
        for batch in batches:
            yield from model.decode(ours, batch, scale.short, scale.steps)
        yield model.prefill(ours)


@dataclass(frozen=True, slots=True)
class Section:
    """`seconds`: its time limit; unused time goes to later sections."""

    name: str
    seconds: float
    measure: Callable[[World], Iterator[Figure]]


SECTIONS = (
    Section(
        "llama-70b",
        40,
        lambda world: _some_layers(world, "llama-3.1-70b", world.scale.batches[::3]),
    ),
    Section(
        "experts", 45, lambda world: _some_layers(world, "qwen3-30b-a3b", world.scale.batches[::3])
    ),
    Section("llama-8b-int4", 75, lambda world: _quantized_8b(world, INT4)),
    Section("llama-8b-fp8", 65, lambda world: _quantized_8b(world, FP8)),
    Section("llama-8b", 145, llama_8b),
    Section("requests", 145, requests),
)
"""Short ones first: what they leave over is there for the long ones."""
