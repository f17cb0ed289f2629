"""The command line of TensorRT-LLM's `trtllm-serve`.

Its options are click's, with underscores. What it has only in a YAML file (`--config`: the KV cache's dtype,
speculation, CUDA graphs) is refused; a checkpoint of ModelOpt or compressed-tensors says its own dtypes. It
caches prefixes, checks no API key, and gives the KV cache a share of what is free after loading, where
`--gpu-memory-utilization` is a share of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping

from .translation import ServerCommand, Translate, as_is, flag, nothing_for

_TABLE: Mapping[str, Translate] = {
    "host": as_is("--host"),
    "port": as_is("--port"),
    "max_model_len": as_is("--max_seq_len"),
    "max_num_seqs": as_is("--max_batch_size"),
    "max_num_batched_tokens": as_is("--max_num_tokens"),
    "kv_cache_dtype": nothing_for("TensorRT-LLM", "kv_cache_dtype", "auto"),
    "enable_prefix_caching": nothing_for("TensorRT-LLM", "enable_prefix_caching", True),
    "tensor_parallel_size": as_is("--tp_size"),
    "pipeline_parallel_size": as_is("--pp_size"),
    "trust_remote_code": flag("--trust_remote_code"),
    "chat_template": as_is("--chat_template"),
}

TRTLLM = ServerCommand(
    name="trtllm",
    title="TensorRT-LLM",
    version="1.2.1",
    program="trtllm-serve",
    words=(),
    install="pip install tensorrt-llm",
    defaults={"host": "127.0.0.1", "port": 8000},
    table=_TABLE,
)
