"""Launches of every Triton kernel, with shapes and types that models have, for compiling without a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from llmopt.engine.kernels.attention import batch as pa
from llmopt.engine.kernels.attention.paged_tensor import E4M3_ALONE, CacheDtype, PagedTensor
from llmopt.engine.kernels.common.devices import gpu_limits
from llmopt.engine.kernels.elementwise.recurrence import (
    ConvCall,
    DeltaCall,
    DeltaPlaces,
    DeltaWeights,
    MambaWeights,
    StateRows,
    StateSpaceCall,
)
from llmopt.engine.kernels.elementwise.reference import ActivationQuant, HeadNorms, RopeCall
from llmopt.engine.kernels.linear.triton_packed_weight import (
    pack_float_weight,
    pack_weight,
    stack_packed_weights,
)
from llmopt.engine.kernels.moe.dispatch import RoutingRule
from llmopt.quant.base.scheme import Activations
from llmopt.quant.families.spec_parts import DeltaNetSpec, Mamba2Spec
from llmopt.quant.kinds.base.tensor import QuantizedTensor
from llmopt.quant.kinds.codebook.kind import CodebookKind
from llmopt.quant.kinds.codebook.scheme import CodebookScheme
from llmopt.quant.kinds.fp8.kind import FloatKind
from llmopt.quant.kinds.fp8.scheme import FloatScheme
from llmopt.quant.kinds.ggml.scheme import GgufScheme
from llmopt.quant.kinds.ggml.tensor import GgufTensor, quantize_blocks
from llmopt.quant.kinds.integer.kind import round_to_nearest
from llmopt.quant.kinds.integer.scheme import IntScheme
from llmopt.quant.kinds.trellis.kind import TrellisTensor
from llmopt.quant.kinds.trellis.scheme import TrellisScheme

BF16, CPU = torch.bfloat16, torch.device("cpu")
E4M3 = torch.float8_e4m3fn


def has_fp8() -> bool:
    """Whether the pretended GPU has e4m3. Without, the engine refuses an e4m3 cache and quantizes no inputs
    to it, and e4m3 weights are decoded from their bits."""
    return gpu_limits(CPU).capability >= 89


def attention(
    heads: int,
    kv_heads: int,
    dims: tuple[int, int],
    stored: CacheDtype = BF16,
    dtype: torch.dtype = BF16,
    **rule: Any,
) -> None:
    """Launch paged attention for six decode rows and one prefill chunk of 64 tokens."""
    from llmopt.engine.kernels.attention.triton_attention import attend_triton

    if stored in (E4M3, E4M3_ALONE) and not has_fp8():
        return
    in_keys = dims[0] > dims[1]
    keys = PagedTensor.zeros(20, 16, kv_heads, dims[0], CPU, stored)
    values = PagedTensor.zeros(20, 16, kv_heads, dims[1], CPU, stored)
    spans = [pa.SequenceSpan(0, 64, 200, torch.arange(13))]
    zeros = torch.zeros(6, dtype=torch.int64)
    decode = pa.DecodeGroup(torch.arange(64, 70), zeros.repeat(130), zeros + 2000, zeros)
    batch = pa.AttentionBatch(spans, decode, 16, dtype)
    queries = torch.zeros(70, heads, dims[0], dtype=dtype)
    values = keys.first_elements(dims[1]) if in_keys else values
    sink_queries = queries if rule.get("num_sink_tokens") else None
    attend_triton(queries, keys, values, batch, pa.AttentionRule(0.1, **rule), sink_queries)


def rows() -> None:
    """Launch norm, gates, and fused RoPE + KV write for every stored type."""
    from llmopt.engine.kernels.elementwise.triton_cache_write import TritonRopeAndCache
    from llmopt.engine.kernels.elementwise.triton_rows import TritonGate, TritonNorm

    x, wide = torch.zeros(4, 4096, dtype=BF16), torch.zeros(4, 14336, dtype=BF16)
    TritonNorm(x[0], 1e-5)(x, x)
    TritonGate("silu")(wide, wide)
    fp8 = [Activations("fp8", "group128")] if has_fp8() else []
    for activations in (Activations("int8"), *fp8):
        TritonNorm(x[0], 1e-5).quantized(x, x, ActivationQuant(activations))
        TritonGate("silu").quantized(wide, wide, ActivationQuant(activations))
    TritonGate("gelu")(wide, wide)
    TritonGate("gelu_tanh")(wide, wide)
    angles = torch.zeros(4, 1, 128, dtype=BF16)
    norms = HeadNorms(angles[0, 0], angles[0, 0], 1e-6)
    stacked = torch.zeros(4, 48, 128, dtype=BF16)
    for stored in (BF16, torch.int8, *([E4M3, E4M3_ALONE] if has_fp8() else [])):
        cache = PagedTensor.zeros(4, 16, 8, 128, CPU, stored)
        TritonRopeAndCache()(
            RopeCall(stacked, 32, angles, angles, cache, cache, torch.arange(4), norms)
        )


def sampling(count: int = 4) -> None:
    """Launch the sampling kernels on `count` rows of logits of a large vocabulary."""
    from llmopt.engine.sampling import triton_sampling as kernels
    from llmopt.engine.sampling.triton_thresholds import thresholds

    scores, rows = torch.zeros(count, 128256), torch.arange(count)
    floats, integers = torch.ones(count, 3), torch.ones(count, 3, dtype=torch.int64)
    stays = thresholds(scores, floats, integers)
    kernels.draw(scores, floats, integers, *stays)
    kernels.exponential(integers[:, :2].contiguous(), 128256, 0)
    counts, words = (torch.zeros(count, width, dtype=torch.int32) for width in (128256, 4008))
    kernels.penalize(scores, rows, counts, rows, floats)
    kernels.constrain(scores, scores, rows, words, rows[:, None].contiguous())


def products(weight: QuantizedTensor, kind: Literal["floats", "quantized"] = "floats") -> None:
    """Launch GEMMs of 1 to 65 tokens, on both sides of the crossover, with float or 8-bit inputs."""
    from llmopt.engine.kernels.linear.triton_linear import FloatInputLinear, QuantizedInputLinear

    quantized, fp8 = kind == "quantized", [E4M3] if has_fp8() else []
    if quantized and isinstance(weight.scheme, FloatScheme) and not fp8:
        return
    elements = [*fp8, torch.int8] if quantized else fp8
    tiles = pack_weight(weight, elements)
    assert tiles is not None
    linear = (QuantizedInputLinear if quantized else FloatInputLinear)(weight, tiles, BF16)
    for tokens in (1, 16, 32, 64, 65):
        linear(torch.zeros(tokens, weight.in_features, dtype=BF16))


def integers(*scheme: Any) -> QuantizedTensor:
    """A weight in integer codes."""
    return round_to_nearest(torch.randn(512, 4096), IntScheme(*scheme), BF16)


def fp8(*scheme: Any) -> QuantizedTensor:
    """A weight in e4m3."""
    return FloatKind(FloatScheme(*scheme)).round(torch.randn(512, 4096), torch.float32)


def blocks(kind: str) -> QuantizedTensor:
    """A weight in ggml's blocks."""
    return GgufTensor(quantize_blocks(torch.randn(64, 4096), kind), GgufScheme(kind))


def experts() -> None:
    """Launch the grouped GEMMs of experts, with few and with many tokens per expert."""
    from llmopt.engine.kernels.moe.triton_experts import GroupedLinear
    from llmopt.engine.kernels.moe.triton_token_permutation import permute_tokens

    floats = pack_float_weight(torch.zeros(256, 2048, dtype=BF16))
    packed = pack_weight(integers(4, 128, False), [])
    for weight in (floats, packed):
        assert weight is not None
        stacked = stack_packed_weights([weight, weight])
        assert stacked is not None
        linear = GroupedLinear(stacked, None, None)
        for routing in (16, 400):
            x = torch.zeros(routing, weight.in_features, dtype=BF16)
            expert_ids = torch.arange(routing) % 2
            linear(x, BF16, permute_tokens(expert_ids, 2, 1, linear.rows_between))


LAUNCHES: dict[str, Callable[[], None]] = {
    "attention, 32 heads of 128 on 8": lambda: attention(32, 8, (128, 128)),
    "  fp8 cache": lambda: attention(32, 8, (128, 128), E4M3),
    "  fp8 cache without scales": lambda: attention(32, 8, (128, 128), E4M3_ALONE),
    "  int8 cache": lambda: attention(32, 8, (128, 128), torch.int8),
    "  window, first tokens kept": lambda: attention(
        32, 8, (128, 128), window=1000, num_sink_tokens=4
    ),
    "  float32": lambda: attention(32, 8, (128, 128), torch.float32, torch.float32),
    "attention, 64 heads of 64 on 8, sinks": lambda: attention(
        64, 8, (64, 64), sinks=torch.zeros(64), window=128
    ),
    "attention, 8 heads of 256 on 1, soft cap": lambda: attention(8, 1, (256, 256), softcap=50.0),
    "attention, 32 heads of 96": lambda: attention(32, 32, (96, 96)),
    "attention, 16 heads on a latent of 576": lambda: attention(16, 1, (576, 512)),
    "attention, 128 heads on a latent of 576": lambda: attention(128, 1, (576, 512)),
    "  of an fp8 latent": lambda: attention(16, 1, (576, 512), E4M3),
    "  of an int8 latent": lambda: attention(16, 1, (576, 512), torch.int8),
    "between the linears": rows,
    "sampling": sampling,
    "4-bit weights": lambda: products(integers(4, 128, False)),
    "4-bit weights, symmetric": lambda: products(integers(4, 128, True)),
    "8-bit weights": lambda: products(integers(8, -1, True)),
    "  and inputs": lambda: products(integers(8, -1, True, Activations("int8")), "quantized"),
    "fp8 weights": lambda: products(fp8("channel")),
    "  and its inputs": lambda: products(fp8("channel", Activations("fp8")), "quantized"),
    "  and inputs, by 128": lambda: products(
        fp8("block", Activations("fp8", "group128")), "quantized"
    ),
    "nf4": lambda: products(
        CodebookKind(CodebookScheme("nf4")).round(torch.randn(512, 4096), torch.float32)
    ),
    "experts": experts,
    "Q4_K": lambda: products(blocks("Q4_K")),
}


def routing() -> None:
    """Launch the routing of gpt-oss, Qwen3-MoE and DeepSeek-V3, of few and of many tokens."""
    from llmopt.engine.kernels.moe.triton_routing import route_triton, router_logits
    from llmopt.engine.kernels.moe.triton_token_permutation import permute_tokens

    deepseek = RoutingRule(8, False, True, 1e-20, 2.5, 8, 4, 2, 1)
    for rule, count in ((RoutingRule(4), 32), (RoutingRule(8), 128), (deepseek, 256)):
        bias = torch.zeros(count)
        router_logits(torch.zeros(4, 2880, dtype=BF16), torch.zeros(count, 2880), bias)
        route_triton(torch.zeros(4, count), rule, bias if rule.num_groups > 1 else None)
        for tokens in (4, 2048):
            permute_tokens(torch.zeros(tokens * rule.top_k, dtype=torch.int64), count, rule.top_k)


def around_experts() -> None:
    """Launch what surrounds the grouped GEMMs: biases, gates, the weighted sum."""
    from llmopt.engine.kernels.moe.triton_token_permutation import biased_gate, weighted_sum

    rows, bias = torch.zeros(16, 5760, dtype=BF16), torch.zeros(32, 5760, dtype=BF16)
    ids = torch.zeros(16, dtype=torch.int64)
    biased_gate(rows, bias, ids, "clamped_swiglu")
    weighted_sum(rows, torch.zeros(4, 4), bias, ids, 4, torch.zeros(4, 5760, dtype=BF16))
    weighted_sum(rows, None, None, ids, 4)


def latent() -> None:
    """Launch DeepSeek-V3's latent attention, up to paged attention, for every stored type of a GPU."""
    from llmopt.engine.kernels.elementwise.triton_cache_write import TritonLatent

    kernel, angles = TritonLatent(), torch.zeros(4, 1, 64, dtype=BF16)
    turn = angles, angles
    both = torch.zeros(4, 1536 + 576, dtype=BF16)
    queries, row = both.split([1536, 576], dim=1)
    norms = (torch.zeros(512, dtype=BF16), 1e-6), (torch.zeros(1536, dtype=BF16), 1e-6)
    slots = torch.arange(4)
    for stored in (BF16, torch.int8, *([E4M3] if has_fp8() else [])):
        cache = PagedTensor.zeros(4, 16, 1, 576, CPU, stored)
        kernel.write(row, norms[0], queries, norms[1], turn, True, cache, slots)
    heads = torch.zeros(4, 128, 192, dtype=BF16)
    kernel.queries(torch.zeros(128, 4, 512, dtype=BF16), heads[..., 128:], turn, True)


def wide_norms() -> None:
    """Launch norms with float32 weights beside 16-bit rows."""
    from llmopt.engine.kernels.elementwise.triton_cache_write import TritonRopeAndCache
    from llmopt.engine.kernels.elementwise.triton_rows import TritonNorm

    x, weight = torch.zeros(4, 3840, dtype=BF16), torch.zeros(3840)
    TritonNorm(weight, 1e-6)(x, x)
    turn = torch.zeros(4, 1, 256, dtype=BF16)
    cache = PagedTensor.zeros(4, 16, 8, 256, CPU, BF16)
    norms = HeadNorms(torch.zeros(256), torch.zeros(256), 1e-6)
    stacked = torch.zeros(4, 32, 256, dtype=BF16)
    TritonRopeAndCache()(RopeCall(stacked, 16, turn, turn, cache, cache, torch.arange(4), norms))


def block_copies() -> None:
    """Launch copies of blocks within the cache, to the host and back."""
    from llmopt.engine.kernels.attention.triton_block_copies import TritonBlockCopies

    parts = [torch.zeros(4, 16, 8, 128, dtype=BF16) for _ in range(2)]
    copies = TritonBlockCopies(parts, parts)
    copies.within([(0, 1)])
    copies.to_host([(0, 1)])
    copies.from_host([(0, 1)])


def recurrent_steps() -> None:
    """Launch the steps of Qwen3-Next's delta rule, Granite 4's Mamba 2 and LFM2's short convolution."""
    from llmopt.engine.kernels.elementwise.triton_recurrence import TritonRecurrence

    kernel, delta = TritonRecurrence(), DeltaNetSpec(16, 32, 128, 128, 4, True)
    mamba = Mamba2Spec(128, 64, 1, 128, 4, True, False, (0.0, math.inf))
    channels, heads = 2 * delta.keys_width + delta.values_width, delta.num_value_heads
    columns = torch.arange(channels + delta.values_width + 2 * heads, dtype=torch.int32)
    parts = [channels, delta.values_width, heads, heads]
    projected, places = torch.zeros(4, len(columns), dtype=BF16), DeltaPlaces(*columns.split(parts))
    rows = StateRows(torch.arange(4), torch.zeros(4, dtype=torch.bool))
    window, weight = torch.zeros(5, channels, 4, dtype=BF16), torch.zeros(channels, 4, dtype=BF16)
    given = {"places": places.mixed, "activated": True}
    mixed = kernel.conv(ConvCall(projected, window, rows, weight, None, **given))
    floats = torch.zeros(heads)
    of_delta = DeltaWeights(floats, floats, torch.zeros(128, dtype=BF16), 1e-6)
    states = torch.zeros(5, heads, 128, 128)
    kernel.delta(DeltaCall(mixed, projected, places, states, rows, of_delta, delta))
    floats, norm = torch.zeros(128), torch.zeros(1, mamba.width, dtype=BF16)
    wide = torch.zeros(4, mamba.width + mamba.conv_width + 128, dtype=BF16)
    gate, mixed, length = wide.split([mamba.width, mamba.conv_width, 128], dim=1)
    weight, bias = torch.zeros(mamba.conv_width, 4, dtype=BF16), mixed[0].contiguous()
    window = torch.zeros(5, mamba.conv_width, 4, dtype=BF16)
    mixed = kernel.conv(ConvCall(mixed, window, rows, weight, bias, activated=True))
    of_mamba = MambaWeights(floats, floats, floats, norm, 1e-6)
    states = torch.zeros(5, 128, 64, 128)
    kernel.state_space(StateSpaceCall(mixed, (gate, length), states, rows, of_mamba, mamba))
    short = torch.zeros(2048, 3, dtype=BF16)
    window = torch.zeros(5, 2048, 3, dtype=BF16)
    kernel.conv(
        ConvCall(torch.zeros(4, 3 * 2048, dtype=BF16), window, rows, short, None, gated=True)
    )


LAUNCHES |= {
    "recurrent steps": recurrent_steps,
    "block copies": block_copies,
    "wide norms": wide_norms,
    "around experts": around_experts,
    "routing": routing,
    "latent attention, before it": latent,
}


OUT, BLOCKED = 512, 4096
"""Outputs, and inputs in blocks of 128."""


def code_products(weight: TrellisTensor) -> None:
    """Launch the linear for a token, for as many as are decoded in registers, and for more."""
    from llmopt.engine.kernels.linear.triton_hadamard import TritonTransformedLinear

    linear = TritonTransformedLinear(weight, BF16)
    for tokens in (1, 64, 65):
        linear(torch.zeros(tokens, weight.in_features, dtype=BF16))


def trellis(bits: int, codebook: str) -> TrellisTensor:
    """A weight of zeros, which are a path as any other words are."""
    words = torch.zeros(BLOCKED // 16, OUT // 16, 16 * bits, dtype=torch.int16)
    sides = torch.zeros(BLOCKED, dtype=torch.float16), torch.zeros(OUT, dtype=torch.float16)
    return TrellisTensor(words, *sides, TrellisScheme(bits, codebook))


TRELLISES = (("mul1", (2, 8)), ("mcg", (3,)))

LAUNCHES |= {
    f"{codebook} trellis of {bits} bits": lambda bits=bits, name=codebook: code_products(
        trellis(bits, name)
    )
    for codebook, widths in TRELLISES
    for bits in widths
}


def trellis_search(bits: int) -> None:
    """Launch the search for trellis codes of a vector of 4,096 channels."""
    from llmopt.quant.kinds.trellis.viterbi import _triton_states

    _triton_states(torch.zeros(256, 256), bits, "mul1")


LAUNCHES |= {
    f"search of {bits} bits": lambda bits=bits: trellis_search(bits) for bits in (2, 3, 4, 6)
}
