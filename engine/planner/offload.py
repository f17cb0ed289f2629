"""Weights in the RAM of the host: experts or whole layers in llama.cpp, `--cpu-offload-gb` in vLLM.

llama.cpp computes a small batch of these weights on the processor, at the speed of RAM. From 32 tokens on it
copies them to the GPU instead, once for each physical batch
(https://github.com/ggml-org/llama.cpp/pull/6083). vLLM's kernels read them over PCIe in every step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, e

from ...base.errors import BadInput
from ...quant.families.shapes import ModelShape
from .devices import PCIE_BYTES_PER_SECOND
from .weights import WeightRecipe

GIB = 2**30
DEFAULT_RAM = "ddr5-5600"
"""Two channels of DDR5-5600, 89.6 GB/s: the rating of desktop processors of 2023 to 2025 (Intel's page of
the Core i9-14900K; https://github.com/nibor1896/Crow/issues/140, 2026-08-27)."""
SYSTEM_BYTES = 4 * GIB
"""RAM that the system and other programs keep. Assumed."""
STREAMED_TOKENS = 32
"""Tokens from which llama.cpp copies weights to the GPU (ggml's `min_batch_size`, same page as above)."""
ENGINES = ("llama.cpp", "vllm")


@dataclass(frozen=True, slots=True)
class Reached:
    """Shares of rated speeds that published set-ups reach, fitted by `python -m tools.offload_error --fit`.

    Attributes:
        ram: share of the rated bandwidth of RAM in decoding.
        layer_seconds: time of a layer in RAM beyond its bytes: hand-over and start of the threads.
        pcie: share of PCIe's rated bandwidth in copies; experts that no token needs are not copied.
    """

    ram: float = 0.70
    layer_seconds: float = 60e-6
    pcie: float = 0.6


@dataclass(frozen=True, slots=True)
class Host:
    """RAM for weights: its bytes, its rated bytes/s, and the rated bytes/s of PCIe in one direction."""

    ram_bytes: int
    ram_bandwidth: float
    pcie_bandwidth: float = PCIE_BYTES_PER_SECOND
    reached: Reached = Reached()


@dataclass(frozen=True, slots=True)
class Offload:
    """Weights of one deployment that are in RAM.

    Attributes:
        engine: engine that reads them, one of `ENGINES`.
        weight_bytes: size of the weights in RAM.
        flag: command-line option that puts them there.
        expert_share: share of the experts that is in RAM.
        linear_share: share of the other streamed weights that is in RAM.
        whole_layers: number of leading layers that are in RAM with their KV cache.
        waits: layers whose weights the processor computes.
        batch_tokens: tokens of a physical batch, for which weights are copied once.
    """

    host: Host
    engine: str
    weight_bytes: int
    flag: str
    expert_share: float = 0.0
    linear_share: float = 0.0
    whole_layers: int = 0
    cache_share: float = 0.0
    waits: int = 0
    batch_tokens: int = 512

    def divided(self, loads: dict[str, float], tokens: int) -> tuple[dict[str, float], float]:
        """Loads that remain on the GPU in a step of so many tokens, and the seconds of those in RAM; `loads`
        has the fields of the step model's `Loads`."""
        reached = self.host.reached
        if self.engine != "llama.cpp" or tokens >= STREAMED_TOKENS:
            batches = max(1, ceil(tokens / self.batch_tokens))
            copied = batches * self._touched_bytes(loads, batches)
            return loads, copied / (self.host.pcie_bandwidth * reached.pcie)
        moved = {"linear": self.linear_share, "expert": self.expert_share}
        moved |= dict.fromkeys(("cache", "pair", "state"), self.cache_share)
        kept = {
            name: value * (1 - moved.get(name.split("_")[0], 0.0))
            for name, value in loads.items()
            if name.endswith(("_bytes", "_flops"))
        }
        read = self._touched_bytes(loads, 1)
        read += self.cache_share * (loads["cache_bytes"] + loads["state_bytes"])
        seconds = read / (self.host.ram_bandwidth * reached.ram)
        return loads | kept, seconds + self.waits * reached.layer_seconds

    def _touched_bytes(self, loads: dict[str, float], batches: int) -> float:
        """Bytes of weights in RAM that a batch reads, under uniform routing."""
        touched = 1 - e ** (loads["expert_miss"] / batches)
        experts = self.expert_share * loads["expert_bytes"] * touched
        return self.linear_share * loads["linear_bytes"] + experts

    def command(self, context: int, sequences: int, kv_dtype: str) -> str:
        """Command that starts the engine so, with a placeholder for the model."""
        if self.engine == "vllm":
            return f"vllm serve MODEL {self.flag} --max-model-len {context}"
        total, batch = context * sequences, self.batch_tokens
        command = f"llama-server -m MODEL.gguf {self.flag} -c {total} -np {sequences}"
        if kv_dtype != "f16":
            command += f" -ctk {kv_dtype} -ctv {kv_dtype}"
        return f"{command} -b {max(2048, batch)} -ub {batch}"


def placements(
    shape: ModelShape, recipe: WeightRecipe, host: Host, engine: str, batch_tokens: int
) -> Iterator[Offload]:
    """Ways to put weights into RAM, the least first: experts of the first layers, then whole layers."""
    sizes = _Sizes.of(shape, recipe)
    if engine == "vllm":
        total = sizes.experts + sizes.layers + sizes.head
        for gib in range(1, total // GIB + 1):
            share = gib * GIB / total
            flag = f"--cpu-offload-gb {gib}"
            yield Offload(host, engine, gib * GIB, flag, share, share, batch_tokens=batch_tokens)
        return
    base = Offload(host, engine, sizes.embedding, "-ngl 99", batch_tokens=batch_tokens)
    for count in range(1, shape.num_layers + 1):
        if shape.experts is not None and count - 1 not in shape.experts.dense_layers:
            yield with_experts(base, sizes, shape, count)
    if shape.experts is not None:
        base = with_experts(base, sizes, shape, shape.num_layers)
    for count in range(1, shape.num_layers):
        yield with_layers(base, sizes, shape, count)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Bytes of a model's parts: experts, the rest of the layers, the head, and the embedding that is looked
    up."""

    experts: int
    layers: int
    head: int
    embedding: int

    @classmethod
    def of(cls, shape: ModelShape, recipe: WeightRecipe) -> _Sizes:
        parts = {"experts": 0, "layers": 0, "head": 0, "embedding": 0}
        for role, size in recipe.bytes_by_role(shape.tensors()).items():
            part = "layers"
            if role.startswith("expert"):
                part = "experts"
            elif role == "head" or (role == "embedding" and shape.tied):
                part = "head"
            elif role in ("embedding", "position"):
                part = "embedding"
            parts[part] += size
        if recipe.stored_bytes:
            scale = recipe.stored_bytes / sum(parts.values())
            parts = {part: round(scale * size) for part, size in parts.items()}
        return cls(**parts)


def with_experts(base: Offload, sizes: _Sizes, shape: ModelShape, count: int) -> Offload:
    """The placement with the experts of the first `count` layers in RAM too."""
    assert shape.experts is not None
    dense = shape.experts.dense_layers
    inside = count - sum(layer < count for layer in dense)
    share = inside / (shape.num_layers - len(dense))
    return replace(
        base,
        weight_bytes=base.weight_bytes + round(share * sizes.experts),
        flag=f"-ngl 99 --n-cpu-moe {count}",
        expert_share=share,
        waits=inside,
    )


def with_layers(base: Offload, sizes: _Sizes, shape: ModelShape, count: int) -> Offload:
    """The placement with the first `count` layers in RAM too. The output layer counts as one on the GPU
    (https://github.com/ggml-org/llama.cpp/pull/26622: 32 of 64 layers in RAM are `-ngl 33`)."""
    share = count / shape.num_layers
    moved = round(share * sizes.layers)
    flag = f"-ngl {shape.num_layers + 1 - count}"
    if base.expert_share:
        flag = f"{flag} --cpu-moe"
    return replace(
        base,
        weight_bytes=base.weight_bytes + moved,
        flag=flag,
        linear_share=moved / (sizes.layers + sizes.head),
        whole_layers=count,
        cache_share=share,
        waits=max(base.waits, count),
    )


_RAM = re.compile(r"(\d+(?:\.\d+)?)\s*(g|gb|gib|t|tb|tib)?")
_MODULES = re.compile(r"(?:(\d+)\s*x\s*)?(?:lp)?ddr[345]x?-(\d{3,5})")
_LANES = re.compile(r"(?:gen)?([3-6])(?:\.0)?\s*x\s*(\d{1,2})")
_BANDWIDTH = re.compile(r"(\d+(?:\.\d+)?)\s*(?:gb/s)?")


def parse_host(ram: str | None, bandwidth: str | None, pcie: str | None) -> Host | None:
    """The host of `--ram`, `--ram-bandwidth` and `--pcie`; None without RAM for weights. Raises BadInput: an
    option that is not understood, or a speed without `--ram`."""
    if ram is None:
        given = {"--ram-bandwidth": bandwidth, "--pcie": pcie}
        if alone := [option for option, value in given.items() if value is not None]:
            raise BadInput(f"{alone[0]} needs --ram, the size of the host's memory: --ram 64GB")
        return None
    size = _RAM.fullmatch(ram.strip().lower())
    if size is None or not float(size[1]):
        raise BadInput(f"--ram {ram!r} is no size of memory: write 64GB")
    # Modules are sold in powers of two: 64 GB of RAM are 64 GiB.
    unit = 1024 * GIB if (size[2] or "g").startswith("t") else GIB
    speed = _ram_bandwidth(bandwidth or DEFAULT_RAM)
    return Host(int(float(size[1]) * unit), speed, _pcie_bandwidth(pcie))


def _ram_bandwidth(text: str) -> float:
    """Rated bytes/s: 8 bytes a transfer and channel, two channels unless others are named."""
    word = text.strip().lower()
    if modules := _MODULES.fullmatch(word):
        return int(modules[1] or 2) * int(modules[2]) * 8e6
    if (number := _BANDWIDTH.fullmatch(word)) and float(number[1]):
        return float(number[1]) * 1e9
    raise BadInput(
        f"--ram-bandwidth {text!r}: write GB/s, or modules such as ddr5-6000 (two channels) or 8xddr4-3200"
    )


def _pcie_bandwidth(text: str | None) -> float:
    """Rated bytes/s in one direction: a lane of PCIe 3 carries 1 GB/s, and twice as much each generation."""
    if text is None:
        return PCIE_BYTES_PER_SECOND
    word = text.strip().lower()
    if lanes := _LANES.fullmatch(word):
        return int(lanes[2]) * 2 ** (int(lanes[1]) - 3) * 1e9
    if (number := _BANDWIDTH.fullmatch(word)) and float(number[1]):
        return float(number[1]) * 1e9
    raise BadInput(f"--pcie {text!r}: write the generation and lanes, 4x16 or 5x8, or GB/s")
