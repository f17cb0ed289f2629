"""Models of a first contact: random weights in real shapes, and steps held against the planner's."""

from __future__ import annotations

import gc
import json
import math
import random
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ...engine.base.sampling_params import SamplingParams
from ...engine.config.config import EngineConfig
from ...engine.engine import Engine
from ...engine.planner.catalog import find_model
from ...engine.planner.devices import Device, find_device
from ...engine.planner.expected import UNKNOWN_FACTORS, Expectation
from ...engine.planner.memory import Deployment
from ...engine.planner.setup import Setup
from ...engine.planner.speed import decode_step_bytes, prefill_flops
from ...quant.base.errors import BadInput
from ...quant.families.config import model_shape
from ...quant.families.shapes import ModelShape
from ...quant.formats.registry import FORMATS
from ...quant.kinds.base.kind import kind_of
from ...quant.kinds.fp8.scheme import FloatScheme
from ...quant.kinds.integer.scheme import IntScheme
from ..machine.kernel_table import ONE_LAUNCH, WHOLE, Sizes
from ..machine.roofline import copy_bandwidth, matmul_flops
from .record import OURS, Finding

FORMAT = "compressed-tensors"
PLAIN = "bf16"
KV_BYTES = 2
MODELS = ("llama-3.1-8b", "llama-3.2-3b", "llama-3.2-1b")
"""From the largest; a card takes the first that it has room for."""
USED, BESIDE = 0.9, 0.04
"""Shares of the free memory: what the engine takes, and of it activations, logits and graphs."""
WARM_STEPS = PROFILED_STEPS = 8
LISTED_KERNELS = 10
SAMPLED_MOST = 1.1
"""A step that draws tokens may take so much of a greedy one."""
Case = tuple[int, int]
"""Batch and context of decode."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of a run.

    Attributes:
        decode: batches and contexts, one sequence alone and many long ones.
        prefill: tokens of a prompt.
        layers: of the models that are too large to make whole.
        bundled, answer: the bundled model that answers, and with how many tokens.
        calibration: samples and their tokens, for a quantized layer.
        self_test: sizes of the kernels' self-test.
        config: what replaces fields of a model's config.
    """

    decode: tuple[Case, Case] = ((1, 128), (32, 4096))
    steps: int = 32
    prefill: int = 8192
    repeats: int = 3
    layers: int = 4
    bundled: str = "stories3M"
    answer: int = 24
    calibration: tuple[int, int] = (32, 512)
    self_test: Sizes = WHOLE
    config: Mapping[str, Any] = field(default_factory=dict)


FULL = Scale()
SMALL = Scale(
    decode=((1, 8), (3, 24)),
    steps=2,
    prefill=24,
    repeats=1,
    bundled="stories260K",
    answer=3,
    calibration=(2, 32),
    self_test=ONE_LAUNCH,
    config={
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 256,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
)


@dataclass
class World:
    """The machine, the sizes of the run, and a folder for checkpoints."""

    device: str
    scale: Scale
    home: Path

    @property
    def is_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def has_verdicts(self) -> bool:
        """Whether times can be held against a plan: small shapes and CPUs have none."""
        return self.is_gpu and self.scale is FULL

    @cached_property
    def copy_bandwidth(self) -> float:
        """Bytes per second of a large copy, measured when it is first asked for."""
        return copy_bandwidth(torch.device(self.device))

    @cached_property
    def matrix_flops(self) -> float:
        """FLOP per second of a large GEMM, measured when it is first asked for."""
        return matmul_flops(torch.device(self.device), torch.bfloat16)

    @cached_property
    def planned_device(self) -> Device:
        """The card as the planner knows it; one that it does not know by its measured roofs."""
        name = torch.cuda.get_device_name() if self.is_gpu else "cpu"
        try:
            return find_device(name)
        except BadInput:
            free = free_bytes(self.device)
            peaks = {"bf16": self.matrix_flops}
            return Device(name, free, bandwidth=self.copy_bandwidth, peaks=peaks)


def free_bytes(device: str) -> int:
    """Free memory of a card."""
    return torch.cuda.mem_get_info(torch.device(device))[0] if device != "cpu" else 8 << 30


def config_of(name: str, scale: Scale, layers: int | None = None) -> dict[str, Any]:
    """The text config of a shape of the planner's table, at that scale; with `layers` of its layers only."""
    whole = dict(find_model(name).config)
    config: dict[str, Any] = dict(whole.get("text_config") or whole) | {"dtype": "bfloat16"}
    config |= {key: value for key, value in scale.config.items() if key in config}
    if layers is not None:
        config["num_hidden_layers"] = min(layers, config["num_hidden_layers"])
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][: config["num_hidden_layers"]]
    return config


def largest(scale: Scale, free: int) -> tuple[str, list[Case]] | None:
    """The largest model of which one sequence of each case fits, and the cases with batches that do.

    None: not even the smallest does.
    """
    for name in MODELS:
        shape = model_shape(config_of(name, scale))
        fitted = [
            (_fitting_batch(shape, case, scale.steps, free), case[1]) for case in scale.decode
        ]
        if all(batch for batch, _ in fitted):
            return name, fitted
    return None


def _fitting_batch(shape: ModelShape, case: Case, steps: int, free: int) -> int:
    """The batch, halved until its cache fits; 0: none does."""
    batch, context = case
    room = (USED - BESIDE) * free - 2 * shape.num_parameters
    each = shape.kv_bytes(context + steps, KV_BYTES)
    while batch and batch * each > room:
        batch //= 2
    return batch


def write_checkpoint(
    folder: Path, config: dict[str, Any], scheme: IntScheme | FloatScheme | None, device: str
) -> None:
    """Random bf16 weights, the layers' linears quantized (RTN) to `scheme`; equal layers after a period.

    Equal layers are as slow as different ones: each has memory of its own, larger than any cache.
    """
    folder.mkdir(parents=True)
    count = config["num_hidden_layers"]
    # A hybrid's layers differ in kind; its whole depth is made.
    period = count if "layer_types" in config else 1
    tensors = _made(config | {"num_hidden_layers": period}, folder / "made", device)
    marks = [f".layers.{index}." for index in range(period)]
    layers = [{name: t for name, t in tensors.items() if mark in name} for mark in marks]
    rest = {name: t for name, t in tensors.items() if not any(name in layer for layer in layers)}
    schemes: dict[str, Any] = {}
    if scheme is not None:
        (layer,) = layers
        for name in [name for name in layer if name.endswith("proj.weight")]:
            module = name.removesuffix(".weight")
            weight: Any = kind_of(scheme).round(layer.pop(name).float(), torch.bfloat16)
            layer |= FORMATS[FORMAT].pack(module, weight.to("cpu"))
            schemes |= {module.replace(marks[0], f".layers.{i}."): scheme for i in range(count)}
    shards = {"rest.safetensors": rest}
    for index in range(count):
        mark, own = marks[index % period], f".layers.{index}."
        shards[f"layer-{index}.safetensors"] = {
            name.replace(mark, own): tensor for name, tensor in layers[index % period].items()
        }
    for shard, named in shards.items():
        held = {name: tensor.contiguous().cpu() for name, tensor in named.items()}
        save_file(held, folder / shard, metadata={"format": "pt"})
    weight_map = {name: shard for shard, named in shards.items() for name in named}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if schemes:
        config = config | {"quantization_config": FORMATS[FORMAT].config(schemes, ["lm_head"])}
    _write_tokenizer(folder, config["vocab_size"])
    (folder / "config.json").write_text(json.dumps(config))


def _made(config: dict[str, Any], folder: Path, device: str) -> dict[str, torch.Tensor]:
    """The tensors of a new model, by the names that checkpoints give them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    fields = dict(config)
    with torch.device(device):
        own = AutoConfig.for_model(fields.pop("model_type"), **fields)
        model = AutoModelForCausalLM.from_config(own, dtype=torch.bfloat16, trust_remote_code=False)
    model.save_pretrained(folder)
    del model
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(shard, device=device)
    shutil.rmtree(folder)
    return tensors


def _write_tokenizer(folder: Path, size: int) -> None:
    """A tokenizer with a word for each token, so that detokenization has text."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"w{index}": index for index in range(size)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)


def greedy(num_tokens: int) -> SamplingParams:
    """The likeliest tokens, and so many of them."""
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def sampled(num_tokens: int) -> SamplingParams:
    """Tokens drawn with temperature, top-k and top-p."""
    chances: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "seed": 0}
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True, **chances)


def prompts_of(lengths: Sequence[int], vocab: int) -> list[list[int]]:
    """Random prompts: no two share a prefix, so that no block is shared."""
    draw = random.Random(0)
    return [[draw.randrange(vocab) for _ in range(length)] for length in lengths]


class Model:
    """A checkpoint of a shape of the planner's table, its engine, and what is measured of it."""

    def __init__(
        self,
        world: World,
        name: str,
        scheme: IntScheme | FloatScheme | None = None,
        layers: int | None = None,
    ) -> None:
        self._world = world
        config = config_of(name, world.scale, layers)
        self.table_name = name
        self.name = name if layers is None else f"{name}, {layers} layers"
        self.weights = PLAIN if scheme is None else scheme.label
        self.folder = world.home / f"{name} {self.weights}"
        if not (self.folder / "config.json").exists():
            shutil.rmtree(self.folder, ignore_errors=True)  # of a process that was ended
            write_checkpoint(self.folder, config, scheme, world.device)
            if world.is_gpu:
                torch.cuda.empty_cache()  # the engine counts what this process holds
        planned = find_model(str(self.folder))
        self.shape = planned.shape
        self._deployment = Deployment(self.shape, planned.as_stored(), KV_BYTES, 16)

    @contextmanager
    def opened(self, cases: Sequence[Case]) -> Iterator[Engine]:
        """An engine that has room for these cases and for a prompt, without prefix cache."""
        scale = self._world.scale
        longest = max(scale.prefill, *(context for _, context in cases)) + 4 * scale.steps + 64
        config: dict[str, Any] = {"device": self._world.device, "dtype": "bfloat16"}
        config |= {"max_model_len": longest, "max_num_seqs": max(batch for batch, _ in cases)}
        engine = Engine(EngineConfig(self.folder, enable_prefix_caching=False, **config))
        try:
            yield engine
        finally:
            engine.close()
            del engine
            gc.collect()
            if self._world.is_gpu:
                torch.cuda.empty_cache()

    def decode(self, engine: Engine, batch: int, context: int) -> Iterator[Finding]:
        """Time of a decode step, with its bytes over the bandwidth of a copy as its roof."""
        steps = self._world.scale.steps
        with decoding(engine, batch, context, steps) as step:
            seconds = [step() for _ in range(steps)]
        held = engine.memory.weight_bytes
        least = decode_step_bytes(self.shape, batch, context, held, KV_BYTES)
        yield self.finding(
            "decode", batch, context, seconds, least_seconds=least / self._world.copy_bandwidth
        )

    def prefill(self, engine: Engine) -> Iterator[Finding]:
        """Seconds from a prompt to its first token, with its FLOP over the rate of a GEMM as its roof."""
        length, repeats = self._world.scale.prefill, self._world.scale.repeats
        seconds = []
        for prompt in prompts_of([length] * (repeats + 1), engine.vocab_size):
            begin = time.perf_counter()
            engine.add_request("prefill", prompt, greedy(1))
            while engine.has_unfinished():
                engine.step()
            seconds.append(time.perf_counter() - begin)
        least = prefill_flops(self.shape, length) / self._world.matrix_flops
        yield self.finding("prefill", 1, length, seconds[1:], least_seconds=least)

    def sampled(self, engine: Engine, batch: int, context: int) -> Iterator[Finding]:
        """A step that draws its tokens, against one that takes the likeliest."""
        steps, medians = self._world.scale.steps, []
        for params in (greedy, sampled):
            with decoding(engine, batch, context, steps, params) as step:
                medians.append(statistics.median(step() for _ in range(steps)))
        plain, drawn = medians
        met = drawn <= plain * SAMPLED_MOST if self._world.has_verdicts else None
        what = f"sampled decode of {self.name}, batch {batch}"
        expected = f"at most {1e3 * plain * SAMPLED_MOST:.2f} ms, {SAMPLED_MOST} of the greedy step"
        numbers = self._numbers(OURS, "sampled decode", batch, context) | {"seconds": drawn}
        yield Finding(what, expected, f"{1e3 * drawn:.2f} ms", met, numbers)

    def profile(self, engine: Engine, batch: int, context: int) -> Iterator[Finding]:
        """The kernels of a step that take longest, and how long the device waits in it."""
        with decoding(engine, batch, context, self._world.scale.steps) as step:
            seconds = statistics.median(step() for _ in range(PROFILED_STEPS))
            events = profiled(step)
        busy = sum(micros for _, micros, _ in events) / 1e6
        if self._world.is_gpu:
            idle = max(0.0, seconds - busy)
            seen = f"{1e3 * idle:.2f} of {1e3 * seconds:.2f} ms"
            yield Finding(f"the device waits in a step, batch {batch}", seen=seen)
        for name, micros, launches in events[:LISTED_KERNELS]:
            yield Finding(f"kernel {name}", seen=f"{micros:.1f} µs, {launches:.1f} launches a step")

    def finding(
        self,
        phase: str,
        batch: int,
        context: int,
        seconds: Sequence[float],
        *,
        engine: str = OURS,
        least_seconds: float | None = None,
    ) -> Finding:
        """The median of measured times against the planner's, and its share of the roof."""
        middle = statistics.median(seconds)
        numbers = self._numbers(engine, phase, batch, context)
        numbers |= {"seconds": middle, "lowest": min(seconds), "highest": max(seconds)}
        seen = f"{1e3 * middle:.2f} ms ({1e3 * min(seconds):.2f} to {1e3 * max(seconds):.2f})"
        if least_seconds is not None:
            numbers["share"] = least_seconds / middle
            seen += f", {least_seconds / middle:.0%} of the roof"
        what = f"{phase} of {self.name} in {self.weights}, batch {batch} at {context} tokens"
        if not self._world.has_verdicts or engine != OURS:
            return Finding(what, "", seen, None, numbers)
        device = self._world.planned_device
        planned, most = planned_seconds(
            self._deployment, device, self.table_name, phase, batch, context
        )
        numbers["expected_seconds"] = planned
        expected = f"{1e3 * planned:.2f} ms, at most {1e3 * most:.2f}"
        return Finding(what, expected, seen, middle <= most, numbers)

    def _numbers(self, engine: str, phase: str, batch: int, context: int) -> dict[str, Any]:
        named = {"model": self.name, "weights": self.weights, "engine": engine, "phase": phase}
        return named | {"batch": batch, "context": context}


def planned_seconds(
    deployment: Deployment, device: Device, name: str, phase: str, batch: int, context: int
) -> tuple[float, float]:
    """Seconds that the planner expects, and the most that deployments like it took of such plans."""
    setup = Setup(engine="llmopt")
    expected = Expectation.of(deployment, device, name, setup)
    if phase == "decode":
        planned = expected.decode(batch, context).seconds
    else:
        reserve = setup.reserve(device, deployment.weight_bytes)
        planned = expected.prefill(context, reserve).seconds
    # No deployment of this engine was measured; vLLM's on such a card bound what may be asked of it.
    band = Expectation.of(deployment, device, name, Setup(engine="vllm")).band(batch)
    bounds = (UNKNOWN_FACTORS,) * 2 if band is None else (band.tpot, band.ttft)
    return planned, planned * bounds[phase == "prefill"][1]


@contextmanager
def decoding(
    engine: Engine,
    batch: int,
    context: int,
    steps: int,
    params: Callable[[int], SamplingParams] = greedy,
) -> Iterator[Callable[[], float]]:
    """A call that makes one step and returns its seconds, once every prompt has been computed; `context` is
    that of the middle of the steps."""
    start = max(1, context - steps // 2 - WARM_STEPS)
    most = 3 * steps + 2 * WARM_STEPS + PROFILED_STEPS
    for index, prompt in enumerate(prompts_of([start] * batch, engine.vocab_size)):
        engine.add_request(str(index), prompt, params(most + batch))
    begun: set[str] = set()

    def step() -> float:
        begin = time.perf_counter()
        begun.update(piece.request_id for piece in engine.step())
        return time.perf_counter() - begin

    try:
        while len(begun) < batch:
            step()
        for _ in range(WARM_STEPS):
            step()
        if waiting := engine.stats.num_waiting:  # preempted; a short answer may have ended
            raise RuntimeError(f"{waiting} of {batch} sequences do not fit into the KV cache")
        yield step
    finally:
        for index in range(batch):
            engine.abort(str(index))
        engine.step()


def profiled(step: Callable[[], object]) -> list[tuple[str, float, float]]:
    """The kernels of a step by their time: name, microseconds and launches a step.

    Raises:
        RuntimeError: the driver lets nobody profile.
    """
    from torch.profiler import ProfilerActivity, profile

    has_gpu = torch.cuda.is_available()
    activity = ProfilerActivity.CUDA if has_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as seen:
        for _ in range(PROFILED_STEPS):
            step()
    averages: Any = seen.key_averages()

    def micros(event: Any) -> float:
        total = event.self_device_time_total if has_gpu else event.self_cpu_time_total
        return total / PROFILED_STEPS

    events = sorted(averages, key=micros, reverse=True)
    found = [(each.key, micros(each), each.count / PROFILED_STEPS) for each in events]
    return [each for each in found if math.isfinite(each[1]) and each[1] > 0]
