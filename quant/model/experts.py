"""Fused experts taken apart: those on disk as linears, and modules of transformers.

`with_experts_apart` is a view of a checkpoint with a layer's experts in two 3-D tensors, which no format
quantizes, where the family says `splits_experts`: transformers 5.23 (Llama 4) and vLLM 0.32 read them apart.
vLLM reads gpt-oss's whole. `split_experts` is for calibration, by routed tokens.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ...base.errors import BadInput
from ..families.registry import model_family, type_of
from .checkpoint import Checkpoint

GATE, UP, DOWN = LEAVES = "gate_proj", "up_proj", "down_proj"
# Gate with up and down of all experts on disk, and the module that holds the experts.
_STACKS = (
    (re.compile(r"(.*\.experts)\.gate_up_proj"), r"{}.down_proj", "{}"),
    (re.compile(r"(.*\.experts)\.fc1\.weight"), r"{}.fc2.weight", "{}"),
    (re.compile(r"(.*)\.input_linear\.weight"), r"{}.output_linear.weight", "{}.experts"),
)
# Formats whose codes those loaders read for an expert by itself.
APART_FORMATS = ("awq", "compressed-tensors", "fp8", "gptq")
_APART = re.compile(rf"(.*\.experts)\.(\d+)\.({GATE}|{UP}|{DOWN})(\.weight)?")


class Part(NamedTuple):
    """A weight of one expert in a fused tensor [experts, out, in], or [experts, in, out] if `transposed`."""

    tensor: str
    expert: int
    rows: slice
    transposed: bool

    def of(self, experts: Any) -> torch.Tensor:
        """The weight [out, in], from the fused tensor or a slice of the file that holds it."""
        whole = experts[self.expert]
        return (whole.T if self.transposed else whole)[self.rows].contiguous()


class ExpertsApart(Checkpoint):
    """A plain checkpoint with `parts` in the place of its fused experts."""

    def __init__(self, source: Checkpoint, parts: Mapping[str, Part]) -> None:
        super().__init__(source.folder, trust_remote_code=source.trust_remote_code)
        self._parts = parts
        fused = {part.tensor for part in parts.values()}
        shards = {name: self.shard_of[part.tensor] for name, part in parts.items()}
        self.shard_of = {n: s for n, s in self.shard_of.items() if n not in fused} | shards

    def tensor(self, name: str) -> torch.Tensor:
        part = self._parts.get(name)
        if part is None:
            return super().tensor(name)
        return part.of(self._slices(name, part))

    def shape(self, name: str) -> tuple[int, ...]:
        part = self._parts.get(name)
        if part is None:
            return super().shape(name)
        _, first, second = self._slices(name, part).get_shape()
        return part.rows.stop - part.rows.start, first if part.transposed else second

    def dtype_name(self, name: str) -> str:
        part = self._parts.get(name)
        if part is None:
            return super().dtype_name(name)
        return self._slices(name, part).get_dtype()

    def _slices(self, name: str, part: Part) -> Any:
        return self._open(self.shard_of[name]).get_slice(part.tensor)


def with_experts_apart(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with fused experts as linears, if its family splits them. BadInput: misfits."""
    family = model_family(type_of(checkpoint.config))
    if family is None or not family.splits_experts:
        return checkpoint
    parts = parts_of({name: checkpoint.shape(name) for name in checkpoint.names})
    return ExpertsApart(checkpoint, parts) if parts else checkpoint


def parts_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Part]:
    parts: dict[str, Part] = {}
    for name, shape in shapes.items():
        for pattern, other, module in _STACKS:
            match = pattern.fullmatch(name)
            down = other.format(match[1]) if match else ""
            if match and len(shape) == len(shapes.get(down, ())) == 3:
                parts |= _parts(module.format(match[1]), name, down, shape, shapes[down])
    return parts


def _parts(
    module: str, gate_up: str, down: str, into: tuple[int, ...], out_of: tuple[int, ...]
) -> dict[str, Part]:
    """The weights of every expert, by name; how the tensors lie follows from both shapes."""
    (count, first, second), (_, third, fourth) = into, out_of
    plain, transposed = (
        (first, second) == (2 * fourth, third),
        (second, first) == (2 * third, fourth),
    )
    if into[0] != out_of[0] or not (plain or transposed):
        raise BadInput(f"{gate_up} is {list(into)}, which does not fit {down}, {list(out_of)}")
    width, hidden = (third, fourth) if transposed else (fourth, third)
    names = {
        GATE: (gate_up, slice(0, width)),
        UP: (gate_up, slice(width, 2 * width)),
        DOWN: (down, slice(0, hidden)),
    }
    return {
        f"{module}.{expert}.{leaf}.weight": Part(tensor, expert, rows, transposed)
        for expert in range(count)
        for leaf, (tensor, rows) in names.items()
    }


def experts_of(names: Iterable[str]) -> dict[str, int]:
    """The modules of experts that are apart, with the number of experts that have all three weights."""
    weights: dict[str, Counter[str]] = defaultdict(Counter)
    for name in names:
        if match := _APART.fullmatch(name):
            weights[match[1]][match[2]] += 1
    return {module: sum(n == 3 for n in counts.values()) for module, counts in weights.items()}


def fused(module: Any, experts: Collection[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The parameters of transformers' fused `module` from its experts' weights, each [out, in]."""
    gate_up = torch.stack([torch.cat((expert[GATE], expert[UP])) for expert in experts])
    down = torch.stack([expert[DOWN] for expert in experts])
    if gate_up.shape != module.gate_up_proj.shape or down.shape != module.down_proj.shape:
        gate_up, down = gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    return {"gate_up_proj": gate_up, "down_proj": down}


# Names of gate, up and down on disk.
NAMES_ON_DISK = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))

_TOKENS = "routed_tokens"


def routed_tokens(expert: nn.Module) -> torch.Tensor | None:
    """Token index of each row of an expert's input, int64, -1 for padding; None if it is no split expert."""
    return getattr(expert, _TOKENS, None)


class _Expert(nn.Module):
    """One gated MLP; `combine` concatenates gate and up as the fused module expects."""

    def __init__(self, hidden: int, width: int, leaves: tuple[str, str, str], combine: Any):
        super().__init__()
        self._leaves, self._combine = leaves, combine
        gate, up, down = leaves
        self.add_module(gate, nn.Linear(hidden, width, bias=False))
        self.add_module(up, nn.Linear(hidden, width, bias=False))
        self.add_module(down, nn.Linear(width, hidden, bias=False))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        gate, up, down = (self.get_submodule(leaf) for leaf in self._leaves)
        return down(self._combine(gate(tokens), up(tokens)))


class SplitExperts(nn.ModuleList):
    """Replacement of transformers' fused experts, of which the activation stays; `leaves` names linears."""

    def __init__(self, fused: Any, leaves: tuple[str, str, str]):
        num_experts, hidden, width = fused.down_proj.shape
        if getattr(fused, "is_transposed", False):
            hidden, width = width, hidden
        concatenated = getattr(fused, "is_concatenated", True)
        apply_gate = fused._apply_gate

        def combine(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            if concatenated:
                return apply_gate(torch.cat((gate, up), dim=-1))
            return apply_gate(torch.stack((gate, up), dim=-1).flatten(-2))

        super().__init__(_Expert(hidden, width, leaves, combine) for _ in range(num_experts))
        del fused.gate_up_proj, fused.down_proj

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Outputs `[tokens, hidden]`; index and weights are `[tokens, top_k]`."""
        outputs = torch.zeros_like(hidden_states)
        for number, expert in enumerate(self):
            tokens, slots = torch.where(top_k_index == number)
            if tokens.numel():
                setattr(expert, _TOKENS, tokens)
                weighted = expert(hidden_states[tokens]) * top_k_weights[tokens, slots, None]
                outputs.index_add_(0, tokens, weighted.to(outputs.dtype))
        return outputs


def split_experts(fused: Any, leaves: tuple[str, str, str], config: Any) -> nn.Module:
    """The experts of a fused module apart: transformers' own such module where it has one (Llama 4)."""
    if (kind := sequential_experts(fused)) is None:
        return SplitExperts(fused, leaves)

    def note_routed_tokens(expert: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        sent = inputs[0].any(dim=-1)  # it gets all tokens, as zeros those not routed to it
        numbers = torch.arange(len(sent), device=sent.device)
        setattr(expert, _TOKENS, torch.where(sent, numbers, -1))

    experts = kind(config)
    for expert in experts:
        expert.register_forward_pre_hook(note_routed_tokens)
    return experts


def patch_of(module: nn.Module) -> Any:
    """How transformers exchanges fused experts while it loads codes; None: not at all."""
    from transformers.quantizers.base import MODULES_TO_PATCH_FOR_QUANTIZATION as PATCHED

    return PATCHED.get(type(module).__name__)


def sequential_experts(module: nn.Module) -> Any:
    patch = patch_of(module)
    return None if patch is None else patch["module_name"]


def fused_experts(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Path and module of every fused, gated experts module without biases in a layer."""
    for path, module in layer.named_modules():
        weights = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
        fused = all(isinstance(weight, nn.Parameter) and weight.dim() == 3 for weight in weights)
        gated = hasattr(module, "_apply_gate") or sequential_experts(module) is not None
        if fused and gated and not getattr(module, "has_bias", False):
            yield path, module
