"""Tensor parallelism: the tokens of one process, and no worker outlives the others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput, Failure
from llmopt.cli.main import run_guarded
from llmopt.engine import SamplingParams
from llmopt.engine.config.config import EngineConfig, SpeculationConfig
from llmopt.engine.core.engine import Engine
from llmopt.recipes import DATA, MODELS
from transformers import AutoModelForCausalLM, AutoTokenizer

from ...support.lora_world import write_adapter

MODEL = MODELS / "stories3M"
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_threads": 1}
LIMITS: dict[str, Any] = {"block_size": 8, "max_num_batched_tokens": 48, "num_blocks": 44}


@pytest.fixture(scope="module")
def loras(tmp_path_factory) -> dict[str, Path]:
    base = AutoModelForCausalLM.from_pretrained(MODEL)
    return {"a": write_adapter(tmp_path_factory.mktemp("adapters") / "a", base)}


@pytest.fixture(scope="module")
def one(loras) -> Engine:
    return Engine(EngineConfig(MODEL, loras=loras, **OPTIONS, **LIMITS))


@pytest.fixture(scope="module")
def two(loras) -> Iterator[Engine]:
    """Draft tokens are verified by both processes; the tokens stay those without speculation."""
    options = {**OPTIONS, **LIMITS, "tensor_parallel_size": 2}
    draft_tokens = SpeculationConfig("draft", draft_model="stories260K")
    engine = Engine(EngineConfig(MODEL, loras=loras, speculation=draft_tokens, **options))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    stories = [s for s in (DATA / "evaluation.txt").read_text().split("\n\n") if s.strip()]
    return [tokenizer(story).input_ids[: 9 + 13 * i] for i, story in enumerate(stories[:12])]


def run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    lora: str | None = None,
) -> dict[tuple[str, int], list[int]]:
    tokens: dict[tuple[str, int], list[int]] = {}
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, params, lora=lora if number % 2 else None)
    while engine.has_unfinished():
        for output in engine.step():
            tokens.setdefault((output.request_id, output.index), []).extend(output.new_token_ids)
        engine.scheduler.check_integrity()
    return tokens


def test_greedy_tokens_are_those_of_one_process(one, two, prompts):
    """In chunks, with preemption, and the second time with whatever is cached."""
    expected = run(one, prompts, GREEDY)
    assert run(two, prompts, GREEDY) == expected
    hits = two.stats.prefix_cache_hits
    assert run(two, prompts, GREEDY) == expected
    assert two.stats.prefix_cache_hits > hits
    assert two.stats.num_preemptions > 0, "the pool was meant to be too small"
    assert two.stats.num_accepted_tokens > 20


def test_logits_are_those_of_one_process(one, two, prompts):
    for lora in (None, "a"):
        got, expected = (e.prompt_logits(prompts[5], lora) for e in (two, one))
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_forks_and_adapters_are_divided_too(one, two, prompts):
    params = SamplingParams(n=3, seed=5, temperature=0.8, max_tokens=10, ignore_eos=True)
    assert run(two, prompts[:4], params, "a") == run(one, prompts[:4], params, "a")
    scored = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=2, logprobs=3)
    assert run(two, prompts[:4], scored, "a") == run(one, prompts[:4], scored, "a")


def test_each_process_holds_half_of_the_layers_and_of_the_cache(one, two):
    shared = one.memory.weight_bytes - one.memory.weight_bytes_per_step
    assert two.workers.loaded[0].bytes_held < 0.6 * one.memory.weight_bytes + shared
    assert two.runner.cache.num_bytes * 2 == one.runner.cache.num_bytes


def test_a_lost_worker_is_one_line_and_leaves_no_process(prompts, capsys):
    engine = Engine(EngineConfig("stories260K", tensor_parallel_size=2, **OPTIONS))
    assert engine.workers is not None
    worker = engine.workers.processes[0]
    engine.add_request("0", prompts[0], SamplingParams(max_tokens=400, ignore_eos=True))
    engine.step()
    worker.send_signal(signal.SIGKILL)

    def endless() -> None:
        while True:
            engine.step()

    assert run_guarded(endless, debug=False) == 3
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"worker 1 (process {worker.pid}) ended with signal 9" in err
    with pytest.raises(Failure):
        engine.step()
    engine.close()
    assert worker.returncode == -9


DRIVER = """
import time, torch
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.execution.workers import open_shards
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.recipes import MODELS
config = EngineConfig(tensor_parallel_size=2, num_threads=1)
parts = open_shards(config, Checkpoint(MODELS / "stories260K"), torch.device("cpu"), torch.float32)
print(parts[2].processes[0].pid, flush=True)
time.sleep(60)
"""


def test_workers_die_with_the_engines_process(tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert driver.stdout is not None
    worker = int(driver.stdout.readline())
    os.kill(worker, 0)
    driver.kill()
    driver.wait()
    deadline = time.monotonic() + 120
    while _is_running(worker):
        assert time.monotonic() < deadline, "an orphan is left"
        time.sleep(0.05)
    assert not list(tmp_path.glob("llmopt-*")), "a file of theirs is left"


def _is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_what_one_process_refuses_is_refused_before_anything_is_left_behind(tmp_path):
    with pytest.raises(BadInput, match=r"adapter_config\.json is missing"):
        Engine(EngineConfig(MODEL, tensor_parallel_size=2, loras={"a": tmp_path}, **OPTIONS))
    with pytest.raises(BadInput, match="tensor_parallel_size = 3: 4 KV heads"):
        Engine(EngineConfig(MODEL, tensor_parallel_size=3, **OPTIONS))
