"""What `awq`, `trellis` and `quip` take where the command leaves it open.

All aim at the float model's outputs (GPTAQ); `awq` has R2 beside it.
`tools/choices.py` measures the first two on a real model (docs/rotations.md). Nothing of it changes what a
loader sees: R2 turns the values of heads inside a layer, so that a tied output projection stays tied.
"""

from __future__ import annotations

from dataclasses import replace

from ..base.errors import BadInput
from ..methods.options import TRANSFORMED, solver_of
from ..model.experts import with_experts_apart
from ..open import open_plain
from ..request.request import QuantizeRequest
from ..rotation.rotate import rotated
from ..rotation.rotation_map import R2


def with_defaults(request: QuantizeRequest) -> QuantizeRequest:
    """The request with `rotations` and `options.asymmetric` decided where they are None.

    They are taken where there is error feedback on decoder layers that are run as they are quantized; R2
    where the model's values can be turned.
    """
    options, rotations = request.options, request.rotations
    feeds_back = request.method == "awq" and solver_of(request.method, options.solver) == "gptq"
    transformed = request.method in TRANSFORMED
    runs = request.errors and request.stats is None and options.true_sequential
    runs = runs and not request.vision
    if rotations is None:
        rotations = (R2,) if feeds_back and runs and _turns(request) else ()
    if options.asymmetric is None:
        options = replace(options, asymmetric=(feeds_back or transformed) and runs)
    return replace(request, rotations=rotations, options=options)


def _turns(request: QuantizeRequest) -> bool:
    """Whether R2 leaves the model's logits, and nothing else takes its tensors apart."""
    if request.gguf_type is not None or "gguf" in (request.format or ""):
        return False
    try:
        checkpoint = open_plain(request.model, trust_remote_code=request.trust_remote_code)
        if with_experts_apart(checkpoint) is not checkpoint:
            return False
        rotated(checkpoint, (R2,), request.seed)
    except BadInput:  # what is wrong with the model itself is said by the plan
        return False
    return True
