"""The benchmark's adapters: requests take them in turn, and the quality is that of the adapter."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.bench.load.inprocess import InProcessTarget
from llmopt.bench.load.load import adapter_of
from llmopt.bench.options.options import BenchOptions, checked
from llmopt.bench.workloads.workload import WorkloadItem


class NotingEngine:
    """Notes which adapter each call names."""

    def __init__(self) -> None:
        self.named: list[str | None] = []

    def add_request(self, *_: object, lora: str | None = None, images: object = ()) -> None:
        self.named.append(lora)


def test_requests_take_the_adapters_round_robin() -> None:
    engine: Any = NotingEngine()
    adapter = partial(adapter_of, names=("a", "b"), assignment="round-robin", seed=0)
    target = InProcessTarget(engine, adapter=adapter)
    for number in (0, 1, 2, 5, 4):
        target.send(WorkloadItem(f"bench-{number}", (1, 2), 3))
    assert engine.named == ["a", "b", "a", "b", "a"]
    InProcessTarget(engine).send(WorkloadItem("bench-0", (1, 2), 3))
    assert engine.named[-1] is None


def test_random_assignment_is_seeded_and_covers_all() -> None:
    ids = [f"bench-{number}" for number in range(60)]

    def drawn(seed: int) -> list[str | None]:
        return [adapter_of(each, ("a", "b", "c"), "random", seed) for each in ids]

    assert drawn(0) == drawn(0) != drawn(1)
    assert set(drawn(0)) == {"a", "b", "c"}
    assert min(drawn(0).count(name) for name in "abc") > 10


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tasks": ("arc_easy",)}, "--tasks and needles score the model without adapters"),
        ({"lora": {"a": Path("a"), "b": Path("b")}}, "--no-quality"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=r"--lora|quality") as refusal:
        checked(BenchOptions, {"lora": {"a": Path("a")}, **options}, "option")
    assert words in str(refusal.value)
