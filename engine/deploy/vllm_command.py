"""The command line of `vllm serve`.

Tensor and pipeline parallelism, and Ray for several nodes, are passed to vLLM. The API key is passed in
`VLLM_API_KEY`, not on the command line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...quant.base.errors import BadInput
from ..base.units import parse_bytes, parse_size
from ..config.adapters import parse_adapters, servable_settings
from .translation import ServerCommand, Translate, Words, as_is, flag, only

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's `--max-lora-rank`."""
KV_CACHE_DTYPES = {
    "auto": "auto",
    "bfloat16": "bfloat16",
    "fp8": "fp8_per_token_head",
    "int8": "int8_per_token_head",
}
"""llmopt has a scale per token and KV head in both 8-bit types."""


def _switch(option: str) -> Translate:
    """A switch, passed as on or off, because vLLM's default may differ."""
    return lambda value: [f"--{option}" if value else f"--no-{option}"]


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


REASONING_PARSERS = {"think": "deepseek_r1", "mistral": "mistral", "seed_oss": "seed_oss"}
_LLMOPT_DEFAULTS: Mapping[str, Any] = {
    "host": "127.0.0.1",
    "port": 8000,
    "cors_origin": (),
    "drain_seconds": 5.0,
}
_TRANSLATIONS: Mapping[str, Translate] = {
    "host": as_is("--host"),
    "port": as_is("--port"),
    "cors_origin": _origins,
    "drain_seconds": lambda seconds: ["--shutdown-timeout", str(round(seconds))],
    "dtype": as_is("--dtype"),
    "max_model_len": as_is("--max-model-len"),
    "max_num_seqs": as_is("--max-num-seqs"),
    "max_num_batched_tokens": as_is("--max-num-batched-tokens"),
    "scheduling_policy": only(
        "vLLM", "scheduling_policy", {"fcfs": "fcfs", "priority": "priority"}, "--scheduling-policy"
    ),
    "prefill_chunk_size": as_is("--long-prefill-token-threshold"),
    "async_scheduling": _switch("async-scheduling"),
    "enforce_eager": _switch("enforce-eager"),
    "trust_remote_code": _switch("trust-remote-code"),
    "seed": as_is("--seed"),
    "kv_cache_memory_bytes": lambda size: ["--kv-cache-memory-bytes", str(parse_size(size))],
    "num_blocks": as_is("--num-gpu-blocks-override"),
    "gpu_memory_utilization": as_is("--gpu-memory-utilization"),
    "kv_cache_dtype": only("vLLM", "kv_cache_dtype", KV_CACHE_DTYPES, "--kv-cache-dtype"),
    "block_size": as_is("--block-size"),
    "enable_prefix_caching": _switch("enable-prefix-caching"),
    "tensor_parallel_size": as_is("--tensor-parallel-size"),
    "pipeline_parallel_size": as_is("--pipeline-parallel-size"),
    "ray": flag("--distributed-executor-backend=ray"),
    "lora": _loras,
    "served_model_name": as_is("--served-model-name"),
    "chat_template": as_is("--chat-template"),
    "tool_call_parser": _tool_parser,
    "reasoning_parser": only("vLLM", "reasoning_parser", REASONING_PARSERS, "--reasoning-parser"),
    "api_key": _api_key,
    "ssl_certfile": as_is("--ssl-certfile"),
    "ssl_keyfile": as_is("--ssl-keyfile"),
    "ssl_ca_certs": as_is("--ssl-ca-certs"),
    "ssl_cert_reqs": as_is("--ssl-cert-reqs"),
    "enable_ssl_refresh": _switch("enable-ssl-refresh"),
    "otlp_traces_endpoint": as_is("--otlp-traces-endpoint"),
    "allowed_media_domains": lambda names: ["--allowed-media-domains", *names],
    "limit_mm_per_prompt": as_is("--limit-mm-per-prompt"),
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


VLLM = ServerCommand(
    name="vllm",
    title="vLLM",
    version="0.32.0",
    program="vllm",
    words=("serve",),
    install="pip install vllm",
    defaults=_LLMOPT_DEFAULTS,
    table=_TRANSLATIONS,
    together=_SPECULATION,
    combined=_speculation,
    key_variable="VLLM_API_KEY",
)
