"""Stages of `gpu_first.py`: the machine, kernels, graphs, tiles, an 8B model, a second card."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.doctor.kernel_table import measure, stored, table
from llmopt.engine.doctor.self_test import tested
from llmopt.engine.engine import Engine
from llmopt.engine.execution.step_loop import StepRecorder
from llmopt.engine.planner.speed import decode_step_bytes
from llmopt.engine.planner.step_parameters import shared_value

from .expectation import Expectation, Facts, Finding, share
from .machine import MODELS, largest, machine
from .ours import Ours
from .sections import KV_BYTES, Model, World
from .tiles import tiles

COPIED = 0.92
"""Share of the data sheet's bandwidth that a large copy reaches. Assumed."""
PROMPTS = ([1, 5, 9, 11], [1, 7, 7, 300, 4, 20, 9], [1, 40])
PROFILED_STEPS, LISTED_KERNELS = 8, 12


def kernels(world: World) -> Iterator[Finding]:
    """Every kernel against its reference; and which of them earn their place."""
    device, dtype = torch.device(world.device), torch.bfloat16
    for finding in tested(device, dtype, world.scale.self_test):
        seen = finding.reason or f"an error of {finding.error:.1e}"
        what = f"{finding.operation}, {finding.situation}: {finding.kernel}"
        yield Expectation(what, f"an error of at most {finding.most:.0e}", seen, finding.passed)
        if device.type == "cuda" and finding.reason is not None:
            # After an illegal access every call fails, and would be told as a fault of its kernel.
            torch.cuda.synchronize(device)
    measure(device, dtype)
    for case, name, verdict in stored():
        seen = "is chosen" if verdict.dropped is None else verdict.dropped
        yield Expectation(f"{case}: {name}", "earns its place", seen, verdict.dropped is None)
    chosen = [
        (each.operation, each.kernel_query, each.chosen or "none") for each in table(device, dtype)
    ]
    yield Facts("kernels chosen", ("operation", "for", "kernel"), chosen)


def graphs(world: World) -> Iterator[Finding]:
    """Tokens of replayed steps against eager ones, and no operation that waits for the device."""
    count = world.scale.answer
    with _opened(world, enforce_eager=True) as engine:
        eager = _answer(engine, count)
    modes: tuple[tuple[str, dict[str, Any]], ...] = (
        ("decode steps from graphs", {}),
        ("async scheduling", {"async_scheduling": True}),
    )
    for name, options in modes:
        with _opened(world, **options) as engine:
            engine.recorder = StepRecorder(engine.scheduler)
            # A first answer makes what is made once.
            _answer(engine, count)
            with waiting_is_an_error(world.device):
                same = _answer(engine, count) == eager
            decoded = [step for step in engine.recorder.steps if step.decode_only]
            replayed = sum(step.replayed for step in decoded)
        seen = "the same" if same else "others"
        yield Expectation(
            f"{name}, where waiting is an error", "the tokens of eager steps", seen, same
        )
        yield Expectation(
            f"{name}: steps that are replayed",
            f"all of {len(decoded)}",
            str(replayed),
            replayed == len(decoded),
        )


def llama_8b(world: World) -> Iterator[Finding]:
    """Decode of Llama-3.1-8B in bf16 at batch 1 and at 32 with 4,096 tokens, with a profile of each; of a
    smaller model, or of fewer sequences, where the card has no room for them."""
    scale = world.scale
    asked = ((1, scale.short, scale.steps), *scale.contexts[:1])
    free = _free_bytes(world.device)
    found = largest(scale, asked, free)
    if found is None:
        yield Expectation("decode", "a model fits", f"{free / 2**30:.1f} GiB are free", None)
        return
    name, cases = found
    if (name, cases) != (MODELS[0], [*asked]):
        most = max(batch for batch, _, _ in cases)
        seen = f"{name}, {most} sequences, in {free / 2**30:.1f} GiB"
        wanted = f"{MODELS[0]}, {max(batch for batch, _, _ in asked)} sequences"
        yield Expectation("what fits into the card's memory", wanted, seen, None)
    model = Model(world, name)
    longest = max(context for _, context, _ in cases) + 2 * scale.steps + 64
    with model.opened(longest, max(batch for batch, _, _ in cases)) as ours:
        for batch, context, steps in cases:
            seconds, kernels = _profiled(ours, batch, context, steps)
            held = ours.engine.memory.weight_bytes
            read = decode_step_bytes(model.shape, batch, context, held, KV_BYTES)
            seen = read / world.copy_bandwidth / statistics.median(seconds)
            expected = expected_share(read, world.copy_bandwidth, model.shape.num_layers)
            what = f"decode of {name} in bf16, batch {batch} at {context} tokens, of the copy bandwidth"
            yield share(what, seen, expected)
            title = f"kernels of a decode step, batch {batch} at {context} tokens"
            yield Facts(title, ("kernel", "µs", "launches"), kernels)


def second_card(world: World) -> Iterator[Finding]:
    """The same tokens on cuda:1, where there is one."""
    if world.device != "cuda" or torch.cuda.device_count() < 2:
        yield Expectation("cuda:1", "the tokens of cuda:0", "there is one device", None)
        return
    answers = []
    for device in ("cuda:0", "cuda:1"):
        with _opened(world, device=device) as engine:
            answers.append(_answer(engine, world.scale.answer))
    same = answers[0] == answers[1]
    yield Expectation("cuda:1", "the tokens of cuda:0", "the same" if same else "others", same)


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the first contact, with the most seconds that it may take."""

    name: str
    seconds: int
    run: Callable[[World], Iterator[Finding]]


STAGES = (
    Stage("machine", 40, machine),
    Stage("kernels", 190, kernels),
    Stage("graphs", 60, graphs),
    Stage("tiles", 90, tiles),
    Stage("llama-8b", 150, llama_8b),
    Stage("second-card", 50, second_card),
)
"""Together less than ten minutes."""


def _profiled(
    ours: Ours, batch: int, context: int, steps: int
) -> tuple[list[float], list[tuple[str, str, str]]]:
    """Seconds of decode steps, and of a few more the kernels that take longest."""
    with ours.decoding(batch, context, steps) as step:
        return [step() for _ in range(steps)], profile(step)


def profile(step: Callable[[], object]) -> list[tuple[str, str, str]]:
    """The kernels of a step that take longest: name, microseconds and launches a step.

    One row with the reason where the driver lets nobody profile.
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recording

    has_gpu = torch.cuda.is_available()
    activity = ProfilerActivity.CUDA if has_gpu else ProfilerActivity.CPU
    try:
        with recording(activities=[activity]) as seen:
            for _ in range(PROFILED_STEPS):
                step()
    except Exception as error:  # of CUPTI
        return [(f"no profile: {type(error).__name__}: {error}", "", "")]
    averages: Any = seen.key_averages()

    def micros(event: Any) -> float:
        total = event.self_device_time_total if has_gpu else event.self_cpu_time_total
        return total / PROFILED_STEPS

    longest = sorted(averages, key=micros, reverse=True)[:LISTED_KERNELS]
    return [(e.key, f"{micros(e):.1f}", f"{e.count / PROFILED_STEPS:.1f}") for e in longest]


def _free_bytes(device: str) -> int:
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


@contextmanager
def waiting_is_an_error(device: str) -> Iterator[None]:
    """A context in which torch raises where an operation waits for the device."""
    if not device.startswith("cuda"):
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def _opened(world: World, **options: Any) -> Iterator[Engine]:
    config: dict[str, Any] = {"device": world.device, "dtype": "bfloat16", "max_num_seqs": 4}
    config |= {"num_blocks": 64, "block_size": 16, "max_model_len": 128} | options
    engine = Engine(EngineConfig(world.scale.bundled, **config))
    try:
        yield engine
    finally:
        engine.close()


def _answer(engine: Engine, num_tokens: int) -> dict[str, Sequence[int]]:
    """Tokens of each prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(str(index), prompt, params)
    tokens: dict[str, list[int]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return dict(tokens)


def expected_share(read_bytes: float, copy_bandwidth: float, num_layers: int) -> float:
    """Share of the copy bandwidth that the planner expects of a decode step."""
    moving = read_bytes * COPIED / shared_value("linear.bandwidth") / copy_bandwidth
    seconds = moving + num_layers * shared_value("layer.seconds")
    return read_bytes / copy_bandwidth / seconds
