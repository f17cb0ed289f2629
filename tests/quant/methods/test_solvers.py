"""GPTQ's error feedback on the grids of other methods, and what a weighted range is worth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.quant.kinds.codebook.scheme import CodebookScheme
from llmopt.quant.kinds.ggml.scheme import GgufScheme
from llmopt.quant.kinds.integer.scheme import IntScheme
from llmopt.quant.methods.folding import scaled_problem
from llmopt.quant.methods.options import MethodOptions, SchemeOptions
from llmopt.quant.methods.registry import METHODS
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.plan import make_plan
from llmopt.quant.plan.request import QuantizeRequest

from ...support.layer_problems import llama_layer
from ...support.quant_support import STORIES, TINY

SOLVED = MethodOptions(solver="gptq")
SMOOTHING = ("awq", "smoothquant")


@pytest.mark.parametrize("name", ["rtn", "int8", "fp8", "nf4", "fp4", "squeezellm", *SMOOTHING])
def test_error_feedback_on_the_grid_of_a_method(name: str) -> None:
    """Held-out errors are lower than those of the method alone, on the very scheme."""
    method = METHODS[name]
    scheme = method.scheme(SchemeOptions())
    if isinstance(scheme, IntScheme) and name in ("rtn", "awq"):
        scheme = replace(scheme, group_size=32)
    problem = llama_layer(scheme)
    nearest: Any = method.quantize_layer(problem)
    solver = method.with_solver("gptq")
    assert solver.needs_statistics and solver.name == name
    solved: Any = solver.quantize_layer(replace(problem, options=SOLVED))
    assert all(tensor.scheme == scheme for tensor in solved.weights.values())
    totals = [sum(r.held_out_error for r in one.reports) for one in (solved, nearest)]
    assert totals[0] < (0.98 if name in SMOOTHING else 0.8) * totals[1]


def test_methods_that_choose_their_codes_take_no_solver() -> None:
    with pytest.raises(BadInput, match="--solver gptq"):
        METHODS["hqq"].with_solver("gptq")
    with pytest.raises(BadInput, match="--act-order dynamic"):
        METHODS["fp8"].with_solver("gptq").scheme(SchemeOptions(act_order="dynamic"))


def test_awq_is_solved_by_error_feedback_unless_asked_otherwise(tmp_path: Path) -> None:
    solvers = {
        name: make_plan(QuantizeRequest(STORIES, tmp_path / "o", name)).options.solver
        for name in ("awq", "rtn", "gptq", "smoothquant")
    }
    assert solvers == dict.fromkeys(solvers, "nearest") | {"awq": "gptq"}
    nearest = QuantizeRequest(STORIES, tmp_path / "o", options=MethodOptions(solver="nearest"))
    assert make_plan(nearest).options.solver == "nearest"


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("method", "solver", "named"),
    [
        ("awq", "auto", "gptq"),
        ("awq", "nearest", "nearest"),
        ("rtn", "auto", "nearest"),
        ("gptq", "auto", "gptq"),
    ],
)
def test_the_solver_that_was_taken_is_recorded(
    tmp_path: Path, method: str, solver: Any, named: str
) -> None:
    """`auto` leaves no trace among the options, which are those that differ from their defaults."""
    request = QuantizeRequest(
        TINY,
        tmp_path / "o",
        method,
        group_size=-1,
        num_samples=2,
        seq_len=8,
        format="compressed-tensors",
        options=MethodOptions(solver=solver),
    )
    result = quantize(request)
    assert result.manifest["solver"] == named
    assert f"`{method}`, solver `{named}`" in (result.output / "README.md").read_text()


def test_a_scaled_layer_is_measured_in_the_unscaled_one() -> None:
    """What is solved already goes back without its scales, and the inputs that come back get theirs."""
    given: dict[str, torch.Tensor] = {}

    def remeasure(done: Any, only: Any) -> Any:
        given.update(done)
        return {name: problem.statistics[name] for name in only}

    problem = replace(llama_layer(IntScheme(4, 32, False)), remeasure=remeasure)
    columns = {name: torch.rand(weight.shape[1]) + 0.5 for name, weight in problem.weights.items()}
    rows = {"mlp.up_proj": torch.rand(problem.weights["mlp.up_proj"].shape[0]) + 0.5}
    scaled = scaled_problem(problem, columns, rows)
    assert scaled.remeasure is not None
    again = scaled.remeasure(scaled.weights, ["mlp.down_proj"])["mlp.down_proj"]
    for name, weight in problem.weights.items():
        torch.testing.assert_close(given[name], weight)
    torch.testing.assert_close(again.gram, scaled.statistics["mlp.down_proj"].gram)
    # The layer's outputs, and so their energies, are the same but for the divided rows.
    for name in set(problem.weights) - set(rows):
        assert scaled.energy(name) == pytest.approx(problem.energy(name), rel=1e-4)


def test_blocks_that_no_solver_takes_have_weighted_ranges() -> None:
    problem = llama_layer(GgufScheme("MXFP4"))
    reports: Any = METHODS["gptq"].quantize_layer(problem).reports
    assert all(report.fallback and report.error < report.rtn_error for report in reports)


def test_gptq_takes_the_block_types_of_a_gguf_mix(tmp_path: Path) -> None:
    request = QuantizeRequest(STORIES, tmp_path / "o", "gptq", format="gguf", gguf_type="Q4_0")
    assert {type(scheme) for scheme in make_plan(request).schemes.values()} == {GgufScheme}
    static = replace(request, options=MethodOptions(act_order="static"))
    assert make_plan(static).schemes == make_plan(request).schemes
    with pytest.raises(BadInput, match="--act-order dynamic"):
        make_plan(replace(request, options=MethodOptions(act_order="dynamic")))


@pytest.mark.parametrize(
    "scheme", [IntScheme(3, 32, True), IntScheme(4, 32, False), GgufScheme("Q4_0")]
)
def test_weighted_ranges_help_rounding(scheme: Any) -> None:
    problem = llama_layer(scheme)
    plainly = replace(problem, options=MethodOptions(ranges="minmax"))
    weighted: Any = METHODS["rtn"].quantize_layer(problem).reports
    plain: Any = METHODS["rtn"].quantize_layer(plainly).reports
    assert [r.rtn_error for r in weighted] == [r.error for r in plain]
    assert sum(r.held_out_error for r in weighted) < 0.9 * sum(r.held_out_error for r in plain)


def test_ranges_of_bitsandbytes_stay_the_largest_magnitude() -> None:
    problem = llama_layer(CodebookScheme("nf4"))
    first, second = (
        METHODS["nf4"].quantize_layer(replace(problem, options=options)).weights
        for options in (MethodOptions(), MethodOptions(ranges="minmax"))
    )
    for name, tensor in first.items():
        assert all(torch.equal(p, second[name].parts()[k]) for k, p in tensor.parts().items())
