"""Models with random weights in real shapes, and the times of their steps next to the planner's."""

from __future__ import annotations

import json
import random
import re
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ...base.errors import BadInput
from ...engine.base.sampling_params import SamplingParams
from ...engine.config.config import EngineConfig
from ...engine.core.engine import Engine
from ...engine.planner.catalog import PlannedModel, find_model
from ...engine.planner.devices import Device, find_device
from ...engine.planner.error_bands import unlike_band
from ...engine.planner.expected import Expectation
from ...engine.planner.memory import Deployment
from ...engine.planner.setup import Setup
from ...engine.planner.speed import decode_step_bytes, prefill_flops
from ...quant.formats.registry import FORMATS
from ...quant.kinds.base.kind import kind_of
from ...quant.kinds.fp8.scheme import FloatScheme
from ...quant.kinds.integer.scheme import IntScheme
from ...recipes import MODELS as BUNDLED
from ..machine.roofline import copy_bandwidth, matmul_flops
from .run import Finding

FORMAT, KV_BYTES, BLOCK_SIZE = "compressed-tensors", 2, 16
COMPILE_CACHE_BYTES = 4 << 30
"""KV cache of an engine next to others on the same card."""
DECODE = ((1, 128), (32, 4096))
"""Batches and contexts of timed decode steps."""
STEPS, WARM_STEPS = 32, 8
PREFILL, PROMPTS = 8192, 3
"""Tokens of a timed prompt, and prompts."""


@cache
def roofs() -> dict[str, float]:
    card = torch.device("cuda")
    return {"bandwidth": copy_bandwidth(card), "flops": matmul_flops(card, torch.bfloat16)}


def planned_device() -> Device:
    """The card in the planner's table; a card that is not there, by its measured roofs."""
    name = torch.cuda.get_device_name()
    try:
        return find_device(name)
    except BadInput:
        bandwidth, flops = roofs().values()
        memory = torch.cuda.mem_get_info()[1]
        return Device(name, memory, bandwidth=bandwidth, peaks={"bf16": flops})


def config_of(name: str, layers: int | None) -> dict[str, Any]:
    """The text config of a model of the planner's table, with its first `layers` layers."""
    whole = dict(find_model(name).config)
    config: dict[str, Any] = dict(whole.get("text_config") or whole) | {"dtype": "bfloat16"}
    config["num_hidden_layers"] = layers or config["num_hidden_layers"]
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][: config["num_hidden_layers"]]
    return config


@dataclass(frozen=True, slots=True)
class TimedModel:
    """A model of the planner's table, random, of `layers` (None: all), quantized by `scheme`, if any."""

    name: str
    scheme: IntScheme | FloatScheme | None = None
    layers: int | None = None

    def write(self, folder: Path) -> None:
        """Write a checkpoint, whose layers are equal but have memory of their own, larger than any cache."""
        config = config_of(self.name, self.layers)
        count = config["num_hidden_layers"]
        period = count if "layer_types" in config else 1  # a hybrid's layers differ in kind
        whole = _random_tensors(config | {"num_hidden_layers": period}, folder)
        if self.scheme is not None:
            schemes: dict[str, Any] = {
                module.replace(".0.", f".{index}.", 1): self.scheme
                for module in _quantize(whole, self.scheme)
                for index in range(count)
            }
            config |= {"quantization_config": FORMATS[FORMAT].config(schemes, ["lm_head"])}
        shards: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for name, tensor in whole.items():
            before, *layer = re.split(r"(?<=\.layers\.)(\d+)", name, maxsplit=1)
            if not layer:
                shards["rest.safetensors"][name] = tensor
            for index in range(int(layer[0]), count, period) if layer else ():
                shards[f"layer-{index}.safetensors"][f"{before}{index}{layer[1]}"] = tensor
        for shard, tensors in shards.items():
            save_file({n: t.contiguous().cpu() for n, t in tensors.items()}, folder / shard)
        weight_map = {name: shard for shard, tensors in shards.items() for name in tensors}
        index_json = json.dumps({"metadata": {}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(index_json)
        for name in ("tokenizer.json", "tokenizer_config.json"):  # its ids are the first ones
            shutil.copy(BUNDLED / "stories260K" / name, folder)
        (folder / "config.json").write_text(json.dumps(config))
        torch.cuda.empty_cache()  # the engine counts what this process holds

    def open(self, folder: Path, **options: Any) -> Engine:
        """An engine with room for each timed case, without prefix cache; writes a missing checkpoint."""
        if not (folder / "config.json").exists():  # a process before this one wrote it
            self.write(folder)
        longest = max(PREFILL, *(context for _, context in DECODE))
        options |= {"device": "cuda", "dtype": "bfloat16", "max_model_len": longest + 128}
        options |= {"max_num_seqs": max(batch for batch, _ in DECODE)}
        return Engine(EngineConfig(folder, enable_prefix_caching=False, **options))

    def compile(self, folder: Path) -> Iterator[Finding]:
        """Open an engine, whose start compiles every kernel that serving launches."""
        begin = time.perf_counter()
        self.open(folder, kv_cache_memory_bytes=COMPILE_CACHE_BYTES).close()
        seen = f"compiled in {time.perf_counter() - begin:.1f} s"
        yield Finding(f"kernels of {folder.name}", seen=seen)

    def time(
        self, folder: Path, engine: Engine, phase: str, batch: int, context: int
    ) -> Iterator[Finding]:
        """Time decode steps (roof: bytes) or prompts (roof: FLOP). RuntimeError: no room for the batch."""
        model = find_model(str(folder))
        if phase == "decode":
            seconds = decode_seconds(engine, batch, context)
            weight_bytes = engine.memory.weight_bytes
            work = decode_step_bytes(model.shape, batch, context, weight_bytes, KV_BYTES)
        else:
            seconds = prefill_seconds(engine, context)
            work = prefill_flops(model.shape, context)
        median, planned = statistics.median(seconds), self.planned(model, phase, batch, context)
        most = unlike_band().tpot[1]  # the planner knows no measured deployment of this engine
        share = work / roofs()["bandwidth" if phase == "decode" else "flops"] / median
        name = self.name if self.layers is None else f"{self.name}, {self.layers} layers"
        weights = model.as_stored().label
        numbers = {"model": name, "weights": weights, "phase": phase, "batch": batch}
        numbers |= {"context": context, "seconds": median, "share": share}
        numbers["expected_seconds"] = planned
        spread = f"{1e3 * min(seconds):.2f} to {1e3 * max(seconds):.2f}"
        yield Finding(
            f"{phase} of {name} in {weights}, batch {batch} at {context} tokens",
            f"{1e3 * planned:.2f} ms, at most {most:.3g} times",
            f"{1e3 * median:.2f} ms ({spread}), {share:.0%} of the roof",
            median <= most * planned,
            numbers,
        )

    def planned(self, stored: PlannedModel, phase: str, batch: int, context: int) -> float:
        """Seconds of a decode step or of a prompt that the planner expects on this card."""
        setup, device = Setup(engine="llmopt"), planned_device()
        deployment = Deployment(stored.shape, stored.as_stored(), KV_BYTES, BLOCK_SIZE)
        plan = Expectation.of(deployment, device, self.name, setup)
        if phase == "decode":
            return plan.decode(batch, context).seconds
        return plan.prefill(context, setup.reserve(device, deployment.weight_bytes)).seconds


def _random_tensors(
    config: dict[str, Any], folder: Path, device: str = "cuda"
) -> dict[str, torch.Tensor]:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    fields = dict(config)
    with torch.device(device):
        own = AutoConfig.for_model(fields.pop("model_type"), **fields)
        model = AutoModelForCausalLM.from_config(own, dtype=torch.bfloat16, trust_remote_code=False)
    model.save_pretrained(folder)
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(shard, device=device)
    shutil.rmtree(folder)
    folder.mkdir()
    return tensors


def _quantize(tensors: dict[str, Any], scheme: IntScheme | FloatScheme) -> list[str]:
    """Round the linears of the layers in place; returns their names."""
    modules = [n.removesuffix(".weight") for n in tensors if n.endswith("proj.weight")]
    for module in modules:
        weight: Any = kind_of(scheme).round(tensors.pop(f"{module}.weight").float(), torch.bfloat16)
        tensors |= FORMATS[FORMAT].pack(module, weight.to("cpu"))
    return modules


def _add(engine: Engine, name: str, length: int, num_tokens: int) -> None:
    draw = random.Random(name)
    prompt = [draw.randrange(engine.vocab_size) for _ in range(length)]
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    engine.add_request(name, prompt, params)


def prefill_seconds(engine: Engine, length: int) -> list[float]:
    """Seconds from each prompt to its first token; the first prompt is not timed."""
    seconds = []
    for index in range(PROMPTS + 1):
        begin = time.perf_counter()
        _add(engine, str(index), length, 1)
        while engine.has_unfinished():
            engine.step()
        seconds.append(time.perf_counter() - begin)
    return seconds[1:]


def decode_seconds(engine: Engine, batch: int, context: int) -> list[float]:
    """Seconds of decode steps about `context`, after prompts. RuntimeError: no room for the batch."""
    start = max(1, context - STEPS // 2 - WARM_STEPS)
    for index in range(batch):
        _add(engine, str(index), start, STEPS + 2 * WARM_STEPS + batch)
    begun: set[str] = set()
    seconds = []
    try:
        while len(begun) < batch:
            begun.update(output.request_id for output in engine.step())
        for _ in range(WARM_STEPS + STEPS):
            begin = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - begin)
        if waiting := engine.stats.num_waiting:  # preempted: such steps have fewer sequences
            raise RuntimeError(f"{waiting} of {batch} sequences do not fit into the KV cache")
    finally:
        for index in range(batch):
            engine.abort(str(index))
        engine.step()
    return seconds[WARM_STEPS:]
