"""Each kernel against its reference, over shapes."""

from __future__ import annotations

import pytest
import torch
from llmopt.bench.machine.kernel_table import table
from llmopt.engine.kernels.attention import batch as pa
from llmopt.engine.kernels.attention.paged_attention import attend_sdpa
from llmopt.engine.kernels.attention.paged_tensor import PagedTensor
from llmopt.engine.kernels.common.dispatch import Candidate, NoKernel, Operation
from llmopt.engine.kernels.linear.linear import LINEAR, LinearKernelQuery, TorchLinear
from llmopt.engine.kernels.linear.quantized_linear import (
    QUANTIZED_LINEAR,
    QuantizedLinearKernelQuery,
)
from llmopt.engine.model.layers.projection import Projection
from llmopt.quant.kinds.integer.kind import round_to_nearest
from llmopt.quant.kinds.integer.scheme import IntScheme

from ...support.attention_reference import attend_reference


def attention_case(heads, kv_heads, head_dim, block_size, lengths, news, seed=0):
    """Queries for `news[i]` last tokens of sequences of `lengths[i]`, over shuffled blocks."""
    g = torch.Generator().manual_seed(seed)
    widths = [-(-length // block_size) for length in lengths]
    num_blocks = sum(widths) + 1
    keys = torch.randn(num_blocks, block_size, kv_heads, head_dim, generator=g)
    values = torch.randn(num_blocks, block_size, kv_heads, head_dim, generator=g)
    ids = iter((torch.randperm(num_blocks - 1, generator=g) + 1).tolist())
    tables = [[next(ids) for _ in range(width)] for width in widths]
    spans, single, begin = [], [], 0
    for length, new, blocks in zip(lengths, news, tables, strict=True):
        if new == 1:
            single.append((begin, length, blocks))
        else:
            spans.append(pa.SequenceSpan(begin, begin + new, length, torch.tensor(blocks)))
        begin += new
    decode = None
    if single:
        width = max(len(blocks) for _, _, blocks in single)
        decode = pa.DecodeGroup(
            torch.tensor([row for row, _, _ in single]),
            torch.tensor(
                [b for _, _, blocks in single for b in blocks + [0] * (width - len(blocks))]
            ),
            torch.tensor([length for _, length, _ in single]),
            torch.zeros(len(single), dtype=torch.int64),
        )
    queries = torch.randn(begin, heads, head_dim, generator=g)
    batch = pa.AttentionBatch(spans, decode, block_size, queries.dtype)
    return queries, PagedTensor(keys), PagedTensor(values), batch


@pytest.mark.parametrize("window", [None, 1, 3, 16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [(8, 4, 32, 4), (4, 4, 16, 1), (6, 2, 8, 5), (8, 1, 64, 16)],
)
def test_attention_agrees_with_its_definition(heads, kv_heads, head_dim, block_size, window):
    case = attention_case(
        heads, kv_heads, head_dim, block_size, [1, 7, 20, 9, 13, 5], [1, 7, 1, 4, 1, 2]
    )
    rule = pa.AttentionRule(0.3, window)
    got = attend_sdpa(*case, rule)
    torch.testing.assert_close(got, attend_reference(*case, rule), atol=1e-5, rtol=1e-5)


RULES = {
    "chunk": {"chunk": 4},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.linspace(-2, 3, 8)},
    "all": {"window": 6, "softcap": 1.5, "sinks": torch.linspace(-2, 3, 8)},
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("value_dim", [32, 20])
def test_attention_rules_agree_with_their_definition(rule, value_dim):
    case = attention_case(8, 4, 32, 4, [1, 7, 20, 9, 13, 5], [1, 7, 1, 4, 1, 2])
    queries, keys, values, batch = case
    values = values.first_elements(value_dim)
    given = pa.AttentionRule(0.3, **RULES[rule])
    got = attend_sdpa(queries, keys, values, batch, given)
    expected = attend_reference(queries, keys, values, batch, given)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    plain = attend_reference(queries, keys, values, batch, pa.AttentionRule(0.3))
    assert (expected - plain).abs().max() > 0.05, "the rule should change something"


def test_the_reference_is_plain_causal_attention():
    queries, keys, values, batch = attention_case(4, 4, 16, 4, [11], [11])
    k = keys.codes[batch.spans[0].block_ids].flatten(0, 1)[:11].transpose(0, 1)
    v = values.codes[batch.spans[0].block_ids].flatten(0, 1)[:11].transpose(0, 1)
    plain = torch.nn.functional.scaled_dot_product_attention(
        queries.transpose(0, 1)[None], k[None], v[None], is_causal=True, scale=0.25
    )
    got = attend_reference(queries, keys, values, batch, pa.AttentionRule(0.25))
    torch.testing.assert_close(got, plain[0].transpose(0, 1), atol=1e-5, rtol=1e-5)


def test_padding_reads_the_null_block_and_nothing_of_it_shows():
    queries, keys, values, batch = attention_case(4, 2, 8, 4, [3, 17], [1, 1])
    before = attend_sdpa(queries, keys, values, batch, pa.AttentionRule(0.3))
    keys.codes[0], values.codes[0] = 1e4, -1e4
    assert torch.equal(before, attend_sdpa(queries, keys, values, batch, pa.AttentionRule(0.3)))


LINEARS = [
    (scheme, candidate)
    for scheme in (
        IntScheme(4, 32, False), IntScheme(4, 128, True), IntScheme(4, -1, False),
        IntScheme(8, -1, True), IntScheme(8, 64, False),
    )
    for candidate in QUANTIZED_LINEAR.candidates
]  # fmt: skip


@pytest.mark.parametrize(
    ("scheme", "candidate"), LINEARS, ids=lambda x: getattr(x, "label", getattr(x, "name", None))
)
@pytest.mark.parametrize("tokens", [1, 5])
def test_quantized_linears_agree_with_dequantized_floats(scheme, candidate, tokens):
    g = torch.Generator().manual_seed(0)
    weight = round_to_nearest(torch.randn(96, 256, generator=g), scheme, torch.float32)
    x = torch.randn(tokens, 256, generator=g)
    exact = x @ weight.dequantize().T
    served = 0
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1.5e-2)):
        kernel_query = QuantizedLinearKernelQuery("cpu", dtype, 96, 256, scheme)
        if candidate.refuses(kernel_query) is None:
            kernel = candidate.run(weight, dtype)
            error = (kernel(x.to(dtype)).float() - exact).norm() / exact.norm()
            assert error < tolerance
            assert kernel.weight_bytes < 96 * 256 * (0.7 if scheme.bits == 4 else 1.3)
            served += 1
    if not served:
        assert candidate.refuses(QuantizedLinearKernelQuery("cpu", torch.bfloat16, 96, 256, scheme))


def test_prepacked_bf16_is_bit_equal_to_torch():
    kernel_query = LinearKernelQuery("cpu", torch.bfloat16, 96, 256)
    chosen = LINEAR.select(kernel_query)
    weight, x = torch.randn(96, 256).bfloat16(), torch.randn(7, 256).bfloat16()
    torch.testing.assert_close(chosen.run(weight)(x), TorchLinear(weight)(x), atol=0, rtol=8e-3)


def test_a_projection_of_mixed_kinds_keeps_the_order():
    g = torch.Generator().manual_seed(0)
    plain = [torch.randn(16, 64, generator=g) for _ in range(3)]
    quantized = round_to_nearest(plain[1], IntScheme(8, -1, True), torch.float32)
    x = torch.randn(3, 64, generator=g)
    bias = torch.randn(48, generator=g)
    got = Projection([plain[0], quantized, plain[2]], bias, torch.float32)(x)
    want = torch.cat([x @ plain[0].T, x @ quantized.dequantize().T, x @ plain[2].T], -1) + bias
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_dispatch_takes_the_first_that_serves_and_explains_itself():
    operation: Operation[int, int] = Operation(
        "demo",
        [
            Candidate("big", lambda n: "too small" if n < 10 else None, 1),
            Candidate("even", lambda n: "odd" if n % 2 else None, 2),
        ],
    )
    assert operation.select(12).name == "big"
    assert operation.select(4).name == "even"
    with pytest.raises(NoKernel, match="no kernel for demo with 3: big: too small; even: odd"):
        operation.select(3)
    assert operation.explain(4).chosen == "even"
    assert operation.explain(4).reasons == (("big", "too small"), ("even", None))


def test_the_table_names_a_kernel_for_every_operation():
    for choice in table(torch.device("cpu"), torch.bfloat16):
        assert choice.chosen in dict(choice.reasons)


@pytest.mark.parametrize(
    ("block_size", "num_sink_tokens", "window"), [(4, 6, 5), (4, 3, 9), (1, 0, 3)]
)
def test_evicted_tokens_were_not_attended_to(block_size, num_sink_tokens, window):
    """Attention sinks stay visible, attended by sink queries; evicted blocks are not read."""
    queries, keys, values, batch = attention_case(
        8, 4, 32, block_size, [30, 50, 7, 21, 33], [1, 1, 1, 4, 9]
    )
    rule = pa.AttentionRule(0.3, window=window, num_sink_tokens=num_sink_tokens)
    sink_queries = torch.randn(queries.shape, generator=torch.Generator().manual_seed(1))
    whole = attend_reference(queries, keys, values, batch, rule, sink_queries)
    num_sink_blocks = -(-num_sink_tokens // block_size)

    def cut(blocks: torch.Tensor, first: int) -> tuple[torch.Tensor, int]:
        stop = max(num_sink_blocks, (first - window + 1) // block_size)
        return torch.cat([blocks[:num_sink_blocks], blocks[stop:]]), (
            stop - num_sink_blocks
        ) * block_size

    spans = []
    for span in batch.spans:
        blocks, evicted_span = cut(span.block_ids, span.num_cached - (span.end - span.begin))
        spans.append(
            pa.SequenceSpan(
                span.begin,
                span.end,
                span.num_cached,
                blocks,
                num_sink_blocks * block_size,
                evicted_span,
            )
        )
    group = batch.decode
    assert group is not None
    tables, evicted_spans = [], []
    for length, row in zip(group.lengths.tolist(), group.block_ids.view(3, -1), strict=True):
        blocks, evicted_span = cut(row[: -(-length // block_size)], length - 1)
        tables.append(blocks)
        evicted_spans.append(evicted_span)
    padded = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True).flatten()
    decode = pa.DecodeGroup(
        group.rows, padded, group.lengths, torch.tensor(evicted_spans), num_sink_blocks * block_size
    )
    assert max(evicted_spans) > 0
    assert max(span.evicted_span for span in spans) > 0
    held = pa.AttentionBatch(spans, decode, block_size, queries.dtype)
    for attend, given in (
        (attend_sdpa, batch),
        (attend_sdpa, held),
        (attend_reference, held),
    ):
        got = attend(queries, keys, values, given, rule, sink_queries)
        torch.testing.assert_close(got, whole, atol=1e-5, rtol=1e-5)
