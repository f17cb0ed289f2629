"""The simulated server: times of the engine's own scheduler, and loads worked out by hand."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.planner.load import Lengths, Load, Quantiles, dataset_lengths
from llmopt.engine.planner.simulation import SimulatedServer, Simulation, simulate
from llmopt.engine.planner.step_model import StepWork
from llmopt.engine.scheduling.request import Request, RequestTimes
from llmopt.engine.scheduling.scheduler_config import SchedulerConfig

from ...bench.workloads.simulated import KeptScheduler, Tokens, work_of


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


@dataclass
class Reference:
    """The engine's own scheduler, step by step, on the clock of a step model."""

    workload: Workload
    model: Any
    scheduler: KeptScheduler
    now: float = 0.0
    computed: float = 0.0
    added: int = 0

    def run(self) -> list[tuple[int, float, float]]:
        """Order, TTFT and end-to-end seconds of each request."""
        work, scheduler, flying = self.workload, self.scheduler, None
        due = deque(work.arrivals)
        while due or scheduler.has_unfinished():
            while due and due[0] <= self.now and self.added < len(work.lengths):
                self.add(due.popleft())
            plan = scheduler.schedule(self.now)
            launched = None
            if plan.rows:
                seconds = self.model.seconds(work_of(plan.rows))
                self.computed = max(self.now, self.computed) + seconds
                launched = plan, self.computed
            if work.server.overlapped:
                flying, launched = launched, flying
            before = len(scheduler.ended)
            if launched is not None:
                self.now = launched[1]
                scheduler.update(launched[0], Tokens(), frozenset(), self.now)
            elif flying is None:
                self.now = max(self.now, due[0])
            ended = len(scheduler.ended) - before
            due += [self.now] * min(ended, len(work.lengths) - self.added - len(due))
        found = []
        for request in scheduler.ended:
            times = request.times
            assert times.first_token is not None and times.last_token is not None
            arrival = times.arrival
            found.append((request.order, times.first_token - arrival, times.last_token - arrival))
        return sorted(found)

    def add(self, arrival: float) -> None:
        prompt, output = self.workload.lengths[self.added]
        tokens = [0] * prompt
        tokens[min(prompt - 1, round(self.workload.prefix_share * prompt))] = self.added + 1
        self.scheduler.add(
            Request(
                sequence_id=f"{self.added}/0",
                request_id=str(self.added),
                index=0,
                token_ids=tokens,
                num_prompt_tokens=prompt,
                max_tokens=output,
                params=SamplingParams(ignore_eos=True),
                seed=0,
                order=self.added,
                times=RequestTimes(arrival),
            )
        )
        self.added += 1


def reference(workload: Workload, model: Any) -> Reference:
    server = workload.server
    scheduler = KeptScheduler(server.limits, server.num_blocks, server.caches_prefixes)
    return Reference(workload, model, scheduler)


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_requests_take_what_the_engines_scheduler_gives_them(first: int) -> None:
    """To 0.1 % where the cache is ample and prompts are not shared; within the mean where it is full."""
    for seed in range(first, first + 50):
        workload = random_workload(seed)
        real = reference(workload, Linear())
        expected = real.run()
        run = Simulation(
            workload.server, Linear(), workload.lengths, workload.arrivals, workload.prefix_share
        )
        run.run()
        found = [(e.order, e.timing.ttft, e.timing.e2e) for e in sorted(run.ended)]
        assert [order for order, _, _ in found] == [order for order, _, _ in expected]
        totals = [sum(e2e for _, _, e2e in times) for times in (found, expected)]
        assert totals[0] == pytest.approx(totals[1], rel=0.35), seed


@pytest.mark.parametrize("overlapped", [False, True])
def test_an_ample_cache_gives_the_times_of_the_engines_scheduler(overlapped: bool) -> None:
    for seed in range(40):
        workload = random_workload(seed)
        server = replace(
            workload.server, num_blocks=10_000, caches_prefixes=False, overlapped=overlapped
        )
        workload = replace(workload, server=server, prefix_share=0.0)
        expected = reference(workload, Linear()).run()
        run = Simulation(server, Linear(), workload.lengths, workload.arrivals)
        run.run()
        for ended, (order, ttft, e2e) in zip(sorted(run.ended), expected, strict=True):
            assert ended.order == order
            assert ended.timing.ttft == pytest.approx(ttft, rel=2e-3, abs=2e-3), seed
            assert ended.timing.e2e == pytest.approx(e2e, rel=2e-3, abs=2e-3), seed


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
