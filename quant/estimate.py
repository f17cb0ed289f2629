"""Peak memory and arithmetic of a run, as stated functions of the sizes of a layer."""

from __future__ import annotations

from dataclasses import dataclass, fields

from .durable import entry_bytes
from .layer_stream import TOKENS_PER_BATCH
from .plan import Plan
from .selection import HEAD

_FLOAT = 4
# Float copies of the largest linears with one input that a method has beside the weights themselves.
_COPIES = {"gptq": 4.0, "awq": 5.0, "smoothquant": 3.0, "hqq": 5.0, "squeezellm": 4.0}
_FEW_COPIES = 5.0
_STAGES = 4  # of a decoder layer under true-sequential: attention in and out, MLP in and out


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Peak resident bytes beyond the process as it starts: the sum of these, for the largest layer.

    Attributes:
        hidden: hidden states of all calibration tokens, float32.
        layer: the largest layer as it is stored (mapped pages), and its float32 copy.
        grams: Gram matrices of the inputs of its linears, for calibration and held-out tokens, and those
            measured anew.
        codes: the quantized layer, one byte a weight, and packed.
        work: copies of the largest linears that the method makes.
        activations: of one batch inside the layer.
    """

    hidden: int
    layer: int
    grams: int
    codes: int
    work: int
    activations: int

    @property
    def bytes(self) -> int:
        """The sum."""
        return sum(getattr(self, field.name) for field in fields(self))


def estimate_memory(plan: Plan, hidden_size: int, tokens: int, held_out: bool) -> MemoryEstimate:
    """Peak memory of a run over so many calibration and held-out tokens."""
    estimates = [
        _layer_memory(plan, index, hidden_size, tokens, held_out)
        for index in _distinct_layers(plan)
    ]
    if plan.lm_head:
        rows, width = plan.modules[HEAD]
        weight = rows * width
        estimates.append(
            MemoryEstimate(
                hidden=tokens * hidden_size * _FLOAT,
                layer=weight * (_FLOAT + 2),
                grams=width * width * _FLOAT * (2 if held_out else 1),
                codes=2 * weight,
                work=int(_COPIES.get(plan.method.name, _FEW_COPIES) * weight * _FLOAT),
                activations=TOKENS_PER_BATCH * width * _FLOAT,
            )
        )
    return max(estimates, key=lambda estimate: estimate.bytes)


def _distinct_layers(plan: Plan) -> list[int]:
    """One layer of each shape."""
    seen: dict[tuple[tuple[str, tuple[int, int]], ...], int] = {}
    for index in range(plan.num_layers):
        seen.setdefault(tuple(_linears(plan, index).items()), index)
    return list(seen.values())


def _linears(plan: Plan, index: int) -> dict[str, tuple[int, int]]:
    start = plan.architecture.layer_prefix(index) + "."
    return {
        name.removeprefix(start): shape
        for name, shape in plan.modules.items()
        if name.startswith(start)
    }


def _layer_memory(
    plan: Plan, index: int, hidden_size: int, tokens: int, held_out: bool
) -> MemoryEstimate:
    checkpoint, start = plan.checkpoint, plan.architecture.layer_prefix(index) + "."
    stored = floats = 0
    for name in checkpoint.names:
        if name.startswith(start):
            dtype, shape = checkpoint.dtype_name(name), checkpoint.shape(name)
            stored += entry_bytes((dtype, shape))
            floats += 0 if dtype == "F32" else entry_bytes(("F32", shape))
    linears = _linears(plan, index)
    groups = [
        [linears[name] for name in group if name in linears]
        for group in plan.architecture.layers[index].shared_inputs
    ]
    groups = [group for group in groups if group]
    gram = sum(group[0][1] ** 2 for group in groups) * _FLOAT
    largest = max((sum(out * width for out, width in group) for group in groups), default=0)
    square = max((group[0][1] ** 2 for group in groups), default=0)
    weights = sum(out * width for out, width in linears.values())
    widest = max((max(shape) for shape in linears.values()), default=hidden_size)
    anew = plan.method.name == "gptq" and plan.options.true_sequential
    packed = sum(
        plan.schemes[start + name].bits_per_weight(*shape) * shape[0] * shape[1] / 8
        for name, shape in linears.items()
    )
    copies = _COPIES.get(plan.method.name, _FEW_COPIES)
    work = copies * largest * _FLOAT + 3 * square * _FLOAT * (plan.method.name == "gptq")
    if anew:  # while the layer runs with some weights replaced, it is there twice
        work = max(work, weights * _FLOAT)
    return MemoryEstimate(
        hidden=tokens * hidden_size * _FLOAT,
        layer=stored + floats,
        grams=gram * (1 + held_out + 2 * anew),
        codes=int(weights * (2 if anew else 1) + packed * len(plan.formats)),
        work=int(work),
        activations=min(tokens, TOKENS_PER_BATCH) * (4 * hidden_size + 3 * widest) * _FLOAT,
    )


def estimate_operations(plan: Plan, tokens: int) -> float:
    """Multiplications and additions of the whole run, at the rate of large matrix products."""
    passes = 2.0 + (_STAGES - 1) * (plan.method.name == "gptq" and plan.options.true_sequential)
    total = 0.0
    for out_features, in_features in plan.modules.values():
        square = in_features**2
        total += passes * 2 * tokens * out_features * in_features  # the layer itself
        total += passes / 2 * 2 * tokens * square / 2  # Gram matrices, shared by two or three
        total += 4 * out_features * square  # the errors in the report
        if plan.method.name == "gptq":
            total += 2 * out_features * square + 2 * square * in_features
        if plan.method.name == "awq":
            total += 30 * out_features * square
    return 2 * total  # what is done besides, and shapes that products like less
