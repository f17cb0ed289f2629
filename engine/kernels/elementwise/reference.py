"""Norms, gates, RoPE, KV-cache write and quantized activations: interfaces of kernels, references in torch.

RoPE is of half-split (NeoX) pairs (i, i + width / 2) (arXiv:2104.09864); QK-norm comes before it.

A linear kernel declares how its input is quantized (`TakesQuantizedInput`); the kernel before may do it as it
writes (`FusesNormQuant`, `FusesGateQuant`). Quantization is batch-invariant: so a dynamic per-tensor scale is
computed per token, as are the outlier columns of LLM.int8().
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch.nn import functional

from ....quant.base.scheme import E4M3_MAX, Activations, Scheme
from ....quant.kinds.fp4.kind import block_scales, e2m1_codes, e2m1_table, fp4_factors
from ....quant.kinds.fp4.scheme import Fp4Scheme
from ..attention.paged_tensor import PagedTensor


def apply_rotary_emb(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate queries or keys [tokens, heads, head_dim]; elements beyond `width` pass through (partial
    rotary).

    `cos` and `sin` are [tokens, 1, width] in x's dtype: the second half of `cos` repeats the first, the first
    half of `sin` is the second's negative, as `expand_cos_sin` makes them.
    """
    width = cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat([apply_rotary_emb(x[..., :width], cos, sin), x[..., width:]], dim=-1)
    half = width // 2
    swapped = torch.cat([x[..., half:], x[..., :half]], dim=-1)
    return x * cos + swapped * sin


def interleaved_to_halves(x: torch.Tensor, width: int) -> torch.Tensor:
    """Reorder interleaved (GPT-J) pairs (2i, 2i + 1) of the first `width` elements to half-split (NeoX) ones,
    for `apply_rotary_emb`. Applied to queries and keys alike, it changes no attention score."""
    if width < x.shape[-1]:
        return torch.cat([interleaved_to_halves(x[..., :width], width), x[..., width:]], dim=-1)
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def expand_cos_sin(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Expand cos and sin [..., width / 2] to the full-width factors that `apply_rotary_emb` takes."""
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorms:
    """QK-norm weights [head_dim], in the heads' dtype, or in float32 for kernels with wide weights."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float

    def apply(self, stacked: torch.Tensor, num_heads: int) -> None:
        kv_heads = (stacked.shape[1] - num_heads) // 2
        queries, keys, _ = stacked.split([num_heads, kv_heads, kv_heads], dim=1)
        for heads, weight in ((queries, self.query), (keys, self.key)):
            heads.copy_(functional.rms_norm(heads, weight.shape, weight, self.eps))


@runtime_checkable
class TakesWideWeights(Protocol):
    """Kernel that computes in float32: its norm weights may be float32 with 16-bit rows (Gemma)."""

    takes_wide_weights: ClassVar[bool]


NormKernel = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""RMSNorm of `x [rows, size]`, or fused add + RMSNorm of `x + added`: returns the sum and its norm."""


class TorchNorm:
    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight, self._eps = weight, eps

    def __call__(
        self, x: torch.Tensor, added: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = x if added is None else x + added
        return x, functional.rms_norm(x, (x.shape[-1],), self._weight, self._eps)


GateKernel = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Gated activation: `activation(gate) * up`, of `[rows, size]` each."""

GatedActivation = Literal["silu", "gelu_tanh", "gelu", "clamped_swiglu"]


def torch_silu_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return functional.silu(gate) * up


SWIGLU_ALPHA = 1.702
SWIGLU_LIMIT = 7.0


def torch_clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SwiGLU of gpt-oss: gate and up are clamped, and 1 is added to `up`."""
    gate = gate.clamp(max=SWIGLU_LIMIT)
    up = up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * SWIGLU_ALPHA))


TORCH_GATES: dict[GatedActivation, GateKernel] = {
    "silu": torch_silu_gate,
    "gelu_tanh": lambda gate, up: functional.gelu(gate, approximate="tanh") * up,
    "gelu": lambda gate, up: functional.gelu(gate) * up,
    "clamped_swiglu": torch_clamped_swiglu,
}


class RopeCall(NamedTuple):
    """Arguments of fused RoPE + KV-cache write. `stacked` [tokens, heads, dim] has queries, keys and values,
    and may be overwritten. `cos` and `sin` are those of `apply_rotary_emb`; QK-norm (`norms`) precedes the
    rotation."""

    stacked: torch.Tensor
    num_heads: int
    cos: torch.Tensor
    sin: torch.Tensor
    keys: PagedTensor
    values: PagedTensor
    slots: torch.Tensor
    norms: HeadNorms | None = None


RopeAndCacheKernel = Callable[[RopeCall], torch.Tensor]
"""Fused RoPE + KV-cache write, optionally with QK-norm; returns the rotated queries."""


class TorchRopeAndCache:
    """RoPE and KV-cache write as separate torch operations: the reference."""

    def __call__(self, call: RopeCall) -> torch.Tensor:
        stacked, num_heads, cos, sin, keys, values, slots, norms = call
        if norms is not None:
            norms.apply(stacked, num_heads)
        kv_heads = (stacked.shape[1] - num_heads) // 2
        queries, new_keys, new_values = stacked.split([num_heads, kv_heads, kv_heads], dim=1)
        keys.write(apply_rotary_emb(new_keys, cos, sin), slots)
        values.write(new_values, slots)
        return apply_rotary_emb(queries, cos, sin)


@dataclass(frozen=True, slots=True)
class ActivationQuant:
    """Activation quantization of a linear's input.

    Attributes:
        int8_levels: the int8 code of the largest magnitude; 127.5 in compressed-tensors.
        block: channels that share a scale, as ggml's activations do; 0: as `activations` say.
    """

    activations: Activations
    input_scale: torch.Tensor | None = None
    int8_levels: float = 127.5
    block: int = 0


@dataclass(frozen=True, slots=True)
class QuantizedActivations:
    """Quantized activations `codes * scales`: int8 or float8_e4m3fn `[rows, size]`, and float32 `[rows, 1]`
    per token, or `[rows, groups]` for groups of channels."""

    codes: torch.Tensor
    scales: torch.Tensor


Rows = torch.Tensor | QuantizedActivations
"""Input of a linear, [rows, size]."""


@runtime_checkable
class TakesQuantizedInput(Protocol):
    """A linear kernel that quantizes its input, and also takes a quantized input."""

    activation_quant: ActivationQuant

    def __call__(self, x: Rows) -> torch.Tensor: ...


@runtime_checkable
class FusesNormQuant(Protocol):
    """A norm kernel with fused output quantization: the sum of `x` and `added`, and its quantized norm."""

    def quantized(
        self, x: torch.Tensor, added: torch.Tensor | None, activation_quant: ActivationQuant
    ) -> tuple[torch.Tensor, QuantizedActivations]: ...


@runtime_checkable
class FusesGateQuant(Protocol):
    """A gated-activation kernel with fused output quantization."""

    def quantized(
        self, gate: torch.Tensor, up: torch.Tensor, activation_quant: ActivationQuant
    ) -> QuantizedActivations: ...


RUN = 128
"""Group size of the granularity `group128`, in input channels; the last group may be shorter."""


def fake_quantize_inputs(
    x: torch.Tensor, scheme: Scheme, input_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Fake-quantize `x [tokens, in]` by `scheme`; `input_scale` float32 `[1]`: static, or NVFP4's global."""
    if (threshold := scheme.outlier_threshold) is not None:
        codes, scale, outliers = split_outliers(x, threshold)
        return (codes * scale + outliers).to(x.dtype)
    if scheme.activations is None:
        return x
    return fake_quantize_activations(x, scheme.activations, input_scale)


def fake_quantize_activations(
    x: torch.Tensor, activations: Activations, input_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """Fake-quantize with compressed-tensors' scales: `max|x| / 127.5` for int8 -128..127, / 448 for e4m3."""
    values = x.to(torch.float32)
    if activations.kind == "nvfp4" or activations.kind == "mxfp4":
        # As weights are quantized, with dynamic scales of blocks.
        scheme = Fp4Scheme(activations.kind)
        blocks = values.unflatten(-1, (-1, scheme.block_size))
        scales = block_scales(blocks.abs().amax(dim=-1), scheme, input_scale)
        factors = fp4_factors(scales, input_scale).unsqueeze(-1)
        codes = e2m1_codes(blocks / factors).to(torch.int32)
        return (e2m1_table().to(x.device)[codes] * factors).flatten(-2).to(x.dtype)
    if activations.granularity == "group128":
        values = functional.pad(values, (0, -x.shape[-1] % RUN)).unflatten(-1, (-1, RUN))
    scale = _scale(values, activations, input_scale)
    if activations.kind == "int8":
        quantized = _int8_codes(values, scale)
    else:
        scaled = (values / scale).clamp(-E4M3_MAX, E4M3_MAX)
        quantized = scaled.to(torch.float8_e4m3fn).to(torch.float32)
    return (quantized * scale).view(*x.shape[:-1], -1)[..., : x.shape[-1]].to(x.dtype)


def int8_inputs(
    x: torch.Tensor, activations: Activations, input_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize `x [tokens, in]` to int8 for an integer GEMM, per token or with a static scale. Returns int8
    codes and float32 scales, `[tokens, 1]` or for static activations `[1]`. There are no groups of 128: their
    partial sums cannot be accumulated as integers."""
    values = x.to(torch.float32)
    scale = _scale(values, activations, input_scale)
    return _int8_codes(values, scale).to(torch.int8), scale


def split_outliers(
    x: torch.Tensor, threshold: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """LLM.int8() decomposition: outliers (magnitude >= `threshold`) stay floats, the rest becomes int8.

    The scale is bitsandbytes', `max|x| / 127` of the quantized values; a threshold of 0 quantizes everything.
    Returns codes int8 `[tokens, in]`, 0 at outliers; float32 scales `[tokens, 1]`; float32 outliers, 0
    elsewhere.

    Source: Dettmers et al., "LLM.int8()", NeurIPS 2022 (arXiv:2208.07339).
    """
    values = x.to(torch.float32)
    small = values.abs() < threshold if threshold > 0 else torch.ones_like(values, dtype=torch.bool)
    rest = values.where(small, 0.0)
    scale = _nonzero(rest.abs().amax(dim=-1, keepdim=True) / 127)
    return torch.round(rest / scale).to(torch.int8), scale, values.where(~small, 0.0)


def _int8_codes(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.round(values / scale).clamp_(-128, 127)


def _scale(
    values: torch.Tensor, activations: Activations, input_scale: torch.Tensor | None
) -> torch.Tensor:
    """Dynamic scale per group along the last axis, or the static scale."""
    if not activations.dynamic:
        assert input_scale is not None
        return input_scale.to(torch.float32)
    largest = values.abs().amax(dim=-1, keepdim=True)
    return _nonzero(largest / (127.5 if activations.kind == "int8" else E4M3_MAX))


def _nonzero(scale: torch.Tensor) -> torch.Tensor:
    """Scales to divide by: 1 for all-zero groups."""
    return scale.where(scale > 0, 1.0)
