"""`PlanRequest`: the options of a plan, as `llmopt kv-plan` takes them."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from ...base.errors import BadInput
from ...base.option import option, option_like
from ..base.units import SLO_SHARE
from .config import EngineConfig

# Options below the headings of the help screen.
_model = partial(option, panel="Model")
_served = partial(option, panel="What is served")
_hardware = partial(option, panel="Hardware")
_load = partial(option, panel="Load, which is simulated")
_money = partial(option, panel="Speed and money")


def _names(texts: list[str]) -> tuple[str, ...]:
    """The names in words, between commas; BadInput: there are only commas."""
    names = tuple(name for word in texts for part in word.split(",") if (name := part.strip()))
    if texts and not names:
        raise BadInput(
            f"--gpu {' '.join(texts)!r}: name a GPU of llmopt kv-plan --list, all or cpu"
        )
    return names


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A model, its workload and its hardware, not parsed yet; None if not set."""

    PANEL: ClassVar = "Engine"

    model: str = _model(
        MISSING,
        "A name of the bundled table, a folder, a config.json, a .gguf file, or a hub id.",
        common=True,
    )
    weights: str | None = _model(
        None,
        "A type or a method of quantize: bf16, fp8, int4, awq, Q4_K_M, exl3:3 ... Without it: as stored.",
        common=True,
    )
    group_size: int | None = _model(
        None, "Input channels per scale, -1 for one scale per output channel."
    )
    symmetric: bool | None = _model(
        None, "int4, int8: without zero points.", flag="--symmetric/--asymmetric"
    )
    file_format: str | None = _model(
        None, "int4, int8: awq or compressed-tensors.", flag="--format"
    )
    trust_remote_code: bool = _model(False, "Run code that the checkpoint brings.")
    context: str | None = _served(
        None,
        "Tokens per sequence, a quarter of them the answer without --output-len: 4096, 128k, 1M. Default: "
        "the model's context.",
        flag="--ctx",
        common=True,
    )
    sequences: int = _served(1, "Concurrent sequences.", flag="--concurrency --batch", common=True)
    output_tokens: int | None = _served(
        None,
        "Output tokens, as part of the context. Default: a quarter.",
        flag="--output-tokens --output-len",
        common=True,
    )
    images: str | None = _served(
        None, "Images in each prompt, COUNTxWIDTHxHEIGHT: 2x1024x768. Default: none."
    )
    kv_dtype: str | None = _served(
        None,
        "bf16, float32, fp8, fp8_per_token_head, int8, nvfp4, q8_0, q5_1 or q4_0. Default: the engine's.",
        common=True,
    )
    gpus: tuple[str, ...] = _hardware(
        (),
        "A GPU of the table, or a number of them: l40s, 2xl40s; repeatable, or several with commas; `all` "
        "ranks all of them; `cpu` is this machine.",
        flag="--gpu",
        word=list[str],
        parse=_names,
        common=True,
    )
    gpu_memory: str | None = _hardware(None, "A GPU by its memory alone: 80GiB.")
    ram: str | None = _hardware(
        None,
        "One GPU, with the weights that do not fit it in the host's memory: 64GB. In llama.cpp, or with "
        "--engine vllm.",
        common=True,
    )
    ram_bandwidth: str | None = _hardware(
        None,
        "Rated speed of --ram: GB/s, or modules such as ddr5-6000 (two channels) or 8xddr4-3200. Default: "
        "ddr5-5600.",
    )
    pcie: str | None = _hardware(
        None,
        "Generation and lanes between --ram and GPU: 5x16, or GB/s. Default: 4x16.",
    )
    tp: int | None = _hardware(
        None,
        "Tensor-parallel size. Default: the fewest GPUs that hold the model.",
        hidden_flags=("--tensor-parallel-size",),
        common=True,
    )
    pp: int | None = _hardware(
        None, "Pipeline-parallel size.", hidden_flags=("--pipeline-parallel-size",)
    )
    ep: int = _hardware(
        1,
        "Expert-parallel size: whole experts on so many of the --tp x --attention-dp devices.",
        hidden_flags=("--expert-parallel-size",),
    )
    attention_dp: int = _hardware(
        1,
        "Attention data parallelism: so many groups of --tp devices, each with sequences of its own, share "
        "the experts.",
        hidden_flags=("--data-parallel-size",),
    )
    input_len: int | None = _load(
        None,
        "Prompt tokens, beside --output-len: simulate --concurrency clients, or --request-rate.",
        common=True,
    )
    dataset: str | None = _load(
        None,
        "Simulate the lengths of bundled requests: sharegpt (a stand-in), azure or mooncake (recorded).",
    )
    request_rate: float | None = _load(
        None,
        "Simulate Poisson arrivals, in requests per second, not --concurrency clients.",
        common=True,
    )
    prefix_hit_rate: float = _served(
        0.0, "Fraction of the prompt tokens that the prefix cache holds."
    )
    slo: str | None = _load(
        None,
        "Find the highest load within these limits, and the cheapest GPUs with --gpu all, in ms without a "
        'unit: "ttft:1s tpot:20ms e2e:30s".',
        common=True,
    )
    target_request_rate: float | None = _load(
        None,
        "Find the fewest GPUs, and their division, that keep --slo under so many requests per second.",
        common=True,
    )
    slo_by: str = _load("concurrency", "concurrency or rate: what --slo varies.")
    slo_share: float = _load(SLO_SHARE, "Fraction of requests that must meet the limits.")
    engine: str | None = option(
        None,
        "vllm, sglang, trtllm, llmopt, llama.cpp, transformers, or all side by side. Default: vllm with "
        "llmopt beside it on GPUs, llama.cpp for GGUF files and on Apple's, llmopt on a CPU.",
        common=True,
    )
    engine_version: str = option(
        "",
        "Version of the engine, such as 0.19.0: speeds follow rows of it. Default: of no version.",
    )
    block_size: int | None = option_like(EngineConfig, "block_size")
    kv_cache_memory: str | None = option_like(
        EngineConfig, "kv_cache_memory_bytes", flag="--kv-cache-memory-bytes", word=None, parse=None
    )
    utilization: float | None = option_like(
        EngineConfig,
        "gpu_memory_utilization",
        flag="--gpu-memory-utilization",
        common=True,
    )
    max_num_seqs: int | None = option_like(EngineConfig, "max_num_seqs")
    max_num_batched_tokens: int | None = option_like(EngineConfig, "max_num_batched_tokens")
    kv_budget: int | None = option_like(EngineConfig, "kv_budget")
    kv_eviction: str | None = option_like(EngineConfig, "kv_eviction")
    measured: Path | None = option(
        None,
        "A run of `llmopt bench`: use its measured ceilings, not a data sheet's. Runs of `bench --plan`, one "
        "or a folder of them, are rows of this machine that correct the plan and narrow its error. Or a "
        "record of `llmopt doctor --gpu`.",
        panel="Speed and money",
    )
    draft_tokens: int | None = _money(None, "Speculative decoding: draft tokens per step.")
    acceptance: float = _money(0.7, "Speculative decoding: acceptance rate of draft tokens.")
    acceptance_length: float | None = _money(
        None,
        "Speculative decoding: tokens of a step, as bench measures them, in place of --acceptance.",
    )
    draft_cost: float = _money(
        0.1, "Speculative decoding: cost of a draft-model step, in target steps."
    )
    gpu_hour_price: float | None = _money(
        None,
        "Dollars per GPU hour. Default: a published price, with its date.",
        common=True,
    )
    api_price_in: float | None = _money(None, "An API's dollars per million input tokens.")
    api_price_out: float | None = _money(None, "An API's dollars per million output tokens.")
    duty_cycle: float = _money(1.0, "Fraction of the day under load.")
