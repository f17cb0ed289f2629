"""The size of a quantization before torch is imported: by the planner's shapes, for a first line at once."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from ...base.errors import BadInput
from ..base.scheme import PER_CHANNEL
from ..check.kernels import engine_rules
from ..families.config import has_table_rule, model_shape
from ..methods.registry import METHODS
from ..model.checkpoint import gguf_file_of, read_json
from .request import DEFAULT_GROUP_SIZES, QuantizeRequest, searches

_PLAIN_BYTES = 2


def sketched_readers(request: QuantizeRequest) -> str:
    """The format and the engines that have a reader of it, before each linear is checked. Empty for several
    formats, or where options may keep the plan from the method's own format."""
    name, options = request.format, request.scheme_options
    is_own = options.bits is None and options.symmetric is None and not searches(request)
    if name is None and is_own:
        name = METHODS[request.method].default_format
    if name is None or "," in name:
        return ""
    readers = [r.name for r in engine_rules().values() if r.has(name, r.version(None))]
    readers += ["llama.cpp"] * (name == "gguf")
    return (
        f"; {name} has a reader in {', '.join(['llmopt', *readers])} (each linear is checked next)"
    )


def sketched_bytes(request: QuantizeRequest) -> int | None:
    """About the bytes of all tensors. None where the names of linears or the values decide: a search, a GGUF
    type, options by name, or a model that the table of families does not know."""
    is_by_name = bool(request.overrides or request.ignore or request.lm_head or request.vision)
    to_blocks = request.gguf_type is not None or "gguf" in (request.format or "")
    if is_by_name or to_blocks or searches(request) or gguf_file_of(request.model) is not None:
        return None
    config = read_json(request.model / "config.json")
    if not has_table_rule(config):
        return None
    tensors = [*model_shape(config).tensors()]
    widths = {tensor.in_features for tensor in tensors if tensor.role in ("linear", "expert")}
    method, options = METHODS[request.method], request.scheme_options
    if method.grouped and options.group_size is None:
        fits = (s for s in DEFAULT_GROUP_SIZES if not any(width % s for width in widths))
        options = replace(options, group_size=next(fits, PER_CHANNEL))
    total = 0.0
    with suppress(BadInput):  # the plan says it with the name of the linear
        scheme = method.scheme(options)
        for tensor in tensors:
            bits = 8.0 * _PLAIN_BYTES
            if tensor.role in ("linear", "expert"):
                bits = scheme.bits_per_weight(tensor.out_features, tensor.in_features)
            total += bits * tensor.num_elements * tensor.count / 8
        return int(total)
    return None
