"""Conditions of measured rows that no column states, from the scripts that made them.

The dated rows come from SemiAnalysisAI/InferenceX, whose history holds every script. Draft tokens are by
image in `nvidia-master.yaml`, or by the day on which a configuration with them first ran.

Two kinds of rows do not say what ran and are left out: GB200s of November 2025, which were prefill and decode
workers (0ba7aa3, `runners/launch_gb200-nv.sh`), and gpt-oss-120b under 512 clients on H100s before
2025-12-09, whose servers took another number of sequences (`--max-concurrency 512` beside
`--max-num-seqs=$CONC`, until 4e135fd).

A prompt waits for steps by three settings. TensorRT-LLM's `batch_wait_timeout_iters` was 20 for Llama-70B
with 1,024 tokens in and out on fewer than eight GPUs (21dc5d0, `70b_fp8_b200_trt_slurm.sh`), and 40 for
DeepSeek-R1 in fp8 on B200s under 64 clients or more from 2026-01-29 (ec7bafa), not with draft tokens
(`dsr1_fp8_b200_trt_mtp.sh`). Its ranks of attention data parallelism wait for each other up to 60
(`timeout_iters` of 0ba7aa3, `dsr1_fp4_b200_trt_slurm.sh`). SGLang on Blackwell polls for requests every 10
steps, or 30 under 16 clients or more (`--scheduler-recv-interval` of 100a5ec, `dsr1_fp8_b200.sh`). It stays
at 10 for DeepSeek-R1 in fp8 on four GPUs and for Qwen3.5 in fp8 by SGLang 0.5.10 (c0f62a2,
`qwen3.5_fp8_b300.sh`), and GLM-5's scripts set none.

TensorRT-LLM's steps for DeepSeek-R1 held the decode tokens, one prompt and 64 more until 2026-01-21
(`--max_num_tokens`, until 64af5a7), and with draft tokens ever since.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from llmopt.engine.planner.expected import CHUNK_TOKENS
from llmopt.engine.planner.step_model import Parallelism

_DRAFTED = (
    r"^trtllm \S+DeepSeek-R1 .*release:1.2.0rc6.post3",
    r"^trtllm \S+DeepSeek-R1 .*measured=2026-01-14.*release:1.1.0rc2.post2",
    r"^sglang \S+DeepSeek-R1 b200_sxm fp8_block 8 .*sglang:v0.5.9-cu130(;|$)",
    r"^sglang \S+Qwen3.5\S+ .*sglang:v0.5.9-cu130(;|$)",
)
_UNKNOWN = (
    r"^gb200 .*;.* measured=2025-11-(?!.*image=)",
    r"^h100_sxm 512 openai/gpt-oss-120b .*measured=2025-1(1-2\d|1-30|2-0[1-8])",
)
_POLLED = r"sglang b[23]00_sxm \S*/(DeepSeek-(R1|V3)|Qwen3.5)\S* "
_LATE_FP8 = r"b300_sxm \S*/Qwen3.5\S* fp8\S* 0.5.10"


def is_known(row: Mapping[str, str]) -> bool:
    """True unless the scripts behind a row show that its columns are not what ran."""
    named = ("system", "batch_size", "model_path", "silicon_data_source")
    text = " ".join(row[name] for name in named)
    return not any(re.search(pattern, text) for pattern in _UNKNOWN)


def draft_tokens(rows: Sequence[Mapping[str, str]], parallel: Parallelism) -> int:
    """Draft tokens of a step: three, one with attention data parallelism."""
    named = ("backend", "model_path", "system", "moe_quant_mode", "tp_size", "silicon_data_source")
    texts = [" ".join(row[name] for name in named) for row in rows]
    if not any(re.search(pattern, text) for pattern in _DRAFTED for text in texts):
        return 0
    return 1 if parallel.attention_dp > 1 else 3


def wait_steps(row: Mapping[str, str], parallel: Parallelism, clients: int, drafts: int) -> int:
    """Steps that a setting of the server lets a prompt wait at most."""
    source = row["silicon_data_source"]
    if not re.match(r"source_file=(20|qwen3.5)|db-dump", source):
        return 0
    tp, ranks = parallel.tp, parallel.attention_dp
    lengths = row["isl"], row["osl"]
    text = f"{row['backend']} {row['system']} {row['model_path']} {row['gemm_quant_mode']} "
    text += row["backend_version"]
    if ranks > 1 and re.match(r"trtllm \S+ \S*DeepSeek", text):
        return 60
    if re.match(r"trtllm \S+ \S*Llama\S*70B", text):
        return 20 if lengths == ("1024", "1024") and tp < 8 else 0
    if re.match(r"trtllm b200_sxm \S*DeepSeek-(R1|V3)\S* fp8", text) and not drafts:
        is_late = source[source.find("measured=") :] >= "measured=2026-01-29"
        return 40 if lengths == ("1024", "1024") and clients >= 64 and is_late else 0
    if not re.match(_POLLED, text):
        return 0
    always_10 = (tp < 8 and re.search(r"DeepSeek\S* fp8", text)) or re.search(_LATE_FP8, text)
    return 10 if clients < 16 or always_10 else 30


def chunk_tokens(row: Mapping[str, str], parallel: Parallelism, clients: int, drafts: int) -> int:
    """Tokens of prompts that a step holds at most."""
    source = row["silicon_data_source"]
    is_early = "measured=" in source and source[source.find("measured=") :] < "measured=2026-01-21"
    if re.match(r"trtllm \S*DeepSeek", f"{row['backend']} {row['model_path']}") and (
        is_early or drafts
    ):
        return clients * (1 + drafts) + parallel.attention_dp * (int(float(row["isl"])) + 64)
    return CHUNK_TOKENS
