"""KL divergence of mixed precisions from the float model, before anything is written.

Float model and candidates walk through the layers together, so that each layer is loaded once, and logits are
computed for a few tokens at a time. The codes are those of the method's own solver, on the statistics that
the search has; each weight is solved once for every scheme that a candidate has for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch.nn import functional

from ...base.progress import Progress
from ..base.device import HOST
from ..base.scheme import Scheme
from ..families.layer_map import LayerMap
from ..kinds.base.kind import kind_of
from ..methods.base import LayerProblem, full_name
from ..methods.rounding import round_weight
from ..plan.journal import sha256_of
from ..plan.plan import QuantizePlan
from ..plan.selection import HEAD
from ..stream.calibration import Images
from ..stream.calls import States
from ..stream.layer_stream import LayerStream
from .cached_calibration import StatisticsFolder
from .quantized_layer import HEAD_FAMILY, LayerStatistics, quantize_tensors

LOGITS = 2**24  # values of a matrix of logits
_HEAD_ROWS = 2**13  # of the output projection that are in float32 at a time
Solved = tuple[str, Scheme]
"""A linear by its full name, and a scheme."""


def solver_facts(plan: QuantizePlan, modules: Iterable[str]) -> list[Any]:
    """Everything that the codes of linears depend on besides schemes and statistics, for JSON."""
    importance = {
        module: sha256_of(plan.importance[module].numpy().tobytes())
        for module in modules
        if module in plan.importance
    }
    formats = [weight_format.name for weight_format in plan.formats]
    return [plan.method.name, asdict(plan.options), formats, sorted(modules), importance]


def rounded(plan: QuantizePlan, scheme: Scheme, module: str, weight: torch.Tensor) -> torch.Tensor:
    """A float32 weight `[out, in]` after rounding to nearest, or with the noise of trellis codes."""
    if (noisy := kind_of(scheme).noisy(weight, module)) is not None:
        return noisy
    problem = LayerProblem(
        prefix=module,
        family=HEAD_FAMILY,
        schemes={HEAD: scheme},
        scale_dtypes={HEAD: plan.scale_dtype(module)},
        weights={HEAD: weight},
    )
    return round_weight(problem, HEAD, weight).dequantize()


def rounded_table(table: torch.Tensor, block: str) -> torch.Tensor:
    """An embedding or output head in its dtype, after rounding to a block type as the file has it."""
    from ..kinds.ggml.tensor import dequantize_blocks, quantize_blocks

    blocks = (quantize_blocks(rows, block) for rows in table.split(_HEAD_ROWS))
    return torch.cat([dequantize_blocks(part, block).to(table.dtype) for part in blocks])


def solve_layer(
    plan: QuantizePlan,
    family: LayerMap,
    prefix: str,
    tensors: Mapping[str, torch.Tensor],
    wanted: Iterable[Solved],
    measured: LayerStatistics | None,
) -> Iterator[tuple[Solved, torch.Tensor]]:
    """The float32 weights of a layer after codes of several schemes, by the method's solver on `measured`."""
    modules: dict[Scheme, list[str]] = {}
    for module, scheme in dict.fromkeys(wanted):
        modules.setdefault(scheme, []).append(module)
    for scheme, names in modules.items():
        if measured is None or plan.method.transformed:
            for module in names:
                name = module.removeprefix(f"{prefix}." if prefix else "")
                weight = tensors[f"{name}.weight"].to(plan.device, torch.float32)
                yield (module, scheme), rounded(plan, scheme, module, weight)
            continue
        part = replace(
            plan,
            modules={module: plan.modules[module] for module in names},
            schemes=dict.fromkeys(names, scheme),
        )
        work = quantize_tensors(
            part, family, prefix, tensors, None, measured, revert_worse=False, measures_errors=False
        )
        for name, codes in work.result.weights.items():
            yield (full_name(prefix, name), scheme), codes.dequantize().to(plan.device)


def divergences(
    plan: QuantizePlan,
    stream: LayerStream,
    token_ids: torch.Tensor,
    candidates: Sequence[Mapping[str, Scheme]],
    progress: Progress,
    images: Images = (),
    folder: StatisticsFolder | None = None,
) -> torch.Tensor:
    """KL divergence in nats of each candidate (schemes by full name) from the float model at each token of
    samples `[samples, length]`, float64 `[candidates, tokens]`; without a folder of statistics codes are
    rounded to nearest."""
    progress.start("checking by KL", stream.num_layers, "layers")
    stream.prepare(token_ids, images)
    plain = stream.embed(token_ids, images)
    # The rounded embedding and output head of a GGUF file, by the names of their tensors.
    tables = [
        {
            name: rounded_table(plan.checkpoint.tensor(name), str(schemes[module].ggml_type))
            for module in plan.gguf_tables
            for name in (f"{module}.weight",)
            if module in schemes
        }
        for schemes in candidates
    ]
    states = []
    for tensors in tables:
        stream.read_instead(tensors)
        states.append(stream.embed(token_ids, images))
    stream.read_instead({})
    for index in stream.loaded(range(stream.num_layers), progress):
        family, prefix, tensors = stream.family(index), stream.prefix(index), stream.tensors(index)
        plain = stream.run(index, plain, in_place=True)
        before = stream.weights(index, family.linears)
        measured = folder and folder.read(f"layer-{index:05d}", family, stream.device)
        pairs = [
            pair for kind in candidates for pair in kind.items() if pair[0].startswith(f"{prefix}.")
        ]
        solved = dict(solve_layer(plan, family, prefix, tensors, pairs, measured))
        for number, schemes in enumerate(candidates):
            weights = {
                name: solved[module, schemes[module]] if module in schemes else weight
                for name, weight in before.items()
                for module in (full_name(prefix, name),)
            }
            stream.substitute(index, weights)
            states[number] = stream.run(index, states[number], in_place=True)
    progress.finish()
    weight, bias = stream.head()
    measured = folder and folder.read("head", HEAD_FAMILY, stream.device) if plan.lm_head else None
    pairs = ((HEAD, schemes[HEAD]) for schemes in candidates if plan.lm_head and HEAD in schemes)
    tensors = {f"{HEAD}.weight": weight}
    solved = dict(solve_layer(plan, HEAD_FAMILY, "", tensors, pairs, measured))
    heads = [weight]
    for schemes, replaced in zip(candidates, tables, strict=True):
        stream.read_instead(replaced)
        own = solved.get((HEAD, schemes[HEAD])) if HEAD in schemes else None
        heads.append(stream.head()[0] if own is None else own)
    stream.read_instead({})
    return _token_divergences(stream, [plain, *states], heads, bias)


def _token_divergences(
    stream: LayerStream,
    states: Sequence[States],
    heads: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """KL divergence of every state from the first at every token, float64 `[states - 1, tokens]`."""
    parts: list[torch.Tensor] = []
    step = max(1, LOGITS // len(heads[0]))
    for batch in zip(*(stream.head_inputs(part) for part in states), strict=True):
        hidden = [part.flatten(0, -2).float() for part in batch]
        for begin in range(0, len(hidden[0]), step):
            rows = slice(begin, begin + step)
            logs = (
                functional.log_softmax(
                    scaled_logits(stream, plain_logits(part[rows], head, bias)), dim=-1
                )
                for part, head in zip(hidden, heads, strict=True)
            )
            plain = next(logs)
            shares = plain.exp()
            losses = [(plain - other).mul_(shares).sum(dim=-1) for other in logs]
            parts.append(torch.stack(losses).to(HOST, torch.float64))
    return torch.cat(parts, dim=1)


def plain_logits(
    hidden: torch.Tensor, head: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Outputs of the output projection, a part of its rows in float32 at a time."""
    logits = torch.cat([hidden @ part.float().T for part in head.split(_HEAD_ROWS)], dim=-1)
    return logits if bias is None else logits + bias.float()


def scaled_logits(stream: LayerStream, logits: torch.Tensor) -> torch.Tensor:
    """The logits with the scale and the soft cap of the config (Granite, Cohere, Gemma)."""
    config = stream.checkpoint.text_config
    if scale := config.get("logit_scale"):
        logits = logits * float(scale)
    if divisor := config.get("logits_scaling"):
        logits = logits / float(divisor)
    cap = config.get("final_logit_softcapping")
    return logits if not cap else cap * torch.tanh(logits / cap)
