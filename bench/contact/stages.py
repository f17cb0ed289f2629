"""Stages of a first contact: lists of cases, and the process that runs those of one stage."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from ...engine.config.config import EngineConfig
from ...engine.engine import Engine
from ...engine.execution.step_loop import StepRecorder
from ...engine.kernels.common.devices import refuses_triton
from ...engine.kernels.common.verdicts import driver_version
from ...engine.kernels.elementwise.dispatch import NORM, RowKernelQuery
from ...engine.scheduling.outputs import TokenLogprobs
from ...quant.base.device import cuda_problem
from ...quant.base.scheme import Activations
from ...quant.kinds.fp8.scheme import FloatScheme
from ...quant.kinds.integer.scheme import IntScheme
from ...quant.methods.options import MethodOptions
from ...quant.methods.registry import METHODS
from ...quant.pipeline.pipeline import quantize
from ...quant.plan.request import QuantizeRequest
from ..machine.environment import describe
from ..machine.kernel_table import measure, self_tests, stored, table
from .models import (
    FULL,
    MODELS,
    SMALL,
    USED,
    Model,
    World,
    config_of,
    free_bytes,
    greedy,
    largest,
    prompts_of,
    write_checkpoint,
)
from .record import VLLM, Finding
from .run import LOST, Case, Refused, lines_of, room, run_cases

FREE = 0.8
"""The least free share of the card's memory: with less, others use it."""
COPIED, MULTIPLIED = 0.85, 0.65
"""Shares of the data sheet's peaks that a large copy and a large GEMM reach at least."""
CLOSE = 0.1
"""Nats between the two likeliest tokens under which rounding, and so the batch, decides between them."""
INT4 = IntScheme(4, 128, True)
FP8 = FloatScheme("channel", Activations("fp8"))
PROMPTS = ([1, 5, 9, 11], [1, 7, 7, 300, 4, 20, 9], [1, 40])


def machine(world: World) -> Iterator[Case]:
    """Refuse a machine that cannot serve; torch, Triton and the roofs of one that can.

    Raises:
        Refused: no CUDA device, an old one, or one that is in use.
    """
    refuse_machine(world)
    yield Case("torch adds eight ones", lambda: [_torch_adds(world)], 20)
    yield Case("a Triton kernel", lambda: [_triton_kernel(world)], 40)
    yield Case("roofs", lambda: _roofs(world), 20)
    facts = {"CUDA of torch": str(torch.version.cuda), "driver": driver_version()}
    facts |= {"C compiler": shutil.which("cc") or "none"}
    facts |= {"room for checkpoints": f"{room(world.home) / 2**30:.0f} GiB"}
    yield Case("facts", lambda: [Finding(name, seen=value) for name, value in facts.items()])


def refuse_machine(world: World) -> None:
    """Raises `Refused`, saying what a user can do."""
    if not world.is_gpu:
        if world.scale is FULL:
            raise Refused(
                f"--device {world.device}: the real shapes need a GPU; add --small to try the command here"
            )
        return
    if (problem := cuda_problem()) is not None:
        raise Refused(
            f"{problem}: take another card, by CUDA_VISIBLE_DEVICES where there are several; "
            "`--device cpu --small` tries the command here"
        )
    free, whole = torch.cuda.mem_get_info(torch.device(world.device))
    if free < FREE * whole:
        raise Refused(
            f"{torch.cuda.get_device_name()} is in use: {free / 2**30:.1f} of {whole / 2**30:.1f} GiB are "
            f"free, and at least {FREE:.0%} are needed: end what nvidia-smi shows, or name an idle card in "
            "CUDA_VISIBLE_DEVICES"
        )


def _torch_adds(world: World) -> Finding:
    """An operation of torch's own: it has no kernels for cards that it was not built for."""
    seen = str(float(torch.ones(8, device=world.device).sum()))
    return Finding("torch adds eight ones", "8.0", seen, seen == "8.0")


def _triton_kernel(world: World) -> Finding:
    """A Triton kernel: it needs Triton, a C compiler, Python's headers, and a driver that takes its code."""
    what, wanted, device = "a Triton kernel", "compiles and runs", torch.device(world.device)
    query = RowKernelQuery(device.type, torch.bfloat16, 64)
    kernel = next(each for each in NORM.candidates if each.name == "triton")
    reason = refuses_triton(device.type) or kernel.refuses(query)
    if reason is not None:
        return Finding(what, wanted, reason, False if world.is_gpu else None)
    x = torch.ones(2, 64, dtype=torch.bfloat16, device=device)
    kernel.run(x[0], 1e-5)(x, x)
    if world.is_gpu:
        torch.cuda.synchronize(device)
    return Finding(what, wanted, "it does", True)


def _roofs(world: World) -> Iterator[Finding]:
    """A large copy and a large GEMM, against the data sheet."""
    device = world.planned_device
    has_sheet = bool(device.source)
    peak = (device.peaks or {}).get("bf16") if has_sheet else None
    for name, rate, sheet, least in (
        ("bandwidth", world.copy_bandwidth, device.bandwidth if has_sheet else None, COPIED),
        ("flops", world.matrix_flops, peak, MULTIPLIED),
    ):
        expected = f"at least {least:.0%} of the data sheet's {sheet / 1e12:.4g} T" if sheet else ""
        met = rate >= least * sheet if sheet and world.has_verdicts else None
        numbers = {"phase": name, "rate": rate}
        yield Finding(f"{name} a second", expected, f"{rate / 1e12:.4g} T", met, numbers)


def kernels(world: World) -> Iterator[Case]:
    """Every kernel against its reference; which earn their place, and which are chosen."""
    device, dtype = torch.device(world.device), torch.bfloat16
    for name, test in self_tests(device, dtype, world.scale.self_test):
        yield Case(name, partial(_self_tested, name, test), 30)
    yield Case("which kernels earn their place", partial(_verdicts, device, dtype))
    chosen = [(f"{one.operation}, {one.kernel_query}", one.chosen) for one in table(device, dtype)]
    yield Case(
        "kernels chosen", lambda: [Finding(what, seen=name or "none") for what, name in chosen]
    )


def _self_tested(name: str, test: Callable[[], Any]) -> Iterator[Finding]:
    found = test()
    seen = found.reason or f"an error of {found.error:.1e}"
    yield Finding(name, f"an error of at most {found.most:.0e}", seen, found.passed)


def _verdicts(device: torch.device, dtype: torch.dtype) -> Iterator[Finding]:
    measure(device, dtype)
    for case, name, verdict in stored():
        is_in = verdict.dropped is None
        seen = "is chosen" if is_in else str(verdict.dropped)
        yield Finding(f"{case}: {name}", "earns its place", seen, is_in)


def graphs(world: World) -> Iterator[Case]:
    """Tokens of replayed steps against eager ones, with no operation that waits for the device."""
    eager = cache(partial(_eager, world))
    for name, options in (
        ("decode steps from graphs", {}),
        ("async scheduling", {"async_scheduling": True}),
    ):
        yield Case(name, partial(_replayed, world, name, options, eager))


Answers = Mapping[str, Sequence[tuple[int, float]]]
"""Tokens of each prompt, each with the nats to the second likeliest."""


def _eager(world: World) -> Answers:
    with _bundled(world, enforce_eager=True) as engine:
        return _answers(engine, world.scale.answer, logprobs=2)


def _replayed(
    world: World, name: str, options: Mapping[str, Any], eager: Callable[[], Answers]
) -> Iterator[Finding]:
    wanted = eager()
    with _bundled(world, **options) as engine:
        engine.recorder = StepRecorder(engine.scheduler)
        _answers(engine, world.scale.answer)  # makes what is made once
        with waiting_is_an_error(world):
            answers = _answers(engine, world.scale.answer)
        decoded = [step for step in engine.recorder.steps if step.decode_only]
        replayed = sum(step.replayed for step in decoded)
    difference = first_difference(wanted, answers)
    what = f"{name}, where waiting is an error"
    yield Finding(what, "the tokens of eager steps", difference or "the same", difference is None)
    what = f"{name}: steps that are replayed"
    met = replayed == len(decoded) if world.is_gpu else None
    yield Finding(what, f"all of {len(decoded)}", str(replayed), met)


def first_difference(wanted: Answers, answers: Answers) -> str | None:
    """Where tokens differ though one was clearly likelier; behind a near tie a sequence is another.

    A padded batch has other GEMMs than an eager one, so that rounding decides between near ties.
    """
    for prompt, tokens in wanted.items():
        for place, ((token, margin), (other, _)) in enumerate(
            zip(tokens, answers[prompt], strict=True)
        ):
            if token != other and margin >= CLOSE:
                return (
                    f"token {place} of prompt {prompt} is {other}, not {token} by {margin:.2f} nats"
                )
            if token != other:
                break
    return None


@contextmanager
def waiting_is_an_error(world: World) -> Iterator[None]:
    """A context in which torch raises where an operation waits for the device."""
    if world.is_gpu:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if world.is_gpu:
            torch.cuda.set_sync_debug_mode("default")


@contextmanager
def _bundled(world: World, **options: Any) -> Iterator[Engine]:
    config: dict[str, Any] = {"device": world.device, "dtype": "bfloat16", "max_num_seqs": 4}
    config |= {"num_blocks": 64, "block_size": 16, "max_model_len": 128} | options
    engine = Engine(EngineConfig(world.scale.bundled, **config))
    try:
        yield engine
    finally:
        engine.close()


def _answers(engine: Engine, num_tokens: int, logprobs: int | None = None) -> Answers:
    params = replace(greedy(num_tokens), logprobs=logprobs)
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(str(index), prompt, params)
    tokens: dict[str, list[tuple[int, float]]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            margins = map(_margin, output.logprobs) if output.logprobs else [0.0] * 99
            pairs = zip(output.new_token_ids, margins, strict=False)
            tokens.setdefault(output.request_id, []).extend(pairs)
    return tokens


def _margin(token: TokenLogprobs) -> float:
    first, second = (logprob for _, logprob in token.top[:2])
    return first - second


def llama(world: World, scheme: IntScheme | FloatScheme | None) -> Iterator[Case]:
    """Decode of Llama-3.1-8B alone and with many long sequences, and prefill; in bf16 also sampled steps and
    their kernels. Of a smaller model, or of fewer sequences, where the card has no room for them."""
    free = free_bytes(world.device)
    found = largest(world.scale, free)
    if found is None or found != (MODELS[0], [*world.scale.decode]):
        most = "none" if found is None else f"{found[0]}, {found[1][-1][0]} sequences"
        wanted = f"{MODELS[0]}, {world.scale.decode[-1][0]} sequences"
        finding = Finding("what has room", wanted, f"{most}, in {free / 2**30:.1f} GiB", None)
        yield Case("what has room", lambda: [finding])
    if found is None:
        return
    name, cases = found
    model = Model(world, name, scheme)
    with model.opened(cases) as engine:
        for batch, context in cases:
            yield Case(f"decode, batch {batch}", partial(model.decode, engine, batch, context))
        yield Case("prefill", partial(model.prefill, engine))
        if scheme is not None:
            return
        for batch, context in cases:
            yield Case(f"sampled, batch {batch}", partial(model.sampled, engine, batch, context))
        for batch, context in cases:
            yield Case(f"kernels, batch {batch}", partial(model.profile, engine, batch, context))


def some_layers(world: World, name: str) -> Iterator[Case]:
    """Decode and prefill of a few layers of a model, alone and with many sequences of its first context."""
    model = Model(world, name, layers=world.scale.layers)
    (_, context), (many, _) = world.scale.decode
    cases = [(1, context), (many, context)]
    with model.opened(cases) as engine:
        for batch, context in cases:
            yield Case(f"decode, batch {batch}", partial(model.decode, engine, batch, context))
        yield Case("prefill", partial(model.prefill, engine))


def vllm(world: World) -> Iterator[Case]:
    """The same model in vLLM: a decode step, from answers of two lengths."""
    found = largest(world.scale, free_bytes(world.device))
    if found is not None:
        yield Case("vLLM", partial(_in_vllm, Model(world, found[0]), world, found[1]), 80)


def _in_vllm(model: Model, world: World, cases: Sequence[tuple[int, int]]) -> Iterator[Finding]:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    steps, longest = world.scale.steps, max(context for _, context in cases)
    options: dict[str, Any] = {"gpu_memory_utilization": USED, "enable_prefix_caching": False}
    served = LLM(model=str(model.folder), max_model_len=longest + 4 * steps, **options)

    def seconds(batch: int, context: int, count: int) -> float:
        prompts = [
            {"prompt_token_ids": ids}
            for ids in prompts_of([context] * batch, model.shape.vocab_size)
        ]
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        begin = time.perf_counter()
        served.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - begin

    for batch, context in cases:
        seconds(batch, context, 2)  # compiles what it has not yet
        few = [seconds(batch, context, 1) for _ in range(world.scale.repeats)]
        many = seconds(batch, context, 1 + steps)
        each = (many - statistics.median(few)) / steps
        yield model.finding("decode", batch, context, [each], engine=VLLM)


def quantizers(world: World) -> Iterator[Case]:
    """One layer by each method, with calibration on random words."""
    folder = world.home / "one layer"
    config = config_of("qwen3-0.6b", world.scale, 1)
    config["vocab_size"] = min(4096, config["vocab_size"])
    if not (folder / "config.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        write_checkpoint(folder, config, None, world.device)
    samples, length = world.scale.calibration
    words, draw = folder / "words.txt", random.Random(0)
    lines = (
        " ".join(f"w{draw.randrange(config['vocab_size'])}" for _ in range(length))
        for _ in range(4 * samples)
    )
    words.write_text("\n\n".join(lines))
    for method in METHODS:
        yield Case(method, partial(_quantized, world, method, folder, words), 20)


def _quantized(world: World, method: str, folder: Path, words: Path) -> Iterator[Finding]:
    samples, length = world.scale.calibration
    given: dict[str, Any] = {"num_samples": samples, "seq_len": length, "device": world.device}
    # Of the method's 200 iterations a tenth: what an iteration costs is seen as well.
    options = MethodOptions(iters=20) if method == "autoround" else MethodOptions()
    output, begin = world.home / method, time.perf_counter()
    request = QuantizeRequest(
        folder, output, method, calibration=str(words), options=options, **given
    )
    summary = quantize(request).manifest["summary"]
    seconds = time.perf_counter() - begin
    shutil.rmtree(output)
    error, nearest = summary["error"], summary["rtn_error"]
    met = error is not None and 0 <= error < 1
    seen = f"an error of {error:.2e}, of RTN's {nearest:.2e}, in {seconds:.1f} s"
    yield Finding(f"a layer by {method}", "an error below 1", seen, met)


def two_cards(world: World) -> Iterator[Case]:
    """The tokens of one card on another, and on both; all-reduces by NCCL."""
    first = cache(partial(_tokens_on, world, device=world.device))
    ways = {"two ranks": {"tensor_parallel_size": 2}}
    if world.is_gpu:
        ways = {"cuda:1": {"device": "cuda:1"}, **ways}
    for name, options in ways.items():
        yield Case(name, partial(_same_elsewhere, world, name, options, first))
    for num_bytes in (16 << 10, 64 << 20) if world.scale is FULL else (4 << 10,):
        name = f"all-reduce of {num_bytes >> 10} KiB"
        yield Case(name, partial(_all_reduced, world, name, num_bytes))


def _tokens_on(world: World, **options: Any) -> Answers:
    with _bundled(world, **options) as engine:
        return _answers(engine, world.scale.answer, logprobs=2)


def _same_elsewhere(
    world: World, name: str, options: Mapping[str, Any], first: Callable[[], Answers]
) -> Iterator[Finding]:
    difference = first_difference(first(), _tokens_on(world, **options))
    yield Finding(name, "the tokens of one card", difference or "the same", difference is None)


def _all_reduced(world: World, name: str, num_bytes: int) -> Iterator[Finding]:
    """Seconds of an all-reduce between two processes, and the bytes that each card sent and received."""
    meeting = world.home / f"meeting {num_bytes}"
    torch.multiprocessing.spawn(_rank, (str(meeting), world.device, num_bytes), nprocs=2)  # type: ignore[attr-defined]
    found = json.loads(meeting.with_suffix(".json").read_text())
    rate = num_bytes / found["seconds"] / 1e9
    seen = f"{1e6 * found['seconds']:.0f} µs, {rate:.1f} GB/s"
    yield Finding(
        name, "the sum of both", seen if found["right"] else "another sum", found["right"]
    )


def _rank(rank: int, meeting: str, device: str, num_bytes: int) -> None:
    """One of the two processes."""
    from torch import distributed

    on_gpu = device != "cpu"
    where = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(where)
    init = {"init_method": f"file://{meeting}", "rank": rank, "world_size": 2}
    distributed.init_process_group("nccl" if on_gpu else "gloo", **init)
    values = torch.ones(num_bytes // 2, dtype=torch.bfloat16, device=where)
    distributed.all_reduce(values)
    right = bool((values == 2).all())
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        distributed.all_reduce(values)
        if on_gpu:
            torch.cuda.synchronize(where)
        times.append(time.perf_counter() - begin)
    if rank == 0:
        found = {"seconds": statistics.median(times), "right": right}
        Path(meeting).with_suffix(".json").write_text(json.dumps(found))
    distributed.destroy_process_group()


CASES: Mapping[str, Callable[[World], Iterator[Case]]] = {
    "machine": machine,
    "kernels": kernels,
    "graphs": graphs,
    "llama-8b": partial(llama, scheme=None),
    "vllm": vllm,
    "llama-8b-int4": partial(llama, scheme=INT4),
    "llama-8b-fp8": partial(llama, scheme=FP8),
    "experts": partial(some_layers, name="qwen3-30b-a3b"),
    "hybrid": partial(some_layers, name="qwen3.5-27b"),
    "quantizers": quantizers,
    "two-cards": two_cards,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=CASES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", required=True)
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    world = World(given.device, SMALL if given.small else FULL, given.folder)

    def answers() -> None:
        if world.is_gpu:
            torch.cuda.synchronize()

    lines_file = lines_of(given.folder, given.stage)
    code = run_cases(CASES[given.stage](world), lines_file, answers, partial(_environment, world))
    sys.stderr.flush()
    if code == LOST:
        os._exit(code)  # closing an engine on a card that is lost may hang
    sys.exit(code)


def _environment(world: World) -> dict[str, Any]:
    gpus = torch.cuda.device_count() if world.is_gpu else 0
    return describe(world.device) | {"gpus": gpus}


if __name__ == "__main__":
    main()
