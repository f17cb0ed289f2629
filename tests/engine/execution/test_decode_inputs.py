"""Static inputs of decode steps written in place, against those of the same rows written anew."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import pytest
import torch
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.execution.decode_inputs import DecodeInputs
from llmopt.engine.kernels.attention.batch import DecodeCounts
from llmopt.engine.kernels.elementwise.native_rows import native_advance
from llmopt.engine.scheduling.block_pool import BlockPool, PrefixCache
from llmopt.engine.scheduling.request import Request, RequestTimes
from llmopt.engine.scheduling.scheduler import Scheduler
from llmopt.engine.scheduling.scheduler_config import SchedulerConfig
from llmopt.engine.scheduling.step_plan import DecodeRows

from ...support.pretended_cuda.card import Card
from ...support.pretended_cuda.runtime import pretended_cuda

BLOCK_SIZE, MAX_BLOCKS, SIZE = 4, 12, 6
COLUMNS = ("token_ids", "positions", "slots")


class World:
    """A scheduler whose requests sample the number of their tokens."""

    def __init__(self) -> None:
        pool = BlockPool(80)
        limits = SchedulerConfig(64, SIZE, BLOCK_SIZE, MAX_BLOCKS * BLOCK_SIZE)
        self.scheduler = Scheduler(limits, pool, PrefixCache(pool, BLOCK_SIZE))
        self.order = 0

    def add(self, length: int, max_tokens: int) -> None:
        name, params = str(self.order), SamplingParams(max_tokens=max_tokens)
        prompt = [self.order + 3] * length
        request = Request(
            f"{name}/0", name, 0, prompt, length, max_tokens, params, 0, self.order, RequestTimes(0)
        )
        self.scheduler.add(request)
        self.order += 1

    def step(self, inputs: DecodeInputs | Captured) -> DecodeRows | None:
        plan = self.scheduler.schedule()
        rows = plan.rows if isinstance(plan.rows, DecodeRows) else None
        if rows is not None:
            check(inputs, rows)
        sampled = {row.sequence_id: [row.end % 50 + 1] for row in plan.rows}
        if isinstance(inputs, Captured):
            tokens = [token for (token,) in sampled.values()]
            inputs.sampled[: len(tokens)] = torch.tensor(tokens)
        self.scheduler.update(plan, sampled, frozenset())
        self.scheduler.check_integrity()
        return rows


class Captured:
    """Inputs that a captured step goes on from by itself, with the tokens that it `sampled`."""

    def __init__(self, inputs: DecodeInputs) -> None:
        self.inputs, self.step, self.sampled = inputs, inputs.step, torch.zeros(SIZE).long()
        self.num_held = inputs.num_held
        self.num_advanced = 0
        library = native_advance().library
        assert library is not None
        self._advance = library.llmopt_advance_step

    def fill_host(self, rows: DecodeRows, size: int) -> None:
        call = self.inputs.advance_call(len(rows), self.sampled)
        call.follows = self.inputs.fill_host(rows, size, advances=True)
        self.num_advanced += call.follows
        assert self._advance(ctypes.byref(call)) == 0


def check(inputs: DecodeInputs | Captured, rows: DecodeRows) -> None:
    """That what is written, in place or not, is what the rows say."""
    inputs.fill_host(rows, SIZE)
    step = inputs.step(SIZE, 0, ())
    group = step.batch.decode
    assert group is not None
    assert inputs.num_held(SIZE) == (group.lengths - group.evicted_spans).tolist()
    tables = group.block_ids.view(SIZE, -1).tolist()
    for place, row in enumerate(rows):
        block = row.block_ids[row.start // BLOCK_SIZE]
        expected = [row.token_ids[0], row.start, block * BLOCK_SIZE + row.start % BLOCK_SIZE]
        assert [int(getattr(step, name)[place]) for name in COLUMNS] == expected
        assert int(group.lengths[place]) == row.end
        assert tables[place][: len(row.block_ids)] == list(row.block_ids)
    for place in range(len(rows), SIZE):
        assert [int(getattr(step, name)[place]) for name in COLUMNS] == [0, 0, 0]
        assert int(group.lengths[place]) == 1 and tables[place][0] == 0


def written(place: str) -> DecodeInputs | Captured:
    inputs = DecodeInputs(SIZE, MAX_BLOCKS, BLOCK_SIZE, torch.device("cpu"), torch.float32)
    if place == "as on a GPU":
        inputs._arrays = None
        inputs._mirror.tables = inputs._mirror.tables.copy()
    return Captured(inputs) if place == "by the captured step" else inputs


@pytest.mark.parametrize(
    "place",
    [
        "in place",
        "as on a GPU",
        pytest.param(
            "by the captured step",
            marks=pytest.mark.skipif(native_advance().reason is not None, reason="not compiled"),
        ),
    ],
)
def test_what_is_changed_in_place_is_what_is_written_anew(place: str) -> None:
    """Sequences of all phases of a block come, end in the middle of the batch, and make way for others."""
    inputs = written(place)
    world = World()
    for length, max_tokens in ((1, 30), (2, 9), (3, 30), (4, 14), (9, 21)):
        world.add(length, max_tokens)
    made = [world.step(inputs) for _ in range(16)]
    world.add(6, 20)
    made += [world.step(inputs) for _ in range(20)]
    steps = [rows for rows in made if rows is not None]
    assert len({id(rows.batch) for rows in steps}) >= 5, "batches came and went"
    assert sum(rows.step > 0 for rows in steps) >= 20, "most steps went on from another"
    if isinstance(inputs, Captured):
        assert inputs.num_advanced == sum(rows.step > 0 for rows in steps)
    assert not world.scheduler.has_unfinished()


def test_something_else_may_write_in_between() -> None:
    inputs = DecodeInputs(SIZE, MAX_BLOCKS, BLOCK_SIZE, torch.device("cpu"), torch.float32)
    world = World()
    world.add(3, 20)
    for _ in range(4):
        world.step(inputs)
    runs = inputs.step(SIZE, 0, ())
    decode = runs.batch.decode
    assert decode is not None
    counts = DecodeCounts(range(SIZE), inputs.num_held(SIZE))
    inputs.fill_device(runs, replace(decode, counts=counts), SIZE, SIZE)
    for _ in range(4):
        assert world.step(inputs) is not None


def test_tokens_that_only_the_device_knows_are_taken_from_it() -> None:
    inputs = DecodeInputs(SIZE, MAX_BLOCKS, BLOCK_SIZE, torch.device("cpu"), torch.float32)
    world = World()
    world.add(3, 20)
    world.step(inputs)
    rows = world.step(inputs)
    assert rows is not None
    inputs.fill_host(rows, SIZE, torch.tensor([41]))
    assert int(inputs.step(SIZE, 0, ()).token_ids[0]) == 41


def metadata_of(inputs: DecodeInputs, *, is_constant: bool) -> tuple[torch.Tensor, Any]:
    """Segments and tiles of Triton's attention, of a step of three rows."""
    from llmopt.engine.kernels.attention.triton_metadata import AttentionMetadata

    batch = inputs.step(3, 0, ()).batch
    assert batch.decode is not None
    if not is_constant:
        batch.decode = replace(batch.decode, constants=None)
    metadata = AttentionMetadata(batch)
    tiles = metadata.tiles(1, True)
    assert tiles is not None
    return metadata.segments, tiles


def test_a_captured_step_launches_little_for_the_metadata_of_attention() -> None:
    """Two launches write what changes from step to step, where twelve made all of it anew."""
    pytest.importorskip("triton", reason="Triton is for Linux alone")
    inputs = DecodeInputs(SIZE, MAX_BLOCKS, BLOCK_SIZE, torch.device("cpu"), torch.float32)
    inputs._lengths[:3], inputs._evicted_spans[:3] = (
        torch.tensor([7, 1, 30]),
        torch.tensor([0, 0, 8]),
    )
    (segments, tiles), (others, other_tiles) = (
        metadata_of(inputs, is_constant=is_constant) for is_constant in (True, False)
    )
    assert torch.equal(segments, others) and tiles.width == other_tiles.width
    assert torch.equal(tiles.index, other_tiles.index) and tiles.num_rows == other_tiles.num_rows
    counts = []
    with pretended_cuda(card := Card()):
        there = DecodeInputs(SIZE, MAX_BLOCKS, BLOCK_SIZE, torch.device("cuda:0"), torch.float32)
        for is_constant in (True, False):
            with card.during(str(is_constant)):
                metadata_of(there, is_constant=is_constant)
            phases = [entry.phase for entry in card.log if entry.kind in ("kernel", "copy")]
            counts.append(phases.count(str(is_constant)))
    assert counts == [2, 12]
