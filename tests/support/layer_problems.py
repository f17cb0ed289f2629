"""Layers to quantize in tests, with inputs as real ones are: correlated, a few channels loud."""

from __future__ import annotations

import torch
from llmopt.quant.base.scheme import Scheme
from llmopt.quant.families.layer_map import LayerMap
from llmopt.quant.methods.base import InputStatistics, LayerProblem, relative
from llmopt.quant.methods.options import MethodOptions

from .hand_kept_maps import map_of

LLAMA = map_of({"model_type": "llama"})
HIDDEN, FFN = 64, 128
NORMS = ("input_layernorm", "post_attention_layernorm")


def correlated_inputs(tokens: int, width: int, *, seed: int = 5, loud: float = 8.0) -> torch.Tensor:
    """Float32 `[tokens, width]` of low rank and noise, every 16th channel `loud` times as large.

    All of one `width` have one distribution; `seed` draws other tokens of it.
    """
    basis = torch.randn(width // 8, width, generator=torch.Generator().manual_seed(width))
    generator = torch.Generator().manual_seed(seed)
    factors = torch.randn(tokens, width // 8, generator=generator)
    inputs = factors @ basis + 0.3 * torch.randn(tokens, width, generator=generator)
    inputs[:, ::16] *= loud
    return inputs


def statistics_of(inputs: torch.Tensor) -> InputStatistics:
    record = InputStatistics(inputs.shape[1])
    record.add(inputs)
    return record


def heavy_weight(rows: int, columns: int, seed: int = 3) -> torch.Tensor:
    """Float32 `[rows, columns]` with a heavier tail than a normal distribution's."""
    generator = torch.Generator().manual_seed(seed)
    spread = 0.5 + torch.rand(rows, columns, generator=generator).square() * 2
    return torch.randn(rows, columns, generator=generator) * spread * 0.03


def one_linear(
    weight: torch.Tensor,
    scheme: Scheme,
    inputs: torch.Tensor | None = None,
    scale_dtype: torch.dtype = torch.float32,
) -> LayerProblem:
    """A layer of a single linear, called `linear`."""
    tokens = correlated_inputs(512, weight.shape[1]) if inputs is None else inputs
    return LayerProblem(
        prefix="model.layers.0",
        family=LayerMap((("linear",),), (), frozenset()),
        schemes={"linear": scheme},
        scale_dtypes={"linear": scale_dtype},
        weights={"linear": weight},
        statistics={"linear": statistics_of(tokens)},
        norms={},
        with_bias=frozenset(),
    )


def llama_layer(
    scheme: Scheme, *, loud: float = 8.0, options: MethodOptions = MethodOptions()
) -> LayerProblem:
    """A random layer of the Llama shape with held-out tokens."""
    shapes: dict[str, tuple[int, int]] = dict.fromkeys(LLAMA.linears, (HIDDEN, HIDDEN))
    shapes |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (FFN, HIDDEN))
    shapes["mlp.down_proj"] = (HIDDEN, FFN)
    statistics: dict[str, InputStatistics] = {}
    held_out: dict[str, InputStatistics] = {}
    for seed, group in enumerate(LLAMA.shared_inputs):
        width = shapes[group[0]][1]
        seen = correlated_inputs(512, width, seed=seed, loud=loud)
        unseen = correlated_inputs(128, width, seed=100 + seed, loud=loud)
        statistics |= dict.fromkeys(group, statistics_of(seen))
        held_out |= dict.fromkeys(group, statistics_of(unseen))
    return LayerProblem(
        prefix="model.layers.0",
        family=LLAMA,
        schemes=dict.fromkeys(shapes, scheme),
        scale_dtypes=dict.fromkeys(shapes, torch.float16),
        weights={
            name: heavy_weight(*shape, seed=seed)
            for seed, (name, shape) in enumerate(shapes.items())
        },
        statistics=statistics,
        norms={
            name: (torch.rand(HIDDEN, generator=torch.Generator().manual_seed(9)) + 0.5).bfloat16()
            for name in NORMS
        },
        with_bias=frozenset(),
        held_out=held_out,
        options=options,
    )


def relative_error(
    statistics: InputStatistics, weight: torch.Tensor, effective: torch.Tensor
) -> float:
    """`|X(W - W')ᵀ|² / |XWᵀ|²` of the weight `effective` used in place of `weight`, both `[out, in]`."""
    energy = float(statistics.row_errors(weight).sum())
    return relative(float(statistics.row_errors(weight - effective).sum()), energy)


def output_error(problem: LayerProblem, linear: str, effective: torch.Tensor) -> float:
    """Relative output error on the calibration data of `effective` replacing a linear's weight."""
    return relative_error(problem.statistics[linear], problem.weights[linear], effective)
