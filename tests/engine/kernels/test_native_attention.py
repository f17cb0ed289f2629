"""The C kernel of paged attention on every path that this processor has, against the definition."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llmopt.base.processor import VARIABLE
from llmopt.engine.kernels.attention import batch as pa
from llmopt.engine.kernels.attention.dispatch import (
    PAGED_ATTENTION,
    AttentionKernelQuery,
    attend_native,
    native_attention,
)
from llmopt.engine.kernels.attention.paged_attention import attend_sdpa
from llmopt.engine.scheduling.draft_length import Tree

from ...support.attention_reference import attend_reference
from ...support.attention_world import STORED, World, rules
from ...support.native_paths import native_paths

HERE = native_paths()
pytestmark = pytest.mark.skipif(not HERE, reason="the C kernels want AVX2 or NEON, and a compiler")


@pytest.fixture(params=HERE or ["off"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every path, forced; the test runs on it and on no other."""
    monkeypatch.setenv(VARIABLE, request.param)
    found = native_attention()
    if found.library is None:
        pytest.skip(str(found.reason))
    assert found.path == request.param
    yield request.param


@pytest.mark.sweep(2)
def test_it_agrees_with_the_definition(path: str) -> None:
    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(st.data())
    def sweep(data: st.DataObject) -> None:
        kv_heads = data.draw(st.sampled_from([1, 2, 3]))
        heads = kv_heads * data.draw(st.sampled_from([1, 2, 5]))
        lengths = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=4))
        world = World(
            lengths,
            [data.draw(st.integers(1, min(9, length))) for length in lengths],
            heads=heads,
            kv_heads=kv_heads,
            dims=data.draw(st.sampled_from([(16, 16), (32, 32), (80, 48), (64, 96)])),
            block_size=data.draw(st.sampled_from([1, 5, 16, 32])),
            stored=data.draw(st.sampled_from(STORED)),
        )
        rule = data.draw(rules(heads))
        got, expected = world.attend(attend_native, rule), world.attend(attend_reference, rule)
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)

    sweep()


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_long_sequences_and_bfloat16(path: str, stored: torch.dtype) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        world = World([700, 40, 1, 513], [1, 40, 1, 150], stored=stored, dtype=dtype)
        for rule in (pa.AttentionRule(0.2), pa.AttentionRule(0.2, window=300, num_sink_tokens=4)):
            got, expected = world.attend(attend_native, rule), world.attend(attend_sdpa, rule)
            bound = 2e-2 if dtype is torch.bfloat16 else 2e-5
            torch.testing.assert_close(got, expected, atol=bound, rtol=bound)


def mask_of(parents: tuple[int, ...]) -> pa.TreeMask:
    tree = Tree(parents)
    ancestors = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for index in range(len(parents)):
        ancestors[index, list(tree.path(index))] = True
    return pa.TreeMask(torch.tensor(tree.depths), ancestors)


@pytest.mark.sweep(1)
def test_token_trees(path: str) -> None:
    """Of some sequences of a batch; their first draft tokens may have been computed before."""

    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(st.data())
    def sweep(data: st.DataObject) -> None:
        count = data.draw(st.sampled_from([1, 3, 9, 40]))
        parents = tuple(data.draw(st.integers(-1, index - 1)) for index in range(count))
        length = data.draw(st.sampled_from([1, 30, 250, 300])) + count
        new = data.draw(st.integers(max(2, count - 2), count + 2).filter(lambda n: n <= length))
        world = World(
            [length, 20, 9],
            [new, 1, 4],
            block_size=data.draw(st.sampled_from([1, 16])),
            stored=data.draw(st.sampled_from(STORED)),
        )
        rows, batch = world.batch()
        spans = [replace(batch.spans[0], tree=mask_of(parents)), *batch.spans[1:]]
        batch = pa.AttentionBatch(spans, batch.decode, world.block_size, world.dtype)
        rule = data.draw(rules(8))
        inputs = (world.queries[rows], world.keys, world.values, batch, rule)
        expected = attend_reference(*inputs)
        torch.testing.assert_close(attend_native(*inputs), expected, atol=2e-5, rtol=2e-5)

    sweep()


def test_values_in_the_first_elements_of_the_keys(path: str) -> None:
    world = World([90, 33], [1, 12], heads=16, kv_heads=1, dims=(80, 64), in_keys=True)
    got = world.attend(attend_native, pa.AttentionRule(0.1))
    expected = world.attend(attend_reference, pa.AttentionRule(0.1))
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)


def test_a_row_depends_on_its_own_prefix_alone(path: str) -> None:
    """Bit for bit: alone or beside others, in one chunk or in several, with one thread or two."""
    lengths, news = [600, 40, 9, 1, 300], [1, 40, 1, 1, 77]
    for rule in (pa.AttentionRule(0.2), pa.AttentionRule(0.2, window=100, softcap=5.0)):
        world = World(lengths, news, stored=torch.bfloat16, dtype=torch.bfloat16)
        together = world.attend(attend_native, rule)
        for i in range(len(lengths)):
            rows, _ = world.batch([i])
            alone = world.attend(attend_native, rule, [i])
            assert torch.equal(alone, together[rows])
            torch.set_num_threads(2)
            try:
                assert torch.equal(world.attend(attend_native, rule, [i]), alone)
            finally:
                torch.set_num_threads(1)
        rows, _ = world.batch([4])
        for first, last in ((0, 30), (30, 31), (31, 77)):
            table = torch.tensor(world.tables[4])
            span = pa.SequenceSpan(0, last - first, 300 - 77 + last, table)
            part = pa.AttentionBatch([span], None, world.block_size, world.dtype)
            queries = world.queries[rows[first:last]]
            got = attend_native(queries, world.keys, world.values, part, rule)
            assert torch.equal(got, together[rows[first:last]])


def test_invisible_tokens_are_not_read(path: str) -> None:
    world = World([40, 3], [1, 2], block_size=8)
    rule = pa.AttentionRule(0.3, window=10)
    before = world.attend(attend_native, rule)
    unseen = [0, *world.tables[0][:3]]
    for tensor in (world.keys, world.values):
        tensor.codes[unseen] = float("nan")
        tensor.codes[world.tables[1][0], 3:] = float("nan")
        tensor.codes[world.tables[0][3], :6] = float("nan")
    assert torch.equal(world.attend(attend_native, rule), before)


def test_heads_of_a_wider_tensor_are_read_where_they_lie(path: str) -> None:
    world = World([20, 7], [1, 7])
    wide = torch.randn(8, 16, 32, generator=torch.Generator().manual_seed(1))
    _, batch = world.batch()
    rule = pa.AttentionRule(0.3)
    for queries in (wide[:, 3:11], wide.transpose(0, 1)[:8, :8]):
        got = attend_native(queries, world.keys, world.values, batch, rule)
        dense = queries.contiguous()
        assert torch.equal(got, attend_native(dense, world.keys, world.values, batch, rule))


@pytest.mark.parametrize(
    ("kernel_query", "reason"),
    [
        (AttentionKernelQuery("cuda", torch.bfloat16, 64, 64), "it is a CPU kernel"),
        (AttentionKernelQuery("cpu", torch.float16, 64, 64), "it takes bfloat16 and float32"),
        (AttentionKernelQuery("cpu", torch.float32, 64, 20), "it is for heads of multiples of 16"),
        (
            AttentionKernelQuery("cpu", torch.float32, 64, 64, "image"),
            "it does not support bidirectional attention",
        ),
    ],
    ids=str,
)
def test_what_it_does_not_serve_it_refuses(
    path: str, kernel_query: AttentionKernelQuery, reason: str
) -> None:
    choice = PAGED_ATTENTION.explain(kernel_query)
    assert choice.chosen != "native-paged"
    assert str(dict(choice.reasons)["native-paged"]).startswith(reason)


def test_without_a_compiler_torch_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_query = AttentionKernelQuery("cpu", torch.bfloat16, 64, 64)
    monkeypatch.setenv(VARIABLE, HERE[0])
    if native_attention().library is not None:
        assert PAGED_ATTENTION.select(kernel_query).name == "native-paged"
    monkeypatch.setenv(VARIABLE, "off")
    choice = PAGED_ATTENTION.explain(kernel_query)
    assert choice.chosen == "torch-sdpa"
    assert dict(choice.reasons)["native-paged"] == f"{VARIABLE}=off"
