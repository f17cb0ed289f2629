"""Turns between keys: nobody waits behind what another has queued, and who asks alone is served in order."""

from __future__ import annotations

import asyncio
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.server.endpoints.capabilities import Constrainer
from llmopt.engine.server.protocol.server_options import ServerOptions
from llmopt.engine.server.protocol.structure import Constraint
from llmopt.engine.server.requests.limits import FairTurns

from ....support.live_server import HANG_SECONDS, eventually, make_engine, running, slow_steps

PARAMS = SamplingParams(max_tokens=16)


def test_one_key_alone_is_served_in_the_order_of_arrival() -> None:
    turns, starts = FairTurns(), []
    for number in range(20):
        waiting = min(starts[number // 2 :], default=None) if number % 3 else None
        starts += [turn.start for turn in turns.take(0, [(5, PARAMS)] * 2, waiting)]
    assert starts == sorted(starts)


def test_a_single_request_is_not_behind_a_thousand() -> None:
    turns = FairTurns()
    many = turns.take(1, [(10, PARAMS)] * 1000, None)
    (one,) = turns.take(2, [(10, PARAMS)], many[8].start)
    assert many[8].start <= one.start < many[9].start
    several = SamplingParams(max_tokens=16, n=64)
    (forked,) = turns.take(3, [(10, several)], many[8].start)
    assert forked.step == 16 and forked.start + 63 * forked.step > one.start + 63 * 10


def test_a_refused_request_takes_no_turn() -> None:
    """A billion tokens that the engine refused stood before all else that their key asked."""
    turns = FairTurns()
    many = turns.take(1, [(10, PARAMS)] * 1000, None)
    refused = turns.take(2, [(10, SamplingParams(max_tokens=10**9))], many[8].start)
    turns.give_back(2, refused)
    (one,) = turns.take(2, [(10, PARAMS)], many[8].start)
    assert one.start == many[8].start


def test_keys_share_by_tokens_whatever_they_have_waiting() -> None:
    random_, turns = random.Random(0), FairTurns()
    queues: dict[int, list[tuple[int, int]]] = {1: [], 2: [], 3: []}
    served = dict.fromkeys(queues, 0)
    for _ in range(3000):
        for key, queue in queues.items():
            while len(queue) < 40 * key:
                length = random_.randint(1, 30 * key)
                waiting = min(
                    (start for each in queues.values() for start, _ in each), default=None
                )
                (turn,) = turns.take(key, [(length, PARAMS)], waiting)
                queue.append((turn.start, length + 16))
        key = min(queues, key=lambda key: queues[key][0])
        served[key] += queues[key].pop(0)[1]
    assert max(served.values()) - min(served.values()) <= 2 * (30 * 3 + 16)


def test_the_other_keys_request_is_answered_before_the_queue_of_the_first() -> None:
    options = ServerOptions(api_keys=("many", "one"))
    order: list[str] = []

    def ask(key: str, prompts: list[str]) -> None:
        headers = {"Authorization": f"Bearer {key}"}
        body = {"prompt": prompts, "max_tokens": 8, "ignore_eos": True}
        with server.http(headers=headers) as http:
            assert http.post("/v1/completions", json=body).status_code == 200
        order.append(key)

    engine = make_engine("stories260K", max_num_seqs=4)
    with (
        running(engine, options) as server,
        ThreadPoolExecutor() as pool,
        slow_steps(server, 0.002),
    ):
        first = pool.submit(ask, "many", ["Once"] * 200)
        eventually(lambda: engine.scheduler.num_waiting > 100)
        ask("one", ["Once"])
        first.result()
    assert order == ["one", "many"]


def test_large_schemas_of_one_key_do_not_hold_the_small_ones_of_another() -> None:
    may_end = threading.Event()

    def compiled(constraint: Constraint, _: int) -> Any:
        assert constraint.value == "small" or may_end.wait(HANG_SECONDS)
        return constraint.value

    async def ask() -> list[Any]:
        constrainer = Constrainer(None, 0, ())
        constrainer._mask = compiled  # type: ignore[method-assign]
        large = [
            asyncio.ensure_future(constrainer.mask(Constraint("regex", "large", "regex"), 1, 1))
            for _ in range(8)
        ]
        await asyncio.sleep(0.05)
        large.pop().cancel()  # a client that has left before it began
        found: list[Any] = [await constrainer.mask(Constraint("regex", "small", "regex"), 1, 2)]
        assert not any(one.done() for one in large)
        may_end.set()
        found += await asyncio.gather(*large)
        constrainer.close()
        return found

    assert asyncio.run(ask()) == ["small", *["large"] * 7]
