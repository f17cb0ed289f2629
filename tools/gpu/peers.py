"""Peers on the same weights and requests: transformers in this process, and servers that are installed."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .figure import OURS

MAX_ROWS = 128
"""Of a batch: its cache is copied in every step, and 256 rows of 2,048 tokens would fill a GPU."""


class Theirs:
    """A model of transformers in bf16, with the attention that it chooses, warm.

    Its continuous batching changes to flash attention by itself, and runs ahead of the host (async), where a
    flash attention or `kernels` is installed; `shortcomings` says what it went without.
    """

    def __init__(self, folder: Path, device: str) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, trust_remote_code=False
        )
        self._model: Any = model.to(device).eval()
        self.shortcomings: list[str] = []
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0
        self.generate([[1, 2, 3]], [2])

    def generate(self, prompts: Sequence[list[int]], num_tokens: Sequence[int]) -> float:
        """Seconds for all, in static batches of about equal output length: every row of a batch goes on until
        the longest ends."""
        order = sorted(range(len(prompts)), key=lambda index: num_tokens[index])
        batches = [order[begin : begin + MAX_ROWS] for begin in range(0, len(order), MAX_ROWS)]
        return sum(
            self._batch([prompts[index] for index in own], max(num_tokens[index] for index in own))
            for own in batches
        )

    def _batch(self, prompts: Sequence[list[int]], most: int) -> float:
        """Seconds for one batch, padded on the left."""
        width = max(len(prompt) for prompt in prompts)
        rows = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
        seen = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        ids, mask = (torch.tensor(table, device=self._model.device) for table in (rows, seen))
        begin = time.perf_counter()
        with torch.inference_mode():
            out = self._model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=most, do_sample=False
            )
        out.cpu()
        seconds = time.perf_counter() - begin
        assert out.shape == (len(prompts), width + most)
        return seconds

    def continuous(self, prompts: Sequence[list[int]], num_tokens: Sequence[int]) -> float:
        """Seconds for requests that come and go, each with its own number of tokens.

        Raises:
            RuntimeError: it ended before every request did.
        """
        config = copy.deepcopy(self._model.generation_config)
        config.do_sample, config.max_new_tokens = False, max(num_tokens)
        with self._model.continuous_batching_context_manager(generation_config=config) as manager:
            self._note_shortcomings(manager)
            begin = time.perf_counter()
            for prompt, count in zip(prompts, num_tokens, strict=True):
                manager.add_request(prompt, max_new_tokens=count, eos_token_id=-1)
            lengths: list[int] = []
            while len(lengths) < len(prompts):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    lengths.append(len(result.generated_tokens))
                elif result is None and not manager.is_running():
                    raise RuntimeError("its thread ended before the requests did")
            seconds = time.perf_counter() - begin
        if sorted(lengths) != sorted(num_tokens):
            raise RuntimeError(f"it drew {sum(lengths)} tokens, {sum(num_tokens)} were asked for")
        return seconds

    def _note_shortcomings(self, manager: Any) -> None:
        """Note what would make it faster and is not here."""
        attention = str(self._model.config._attn_implementation)
        lacks = [] if "flash" in attention else [f"flash attention (it took {attention})"]
        if not getattr(manager.continuous_batching_config, "use_async_batching", None):
            lacks.append("async batching")
        self.shortcomings = lacks


SERVERS = {"vLLM": "vllm", "SGLang": "sglang"}
"""The peers, and what `--serve` and their programs are called."""
LLMOPT = (sys.executable, "-c", "from llmopt.cli.main import main; main()")


def installed() -> dict[str, str]:
    """Peers whose programs are here, and ours before them: a server's figures stand beside a server's."""
    there = {who: name for who, name in SERVERS.items() if _is_installed(name)}
    return {f"{OURS} server": "llmopt", **there} if there else {}


def missing() -> list[str]:
    """Peers whose programs are not here."""
    return [who for who, name in SERVERS.items() if not _is_installed(name)]


def _is_installed(name: str) -> bool:
    beside = str(Path(sys.executable).parent)
    return (shutil.which(name, path=beside) or shutil.which(name)) is not None


def words(name: str, folder: Path, count: int, low: int, high: int) -> list[str]:
    """The command of a run: `count` requests at once, of `low` to `high` tokens in and out."""
    middle = (low + high) // 2
    given = {
        "serve": name,
        "dataset": "random",
        "num-prompts": count,
        "request-rate": "inf",
        "random-input-len": middle,
        "random-output-len": middle,
        "random-range-ratio": f"{(high - low) / (high + low):.3f}",
    }
    options = [word for key, value in given.items() for word in (f"--{key}", str(value))]
    return [*LLMOPT, "bench", str(folder), *options, "--ignore-eos", "--json"]


def throughput(name: str, folder: Path, count: int, low: int, high: int) -> float:
    """Output tokens per second of a server that is started for the run and stopped after it.

    Raises:
        RuntimeError: the run failed; its message is the last line of the command's errors.
    """
    run = subprocess.run(words(name, folder, count, low, high), capture_output=True, text=True)
    if run.returncode:
        last = (run.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"llmopt bench --serve {name} ended with {run.returncode}: {last}")
    return float(json.loads(run.stdout)["output_throughput"])
