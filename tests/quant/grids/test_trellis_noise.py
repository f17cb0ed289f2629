from __future__ import annotations

import pytest
import torch
from llmopt.quant.kinds.base.kind import kind_of
from llmopt.quant.kinds.trellis.kind import TrellisKind
from llmopt.quant.kinds.trellis.scheme import TrellisScheme

from ...support.layer_problems import heavy_weight
from ...support.native_paths import needs_compiler


@needs_compiler
@pytest.mark.parametrize("bits", range(1, 9))
def test_the_noise_is_as_large_as_the_error_of_the_nearest_paths(bits: int) -> None:
    """At 7 and 8 bits the error is mostly of the few values beyond the codebook, of which weights differ."""
    weight, scheme = heavy_weight(128, 128), TrellisScheme(bits)
    noise = TrellisKind(scheme).noisy(weight, "a") - weight
    error = kind_of(scheme).round(weight, torch.float16, name="a").dequantize() - weight
    assert float(noise.square().sum() / error.square().sum()) == pytest.approx(
        1, abs=0.06 if bits < 7 else 0.4
    )
    assert torch.equal(noise, TrellisKind(scheme).noisy(weight, "a") - weight)
