"""Worker threads: a client with much to do does not hold up another."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from llmopt.engine.server.endpoints.capabilities import Constrainer
from llmopt.engine.server.protocol.structure import Constraint

from ....support.live_server import HANG_SECONDS


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
