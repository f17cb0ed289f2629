"""Launches of the kernels of model families, to compile them for a GPU that is not there.

`python -m tools.triton_family_launches 80 90 100 120` compiles them for these compute capabilities and prints
registers, bytes of local memory and of shared memory.
"""

from __future__ import annotations

import sys

import torch
from llmopt.engine.kernels.attention.paged_tensor import PagedTensor
from llmopt.engine.kernels.elementwise.head_norms import HeadNorms
from llmopt.engine.kernels.moe.routing import RoutingRule

from tools.triton_code import compiling

BF16, CPU = torch.bfloat16, torch.device("cpu")


def routing() -> None:
    """Launch the routing of gpt-oss, Qwen3-MoE and DeepSeek-V3, of few and of many tokens."""
    from llmopt.engine.kernels.moe.triton_router_logits import router_logits
    from llmopt.engine.kernels.moe.triton_routing import route_triton
    from llmopt.engine.kernels.moe.triton_token_permutation import permute_tokens

    deepseek = RoutingRule(8, False, True, 1e-20, 2.5, 8, 4, 2, 1)
    for rule, count in ((RoutingRule(4), 32), (RoutingRule(8), 128), (deepseek, 256)):
        bias = torch.zeros(count)
        router_logits(torch.zeros(4, 2880, dtype=BF16), torch.zeros(count, 2880), bias)
        route_triton(torch.zeros(4, count), rule, bias if rule.num_groups > 1 else None)
        for tokens in (4, 2048):
            permute_tokens(torch.zeros(tokens * rule.top_k, dtype=torch.int64), count, rule.top_k)


def experts() -> None:
    """Launch what surrounds the grouped GEMMs: biases, gates, the weighted sum."""
    from llmopt.engine.kernels.moe.triton_expert_rows import biased_gate, weighted_sum

    rows, bias = torch.zeros(16, 5760, dtype=BF16), torch.zeros(32, 5760, dtype=BF16)
    ids = torch.zeros(16, dtype=torch.int64)
    biased_gate(rows, bias, ids, "clamped_swiglu")
    weighted_sum(rows, torch.zeros(4, 4), bias, ids, 4, torch.zeros(4, 5760, dtype=BF16))
    weighted_sum(rows, None, None, ids, 4)


def latent(capability: int) -> None:
    """Launch DeepSeek-V3's latent attention, up to paged attention, for every stored type of a GPU."""
    from llmopt.engine.kernels.elementwise.triton_latent import TritonLatent

    kernel, angles = TritonLatent(), torch.zeros(4, 1, 64, dtype=BF16)
    turn = angles, angles
    both = torch.zeros(4, 1536 + 576, dtype=BF16)
    queries, row = both.split([1536, 576], dim=1)
    norms = (torch.zeros(512, dtype=BF16), 1e-6), (torch.zeros(1536, dtype=BF16), 1e-6)
    slots = torch.arange(4)
    for stored in (BF16, torch.int8, *((torch.float8_e4m3fn,) if capability >= 89 else ())):
        cache = PagedTensor.zeros(4, 16, 1, 576, CPU, stored)
        kernel.write(row, norms[0], queries, norms[1], turn, True, cache, slots)
    heads = torch.zeros(4, 128, 192, dtype=BF16)
    kernel.queries(torch.zeros(128, 4, 512, dtype=BF16), heads[..., 128:], turn, True)


def wide_norms() -> None:
    """Launch norms with float32 weights beside 16-bit rows."""
    from llmopt.engine.kernels.elementwise.triton_norm import TritonNorm
    from llmopt.engine.kernels.elementwise.triton_rope_and_cache import TritonRopeAndCache

    x, weight = torch.zeros(4, 3840, dtype=BF16), torch.zeros(3840)
    TritonNorm(weight, 1e-6)(x, x)
    turn = torch.zeros(4, 1, 256, dtype=BF16)
    cache = PagedTensor.zeros(4, 16, 8, 256, CPU, BF16)
    norms = HeadNorms(torch.zeros(256), torch.zeros(256), 1e-6)
    stacked = torch.zeros(4, 32, 256, dtype=BF16)
    TritonRopeAndCache()(stacked, 16, turn, turn, cache, cache, torch.arange(4), norms)


def block_copies() -> None:
    """Launch copies of blocks within the cache, to the host and back."""
    from llmopt.engine.kernels.attention.triton_block_copies import TritonBlockCopies

    parts = [torch.zeros(4, 16, 8, 128, dtype=BF16) for _ in range(2)]
    copies = TritonBlockCopies(parts, parts)
    copies.within([(0, 1)])
    copies.to_host([(0, 1)])
    copies.from_host([(0, 1)])


LAUNCHES = (block_copies, wide_norms, experts, routing)


def main(capabilities: list[int]) -> None:
    """Print what the kernels take on each compute capability."""
    for capability in capabilities:
        with compiling(capability) as compiled:
            latent(capability)
            for launch in LAUNCHES:
                launch()
        print(f"compute capability {capability / 10:.1f}", flush=True)
        for kernel in compiled:
            print(
                f"  {kernel.name:20} {kernel.registers:4} registers {kernel.stack:4} B stack "
                f"{kernel.shared:6} B shared"
            )


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or [80, 90, 100, 120])
