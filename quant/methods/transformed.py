"""The methods `trellis` and `quip`: codes after incoherence processing, solved by error feedback.

QTIP (arXiv:2406.11235) and QuIP# (arXiv:2402.04396): a weight is turned on both sides, and vectors of inputs
are rounded, each corrected for the errors before (block LDLQ). Then scales are fitted to the codes by least
squares, and a layer's are tuned together on its output.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...base.errors import BadInput, first_line
from ..base.device import temporaries_kept
from ..kinds.base.incoherence import (
    TransformedGrid,
    TransformedKind,
    TransformedTensor,
    fitted_scales,
)
from ..kinds.base.kind import kind_of
from ..kinds.base.tensor import require_finite, require_scales
from .autoround import TunedScales
from .base import LayerProblem, LayerResult, full_name
from .error_feedback import Solver, asymmetric_shift, feedback, rounding_order
from .gptq import StageWork, quantize_stages, unusable
from .rounding import gram_of, own_gram
from .sign_descent import tune

_RATE = 4e-3  # length of the first step of fine-tuning, in mean scales
_UNSOLVED = "error feedback failed under any damping"


def quantize_layer(problem: LayerProblem) -> LayerResult:
    return _finetuned(problem, quantize_stages(problem, _Work(problem)))


class _Work(StageWork):
    def quantize(self, linears: tuple[str, ...]) -> None:
        """Quantize linears that share their input; each has transforms, and a factorisation, of its own."""
        reason = unusable(self.problem, linears[0])
        gram = None if reason else gram_of(self.problem, linears[0])
        for name in linears:
            weight, module = self.problem.weights[name], full_name(self.problem.prefix, name)
            require_finite(weight, module)
            kind = kind_of(self.problem.schemes[name])
            assert isinstance(kind, TransformedKind)
            grid = kind.grid_of(weight, module)
            solved = None if gram is None else self._solved(name, grid, gram)
            tensor, damp = solved or (grid.nearest(weight), None)
            require_scales(tensor, module)
            self.codes[name] = tensor
            self.reports[name] = self.problem.report(
                name,
                tensor.dequantize(),
                grid.yardstick(weight),
                damp=damp,
                fallback=reason or (None if solved else _UNSOLVED),
            )

    def _solved(
        self, name: str, grid: TransformedGrid[Any, Any], gram: torch.Tensor
    ) -> tuple[TransformedTensor, float] | None:
        """A weight solved by error feedback, and the damping; None where that fails."""
        weight, sides, damp = self.problem.weights[name], grid.transforms, self.problem.options.damp
        turned_gram = sides.of_inputs(gram)
        order = rounding_order(turned_gram, "group-aware", len(gram), grid.vector)
        factor = feedback(turned_gram, order, damp)
        if factor is None:
            return None
        turned = sides.forward(weight)
        cross = self.problem.statistics[name].cross
        if cross is not None:
            own = own_gram(self.problem, name)
            own = None if own is None else sides.of_inputs(own)
            turned += asymmetric_shift(turned, sides.of_inputs(cross), factor, own)
        tensor = Solver(
            turned, factor, grid, slots=factor.channels, static_groups=True, weighted=False
        ).run()
        if tensor is None:
            return None
        assert isinstance(tensor, TransformedTensor)
        fitted = fitted_scales(sides, tensor.inner(), weight, gram, damp)
        return tensor.with_scales(fitted.inputs, fitted.outputs), factor.damp


def _finetuned(problem: LayerProblem, result: LayerResult) -> LayerResult:
    """The layer with its scales tuned, for `options.finetune_steps`; as it is where the layer is not run."""
    options, block = problem.options, problem.block
    if not options.finetune_steps or block is None:
        return result
    parts = {
        name: TunedScales(tensor)
        for name, tensor in result.weights.items()
        if isinstance(tensor, TransformedTensor)
    }
    shapes = {name: problem.weights[name].shape for name in parts}
    steps, rate = options.finetune_steps, options.lr or _RATE
    try:
        with temporaries_kept():
            tune(block, parts, shapes, iters=steps, rate=rate, batch_size=options.batch_size)
    except RuntimeError as error:
        raise BadInput(
            f"{problem.prefix} gives no gradients: {first_line(error)}: take --finetune-steps 0"
        ) from error
    reports = []
    for name, before in zip(parts, result.reports, strict=True):
        tensor = result.weights[name] = parts[name].tensor()
        require_scales(tensor, before.module)
        effective = tensor.dequantize()
        tuned = problem.report(name, effective, effective)
        errors = {"error": tuned.error, "held_out_error": tuned.held_out_error}
        reports.append(replace(before, **errors))
    return replace(result, reports=reports)
