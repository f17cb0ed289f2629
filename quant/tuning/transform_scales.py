"""Adam on the scales around a linear's transforms, by the gradient of its weight (QuIP#'s fine-tuning).

Tseng et al., "QuIP#", ICML 2024 (arXiv:2402.04396), section 5: signs are relaxed to real numbers, which are
tuned together with the scales. Both are one vector a side in the files. Hadamard transforms act on rows and
on columns apart, so that a weight is `diag(sv) C diag(su)` with `C` fixed: no graph is needed.
"""

from __future__ import annotations

import torch

from ..kinds.base.transformed import TransformedTensor

_DECAYS = (0.9, 0.95)
_TINY = 1e-30


class TunedScales:
    """The tuned scales of a linear's inputs and outputs; see `Rounding`."""

    def __init__(self, tensor: TransformedTensor):
        self._tensor, sides = tensor, tensor.transforms
        self._codes = sides.unscaled(tensor.inner()).contiguous()
        self._inputs, self._outputs = _Adam(sides.inputs), _Adam(sides.outputs)

    def keep(self) -> None:
        """Remember the present scales."""
        self._inputs.keep()
        self._outputs.keep()

    def recall(self) -> None:
        """Go back to the scales that were kept last; those of the beginning at first."""
        self._inputs.recall()
        self._outputs.recall()

    def write(self, into: torch.Tensor) -> None:
        """The weight under the present scales in `into` `[out, in]`, in its dtype."""
        into.copy_((self._codes * self._inputs.values).mul_(self._outputs.values[:, None]))

    def descend(self, gradient: torch.Tensor, rate: float) -> None:
        """One step for the gradient of the weight `[out, in]`; `rate` is in mean magnitudes of the scales."""
        by_code = gradient.to(torch.float32) * self._codes
        by_input, by_output = self._outputs.values @ by_code, by_code @ self._inputs.values
        self._inputs.descend(by_input, rate)
        self._outputs.descend(by_output, rate)

    def tensor(self) -> TransformedTensor:
        """The weight with its scales as they are stored."""
        return self._tensor.with_scales(self._inputs.values, self._outputs.values)


class _Adam:
    """A vector and its moments (Kingma and Ba, arXiv:1412.6980); zeros stay zero.

    Args:
        values: float32; their mean magnitude is the length of a step at rate 1.
    """

    def __init__(self, values: torch.Tensor):
        self.values = values
        self._live = values != 0
        self._length = float(values[self._live].abs().mean()) if bool(self._live.any()) else 0.0
        self._mean, self._square = torch.zeros_like(values), torch.zeros_like(values)
        self._steps = 0
        self._kept = values.clone()

    def keep(self) -> None:
        self._kept.copy_(self.values)

    def recall(self) -> None:
        self.values.copy_(self._kept)

    def descend(self, gradient: torch.Tensor, rate: float) -> None:
        self._steps += 1
        first, second = _DECAYS
        self._mean.lerp_(gradient, 1 - first)
        self._square.lerp_(gradient.square(), 1 - second)
        spread = (self._square / (1 - second**self._steps)).sqrt_().add_(_TINY)
        step = (self._mean / spread).mul_(self._live)
        self.values.sub_(step, alpha=rate * self._length / (1 - first**self._steps))
