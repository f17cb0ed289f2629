"""Shape of a model that was probed: its tensors and cache as measured, in place of a family's rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil
from typing import Any, Self, cast

from ...base.errors import BadInput
from ...quant.families.shapes import Experts, Latent, ModelShape, Role, Shard, Tensor
from ..probe.facts import CachedTensor, ProbedModel


class ElementBytes(Fraction):
    """Mean bytes per element, with the bytes of a vector of each width (`by_width`). Scales are per vector,
    so layers whose vectors differ in width take different bytes per element."""

    __slots__ = ("by_width",)
    by_width: Mapping[int, Fraction | int]

    def __new__(cls, mean: Fraction, by_width: Mapping[int, Fraction]) -> Self:
        # The number itself is the mean.
        number = super().__new__(cls, mean.numerator, mean.denominator)
        # Whole numbers are added many times faster as such.
        number.by_width = {
            width: size.numerator if size.denominator == 1 else size
            for width, size in by_width.items()
        }
        return number


@dataclass(frozen=True, slots=True)
class ProbedShape(ModelShape):
    """A shape whose parameters and cache come from `facts`.

    `ranks` is the number of ranks that the cache is split over, `stage` the layers whose cache it is (None:
    all), and `frees_windows` is False where a window keeps every token. State and positions have dtypes of
    their own; a KV dtype narrows the growing tensors alone. `conv_kernel` is the width of its causal
    convolutions (0: none).

    Attributes:
        layer_tensors: cached tensors of this stage on one rank: heads are split, at least one on each. A
            stage whose layers share the keys and values of an earlier stage holds a copy of them.
        growing: cached keys, values and latents, which grow with the sequence.
    """

    facts: ProbedModel | None = None
    ranks: int = 1
    stage: range | None = None
    frees_windows: bool = True
    conv_kernel: int = 0
    layer_tensors: tuple[CachedTensor, ...] = field(init=False, compare=False, repr=False)
    growing: tuple[CachedTensor, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        ModelShape.__post_init__(self)
        cached = self.measured.cache
        if self.stage is not None:
            layers = {*self.stage}
            if self.stage.stop > self.num_layers - self.measured.num_shared_layers:
                # The KV-sharing layers read, for each window, the last layer that caches its own.
                last = {t.window: t.layer for t in cached if t.law == "growing"}
                layers.update(last.values())
            cached = tuple(t for t in cached if t.layer in layers)
        if self.ranks > 1:  # whole heads, at least one; a state is split evenly, to whole elements
            cached = tuple(replace(t, heads=ceil(t.heads / self.ranks)) for t in cached)
        growing = tuple(t for t in cached if t.law == "growing" and t.is_float)
        object.__setattr__(self, "layer_tensors", cached)
        object.__setattr__(self, "growing", growing)

    @classmethod
    def from_facts(cls, facts: ProbedModel, raw: Mapping[str, Any]) -> ProbedShape:
        """The shape of a probed model; `raw` is its config."""
        text, experts = raw.get("text_config") or raw, None
        if facts.num_experts and facts.experts_per_token:
            with_experts = {p.layer for p in facts.parameters if p.role == "expert"}
            dense = tuple(n for n in range(facts.num_layers) if n not in with_experts)
            sizes = facts.num_experts, facts.experts_per_token, facts.expert_width
            experts = Experts(*sizes, 0, dense)
        return cls(
            family=facts.family,
            num_layers=facts.num_layers,
            hidden_size=facts.hidden_size,
            num_heads=facts.num_heads or 1,
            num_kv_heads=facts.num_kv_heads or 1,
            head_dim=facts.head_dim or 1,
            intermediate_size=facts.intermediate_size,
            vocab_size=facts.vocab_size,
            tied=facts.tied,
            max_context=facts.max_context or _UNLIMITED,
            windows=_windows(facts),
            experts=experts,
            latent=_latent(facts, text),
            facts=facts,
            conv_kernel=next((text[name] for name in _CONV_KERNELS if text.get(name)), 0),
        )

    @property
    def measured(self) -> ProbedModel:
        assert self.facts is not None
        return self.facts

    def tensors(self, stage: range | None = None) -> Iterator[Tensor]:
        """All parameter tensors, tied ones once; of one pipeline stage with a range of layers. Parameters
        outside the layers belong to the first stage, the head and a copy of a tied embedding to the last."""
        first = stage is None or stage.start == 0
        last = stage is None or stage.stop == self.num_layers
        for p in self.measured.parameters:
            role = cast(Role, p.role)
            if p.layer >= 0:
                here = stage is None or p.layer in stage
            elif p.role == "head":
                here = last
            else:
                here = first
            tensor = Tensor(
                role, p.out_features, p.in_features, p.count, p.used, cast(Shard, p.shard)
            )
            if here:
                yield tensor
            elif self.tied and last and p.role == "embedding" and p.out_features == self.vocab_size:
                yield replace(tensor, role="head")

    @property
    def positions(self) -> tuple[CachedTensor, ...]:
        """Cached positions (Qwen4): transformers alone keeps them, engines know a token's position."""
        return tuple(t for t in self.layer_tensors if t.law == "growing" and not t.is_float)

    @property
    def state_bytes(self) -> int:
        """Bytes of the constant state of one sequence: states, and full buffers of compressed caches."""
        return sum(
            t.element_bytes * self.state_elements(t)
            for t in self.layer_tensors
            if t.law != "growing"
        )

    @staticmethod
    def state_elements(tensor: CachedTensor) -> int:
        """Elements of a state, or of the buffer of a compressed cache, before its entry is complete."""
        entries = tensor.stride - 1 if tensor.law == "remainder" else 1
        return entries * tensor.heads * tensor.width

    def served_state_elements(self, tensor: CachedTensor) -> int:
        """Elements of a state in vLLM (`MambaStateShapeCalculator`, mamba_utils.py) and llama.cpp
        (`llama_hparams::n_embd_r`): a convolution keeps the inputs before the present token, transformers
        that token's as well."""
        elements, kernel = self.state_elements(tensor), self.conv_kernel
        is_convolution = kernel > 0 and "conv" in tensor.name and elements % kernel == 0
        return elements // kernel * (kernel - 1) if is_convolution else elements

    def vllm_state_width(self, tensor: CachedTensor) -> int:
        """Bytes of an element of a state in vLLM, where `--mamba-ssm-cache-dtype auto` is the model's dtype
        (`_mamba_state_dtype`, mamba_utils.py), 16 bits on a GPU, unless the family's config has another."""
        narrow = self.family in _NARROW_STATES and "recurrent" in tensor.name
        return 2 if narrow else tensor.element_bytes

    @property
    def cached_elements(self) -> int:
        """KV-cache elements per token and layer: the mean over the layers, rounded up."""
        total = sum(Fraction(t.heads * t.width, t.stride) for t in self.growing)
        return ceil(total / max(1, self.num_layers))

    def kv_bytes_per_token(self, bytes_per_element: float | Fraction) -> int:
        """KV-cache bytes per token in all layers, while the sequence is within every window."""
        return self._token_bytes(self.growing, bytes_per_element)

    def kv_bytes_per_extra_token(self, bytes_per_element: float | Fraction) -> int:
        unlimited = [t for t in self.growing if not (t.window and self.frees_windows)]
        return self._token_bytes(unlimited, bytes_per_element)

    @staticmethod
    def _token_bytes(tensors: Iterable[CachedTensor], element: float | Fraction) -> int:
        return ceil(sum(entry_bytes(t, element) / Fraction(t.stride) for t in tensors))

    def kv_bytes(
        self, num_tokens: int, bytes_per_element: float | Fraction, block_size: int = 1
    ) -> int:
        blocks = ((ceil(self.entries(t, num_tokens) / block_size), t) for t in self.growing)
        size = sum(count * block_size * entry_bytes(t, bytes_per_element) for count, t in blocks)
        return ceil(size) + self.state_bytes

    def entries(self, tensor: CachedTensor, num_tokens: int) -> int:
        """Entries that a growing tensor has to hold: a window of W keeps W - 1 before the present token."""
        entries = num_tokens // tensor.stride
        return min(entries, tensor.window + 1) if tensor.window and self.frees_windows else entries

    @property
    def looked_up_elements(self) -> int:
        """Elements of embeddings that are looked up, and of vision towers, which a decode step skips."""
        roles = ("embedding", "vision", "projector")
        skipped = sum(p.num_elements for p in self.measured.parameters if p.role in roles)
        return skipped - (self.vocab_size * self.hidden_size if self.tied else 0)

    def visible_elements(self, context: float) -> float:
        """Cached elements that one token attends to, over all layers."""
        return sum(self.entries(t, int(context)) * t.heads * t.width for t in self.growing)

    @property
    def indexer_elements(self) -> int:
        """Elements per token of the keys that a sparse indexer scores."""
        return sum(ceil(t.heads * t.width / t.stride) for t in self.growing if is_indexer(t))

    def without_windows(self) -> Self:
        return replace(self, frees_windows=False)

    def cache_on_rank(self, ranks: int) -> Self:
        """The shape whose cache is that of one of `ranks` TP ranks; what has one head is replicated."""
        if self.measured.num_heads:
            self.kv_heads_per_rank(ranks)
        elif any(t.heads % ranks for t in self.measured.cache if t.law == "constant"):
            raise BadInput(f"the state does not divide over {ranks} ranks: choose another --tp")
        return replace(self, ranks=ranks)

    def cache_of_stage(self, stage: range) -> Self:
        return replace(self, stage=stage)


def cache_line(shape: ProbedShape) -> str:
    """The growing cache in words: `25 layers x 8 x 256 keys (window 1,024)`, one part per kind."""
    kinds = Counter((t.name, t.heads, t.width, t.window, t.stride) for t in shape.growing)
    parts = []
    for (name, heads, width, window, stride), count in kinds.items():
        notes = [f"window {window + 1:,}"] if window else []
        notes += [f"an entry per {stride} tokens"] if stride > 1 else []
        size = f"{heads} x {width}" if heads > 1 else f"{width}"
        parts.append(f"{count} x {size} {name}" + (f" ({', '.join(notes)})" if notes else ""))
    return " + ".join(parts) or "nothing"


# Qwen3.5's `mamba_ssm_dtype` and Nemotron-H's `mamba_ssm_cache_dtype` are float32; KDA always is.
_NARROW_STATES = {"bamba", "falcon_h1", "granitemoehybrid", "jamba", "qwen3_next", "zamba2"}
_CONV_KERNELS = ("linear_conv_kernel_dim", "conv_kernel", "mamba_d_conv", "conv_L_cache")
_UNLIMITED = 1_048_576  # the longest context of a model without positions, which names none


def is_indexer(tensor: CachedTensor) -> bool:
    """True if a cached tensor holds a sparse indexer's keys (DeepSeek-V3.2, GLM, MiniMax-M3)."""
    return "index" in tensor.name or "idx" in tensor.name


def entry_bytes(tensor: CachedTensor, bytes_per_element: float | Fraction) -> Fraction | int:
    if isinstance(bytes_per_element, ElementBytes):
        return tensor.heads * bytes_per_element.by_width[tensor.width]
    return tensor.heads * tensor.width * Fraction(bytes_per_element)


def _windows(facts: ProbedModel) -> tuple[int | None, ...]:
    """Window of each layer's attention in tokens; 0 for a layer without attention."""
    kept: dict[int, int] = {}
    for tensor in facts.cache:
        if tensor.law == "growing" and not is_indexer(tensor):
            # A compressed cache next to a window reaches back to the first token.
            reach = 0 if tensor.stride > 1 else tensor.window
            kept[tensor.layer] = min(kept.get(tensor.layer, reach), reach)
    shared = range(facts.num_layers - facts.num_shared_layers, facts.num_layers)
    windows: list[int | None] = []
    for layer in range(facts.num_layers):
        if layer in kept:
            windows.append(kept[layer] + 1 if kept[layer] else None)
        else:
            windows.append(None if layer in shared else 0)
    return tuple(windows)


def _latent(facts: ProbedModel, text: Mapping[str, Any]) -> Latent | None:
    """The latent of a model whose cache holds it once (one head, keys of the latent's rank)."""
    rank, rope = text.get("kv_lora_rank"), text.get("qk_rope_head_dim")
    widths = Counter((t.heads, t.width) for t in facts.cache if t.law == "growing")
    if not (isinstance(rank, int) and isinstance(rope, int) and (1, rank) in widths):
        return None
    nope, value = text.get("qk_nope_head_dim") or 0, text.get("v_head_dim") or rank
    return Latent(rank, rope, nope, value, text.get("q_lora_rank"))
