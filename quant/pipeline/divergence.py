"""KL divergence of rounded models from the float model on held-out samples, layer by layer.

The float model and every candidate walk through the layers together, so each layer is loaded once. Logits are
computed for a few tokens at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.nn import functional

from ..base.progress import Progress
from ..base.scheme import Scheme
from ..calibration.calibration import Images
from ..kinds.base.kind import kind_of
from ..layers.quantized_layer import HEAD_FAMILY
from ..methods.base import LayerProblem
from ..methods.rounding import round_weight
from ..plan.plan import QuantizePlan
from ..request.selection import HEAD
from ..stream.calls import States
from ..stream.layer_stream import LayerStream

_LOGITS = 2**24  # values of a matrix of logits
_HEAD_ROWS = 2**13  # of the output projection that are in float32 at a time


def rounded(plan: QuantizePlan, scheme: Scheme, module: str, weight: torch.Tensor) -> torch.Tensor:
    """A float32 weight `[out, in]` after rounding to the nearest values of a scheme, or with the noise of
    trellis codes, whose search takes too long to try widths."""
    if (noisy := kind_of(scheme).noisy(weight, module)) is not None:
        return noisy
    problem = LayerProblem(
        prefix=module,
        family=HEAD_FAMILY,
        schemes={HEAD: scheme},
        scale_dtypes={HEAD: plan.scale_dtype(module)},
        weights={HEAD: weight},
        statistics={},
        norms={},
        with_bias=frozenset(),
    )
    return round_weight(problem, HEAD, weight).dequantize()


def round_layer(
    plan: QuantizePlan,
    schemes: Mapping[str, Scheme],
    prefix: str,
    weights: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """The weights of a layer that the plan quantizes, rounded; `weights` by name relative to it."""
    return {
        name: rounded(plan, schemes[f"{prefix}.{name}"], f"{prefix}.{name}", weight)
        for name, weight in weights.items()
        if f"{prefix}.{name}" in schemes
    }


def divergences(
    plan: QuantizePlan,
    stream: LayerStream,
    token_ids: torch.Tensor,
    candidates: Sequence[Mapping[str, Scheme]],
    progress: Progress,
    images: Images = (),
) -> list[float]:
    """Mean KL divergence in nats of each candidate, rounded to nearest, from the float model.

    Args:
        token_ids: samples `[samples, length]`.
        candidates: schemes of all quantized linears, by full name.
        images: of each sample; empty for text alone.
    """
    progress.start("checking by KL", stream.num_layers, "layers")
    stream.prepare(token_ids, images)
    plain = stream.embed(token_ids, images)
    states = [stream.embed(token_ids, images) for _ in candidates]
    for index in range(stream.num_layers):
        stream.load(index, stream.tensors(index))
        plain = stream.run(index, plain, in_place=True)
        before = stream.weights(index, stream.family(index).linears)
        for number, schemes in enumerate(candidates):
            stream.substitute(index, round_layer(plan, schemes, stream.prefix(index), before))
            states[number] = stream.run(index, states[number], in_place=True)
        stream.unload(index)
        stream.checkpoint.release()
        progress.advance()
    progress.finish()
    weight, bias = stream.head()
    heads = [weight]
    heads += [
        rounded(plan, schemes[HEAD], HEAD, weight.float()) if HEAD in schemes else weight
        for schemes in candidates
    ]
    return _mean_divergences(stream, [plain, *states], heads, bias)


def _mean_divergences(
    stream: LayerStream,
    states: Sequence[States],
    heads: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
) -> list[float]:
    """Of all states but the first from the first, over all tokens."""
    sums = torch.zeros(len(states) - 1, dtype=torch.float64)
    num_tokens, step = 0, max(1, _LOGITS // len(heads[0]))
    for batch in zip(*(stream.head_inputs(part) for part in states), strict=True):
        hidden = [part.flatten(0, -2).float() for part in batch]
        num_tokens += len(hidden[0])
        for begin in range(0, len(hidden[0]), step):
            rows = slice(begin, begin + step)
            logs = [
                functional.log_softmax(_logits(stream, part[rows], head, bias), dim=-1)
                for part, head in zip(hidden, heads, strict=True)
            ]
            for number, other in enumerate(logs[1:]):
                sums[number] += float((logs[0].exp() * (logs[0] - other)).sum())
    return (sums / max(1, num_tokens)).tolist()


def _logits(
    stream: LayerStream, hidden: torch.Tensor, head: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Logits with the scale and the soft cap of the config (Granite, Cohere, Gemma)."""
    config = stream.checkpoint.text_config
    logits = torch.cat([hidden @ part.float().T for part in head.split(_HEAD_ROWS)], dim=-1)
    logits = logits if bias is None else logits + bias.float()
    logits = (
        logits * float(config.get("logit_scale") or 1) / float(config.get("logits_scaling") or 1)
    )
    cap = config.get("final_logit_softcapping")
    return logits if not cap else cap * torch.tanh(logits / cap)
