"""Example lines of every command, for its help screen; a test holds each against the command's options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

EXAMPLES: Mapping[str, Sequence[str]] = {
    "llmopt": (
        "llmopt quantize --method awq",
        "llmopt bench --dataset sharegpt",
        "llmopt kv-plan --model llama-70b --ctx 128k",
        "llmopt serve-local",
    ),
    "quantize": (
        "llmopt quantize --method awq",
        "llmopt quantize ./my-model --method gptq --bits 4 --group-size 128 -o out",
        "llmopt quantize ./my-model --method rtn --format gguf --gguf-type Q4_K_M",
    ),
    "verify": (
        "llmopt verify stories3M-awq-4bit",
        "llmopt verify model.Q4_K_M.gguf --json",
    ),
    "convert": (
        "llmopt convert stories3M-awq-4bit --format gptq -o out",
        "llmopt convert model.gguf --format compressed-tensors",
    ),
    "merge": (
        "llmopt merge ./my-model ./my-adapter -o merged",
        "llmopt merge ./my-model ./first ./second --weights 0.7,0.3",
    ),
    "bench": (
        "llmopt bench --dataset sharegpt",
        "llmopt bench ./quantized --reference ./my-model --gate 'kl<=0.02'",
        "llmopt bench ./my-model --serve vllm --max-concurrency 32",
    ),
    "freeze": (
        "llmopt freeze ./my-model --num-prompts 256 -o workload.jsonl",
        "llmopt freeze --dataset azure --trace-speed 5 -o azure.jsonl",
    ),
    "compare": (
        "llmopt compare runs/BASE runs/NEW --threshold 5% --max-kl 0.02",
        "llmopt compare --run base=v1/.venv --run new=v2/.venv --max-minutes 8",
    ),
    "serve-local": (
        "llmopt serve-local",
        "llmopt serve-local ./my-model --port 9000 --max-model-len 8192",
        "llmopt serve-local ./my-model --lora sql=adapters/sql --api-key SECRET",
    ),
    "batch": (
        "llmopt batch requests.jsonl",
        "llmopt batch requests.jsonl -o answers.jsonl --model ./my-model",
    ),
    "kv-plan": (
        "llmopt kv-plan llama-70b --ctx 128k",
        "llmopt kv-plan qwen3-32b --gpu all --slo 'ttft:1s tpot:20ms'",
        "llmopt kv-plan ./my-model --weights int4 --gpu l40s --concurrency 32",
    ),
    "deploy": (
        "llmopt deploy meta-llama/Llama-3.1-8B-Instruct --like llama-3.1-8b",
        "llmopt deploy /models/mine --like llama-70b --ctx 32k --gpu h100 -o deploy",
    ),
    "history": (
        "llmopt history add kept runs/*-nightly",
        "llmopt history check kept --threshold 5%",
    ),
    "history add": (
        "llmopt history add kept runs/*-nightly",
        "llmopt history add kept runs/NEW --commit 1a2b3c4",
    ),
    "history show": (
        "llmopt history show kept",
        "llmopt history show kept -o history.html",
    ),
    "history check": (
        "llmopt history check kept --threshold 5%",
        "llmopt history check kept --gate 'median_tpot_ms<=+3%'",
    ),
    "report": (
        "llmopt report runs/A runs/B",
        "llmopt report runs/A runs/B runs/C -o page.html --markdown page.md",
    ),
    "run": (
        "llmopt run quickstart",
        "llmopt run method-shootout --dry-run",
        "llmopt run my-recipe.yaml -o runs/mine",
    ),
    "doctor": (
        "llmopt doctor",
        "llmopt doctor --all",
    ),
}
"""{command: its lines}, the shortest first; `llmopt` itself by its name."""
