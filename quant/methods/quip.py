"""The method `quip`: QuIP#'s lattice codes behind incoherence processing, solved by error feedback.

Tseng et al., "QuIP#: Even Better LLM Quantization with Hadamard Incoherence and Lattice Codebooks", ICML
2024 (arXiv:2402.04396): a weight is turned on both sides, and vectors of 8 input channels are rounded to the
nearest points of E8P, each corrected for the errors of those before (block LDLQ: GPTQ's feedback on vectors).
Then the scales of inputs and outputs are fitted to the codes, by least squares, where QuIP# fine-tunes them.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..base.scheme import E8pScheme, Scheme
from ..feedback.column_loop import solve
from ..feedback.error_feedback import asymmetric_shift, feedback, rounding_order
from ..grids.e8p_grid import E8pGrid, round_to_e8p, transforms_of
from ..tensors.e8p import E8pTensor
from ..trellis.scale_fit import fitted_scales
from .base import LayerProblem, LayerResult, SchemeOptions
from .expert_statistics import gram_of
from .gptq import StageWork, quantize_stages, unusable
from .options import choose_bits, refuse_options
from .rounding import module_name, require_finite, require_scales

_UNSOLVED = "error feedback failed under any damping"


class Quip:
    """Points of the E8 lattice, 2, 3 or 4 bits a weight, with a float16 scale for each input and output."""

    name = "quip"
    num_samples = 512
    default_format = "quip"
    needs_statistics = True
    grouped = False
    sequential = True
    blockwise = False

    def scheme(self, options: SchemeOptions) -> Scheme:
        refuse_options(self.name, options, "bits")
        return E8pScheme(choose_bits(self.name, options.bits, range(2, 5), 2))

    def quantize_layer(self, problem: LayerProblem) -> LayerResult:
        return quantize_stages(problem, _Work(problem))


class _Work(StageWork):
    def quantize(self, linears: tuple[str, ...]) -> None:
        """Quantize linears that share their input; each has transforms, and a factorisation, of its own."""
        reason = unusable(self.problem, linears[0])
        gram = None if reason else gram_of(self.problem, linears[0])
        for name in linears:
            weight, module = self.problem.weights[name], module_name(self.problem, name)
            require_finite(weight, module)
            scheme = self.problem.schemes[name]
            assert isinstance(scheme, E8pScheme)
            rounded = round_to_e8p(weight, scheme, name=module)
            solved = None if gram is None else self._solved(name, scheme, gram)
            tensor, damp = solved or (rounded, None)
            require_scales(tensor, module)
            self.codes[name] = tensor
            self.reports[name] = self.problem.report(
                name,
                tensor.dequantize(),
                rounded.dequantize(),
                damp=damp,
                fallback=reason or (_UNSOLVED if solved is None else None),
            )

    def _solved(
        self, name: str, scheme: E8pScheme, gram: torch.Tensor
    ) -> tuple[E8pTensor, float] | None:
        """A weight solved by error feedback, and the damping; None where that fails."""
        problem, weight = self.problem, self.problem.weights[name]
        transforms = transforms_of(weight, scheme, module_name(problem, name))
        turned_gram = transforms.of_inputs(gram)
        order = rounding_order(turned_gram, "group-aware", len(gram), E8pGrid.vector)
        factor = feedback(turned_gram, order, problem.options.damp)
        if factor is None:
            return None
        turned = transforms.forward(weight)
        cross = problem.statistics[name].cross
        if cross is not None:
            turned += asymmetric_shift(turned, transforms.of_inputs(cross), factor)
        grid = E8pGrid(scheme, transforms)
        solved = solve(
            turned, factor, grid, slots=factor.channels, static_groups=True, weighted=False
        )
        if solved is None:
            return None
        tensor = grid.tensor(solved.values, solved.parameters)
        sides = fitted_scales(transforms, tensor.inner(), weight, gram, problem.options.damp)
        return replace(tensor, su=sides.inputs.half(), sv=sides.outputs.half()), factor.damp
