"""Triton's paged attention against the definition."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from llmopt.engine.kernels.attention import batch as pa
from llmopt.engine.kernels.attention.dispatch import PAGED_ATTENTION, AttentionKernelQuery
from llmopt.engine.kernels.common.devices import VARIABLE

from ...support.attention_reference import attend_reference
from ...support.attention_world import STORED, World
from ...support.triton_world import DEVICE

SINKS = torch.linspace(-3, 3, 4, device=DEVICE)
CASES: list[tuple[dict[str, Any], dict[str, Any], list[int], list[int]]] = [
    ({}, {}, [20, 9, 1, 13], [1, 9, 1, 3]),
    ({"stored": torch.int8}, {"softcap": 2.0}, [70], [1]),
    ({"stored": torch.float8_e4m3fn}, {"window": 9}, [70, 5], [66, 1]),
    ({"stored": torch.bfloat16}, {"chunk": 7}, [64, 65], [1, 12]),
    ({"block_size": 1}, {"window": 1}, [12, 30], [12, 1]),
    ({"block_size": 5}, {"window": 20, "num_sink_tokens": 3}, [90, 17], [10, 1]),
    ({"block_size": 32}, {"window": 70, "num_sink_tokens": 65}, [200, 150], [1, 2]),
    ({"block_size": 16}, {"sinks": SINKS}, [300, 513], [1, 2]),
    ({"block_size": 64}, {"sinks": SINKS, "softcap": 3.0, "window": 4}, [65, 64], [20, 1]),
    ({"dims": (80, 48)}, {}, [33, 66], [33, 1]),
    (
        {"dims": (24, 24), "stored": torch.int8},
        {"window": 5, "num_sink_tokens": 2},
        [33, 6],
        [12, 1],
    ),
    ({"dims": (8, 8)}, {}, [1, 9], [1, 9]),
    ({"dims": (96, 96), "heads": 10, "kv_heads": 2}, {}, [17, 2], [10, 1]),
    ({"heads": 3, "kv_heads": 1}, {"chunk": 3}, [70, 4], [1, 4]),
    # Prompts of several tiles, the middle ones of which need no mask.
    ({"block_size": 16}, {}, [300, 40], [290, 40]),
    ({"block_size": 16}, {"window": 150}, [300], [290]),
    ({"stored": torch.int8}, {"chunk": 130, "softcap": 2.0}, [300], [290]),
    ({"block_size": 16}, {"window": 140, "num_sink_tokens": 70}, [400], [390]),
    ({"dims": (80, 64), "in_keys": True, "kv_heads": 1}, {}, [200], [150]),
]


def check(world: World, rule: pa.AttentionRule, bound: float = 2e-5) -> None:
    from llmopt.engine.kernels.attention.triton_attention import attend_triton

    got, expected = world.attend(attend_triton, rule), world.attend(attend_reference, rule)
    torch.testing.assert_close(got, expected, atol=bound, rtol=bound)


@pytest.mark.sweep(7)
@pytest.mark.parametrize(("shape", "rule", "lengths", "news"), CASES)
def test_it_agrees_with_the_definition(
    shape: dict[str, Any], rule: dict[str, Any], lengths: list[int], news: list[int]
) -> None:
    given = {"heads": 4, "kv_heads": 2, "dims": (32, 32), "device": DEVICE, **shape}
    check(World(lengths, news, **given), pa.AttentionRule(0.2, **rule))


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_bfloat16_queries_meet_every_stored_type(stored: torch.dtype) -> None:
    shape: Any = {"heads": 4, "kv_heads": 1, "stored": stored, "dtype": torch.bfloat16}
    check(World([30, 40], [1, 12], device=DEVICE, **shape), pa.AttentionRule(0.2), 2e-2)


@pytest.mark.parametrize("dims", [(80, 64), (96, 64), (64, 40)], ids=str)
def test_values_in_the_first_elements_of_the_keys(dims: tuple[int, int]) -> None:
    shape: Any = {"heads": 20, "kv_heads": 1, "dims": dims, "in_keys": True, "block_size": 4}
    check(World([41, 13], [1, 12], device=DEVICE, **shape), pa.AttentionRule(0.1))


def test_evicted_tokens_were_not_attended_to() -> None:
    """Attention sinks stay visible; the evicted span is not in the block table."""
    from llmopt.engine.kernels.attention.triton_attention import attend_triton

    shape: Any = {"heads": 4, "kv_heads": 2, "block_size": 4, "device": DEVICE}
    world = World([50, 30, 33], [1, 1, 9], **shape)
    rule = pa.AttentionRule(0.3, window=7, num_sink_tokens=6)
    whole = world.attend(attend_reference, rule)
    num_sink_blocks, spans, tables, evicted_spans = 2, [], [], []
    for index, first in enumerate((49, 29, 24)):
        stop = max(num_sink_blocks, (first - 6) // 4)
        table = world.tables[index]
        tables.append([*table[:num_sink_blocks], *table[stop:]])
        evicted_spans.append((stop - num_sink_blocks) * 4)
    width = max(map(len, tables[:2]))
    of_decode = [block for own in tables[:2] for block in own + [0] * (width - len(own))]

    def tensor(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, device=DEVICE)

    decode = pa.DecodeGroup(
        tensor([0, 1]),
        tensor(of_decode),
        tensor([50, 30]),
        tensor(evicted_spans[:2]),
        num_sink_blocks * 4,
    )
    spans = [pa.SequenceSpan(2, 11, 33, tensor(tables[2]), num_sink_blocks * 4, evicted_spans[2])]
    batch = pa.AttentionBatch(spans, decode, 4, world.dtype)
    got = attend_triton(world.queries, world.keys, world.values, batch, rule, world.sink_queries)
    torch.testing.assert_close(got, whole, atol=2e-5, rtol=2e-5)


def test_a_row_depends_on_its_own_prefix_alone() -> None:
    """Bit for bit: alone or beside others."""
    from llmopt.engine.kernels.attention.triton_attention import attend_triton

    lengths, news = [300, 20, 70], [1, 20, 3]
    world = World(lengths, news, heads=2, kv_heads=1, device=DEVICE)
    rule = pa.AttentionRule(0.2)
    together = world.attend(attend_triton, rule)
    for index in range(3):
        rows, _ = world.batch([index])
        assert torch.equal(world.attend(attend_triton, rule, [index]), together[rows])


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "given", [{}, {"sinks": SINKS}, {"window": 300, "num_sink_tokens": 3}], ids=str
)
def test_the_grid_changes_no_bit(monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]) -> None:
    """Split-KV: one program for all parts of a head, some for each, and more programs than parts."""
    from llmopt.engine.kernels.attention import triton_attention as attention

    world = World([700, 20, 300], [1, 1, 2], heads=4, kv_heads=2, device=DEVICE)
    rule, found = pa.AttentionRule(0.2, **given), []
    limits = attention.gpu_limits(world.device)
    for count in (1, 3, 500):
        few = replace(limits, multiprocessors=count)
        monkeypatch.setattr(attention, "gpu_limits", lambda device, few=few: few)
        found.append(world.attend(attention.attend_triton, rule))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    torch.testing.assert_close(found[0], world.attend(attend_reference, rule), atol=2e-5, rtol=2e-5)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "kernels"),
    [(4, 2, 32, {"attend"}), (20, 1, 96, {"attend", "reduce_parts"})],
    ids=["last program", "second kernel"],
)
def test_parts_of_a_tile_are_reduced(
    heads: int, kv_heads: int, dim: int, kernels: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers of a step share the counts of arrived parts, as replays of a graph do: each leaves zeros."""
    from llmopt.engine.kernels.attention import triton_attention as attention
    from llmopt.engine.kernels.attention.triton_metadata import AttentionMetadata

    shape: Any = {"heads": heads, "kv_heads": kv_heads, "dims": (dim, dim), "device": DEVICE}
    world, rule = World([2100, 300, 20], [1, 2, 1], **shape), pa.AttentionRule(0.2)
    expected = world.attend(attend_reference, rule)
    limits = replace(attention.gpu_limits(world.device), multiprocessors=3)
    monkeypatch.setattr(attention, "gpu_limits", lambda device: limits)
    launched: set[str] = set()

    class Watched:
        """A kernel whose launches are noted."""

        def __init__(self, name: str) -> None:
            self.name, self.kernel = name, getattr(attention, name)

        def __getitem__(self, grid: Any) -> Any:
            launched.add(self.name)
            return self.kernel[grid]

    for name in ("attend", "reduce_parts"):
        monkeypatch.setattr(attention, name, Watched(name))
    _, batch = world.batch()
    given = world.queries, world.keys, world.values, batch, rule
    first, second = attention.attend_triton(*given), attention.attend_triton(*given)
    torch.testing.assert_close(first, expected, atol=2e-5, rtol=2e-5)
    assert torch.equal(first, second) and launched == kernels
    lists = batch.kernel_metadata(AttentionMetadata)._work_lists.values()
    assert len(lists) == 1 and not any(arrived.any() for _, arrived in lists)


def test_programs_of_the_longest_prompts_start_first() -> None:
    """Tiles of two prompts and a later part of a third, by the tokens before each."""
    from llmopt.engine.kernels.attention.triton_metadata import (
        AttentionMetadata,
        Segment,
        StaticBuffer,
        StaticMetadata,
    )

    world = World([40, 300, 20], [40, 20, 20], heads=1, kv_heads=1, dims=(8, 8), device=DEVICE)
    _, batch = world.batch()
    expected = [300 - 20 + 16, 300 - 20, 32, 16, 16, 0, 0]

    def before(metadata: AttentionMetadata) -> list[int]:
        tiles = metadata.tiles(16, False)
        assert tiles is not None
        found = [(*metadata.segments[segment].tolist(), first) for segment, first, _ in tiles.index]
        return [known - count + int(first) for _, count, known, *_, first in found]

    assert before(AttentionMetadata(batch)) == expected
    space = torch.zeros(StaticBuffer.capacity(100, 40), dtype=torch.int64, device=DEVICE)
    buffer = StaticBuffer(100, 40, space, 0)
    blocks = [0] * 40
    segments = [
        Segment(0, 40, 40, blocks),
        Segment(40, 20, 300, blocks),
        Segment(60, 20, 20, blocks),
    ]
    buffer.fill([[0] * 80] * StaticBuffer.columns, segments)
    assert before(StaticMetadata(buffer, 8))[: len(expected)] == expected


def test_latents_of_prompts_fill_a_matrix_instruction_of_hopper() -> None:
    """Cover a shard with 16 heads too; on 10.0 their sums leave tensor memory no room for scores."""
    from llmopt.engine.kernels.attention.triton_attention import HeadShape, tiling
    from llmopt.engine.kernels.common.devices import HOPPER

    latent = HeadShape(576, 512, 16, True, 2, 2)
    rows = {
        (capability, short): tiling(latent, replace(HOPPER, capability=capability), short).rows
        for capability in (90, 100)
        for short in (True, False)
    }
    assert rows == {(90, True): 16, (90, False): 64, (100, True): 16, (100, False): 16}


def test_the_work_list_has_every_part_once() -> None:
    """Of more sequences than a program of the list counts, one of them much longer than the others."""
    from llmopt.engine.kernels.attention.triton_metadata import (
        LISTED,
        MAX_PARTS,
        AttentionMetadata,
        Visibility,
    )

    lengths = [1 + 7 * i % 90 for i in range(2 * LISTED + 3)]
    lengths[LISTED] = 3000
    world = World(lengths, [1] * len(lengths), heads=1, kv_heads=1, dims=(8, 8), device=DEVICE)
    _, batch = world.batch()
    for window, longest in ((0, 12), (100, 1)):
        metadata = AttentionMetadata(batch)
        work, arrived = metadata.work_list(1, Visibility(64, window, 0, 0), 12, 2)
        assert arrived.shape == (len(lengths), 2) and not arrived.any()
        work = work.tolist()
        parts = [longest if length == 3000 else 1 for length in lengths]
        expected = [i * MAX_PARTS + part for i, count in enumerate(parts) for part in range(count)]
        assert work[: work[0] + 1] == [len(expected), *expected]


def test_heads_of_a_wider_tensor_are_read_where_they_lie() -> None:
    from llmopt.engine.kernels.attention.triton_attention import attend_triton

    world = World([20, 7], [1, 7], heads=4, kv_heads=2, device=DEVICE)
    wide = torch.randn(8, 9, 32, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    _, batch = world.batch()
    rule = pa.AttentionRule(0.3)
    for queries in (wide[:, 3:7], wide.transpose(1, 2).contiguous().transpose(1, 2)[:, :4]):
        got = attend_triton(queries, world.keys, world.values, batch, rule)
        expected = attend_reference(queries, world.keys, world.values, batch, rule)
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)


def test_which_queries_are_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(device: str, dtype: torch.dtype, trees: bool = False) -> str | None:
        kernel_query = AttentionKernelQuery(device, dtype, 64, 64, "tree" if trees else "causal")
        return dict(PAGED_ATTENTION.explain(kernel_query).reasons)["triton-paged"]

    monkeypatch.delenv(VARIABLE, raising=False)
    assert reason("cuda", torch.bfloat16) is None
    assert reason("cpu", torch.bfloat16) == "it is a GPU kernel"
    assert str(reason("cuda", torch.float64)).startswith("it takes bfloat16, float16 and float32")
    assert str(reason("cuda", torch.bfloat16, True)).startswith(
        "it does not support tree attention"
    )
    monkeypatch.setenv(VARIABLE, "off")
    assert reason("cuda", torch.bfloat16) == f"{VARIABLE}=off"
    if DEVICE == "cpu":
        monkeypatch.setenv(VARIABLE, "interpret")
        assert reason("cpu", torch.bfloat16) is None


def test_triton_that_was_imported_too_early_is_refused() -> None:
    script = (
        "import triton; from llmopt.engine.kernels.common.devices import refuses_triton;"
        "print(refuses_triton('cpu'))"
    )
    environment = {**os.environ, VARIABLE: "interpret"}
    environment.pop("TRITON_INTERPRET", None)
    run = [sys.executable, "-c", script]
    said = subprocess.run(run, capture_output=True, text=True, env=environment, check=True).stdout
    assert said.startswith("Triton was imported before it was told to interpret")
