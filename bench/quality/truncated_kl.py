"""KL divergence from the top tokens of two distributions, all other tokens pooled in one bucket.

Servers tell the likeliest tokens only. Pooling never raises a KL divergence (the data-processing
inequality), so that this one is a lower bound of the KL divergence over the whole vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

# Sums of rounded probabilities leave a rest of about this size, of either sign.
SMALLEST_REST = 1e-9


class TruncatedKL(NamedTuple):
    """KL in nats, and the reference's probability in the bucket."""

    kl: float
    rest: float


def truncated_kl(
    reference: Mapping[int | str, float], model: Mapping[int | str, float]
) -> TruncatedKL:
    """KL(reference ‖ model) over the tokens of both and the bucket.

    Args:
        reference, model: natural-log probabilities of the likeliest tokens.
    """
    shared = reference.keys() & model.keys()
    p = {token: math.exp(reference[token]) for token in shared}
    rests = [
        max(1.0 - math.fsum(mass), SMALLEST_REST)
        for mass in (p.values(), (math.exp(model[token]) for token in shared))
    ]
    kl = math.fsum(p[token] * (reference[token] - model[token]) for token in shared)
    kl += rests[0] * math.log(rests[0] / rests[1])
    return TruncatedKL(max(kl, 0.0), rests[0])
