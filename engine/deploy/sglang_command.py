"""The command line of SGLang's server.

Its `--mem-fraction-static` leaves activations out, so `--gpu-memory-utilization` has no counterpart. It takes
an API key on its command line alone, where every user of the machine can read it: none is passed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...quant.base.errors import BadInput
from ..config.adapters import parse_adapters, servable_settings
from .translation import ServerCommand, Translate, Words, as_is, flag, only, unless

KV_CACHE_DTYPES = {"auto": "auto", "bfloat16": "bfloat16", "fp8": "fp8_e4m3"}


def _policy(value: str) -> Words:
    if value == "priority":
        return ["--enable-priority-scheduling", "--schedule-low-priority-values-first"]
    if value == "fcfs":
        return ["--schedule-policy", "fcfs"]
    raise BadInput(f"--scheduling-policy {value}: SGLang has fcfs, priority")


def _loras(words: Sequence[str]) -> Words:
    adapters = parse_adapters(words)
    for folder in adapters.values():
        servable_settings(folder)
    named = [f"{name}={folder.resolve()}" for name, folder in adapters.items()]
    # A request without an adapter takes a place in the batch too.
    return ["--lora-paths", *named, "--max-loras-per-batch", str(len(named) + 1)]


_TABLE: Mapping[str, Translate] = {
    "host": as_is("--host"),
    "port": as_is("--port"),
    "dtype": as_is("--dtype"),
    "max_model_len": as_is("--context-length"),
    "max_num_seqs": as_is("--max-running-requests"),
    "prefill_chunk_size": as_is("--chunked-prefill-size"),
    "max_num_batched_tokens": as_is("--max-prefill-tokens"),
    "scheduling_policy": _policy,
    "async_scheduling": unless("--disable-overlap-schedule"),
    "enforce_eager": flag("--disable-cuda-graph"),
    "seed": as_is("--random-seed"),
    "trust_remote_code": flag("--trust-remote-code"),
    "kv_cache_dtype": only("SGLang", "kv_cache_dtype", KV_CACHE_DTYPES, "--kv-cache-dtype"),
    "block_size": as_is("--page-size"),
    "enable_prefix_caching": unless("--disable-radix-cache"),
    "tensor_parallel_size": as_is("--tensor-parallel-size"),
    "pipeline_parallel_size": as_is("--pipeline-parallel-size"),
    "lora": _loras,
    "ssl_certfile": as_is("--ssl-certfile"),
    "ssl_keyfile": as_is("--ssl-keyfile"),
    "ssl_ca_certs": as_is("--ssl-ca-certs"),
    "enable_ssl_refresh": flag("--enable-ssl-refresh"),
    "served_model_name": as_is("--served-model-name"),
    "chat_template": as_is("--chat-template"),
    "tool_call_parser": only(
        "SGLang",
        "tool_call_parser",
        {"hermes": "hermes", "llama3_json": "llama3", "mistral": "mistral"},
        "--tool-call-parser",
    ),
}
_SPECULATION = ("speculative", "draft_model", "num_speculative_tokens")


def _speculation(asked: Mapping[str, Any]) -> Words:
    method = asked.get("speculative")
    if method is None:
        return []
    count = int(asked.get("num_speculative_tokens", 4))
    if method == "ngram":
        return ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(count)]
    algorithms = {"draft": "STANDALONE", "eagle": "EAGLE"}
    if method not in algorithms or "draft_model" not in asked:
        listed = ", ".join(algorithms)
        raise BadInput(
            f"--speculative {method}: for SGLang give ngram, or one of {listed} with --draft-model"
        )
    # A chain: one candidate a step. The token that the draft starts from counts as one.
    return [
        *("--speculative-algorithm", algorithms[method]),
        *("--speculative-draft-model-path", str(asked["draft_model"])),
        *("--speculative-num-steps", str(count), "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(count + 1)),
    ]


SGLANG = ServerCommand(
    name="sglang",
    title="SGLang",
    version="0.5.23",
    program="sglang",
    words=("serve", "--model-path"),
    install="pip install sglang",
    defaults={"host": "127.0.0.1", "port": 8000},
    table=_TABLE,
    together=_SPECULATION,
    combined=_speculation,
    ready_path="/health",
)
