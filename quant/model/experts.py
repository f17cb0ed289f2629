"""Split MoE experts: fused 3-D expert parameters as separate linears, to be measured and replaced.

transformers keeps the experts of a layer in two 3-D parameters; checkpoints mostly store one matrix for
each projection of each expert. Calibration needs the latter: each expert's input is its routed tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

# Names of gate, up and down on disk.
LEAVES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))

_Gate = Callable[[torch.Tensor], torch.Tensor]


_TOKENS = "routed_tokens"


def routed_tokens(expert: nn.Module) -> torch.Tensor | None:
    """For each row of an expert's present input the number of its token, int64, -1: of none; None: it is no
    expert, or not taken apart here."""
    return getattr(expert, _TOKENS, None)


class _Expert(nn.Module):
    """One gated MLP; `combine` concatenates gate and up as the fused module expects."""

    def __init__(self, hidden: int, width: int, leaves: tuple[str, str, str], combine: _Gate):
        super().__init__()
        self._leaves = leaves
        self._combine = combine
        gate, up, down = leaves
        self.add_module(gate, nn.Linear(hidden, width, bias=False))
        self.add_module(up, nn.Linear(hidden, width, bias=False))
        self.add_module(down, nn.Linear(width, hidden, bias=False))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        gate, up, down = (self.get_submodule(leaf) for leaf in self._leaves)
        return down(self._combine(torch.stack((gate(tokens), up(tokens)))))


class SplitExperts(nn.ModuleList):
    """Drop-in replacement of a fused experts module.

    Args:
        fused: transformers' module; only its activation is kept.
        leaves: names of gate, up and down in an expert.
    """

    def __init__(self, fused: Any, leaves: tuple[str, str, str]):
        num_experts, hidden, width = fused.down_proj.shape
        if getattr(fused, "is_transposed", False):
            hidden, width = width, hidden
        concatenated = getattr(fused, "is_concatenated", True)
        apply_gate = fused._apply_gate

        def combine(gate_and_up: torch.Tensor) -> torch.Tensor:
            if concatenated:
                return apply_gate(torch.cat((gate_and_up[0], gate_and_up[1]), dim=-1))
            return apply_gate(gate_and_up.movedim(0, -1).flatten(-2))

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
    experts = kind(config)
    for expert in experts:
        expert.register_forward_pre_hook(_tell_tokens)
    return experts


def _tell_tokens(expert: nn.Module, inputs: tuple[torch.Tensor]) -> None:
    """Keep the tokens of an expert that is given all; the rows of those not routed to it are zero."""
    sent = inputs[0].any(dim=-1)
    numbers = torch.arange(len(sent), device=sent.device)
    setattr(expert, _TOKENS, torch.where(sent, numbers, -1))


def sequential_experts(module: nn.Module) -> Any:
    """The class that transformers puts in the place of fused experts for quantized checkpoints; or None."""
    from transformers.quantizers.base import MODULES_TO_PATCH_FOR_QUANTIZATION as PATCHED

    patch: Any = PATCHED.get(type(module).__name__)
    return None if patch is None else patch["module_name"]


def fused_experts(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Path and module of every fused, gated experts module without biases in a layer."""
    for path, module in layer.named_modules():
        shapes = [getattr(module, name, None) for name in ("gate_up_proj", "down_proj")]
        fused = all(isinstance(shape, nn.Parameter) and shape.dim() == 3 for shape in shapes)
        gated = hasattr(module, "_apply_gate") or sequential_experts(module) is not None
        if fused and gated and not getattr(module, "has_bias", False):
            yield path, module
