"""The simulated server: the engine's own steps, jumps that equal stepping, and loads worked out by hand."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.execution.output_processor import OutputProcessor
from llmopt.engine.execution.step import StepResult
from llmopt.engine.execution.step_loop import ComputedStep
from llmopt.engine.planner.load import Lengths, Load, Quantiles, dataset_lengths
from llmopt.engine.planner.simulation import (
    SimulatedServer,
    Simulation,
    prompt_tokens,
    simulate,
    work_of,
)
from llmopt.engine.planner.step_model import StepWork
from llmopt.engine.scheduling.block_pool import BlockPool, PrefixCache
from llmopt.engine.scheduling.scheduler import Scheduler
from llmopt.engine.scheduling.scheduler_config import SchedulerConfig
from llmopt.engine.scheduling.step_plan import StepPlan
from llmopt.recipes import MODELS

Steps = list[dict[str, int]]


class Constant:
    """A step model of one second a step."""

    def seconds(self, work: StepWork) -> float:
        return 1.0


class Linear:
    """A step model of a time per step, per token and per token attended to."""

    def seconds(self, work: StepWork) -> float:
        attended = work.decode_context_tokens + work.prefill_context_tokens
        return 0.01 + 1e-4 * (work.decode_sequences + work.prefill_tokens) + 1e-6 * attended


@dataclass(frozen=True)
class Workload:
    server: SimulatedServer
    lengths: list[Lengths]
    arrivals: list[float]
    prefix_share: float


def random_workload(seed: int) -> Workload:
    draw = random.Random(seed)
    block_size, count = draw.choice((1, 4, 8)), draw.randint(1, 14)
    lengths = [(draw.randint(1, 40), draw.randint(1, 30)) for _ in range(count)]
    longest = max(map(sum, lengths))
    sequences = draw.randint(1, 6)
    limits = SchedulerConfig(
        max_num_batched_tokens=draw.randint(sequences, 48),
        max_num_seqs=sequences,
        block_size=block_size,
        max_model_len=longest,
        prefill_chunk_size=draw.choice((None, None, 5)),
        watermark=draw.choice((0.0, 0.01, 0.1)),
    )
    num_blocks = 1 + int(limits.num_blocks(longest) * draw.choice((1, 1.3, 2, 6)))
    server = SimulatedServer(
        limits,
        num_blocks,
        caches_prefixes=draw.random() < 0.5,
        overlapped=draw.random() < 0.5,
    )
    arrivals = [0.0] * draw.randint(1, count)
    if draw.random() < 0.5:
        arrivals = list(accumulate(draw.expovariate(0.2) for _ in range(count)))
    return Workload(server, lengths, arrivals, draw.choice((0.0, 0.3, 0.8)))


class Recorded(Simulation):
    """A simulation that steps through every step and records it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.steps: Steps = []
        self.scheduler.can_jump = lambda plan: False

    def _launch(self, plan: StepPlan) -> Any:
        self.steps.append(plan.num_tokens_of)
        self.scheduler.check_integrity()
        return super()._launch(plan)


class Counted(Simulation):
    """A simulation that counts the steps that it does not jump over."""

    num_launched = 0

    def _launch(self, plan: StepPlan) -> Any:
        self.num_launched += 1
        return super()._launch(plan)


def simulation(kind: type[Simulation], workload: Workload, model: Any) -> Any:
    return kind(workload.server, model, workload.lengths, workload.arrivals, workload.prefix_share)


class FakeLoop:
    """A step loop whose model samples token 0."""

    def __init__(self, is_overlapped: bool) -> None:
        self.is_overlapped, self.steps = is_overlapped, []

    def launch(self, plan: StepPlan, timer: Any = None) -> Callable[[], ComputedStep]:
        self.steps.append(plan.num_tokens_of)
        sampled = {row.sequence_id: [0] for row in plan.rows if row.num_samples}
        return partial(ComputedStep, StepResult(sampled), 0.0, 0.0)

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    built = Engine(EngineConfig(model=str(MODELS / "stories260K"), device="cpu", num_blocks=64))
    loop = built._loop
    yield built
    built._loop = loop
    built.close()


def engine_steps(engine: Engine, workload: Workload) -> Steps:
    """The steps of the engine: arrivals on a clock of one second for each step that it ends."""
    server, limits = workload.server, workload.server.limits
    pool = BlockPool(server.num_blocks)
    cache = PrefixCache(pool, limits.block_size, enabled=server.caches_prefixes)
    engine.scheduler = Scheduler(limits, pool, cache)
    engine.output_processor = OutputProcessor(engine.scheduler, engine.tokenizer)
    engine._next_order, loop = 0, FakeLoop(server.overlapped)
    engine._loop = loop  # type: ignore[assignment]
    due, now, added = list(workload.arrivals), 0.0, 0
    while due or engine.has_unfinished():
        if not engine.has_unfinished():
            now = max(now, due[0])
        while due and due[0] <= now:
            prompt, output = workload.lengths[added]
            engine.add_request(
                str(added),
                prompt_tokens(added, prompt, workload.prefix_share),
                SamplingParams(max_tokens=output, ignore_eos=True),
            )
            due.pop(0)
            added += 1
        before = engine.stats.num_steps
        outputs = engine.step()
        now += engine.stats.num_steps - before
        ended = sum(output.finish_reason is not None for output in outputs)
        due += [now] * min(ended, len(workload.lengths) - added - len(due))
    return loop.steps


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_steps_are_those_of_the_engine(engine: Engine, first: int) -> None:
    preempted = 0
    for seed in range(first, first + 50):
        workload = random_workload(seed)
        simulated = simulation(Recorded, workload, Constant())
        simulated.run()
        assert simulated.steps == engine_steps(engine, workload), seed
        preempted += simulated.scheduler.num_preemptions
    assert preempted > 10


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_jumps_equal_steps(first: int) -> None:
    """Times to the last bit, block tables and cached blocks; and most of the steps are jumped over."""
    scheduled = steps = 0
    for seed in range(first, first + 50):
        workload = random_workload(seed)
        stepped = simulation(Recorded, workload, Linear())
        jumped = simulation(Counted, workload, Linear())
        stepped.run()
        jumped.run()
        assert jumped.scheduler.ended == stepped.scheduler.ended, seed
        assert jumped.num_steps == stepped.num_steps == len(stepped.steps)
        assert (jumped.most_running, jumped.most_waiting) == (
            stepped.most_running,
            stepped.most_waiting,
        )
        ours, theirs = jumped.scheduler, stepped.scheduler
        assert ours.num_preemptions == theirs.num_preemptions
        assert ours.pool.kept_block_ids() == theirs.pool.kept_block_ids()
        assert ours.cache.num_hit_tokens == theirs.cache.num_hit_tokens
        ours.check_integrity()
        scheduled, steps = scheduled + jumped.num_launched, steps + jumped.num_steps
    assert scheduled < 0.75 * steps


def server(sequences: int = 8, blocks: int = 1000, **changes: Any) -> SimulatedServer:
    limits = SchedulerConfig(512, sequences, 16, 4096)
    return SimulatedServer(limits, blocks, **{"overlapped": False, **changes})


def test_one_client_waits_for_nobody() -> None:
    found = simulate(server(), Constant(), Load(((1000, 11),), concurrency=1), counted=5)
    assert [(one.ttft, one.e2e) for one in found.requests] == [(2.0, 12.0)] * 5
    assert found.tpot == Quantiles(1.0, 1.0, 1.0, 1.0)
    assert found.output_tokens_per_second == pytest.approx(11 / 12)
    assert (found.preemptions, found.most_running, found.most_waiting) == (0, 1, 0)


def test_clients_past_the_limit_of_sequences_wait() -> None:
    load = Load(((16, 10),), concurrency=4)
    found = simulate(server(sequences=2), Constant(), load, counted=40)
    assert (found.most_running, found.most_waiting) == (2, 2)
    assert found.ttft.p50 == 11.0  # the ten steps of the two before, and one of its own
    assert found.output_tokens_per_second == pytest.approx(2.0)


def test_a_full_cache_preempts() -> None:
    load = Load(((64, 200),), concurrency=8)
    roomy, tight = (simulate(server(blocks=n), Linear(), load, counted=40) for n in (1000, 60))
    assert roomy.preemptions == 0 < tight.preemptions
    assert tight.output_tokens_per_second < roomy.output_tokens_per_second
    with pytest.raises(BadInput, match="can never fit"):
        simulate(server(blocks=10), Linear(), load)


def test_prefix_hits_shorten_the_prefill() -> None:
    lengths = ((2000, 20),)
    cold = simulate(server(), Linear(), Load(lengths, concurrency=4), counted=20)
    hits = Load(lengths, concurrency=4, prefix_share=0.9)
    warm = simulate(server(caches_prefixes=True), Linear(), hits, counted=20)
    assert warm.ttft.p50 < cold.ttft.p50 / 3


def test_equal_ranks_share_the_load() -> None:
    one = simulate(server(), Constant(), Load(((16, 10),), concurrency=4), counted=40)
    two = simulate(server(ranks=2), Constant(), Load(((16, 10),), concurrency=8), counted=80)
    assert two.ttft == one.ttft
    assert two.output_tokens_per_second == pytest.approx(2 * one.output_tokens_per_second)


def test_a_rate_arrives_at_that_rate() -> None:
    load = Load(((16, 10),), rate=0.5, seed=3)
    found = simulate(server(), Constant(), load, counted=400)
    assert found.requests_per_second == pytest.approx(0.5, rel=0.1)
    assert 1.0 <= found.ttft.mean <= 2.5  # the rest of the step in flight, and its own
    assert found.most_running > 2


def test_work_counts_what_rows_attend_to() -> None:
    run = Simulation(server(), Constant(), [(300, 5), (400, 5)], [0.0, 0.0])
    run._arrive()
    rows = run.scheduler.schedule().rows
    attended = 300 * 301 // 2 + 212 * 213 // 2
    assert work_of(rows) == StepWork(0, 0, 512, attended, 2)
    assert work_of(rows, ranks=2) == StepWork(0, 0, 1024, 2 * attended, 4)


def test_quantiles_interpolate() -> None:
    found = Quantiles.of([4.0, 1.0, 2.0, 3.0])
    assert (found.mean, found.p50) == (2.5, 2.5)
    assert (found.p90, found.p99) == (pytest.approx(3.7), pytest.approx(3.97))


@pytest.mark.parametrize(("name", "count"), [("sharegpt", 128), ("azure", 400), ("mooncake", 200)])
def test_bundled_lengths(name: str, count: int) -> None:
    lengths = dataset_lengths(name)
    assert len(lengths) == count
    assert all(prompt >= 1 and output >= 1 for prompt, output in lengths)
    load = Load(lengths, concurrency=2, seed=1)
    assert load.requests(50) == load.requests(50) != Load(lengths, concurrency=2).requests(50)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "--concurrency or --request-rate"),
        ({"concurrency": 2, "rate": 1.0}, "one of them"),
        ({"concurrency": 0}, "--concurrency 0"),
        ({"rate": -1.0}, "--request-rate -1.0"),
        ({"concurrency": 1, "prefix_share": 1.0}, "--prefix-hit-rate"),
    ],
)
def test_impossible_loads_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Load(((1, 1),), **values)


def test_an_unknown_data_set_gets_the_nearest_name() -> None:
    with pytest.raises(BadInput, match="sharegpt"):
        dataset_lengths("sharegtp")
