"""The `Grid` protocol on every scheme: points, columns, codes found again, and GPTQ's feedback to any of them."""

from __future__ import annotations

import pytest
import torch
from llmopt.quant.base.scheme import Scheme
from llmopt.quant.kinds.base.grid import Grid, Parameters, group_of
from llmopt.quant.kinds.base.kind import Rounding, kind_of
from llmopt.quant.kinds.codebook.scheme import CodebookScheme
from llmopt.quant.kinds.fp4.scheme import Fp4Scheme
from llmopt.quant.kinds.fp8.scheme import FloatScheme
from llmopt.quant.kinds.ggml.scheme import GgufScheme
from llmopt.quant.kinds.integer.kind import IntTensor
from llmopt.quant.kinds.integer.scheme import IntScheme
from llmopt.quant.kinds.lookup.scheme import LookupScheme
from llmopt.quant.kinds.vectorwise.scheme import VectorwiseScheme
from llmopt.quant.methods.error_feedback import Solver, feedback
from llmopt.quant.methods.registry import METHODS

from ...support.format_support import same_bits
from ...support.layer_problems import correlated_inputs, heavy_weight, one_linear, statistics_of

SCHEMES: list[Scheme] = [
    IntScheme(4, 64, True),
    IntScheme(3, 32, False),
    IntScheme(8, -1, False),
    FloatScheme("channel"),
    FloatScheme("tensor"),
    FloatScheme("block"),
    CodebookScheme("nf4"),
    CodebookScheme("fp4", 32),
    Fp4Scheme("nvfp4"),
    Fp4Scheme("mxfp4"),
    CodebookScheme("nf4", double_quant=True),
    CodebookScheme("nf4", 1024),
    VectorwiseScheme(),
    LookupScheme(4),
    LookupScheme(3, 0.01),
    *(GgufScheme(name) for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")),
    *(GgufScheme(name) for name in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")),
    *(GgufScheme(name) for name in ("IQ4_NL", "IQ4_XS")),
]
EACH = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.label)
SHAPE = 136, 512


@EACH
def test_points_are_the_dequantized_weight_and_codes_come_back_from_them(scheme: Scheme) -> None:
    weight = heavy_weight(*SHAPE)
    weight[3, :256] = 0
    grid = kind_of(scheme).grid_for(SHAPE, Rounding(torch.float32, largest=weight.abs().max()))
    grouped = weight.unflatten(1, (-1, grid.group))
    for importance in (None, torch.rand(grouped.shape[1:]) + 0.1):
        parameters = grid.fit(grouped, importance)
        points = grid.round(grouped, parameters)
        tensor = grid.tensor(points.flatten(1), parameters)
        assert tensor.scheme == scheme
        assert torch.equal(tensor.dequantize(), points.flatten(1))
        # A solver subtracts errors from weights, which loses last places of the values.
        shaken = points.flatten(1) * (1 + 3e-7 * torch.randn(SHAPE))
        again = grid.tensor(shaken, parameters)
        for name, part in tensor.parts().items():
            if name != "sparse_values":
                assert same_bits(again.parts()[name], part), name


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "IQ4_XS"])
def test_a_tall_weight_is_fitted_as_its_rows_are(name: str) -> None:
    """The search goes through blocks in chunks, whose ends are no rows' ends."""
    weight = heavy_weight(350, 512).unflatten(1, (2, 256))
    grid = kind_of(GgufScheme(name)).grid_for((350, 512), Rounding(torch.float32))
    importance = torch.rand(2, 256) + 0.1
    whole = grid.fit(weight, importance)
    parts = [grid.fit(rows, importance) for rows in weight.split(100)]
    for part, rows in zip(whole, zip(*parts, strict=True), strict=True):
        assert part.shape[0] == 350 and torch.equal(part, torch.cat(rows))


@EACH
def test_columns_are_rounded_as_the_whole_weight_is(scheme: Scheme) -> None:
    weight = heavy_weight(*SHAPE)
    grid = kind_of(scheme).grid_for(SHAPE, Rounding(torch.float32, largest=weight.abs().max()))
    grouped = weight.unflatten(1, (-1, grid.group))
    parameters = grid.fit(grouped)
    points = grid.round(grouped, parameters)
    error = torch.empty(grid.vector, SHAPE[0])
    for group in {0, grouped.shape[1] - 1}:
        alone = parameters if grouped.shape[1] == 1 else group_of(parameters, group)
        columns = grid.columns(alone)
        for first in range(0, grid.group, grid.vector):
            targets = grouped[:, group, first : first + grid.vector].T.contiguous()
            expected = targets - points[:, group, first : first + grid.vector].T
            if grid.vector == 1:
                columns.errors(targets[0], targets[0], first, out=error[0])
            else:
                columns.errors(targets, targets, first, out=error)
            # Sparse weights are stored to float16.
            assert torch.allclose(
                error, expected, atol=1e-4 if hasattr(scheme, "sparse_fraction") else 1e-7
            )


@EACH
def test_error_feedback_reaches_every_grid(scheme: Scheme) -> None:
    weight = heavy_weight(*SHAPE)
    problem = one_linear(weight, scheme)
    (report,) = METHODS["gptq"].quantize_layer(problem).reports
    assert report.fallback is None
    assert report.error is not None and report.rtn_error is not None
    assert report.error < 0.7 * report.rtn_error


class CheckerboardGrid(Grid):
    """The lattice D4 with one scale for all: four integers whose sum is even."""

    group, vector = 8, 4
    step = 0.02

    def fit(self, values: torch.Tensor, importance: torch.Tensor | None = None) -> Parameters:
        return (torch.full(values.shape[:2], self.step),)

    def round(self, values: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        vectors = values.unflatten(-1, (-1, 4)) / self.step
        nearest = vectors.round()
        farthest = (vectors - nearest).abs().argmax(dim=-1, keepdim=True)
        change = (vectors - nearest).gather(-1, farthest).sign()
        odd = nearest.sum(dim=-1, keepdim=True) % 2
        nearest.scatter_add_(-1, farthest, torch.where(change == 0, 1.0, change) * odd)
        return (nearest * self.step).flatten(-2)

    def columns(self, parameters: Parameters) -> CheckerboardGrid:
        return self

    def errors(
        self, targets: torch.Tensor, weights: torch.Tensor, first: int, *, out: torch.Tensor
    ) -> None:
        assert len(targets) == 4 and first % 4 == 0
        torch.sub(weights, self.round(targets.T.unsqueeze(1), ()).squeeze(1).T, out=out)

    def tensor(self, values: torch.Tensor, parameters: Parameters) -> IntTensor:
        codes = (values / self.step).round() + 128
        scales = torch.full((len(values), 1), self.step)
        zeros = torch.full((len(values), 1), 128, dtype=torch.uint8)
        return IntTensor(codes.to(torch.uint8), scales, zeros, IntScheme(8, -1, False))


@pytest.mark.parametrize("static", [True, False])
def test_a_grid_of_vectors_gets_its_columns_together(static: bool) -> None:
    """The loop gives what vectors rounded one by one give, each after the errors of all before it."""
    weight, grid = heavy_weight(24, 96), CheckerboardGrid()
    record = statistics_of(correlated_inputs(400, 96))
    factor = feedback(record.gram, torch.arange(96), 0.01)
    assert factor is not None
    tensor = Solver(
        weight, factor, grid, slots=factor.channels, static_groups=static, weighted=False
    ).run()
    assert tensor is not None
    solved = tensor.dequantize()
    # In units of the damped Hessian `H`: `(W - W') H[:, b] H[b, b]^-1` moves the target of block `b`.
    hessian = record.gram.double() + factor.damp * record.gram.diagonal().mean() * torch.eye(96)
    values, error = torch.zeros(24, 96), torch.zeros(24, 96, dtype=torch.float64)
    for first in range(0, 96, 4):
        rest = hessian[first:, first:]
        pull = error[:, :first] @ hessian[:first, first:] @ torch.linalg.inv(rest)
        targets = weight[:, first : first + 4] + pull[:, :4]
        points = grid.round(targets.float().unsqueeze(1), ()).squeeze(1)
        values[:, first : first + 4] = points
        error[:, first : first + 4] = weight[:, first : first + 4] - points
    assert float((solved - values).abs().max()) < 1e-5
    plain = grid.round(weight.unflatten(1, (-1, 8)), ()).flatten(1)
    lost = [float(record.row_errors(weight - rounded).sum()) for rounded in (solved, plain)]
    assert lost[0] < 0.5 * lost[1]
