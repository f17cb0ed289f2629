"""Translation of `serve-local` options to a `vllm serve` command line.

For vLLM 0.32.0: tests check every option against that version's list. Tensor and pipeline parallelism, and
Ray for several nodes, are passed to vLLM.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...quant.base.errors import BadInput
from ..base.units import parse_bytes, parse_size
from ..config.adapters import parse_adapters, servable_settings

VLLM_VERSION = "0.32.0"
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's `--max-lora-rank`."""
KV_CACHE_DTYPES = {
    "auto": "auto",
    "bfloat16": "bfloat16",
    "fp8": "fp8_per_token_head",
    "int8": "int8_per_token_head",
}
"""llmopt has a scale per token and KV head in both 8-bit types."""

Words = Sequence[str]


def vllm_command(model: str, asked: Mapping[str, Any]) -> list[str]:
    """`vllm serve ...` for `model` and the options of `serve-local` in `asked`, by their names in Python.

    Defaults of llmopt's server that differ from vLLM's are passed: loopback, no CORS, a drain. The API key is
    passed in `VLLM_API_KEY`, not on the command line.

    Raises:
        BadInput: vLLM has no equivalent of an option or its value.
    """
    unknown = [name for name in asked if name not in _TRANSLATIONS and name not in _SPECULATION]
    if unknown:
        listed = ", ".join(_option(name) for name in unknown)
        raise BadInput(f"{listed}: vLLM's server has nothing that means the same; leave it out")
    everything = {**_LLMOPT_DEFAULTS, **asked}
    words = [
        word
        for name, value in everything.items()
        if name in _TRANSLATIONS
        for word in _TRANSLATIONS[name](value)
    ]
    return ["vllm", "serve", model, *words, *_speculation(asked)]


def find_vllm() -> str:
    """The `vllm` executable beside this Python, or on the PATH.

    Raises:
        BadInput: there is none.
    """
    beside = str(Path(sys.executable).parent)
    if program := shutil.which("vllm", path=beside) or shutil.which("vllm"):
        return program
    raise BadInput("--engine vllm: there is no program `vllm` here: pip install vllm")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-").removesuffix("-option")


def _as_is(option: str) -> Callable[[Any], Words]:
    return lambda value: [option, str(value)]


def _switch(option: str) -> Callable[[Any], Words]:
    """A switch, passed as on or off, because vLLM's default may differ."""
    return lambda value: [f"--{option}" if value else f"--no-{option}"]


def _flag(option: str) -> Callable[[Any], Words]:
    return lambda value: [option] if value else []


def _policy(value: str) -> Words:
    if value not in ("fcfs", "priority"):
        raise BadInput(f"--scheduling-policy {value}: vLLM has fcfs and priority")
    return ["--scheduling-policy", value]


def _kv_cache_dtype(value: str) -> Words:
    if value not in KV_CACHE_DTYPES:
        raise BadInput(f"--kv-cache-dtype {value}: vLLM has {', '.join(KV_CACHE_DTYPES)}")
    return ["--kv-cache-dtype", KV_CACHE_DTYPES[value]]


def _loras(words: Sequence[str]) -> Words:
    adapters = parse_adapters(words)
    largest = max(servable_settings(folder).rank for folder in adapters.values())
    rank = next((rank for rank in LORA_RANKS if rank >= largest), None)
    if rank is None:
        raise BadInput(f"--lora: an adapter has rank {largest}, vLLM takes up to {LORA_RANKS[-1]}")
    named = [f"{name}={folder.resolve()}" for name, folder in adapters.items()]
    limits = ["--max-loras", str(len(named)), "--max-lora-rank", str(rank)]
    return ["--enable-lora", *limits, "--lora-modules", *named]


def _api_key(keys: Sequence[str]) -> Words:
    """Not on the command line, which every user of the machine can read."""
    if len(keys) != 1:
        raise BadInput(
            f"--api-key: vLLM reads one key from its environment, {len(keys)} were given"
        )
    return []


def _origins(origins: Sequence[str]) -> Words:
    return ["--allowed-origins", json.dumps(list(origins))]


def _tool_parser(name: str) -> Words:
    return ["--enable-auto-tool-choice", "--tool-call-parser", name]


_LLMOPT_DEFAULTS: Mapping[str, Any] = {
    "host": "127.0.0.1",
    "port": 8000,
    "cors_origin": (),
    "drain_seconds": 5.0,
}
_TRANSLATIONS: Mapping[str, Callable[[Any], Words]] = {
    "host": _as_is("--host"),
    "port": _as_is("--port"),
    "cors_origin": _origins,
    "drain_seconds": lambda seconds: ["--shutdown-timeout", str(round(seconds))],
    "dtype": _as_is("--dtype"),
    "max_model_len": _as_is("--max-model-len"),
    "max_num_seqs": _as_is("--max-num-seqs"),
    "max_num_batched_tokens": _as_is("--max-num-batched-tokens"),
    "scheduling_policy": _policy,
    "prefill_chunk_size": _as_is("--long-prefill-token-threshold"),
    "async_scheduling": _switch("async-scheduling"),
    "enforce_eager": _switch("enforce-eager"),
    "seed": _as_is("--seed"),
    "kv_cache_memory_bytes": lambda size: ["--kv-cache-memory-bytes", str(parse_size(size))],
    "num_blocks": _as_is("--num-gpu-blocks-override"),
    "gpu_memory_utilization": _as_is("--gpu-memory-utilization"),
    "kv_cache_dtype": _kv_cache_dtype,
    "block_size": _as_is("--block-size"),
    "enable_prefix_caching": _switch("enable-prefix-caching"),
    "tensor_parallel_size": _as_is("--tensor-parallel-size"),
    "pipeline_parallel_size": _as_is("--pipeline-parallel-size"),
    "ray": _flag("--distributed-executor-backend=ray"),
    "lora": _loras,
    "served_model_name": _as_is("--served-model-name"),
    "chat_template": _as_is("--chat-template"),
    "tool_call_parser": _tool_parser,
    "api_key": _api_key,
    "max_header": lambda size: ["--h11-max-incomplete-event-size", str(parse_bytes(size))],
}
_SPECULATION = (
    "speculative",
    "draft_model",
    "num_speculative_tokens",
    "prompt_lookup_min",
    "prompt_lookup_max",
)
_DRAFTING = {"draft": "draft_model", "medusa": "medusa", "eagle": "eagle"}


def _speculation(asked: Mapping[str, Any]) -> Words:
    method = asked.get("speculative")
    if method is None:
        return []
    config: dict[str, Any] = {"num_speculative_tokens": asked.get("num_speculative_tokens", 4)}
    if method == "ngram":
        config |= {
            "method": "ngram",
            "prompt_lookup_min": asked.get("prompt_lookup_min", 2),
            "prompt_lookup_max": asked.get("prompt_lookup_max", 4),
        }
    elif method in _DRAFTING and "draft_model" in asked:
        config |= {"method": _DRAFTING[method], "model": asked["draft_model"]}
    else:
        listed = ", ".join(_DRAFTING)
        raise BadInput(
            f"--speculative {method}: for vLLM give ngram, or one of {listed} with --draft-model"
        )
    return ["--speculative-config", json.dumps(config)]
