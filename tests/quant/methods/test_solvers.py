"""GPTQ's error feedback on the grids of other methods, and what a weighted range is worth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.quant.base.errors import BadInput
from llmopt.quant.base.scheme import CodebookScheme, GgufScheme, IntScheme
from llmopt.quant.methods.base import MethodOptions, SchemeOptions
from llmopt.quant.methods.registry import METHODS
from llmopt.quant.methods.rtn import RoundToNearest
from llmopt.quant.methods.solvers import with_solver
from llmopt.quant.plan.plan import make_plan
from llmopt.quant.request.request import QuantizeRequest

from ...support.layer_problems import llama_layer
from ...support.quant_support import STORIES

SOLVED = MethodOptions(solver="gptq")


@pytest.mark.parametrize("name", ["rtn", "int8", "fp8", "nf4", "fp4", "squeezellm", "smoothquant"])
def test_error_feedback_on_the_grid_of_a_method(name: str) -> None:
    """Held-out errors are lower than those of the method alone, on the very scheme."""
    method = METHODS[name]
    scheme = method.scheme(SchemeOptions())
    if isinstance(scheme, IntScheme) and name == "rtn":
        scheme = replace(scheme, group_size=32)
    problem = llama_layer(scheme)
    nearest: Any = method.quantize_layer(problem)
    solver = with_solver(method, "gptq")
    assert solver.needs_statistics and solver.name == name
    solved: Any = solver.quantize_layer(replace(problem, options=SOLVED))
    assert all(tensor.scheme == scheme for tensor in solved.weights.values())
    totals = [sum(r.held_out_error for r in one.reports) for one in (solved, nearest)]
    assert totals[0] < (0.98 if name == "smoothquant" else 0.8) * totals[1]


def test_methods_that_choose_their_codes_take_no_solver() -> None:
    for name in ("awq", "hqq"):
        with pytest.raises(BadInput, match="--solver gptq"):
            with_solver(METHODS[name], "gptq")
    with pytest.raises(BadInput, match="--act-order dynamic"):
        with_solver(METHODS["fp8"], "gptq").scheme(SchemeOptions(act_order="dynamic"))


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
    weighted: Any = RoundToNearest().quantize_layer(problem).reports
    plain: Any = RoundToNearest().quantize_layer(plainly).reports
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
