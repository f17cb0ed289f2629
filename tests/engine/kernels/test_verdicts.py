"""Verdicts of kernels: wrong, failing and slower candidates are dropped once per device, and it is told."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from llmopt.base.errors import Failure
from llmopt.engine.kernels.attention.dispatch import AttentionKernelQuery, attention_trial
from llmopt.engine.kernels.attention.paged_attention import attend_sdpa
from llmopt.engine.kernels.attention.paged_tensor import PagedTensor
from llmopt.engine.kernels.common import dispatch, verdicts
from llmopt.engine.kernels.common.dispatch import Candidate, Operation
from llmopt.engine.kernels.common.verdicts import Quartiles, Trial, VerdictTable, relative_error

Kernel = Callable[[torch.Tensor], torch.Tensor]


def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


def power(x: torch.Tensor) -> torch.Tensor:
    return x**2


def cube(x: torch.Tensor) -> torch.Tensor:
    return x**3


def nan(x: torch.Tensor) -> torch.Tensor:
    return x * float("nan")


def broken(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("out of resource: shared memory\nRequired: 206000")


class Query:
    device = "cuda"

    def __str__(self) -> str:
        return "rows of 8 on cuda"


class Clock:
    """Seconds by kernel, whose quartiles lie `spread` of them apart, and how often each was timed."""

    def __init__(self, spread: float = 0.0, **seconds: float) -> None:
        self.seconds, self.timed, self.spread = seconds, [], spread

    def __call__(self, call: Callable[[], object]) -> Quartiles:
        name = call()
        self.timed.append(name)
        median = self.seconds[str(name)]
        half = self.spread / 2
        return Quartiles((1 - half) * median, median, (1 + half) * median)


def trial() -> Trial[Kernel]:
    x = torch.arange(1.0, 9.0)

    def calls(kernel: Kernel) -> Sequence[Callable[[], object]]:
        return [lambda: kernel.__name__] * 2

    return Trial(lambda kernel: [kernel(x)], 1e-3, calls)


def operation(*kernels: Kernel) -> Operation[Query, Kernel]:
    candidates = [Candidate(each.__name__, lambda _: None, each) for each in kernels]
    return Operation("square", candidates, lambda _: trial())


@pytest.fixture
def table_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Clock], VerdictTable]:
    """The table of a device with a clock, as a new process reads it."""

    def make(clock: Clock) -> VerdictTable:
        table = VerdictTable(tmp_path / "new" / "card.json", clock)
        monkeypatch.setattr(dispatch, "current_verdicts", lambda: table)
        return table

    return make


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (cube, "its error is"),
        (nan, "its error is nan"),
        (broken, "it failed: ValueError: out of resource: shared memory"),
        (power, "square takes 50 % of its time"),
    ],
)
def test_a_candidate_that_is_wrong_fails_or_is_slower_is_dropped_with_a_line(
    first: Kernel, reason: str, table_on, caplog: pytest.LogCaptureFixture
) -> None:
    table = table_on(Clock(power=2.0, square=1.0, cube=0.1, nan=0.1))
    with caplog.at_level(logging.WARNING):
        assert operation(first, square).select(Query()).name == "square"
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"square for rows of 8 on cuda: {first.__name__} is dropped: {reason}")
    assert "\n" not in line
    assert operation(first, square).explain(Query()).reasons[0][1] == line.partition("dropped: ")[2]
    assert table.dropped("square", "rows of 8 on cuda")


def test_the_first_that_is_right_and_not_slower_is_chosen(table_on) -> None:
    table_on(Clock(power=1.04, square=1.0))
    assert operation(power, square).select(Query()).name == "power"
    table_on(Clock(power=3.0, square=2.0, cube=1.0))
    three = operation(cube, power, square)  # the last is the reference, whom cube contradicts
    assert three.select(Query()).name == "square"


def test_a_doubtful_verdict_drops_none(table_on, caplog: pytest.LogCaptureFixture) -> None:
    """On a card that others use, the quartiles of two equal kernels overlap."""
    for spread, chosen in ((0.3, "power"), (0.1, "square")):
        table = table_on(Clock(power=1.2, square=1.0, spread=spread))
        assert operation(power, square).select(Query()).name == chosen
        table.clear()
    assert "square takes 83 % of its time" in caplog.text


def test_one_process_at_a_time_tries_kernels(table_on) -> None:
    """A second one would time the first one's kernels; it waits, and takes over what the first found out."""

    class Locked(Clock):
        def __call__(self, call: Callable[[], object]) -> Quartiles:
            with (
                table.path.with_suffix(".lock").open("w") as file,
                pytest.raises(BlockingIOError),
            ):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return super().__call__(call)

    clock = Locked(power=2.0, square=1.0)
    table = table_on(clock)
    other = VerdictTable(table.path, clock)
    operation(power, square).select(Query())
    timed = len(clock.timed)
    candidates = operation(power, square).candidates
    assert "power" in other.judge("square", str(Query()), candidates, trial)
    assert len(clock.timed) == timed
    with table.path.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_trial_may_select_kernels_itself(table_on) -> None:
    table = table_on(Clock(power=2.0, square=1.0))

    def measure() -> int:
        return len(operation(power, square).select(Query()).name)

    assert table.crossover("int4", measure) == len("square")


def test_another_process_reads_what_one_has_measured(table_on, caplog) -> None:
    clock = Clock(power=2.0, square=1.0)
    table_on(clock)
    operation(power, square).select(Query())
    caplog.clear()
    table_on(clock)
    assert operation(power, square).select(Query()).name == "square"
    assert clock.timed == ["power"] * 2 + ["square"] * 2 and not caplog.records
    # With another candidate, all are tried again.
    clock.seconds["cube"] = 1.0
    operation(cube, power, square).select(Query())
    assert len(clock.timed) == 8


def test_nothing_is_tried_by_a_single_candidate_elsewhere_or_to_explain(table_on) -> None:
    table = table_on(Clock())
    assert operation(square).select(Query()).name == "square"
    on_cpu = Query()
    on_cpu.device = "cpu"
    assert operation(broken, square).select(on_cpu).name == "broken"
    assert operation(broken, square).explain(Query()).chosen == "broken"
    assert not table.verdicts


def test_a_trial_of_the_caller_is_taken_in_place_of_the_operations(table_on) -> None:
    table_on(Clock(power=1.0, square=2.0))
    chosen = operation(cube, square).select(Query(), lambda: Trial(lambda _: [torch.ones(1)], 1e-3))
    assert chosen.name == "cube"


def test_a_candidate_that_ended_its_process_twice_is_dropped(table_on) -> None:
    table, notes = table_on(Clock(square=1.0)), []

    def fatal(x: torch.Tensor) -> torch.Tensor:
        notes.append(json.loads(path.read_text()))
        raise SystemExit  # the process ends in it

    path = table.path
    for times in (1, 2):
        with pytest.raises(SystemExit):
            operation(fatal, square).select(Query())
        ((case, attempt),) = notes[-1]["trying"].items()
        assert attempt == ["fatal", times]
        path.write_text(json.dumps(notes[-1]))
        table_on(Clock(square=1.0))
    assert operation(fatal, square).select(Query()).name == "square"
    kept = json.loads(path.read_text())["verdicts"][case]["fatal"]["dropped"]
    assert kept == "it ended the process that tried it, 2 times"


def test_no_attempt_is_noted_where_files_have_no_locks(
    table_on, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that tries at the same time would take it for one that ended its process."""

    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    table, notes = table_on(Clock(square=1.0, watched=0.5)), []

    def watched(x: torch.Tensor) -> torch.Tensor:
        notes.append(table.path.exists())
        return x * x

    assert operation(watched, square).select(Query()).name == "watched"
    assert notes == [False] and table.path.exists()


def test_who_interrupts_a_trial_blames_no_kernel(table_on) -> None:
    def slow(x: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    path = table_on(Clock()).path
    with pytest.raises(KeyboardInterrupt):
        operation(slow, square).select(Query())
    assert json.loads(path.read_text())["trying"] == {}


def test_what_leaves_the_device_unusable_ends_in_a_line_that_says_so(
    table_on, monkeypatch: pytest.MonkeyPatch
) -> None:
    def synchronize() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    table = table_on(Clock())
    with pytest.raises(Failure, match=r"broken left the GPU unusable .*start again"):
        operation(broken, square).select(Query())
    note = json.loads(table.path.read_text())
    assert [*note["trying"].values()] == [["broken", 1]]


def test_out_of_memory_is_no_verdict(table_on) -> None:
    def large(x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    table = table_on(Clock(square=1.0))
    assert operation(large, square).select(Query()).name == "large"
    assert not table.verdicts


@pytest.mark.parametrize("text", ["", "[1]", '{"verdicts": {"a": 1}}', "\x00"])
def test_a_damaged_file_is_measured_anew(text: str, table_on, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "card.json").write_text(text)
    table = table_on(Clock(power=2.0, square=1.0))
    assert table.crossover("int4", lambda: 16) == 16
    assert operation(power, square).select(Query()).name == "square"
    assert table_on(Clock()).crossovers == {"int4": 16}
    table.clear()
    assert not table_on(Clock()).crossovers and not table.verdicts


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    table = VerdictTable(tmp_path / "file" / "card.json", Clock())
    assert table.crossover("int4", lambda: 16) == 16


def test_the_file_is_of_the_device_the_driver_and_the_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cards = [("NVIDIA H200", (9, 0)), ("NVIDIA H100 80GB HBM3", (9, 0))]
    names = {verdicts.verdict_file(*card) for card in cards}
    monkeypatch.setattr(verdicts, "driver_version", lambda: "NVRM version: 999.1")
    names.add(verdicts.verdict_file(*cards[0]))
    monkeypatch.setattr(verdicts, "KERNELS", tmp_path)
    names.add(verdicts.verdict_file(*cards[0]))
    assert len(names) == 4 and all(name.is_relative_to(tmp_path) for name in names)


def test_trials_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LLMOPT_KERNEL_TRIALS", "off")
    assert verdicts.current_verdicts() is None
    assert operation(broken, square).select(Query()).name == "broken"


def test_attention_is_tried_on_decode_alone_and_on_each_rule() -> None:
    """A library takes another of its kernels for each of them."""
    trial = attention_trial(AttentionKernelQuery("cpu", torch.float32, 64, 64))
    assert trial is not None
    tried: list[tuple[bool, bool, bool]] = []

    def seen(queries: Any, keys: Any, values: Any, batch: Any, rule: Any, *rest: Any) -> Any:
        if not rule.num_sink_tokens:
            tried.append((bool(batch.spans), rule.window is not None, rule.softcap is not None))
        return attend_sdpa(queries, keys, values, batch, rule, *rest)

    trial.compute(cast(Any, seen))
    assert sorted(tried) == sorted(product((False, True), repeat=3))


@pytest.mark.parametrize("stored", [None, torch.int8, torch.float8_e4m3fn], ids=str)
def test_attention_is_tried_on_the_cache_that_it_will_read(stored: torch.dtype | None) -> None:
    """The case is one of its own, and who forgets the scales of 8-bit keys and values is found out."""
    query = AttentionKernelQuery("cpu", torch.float32, 64, 64, stored=stored)
    assert str(query).endswith("cpu" if stored is None else f"cached in {stored}")
    trial = attention_trial(query)
    assert trial is not None
    seen: set[torch.dtype] = set()

    def forgetful(queries: Any, keys: PagedTensor, values: PagedTensor, *rest: Any) -> Any:
        seen.update((keys.codes.dtype, values.codes.dtype))
        keys, values = (PagedTensor(part.codes.float()) for part in (keys, values))
        return attend_sdpa(queries, keys, values, *rest)

    error = relative_error(trial.compute(cast(Any, forgetful)), trial.compute(attend_sdpa))
    assert seen == {stored or torch.float32}
    assert (error <= trial.tolerance) == (stored is None)
