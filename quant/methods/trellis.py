"""The method `trellis`: QTIP's trellis codes behind incoherence processing, solved by error feedback.

Tseng et al., "QTIP: Quantization with Trellises and Incoherence Processing", NeurIPS 2024 (arXiv:2406.11235):
a weight is rotated on both sides, and its tiles are rounded to the nearest paths of a trellis, 16 input
channels at a time, each corrected for the errors of those before (block LDLQ: GPTQ's feedback on vectors).
Then the scales of inputs and outputs are fitted to the codes, by least squares, and those of a whole layer
are tuned together on the layer's output, towards the float model's.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..base.errors import BadInput, first_line
from ..base.memory import temporaries_kept
from ..base.scheme import SUPPORTED_BITS, IntScheme, Scheme, TrellisScheme
from ..feedback.column_loop import solve
from ..feedback.error_feedback import Feedback, asymmetric_shift, feedback, rounding_order
from ..grids.int_grid import round_to_nearest
from ..grids.trellis_grid import TrellisGrid, round_to_trellis, transforms_of
from ..tensors.trellis import TrellisTensor
from ..trellis.scale_fit import fitted_scales
from ..tuning.sign_descent import tune
from ..tuning.trellis_scales import TunedScales
from .base import LayerProblem, LayerResult, SchemeOptions
from .expert_statistics import gram_of
from .gptq import StageWork, quantize_stages, unusable
from .options import choose_bits, refuse_options
from .rounding import module_name, require_finite, require_scales

_RATE = 4e-3  # length of the first step of fine-tuning, in mean scales


class Trellis:
    """Trellis codes of 1 to 8 bits, with a float16 scale for each input and output channel."""

    name = "trellis"
    num_samples = 512
    default_format = "exl3"
    needs_statistics = True
    grouped = False
    sequential = True
    blockwise = False

    def scheme(self, options: SchemeOptions) -> Scheme:
        refuse_options(self.name, options, "bits")
        return TrellisScheme(choose_bits(self.name, options.bits, range(1, 9), 3))

    def quantize_layer(self, problem: LayerProblem) -> LayerResult:
        return _finetuned(problem, quantize_stages(problem, _Work(problem)))


class _Work(StageWork):
    def quantize(self, linears: tuple[str, ...]) -> None:
        """Quantize linears that share their input; each has transforms, and a factorisation, of its own."""
        reason = unusable(self.problem, linears[0])
        gram = None if reason else gram_of(self.problem, linears[0])
        for name in linears:
            self._quantize(name, gram, reason)

    def _quantize(self, name: str, gram: torch.Tensor | None, reason: str | None) -> None:
        problem, scheme = self.problem, self.problem.schemes[name]
        assert isinstance(scheme, TrellisScheme)
        weight, module = problem.weights[name], module_name(problem, name)
        require_finite(weight, module)
        transforms = transforms_of(weight, scheme, module)
        grid, damp = TrellisGrid(scheme, transforms), None
        tensor = None
        if gram is not None:
            factor = _factor(transforms.of_inputs(gram), problem.options.damp)
            damp = None if factor is None else factor.damp
            tensor = None if factor is None else self._solved(name, grid, factor)
            reason = None if tensor is not None else "error feedback failed under any damping"
        if tensor is None:
            tensor = round_to_trellis(weight, scheme, name=module)
        elif gram is not None:
            sides = fitted_scales(transforms, tensor.inner(), weight, gram, problem.options.damp)
            tensor = replace(tensor, suh=sides.inputs.half(), svh=sides.outputs.half())
        require_scales(tensor, module)
        self.codes[name] = tensor
        self.reports[name] = problem.report(
            name, tensor.dequantize(), _integers(weight, scheme), damp=damp, fallback=reason
        )

    def _solved(self, name: str, grid: TrellisGrid, factor: Feedback) -> TrellisTensor | None:
        problem = self.problem
        weight = grid.transforms.forward(problem.weights[name])
        cross = problem.statistics[name].cross
        if cross is not None:
            weight += asymmetric_shift(weight, grid.transforms.of_inputs(cross), factor)
        solved = solve(
            weight, factor, grid, slots=factor.channels, static_groups=True, weighted=False
        )
        return None if solved is None else grid.tensor(solved.values, solved.parameters)


def _finetuned(problem: LayerProblem, result: LayerResult) -> LayerResult:
    """The layer with its scales tuned, for `options.finetune_steps`; as it is where the layer is not run."""
    options, block = problem.options, problem.block
    if not options.finetune_steps or block is None:
        return result
    parts = {
        name: TunedScales(tensor)
        for name, tensor in result.weights.items()
        if isinstance(tensor, TrellisTensor)
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
    for name, report in zip(parts, result.reports, strict=True):
        tensor = result.weights[name] = parts[name].tensor()
        require_scales(tensor, report.module)
        rounded = _integers(problem.weights[name], tensor.scheme)
        reports.append(
            problem.report(
                name, tensor.dequantize(), rounded, damp=report.damp, fallback=report.fallback
            )
        )
    return replace(result, reports=reports)


def _integers(weight: torch.Tensor, scheme: TrellisScheme) -> torch.Tensor:
    """The yardstick: rounding to nearest on asymmetric integers of as many bits, in groups of 128.

    The nearest path of a trellis would take as long as the method.
    """
    bits = next(bits for bits in SUPPORTED_BITS if bits >= scheme.bits)
    return round_to_nearest(weight, IntScheme(bits, 128, False), torch.float16).dequantize()


def _factor(gram: torch.Tensor, damp: float) -> Feedback | None:
    order = rounding_order(gram, "group-aware", len(gram), TrellisGrid.vector)
    return feedback(gram, order, damp)
