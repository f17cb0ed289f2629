"""Scales fitted to codes: the least squares of a linear's output error over `sv` and `su`, in turn.

With the states given, a weight is linear in the scales of its outputs, and in those of its inputs. Each
output channel has a quotient of two products; the inputs have one system, whose matrix is the Gram matrix
times that of the codes, element by element.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from .incoherence import Incoherence

_ROUNDS = 2


def fitted_scales(
    transforms: Incoherence,
    values: torch.Tensor,
    weight: torch.Tensor,
    gram: torch.Tensor,
    damp: float,
) -> Incoherence:
    """The transforms with scales of least `|X(W - W')ᵀ|²`.

    Args:
        values: float32 `[out, in]`, of the codes.
        weight: float32 `[out, in]`, what they stand for.
        gram: float32 `[in, in]`, XᵀX.
        damp: of the mean of its diagonal, added to it.
    """
    gram = gram.clone()
    gram.diagonal().add_(damp * float(gram.diagonal().mean()))
    codes = transforms.unscaled(values)
    wanted = weight @ gram
    outputs, inputs = transforms.outputs, transforms.inputs
    for _ in range(_ROUNDS):
        scaled = codes * inputs
        energy = ((scaled @ gram) * scaled).sum(dim=1)
        fits = (wanted * scaled).sum(dim=1) / energy.clamp(min=1e-30)
        outputs = torch.where((outputs != 0) & (energy > 0), fits, outputs)
        turned = codes * outputs[:, None]
        system = (turned.T @ turned) * gram
        missing = (turned * wanted).sum(dim=0) - system @ inputs
        system.diagonal().add_(damp * float(system.diagonal().mean()) + 1e-30)
        step = torch.linalg.solve(system, missing)
        inputs = torch.where(inputs != 0, inputs + step, 0.0)
    return replace(transforms, inputs=inputs.half().float(), outputs=outputs.half().float())
