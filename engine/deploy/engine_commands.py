"""Command lines of the other engines' servers: one table of what each calls an option of `serve-local`.

`serve-local --engine`, `deploy --engine` and `bench --serve` know these servers. Notes on the columns:

* vLLM: its API key goes into `VLLM_API_KEY`, not on the command line.
* SGLang: its `--mem-fraction-static` leaves activations out, so `--gpu-memory-utilization` has no
  counterpart. It takes an API key on its command line alone, where every user of the machine can read it:
  none is passed.
* TensorRT-LLM: its options are click's, with underscores. What it has only in a YAML file (`--config`: the KV
  cache's dtype, speculation, CUDA graphs) is refused; a checkpoint of ModelOpt or compressed-tensors says its
  own dtypes. It caches prefixes, checks no API key, and gives the KV cache a share of what is free after
  loading, where `--gpu-memory-utilization` is a share of the whole.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...base.errors import BadInput
from ..base.units import parse_bytes, parse_size
from ..config.adapters import parse_adapters, servable_settings

Words = Sequence[str]


@dataclass(frozen=True, slots=True)
class OneOf:
    """The words for each value that the engine has."""

    words: Mapping[str, Words]


@dataclass(frozen=True, slots=True)
class Always:
    """An option of which the engine always does one thing."""

    value: object


Translation = str | OneOf | Always | Callable[[Any], Words]
"""The name of an option that takes the same value, or how its words are found."""


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """Another engine's server, and what its options are for those of `serve-local`.

    Attributes:
        name: value of `--engine`.
        title: name for people.
        version: version of the engine whose options are named; tests compare each with a list of its options.
        words: arguments before the model.
        table: translation of each option, by its name in Python.
        defaults: llmopt's defaults that differ from the engine's, and are passed.
        together, combined: options that are translated at once, and their translation.
        key_variable: environment variable that holds the API key; None: the engine takes none from there.
    """

    name: str
    title: str
    version: str
    program: str
    words: Words
    install: str
    table: Mapping[str, Translation]
    defaults: Mapping[str, Any]
    together: Words = ()
    combined: Callable[[Mapping[str, Any]], Words] = lambda _: ()
    key_variable: str | None = None

    def command(self, model: str, options: Mapping[str, Any]) -> list[str]:
        """The command line for `model` and the `options` of `serve-local`, by their names in Python. Raises
        `BadInput`: the engine has no equivalent of an option or its value."""
        return [self.program, *self.words, model, *self.options({**self.defaults, **options})]

    def options(self, given: Mapping[str, Any]) -> list[str]:
        """The part of the command line for options of `serve-local` alone. Raises `BadInput`: the engine has
        no equivalent of an option or its value."""
        unknown = [shown(name) for name in given if name not in {*self.table, *self.together}]
        if unknown:
            problem = f"{self.title}'s server has nothing that means the same; leave it out"
            raise BadInput(f"{', '.join(unknown)}: {problem}")
        known = [(name, value) for name, value in given.items() if name in self.table]
        arguments = [word for name, value in known for word in self._translated(name, value)]
        return [*arguments, *self.combined(given)]

    def find(self) -> str:
        """Path of the executable. Raises `BadInput`: it is not installed."""
        if path := find_program(self.program):
            return path
        raise BadInput(
            f"--engine {self.name}: there is no program `{self.program}` here: {self.install}"
        )

    def _translated(self, name: str, value: Any) -> Words:
        match self.table[name]:
            case str(option):
                return [option, str(value)]
            case OneOf(words):
                if value not in words:
                    raise BadInput(f"{shown(name)} {value}: {self.title} has {', '.join(words)}")
                return words[value]
            case Always(meant):
                if value != meant:
                    raise BadInput(
                        f"{shown(name)} {value}: {self.title}'s server always has {meant}"
                    )
                return []
            case translate:
                return translate(value)


def find_program(name: str) -> str | None:
    return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)


def shown(name: str) -> str:
    return "--" + name.replace("_", "-").removesuffix("-option")


def flag(option: str) -> Translation:
    return lambda value: [option] if value else []


def unless(option: str) -> Translation:
    return lambda value: [] if value else [option]


def switch(option: str) -> Translation:
    return lambda value: [f"--{option}" if value else f"--no-{option}"]


def renamed(option: str, values: Mapping[str, str]) -> OneOf:
    return OneOf({ours: (option, theirs) for ours, theirs in values.items()})


LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's `--max-lora-rank`."""


def _named_adapters(entries: Sequence[str]) -> tuple[list[str], int]:
    """(NAME=FOLDER of each adapter, their largest rank)."""
    adapters = parse_adapters(entries)
    rank = max(servable_settings(folder).rank for folder in adapters.values())
    return [f"{name}={folder.resolve()}" for name, folder in adapters.items()], rank


def _vllm_loras(entries: Sequence[str]) -> Words:
    named, largest = _named_adapters(entries)
    rank = next((rank for rank in LORA_RANKS if rank >= largest), None)
    if rank is None:
        raise BadInput(f"--lora: an adapter has rank {largest}, vLLM takes up to {LORA_RANKS[-1]}")
    limits = ["--max-loras", str(len(named)), "--max-lora-rank", str(rank)]
    return ["--enable-lora", *limits, "--lora-modules", *named]


def _sglang_loras(entries: Sequence[str]) -> Words:
    named, _ = _named_adapters(entries)
    # A request without an adapter takes a place in the batch too.
    return ["--lora-paths", *named, "--max-loras-per-batch", str(len(named) + 1)]


def _vllm_key(keys: Sequence[str]) -> Words:
    """Nothing: `ps` shows the command line, so that the key goes into VLLM_API_KEY."""
    if len(keys) != 1:
        problem = f"vLLM reads one key from its environment, {len(keys)} were given"
        raise BadInput(f"--api-key: {problem}")
    return []


# llmopt has a scale per token and KV head in both 8-bit types of KV cache.
_VLLM_CACHES = {
    "auto": "auto",
    "bfloat16": "bfloat16",
    "fp8": "fp8_per_token_head",
    "int8": "int8_per_token_head",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
}
_SGLANG_CACHES = {"auto": "auto", "bfloat16": "bfloat16", "fp8": "fp8_e4m3"} | {
    name: name for name in ("fp8_e4m3", "fp8_e5m2")
}
_SGLANG_POLICIES = {
    "fcfs": ("--schedule-policy", "fcfs"),
    "priority": ("--enable-priority-scheduling", "--schedule-low-priority-values-first"),
}
_SGLANG_TOOLS = {"hermes": "hermes", "llama3_json": "llama3", "mistral": "mistral"}
_VLLM_REASONING = {
    "think": "deepseek_r1",
    **{name: name for name in ("qwen3", "deepseek_r1", "mistral", "seed_oss")},
}

_OPTIONS: Mapping[str, tuple[Translation, Translation | None, Translation | None]] = {
    # option of serve-local: vLLM, SGLang, TensorRT-LLM
    "host": ("--host", "--host", "--host"),
    "port": ("--port", "--port", "--port"),
    "dtype": ("--dtype", "--dtype", None),
    "seed": ("--seed", "--random-seed", None),
    "max_model_len": ("--max-model-len", "--context-length", "--max_seq_len"),
    "max_num_seqs": ("--max-num-seqs", "--max-running-requests", "--max_batch_size"),
    "max_num_batched_tokens": (
        "--max-num-batched-tokens",
        "--max-prefill-tokens",
        "--max_num_tokens",
    ),
    "prefill_chunk_size": ("--long-prefill-token-threshold", "--chunked-prefill-size", None),
    "scheduling_policy": (
        renamed("--scheduling-policy", {"fcfs": "fcfs", "priority": "priority"}),
        OneOf(_SGLANG_POLICIES),
        None,
    ),
    "async_scheduling": (switch("async-scheduling"), unless("--disable-overlap-schedule"), None),
    "enforce_eager": (switch("enforce-eager"), flag("--disable-cuda-graph"), None),
    "trust_remote_code": (
        switch("trust-remote-code"),
        flag("--trust-remote-code"),
        flag("--trust_remote_code"),
    ),
    "block_size": ("--block-size", "--page-size", None),
    "kv_cache_dtype": (
        renamed("--kv-cache-dtype", _VLLM_CACHES),
        renamed("--kv-cache-dtype", _SGLANG_CACHES),
        Always("auto"),
    ),
    "enable_prefix_caching": (
        switch("enable-prefix-caching"),
        unless("--disable-radix-cache"),
        Always(True),
    ),
    "tensor_parallel_size": ("--tensor-parallel-size", "--tensor-parallel-size", "--tp_size"),
    "pipeline_parallel_size": ("--pipeline-parallel-size", "--pipeline-parallel-size", "--pp_size"),
    "lora": (_vllm_loras, _sglang_loras, None),
    "served_model_name": ("--served-model-name", "--served-model-name", None),
    "chat_template": ("--chat-template", "--chat-template", "--chat_template"),
    "tool_call_parser": (
        lambda name: ["--enable-auto-tool-choice", "--tool-call-parser", name],
        renamed("--tool-call-parser", _SGLANG_TOOLS),
        None,
    ),
    "ssl_certfile": ("--ssl-certfile", "--ssl-certfile", None),
    "ssl_keyfile": ("--ssl-keyfile", "--ssl-keyfile", None),
    "ssl_ca_certs": ("--ssl-ca-certs", "--ssl-ca-certs", None),
}
_VLLM_ALONE: Mapping[str, Translation] = {
    "num_blocks": "--num-gpu-blocks-override",
    "kv_cache_memory_bytes": lambda size: ["--kv-cache-memory-bytes", str(parse_size(size))],
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "ray": flag("--distributed-executor-backend=ray"),
    "reasoning_parser": renamed("--reasoning-parser", _VLLM_REASONING),
    "api_key": _vllm_key,
    "ssl_cert_reqs": "--ssl-cert-reqs",
    "cors_origin": lambda origins: ["--allowed-origins", json.dumps(list(origins))],
    "drain_seconds": lambda seconds: ["--shutdown-timeout", str(round(seconds))],
    "allowed_media_domains": lambda names: ["--allowed-media-domains", *names],
    "limit_mm_per_prompt": "--limit-mm-per-prompt",
    "max_header": lambda size: ["--h11-max-incomplete-event-size", str(parse_bytes(size))],
}


def _column(index: int) -> dict[str, Translation]:
    column = {name: row[index] for name, row in _OPTIONS.items()}
    return {name: entry for name, entry in column.items() if entry is not None}


def _vllm_speculation(options: Mapping[str, Any]) -> Words:
    method = options.get("speculative")
    if method is None:
        return []
    drafting = {"draft": "draft_model", "medusa": "medusa", "eagle": "eagle"}
    config: dict[str, Any] = {"num_speculative_tokens": options.get("num_speculative_tokens", 4)}
    if method == "ngram":
        config |= {
            "method": "ngram",
            "prompt_lookup_min": options.get("prompt_lookup_min", 2),
            "prompt_lookup_max": options.get("prompt_lookup_max", 4),
        }
    else:
        _check_drafting("vLLM", method, drafting, options)
        config |= {"method": drafting[method], "model": options["draft_model"]}
    return ["--speculative-config", json.dumps(config)]


def _sglang_speculation(options: Mapping[str, Any]) -> Words:
    method = options.get("speculative")
    if method is None:
        return []
    count = int(options.get("num_speculative_tokens", 4))
    if method == "ngram":
        return ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(count)]
    algorithms = {"draft": "STANDALONE", "eagle": "EAGLE"}
    _check_drafting("SGLang", method, algorithms, options)
    # A chain: one candidate a step. The token that the draft starts from counts as one.
    return [
        *("--speculative-algorithm", algorithms[method]),
        *("--speculative-draft-model-path", str(options["draft_model"])),
        *("--speculative-num-steps", str(count), "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(count + 1)),
    ]


def _check_drafting(
    title: str, method: str, known: Mapping[str, str], options: Mapping[str, Any]
) -> None:
    if method not in known or "draft_model" not in options:
        raise BadInput(
            f"--speculative {method}: for {title} give ngram, or one of {', '.join(known)} with "
            "--draft-model"
        )


_ADDRESS = {"host": "127.0.0.1", "port": 8000}
_DRAFTING = ("speculative", "draft_model", "num_speculative_tokens")

VLLM = ServerCommand(
    name="vllm",
    title="vLLM",
    version="0.32.0",
    program="vllm",
    words=("serve",),
    install="pip install vllm",
    table={**_column(0), **_VLLM_ALONE},
    defaults={**_ADDRESS, "cors_origin": (), "drain_seconds": 5.0},
    together=(*_DRAFTING, "prompt_lookup_min", "prompt_lookup_max"),
    combined=_vllm_speculation,
    key_variable="VLLM_API_KEY",
)
SGLANG = ServerCommand(
    name="sglang",
    title="SGLang",
    version="0.5.23",
    program="sglang",
    words=("serve", "--model-path"),
    install="pip install sglang",
    table=_column(1),
    defaults=_ADDRESS,
    together=_DRAFTING,
    combined=_sglang_speculation,
)
TRTLLM = ServerCommand(
    name="trtllm",
    title="TensorRT-LLM",
    version="1.2.1",
    program="trtllm-serve",
    words=(),
    install="pip install tensorrt-llm",
    table=_column(2),
    defaults=_ADDRESS,
)
ENGINES = {engine.name: engine for engine in (VLLM, SGLANG, TRTLLM)}


def server_command(name: str) -> ServerCommand:
    if name not in ENGINES:
        raise BadInput(f"--engine {name}: choose llmopt, {', '.join(ENGINES)}")
    return ENGINES[name]
