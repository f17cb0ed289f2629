"""Weight bytes of a model under a quantization format, summed over its tensors.

Linear layers and experts take the quantized bits and their scales, while embeddings, output head, norms,
router and biases stay unquantized. `checkpoint_file_bytes` predicts the files that `llmopt quantize` writes:
on disk each begins with a JSON header that lists its tensors by name, nearly a percent of a small model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil

from ...base.atomic_io import Entry, file_bytes
from ...base.errors import BadInput
from ...quant.families.registry import model_family
from ...quant.families.shapes import ModelShape, Role, Tensor

UNQUANTIZED_BYTES = 2
WIDENED: tuple[Role, ...] = (
    "norm",
    "bias",
    "expert_bias",
    "router",
    "position",
    "vision",
    "projector",
)
"""Roles that a decoder in float32 widens: neither linears of its own nor its embedding."""
GROUP_SIZES = (128, 64, 32, 16)  # as `llmopt quantize` tries them
FORMATS = ("awq", "compressed-tensors")


@dataclass(frozen=True, slots=True)
class ExpertPadding:
    """Multiples that an engine pads a rank's experts to in memory: the hidden size and the expert's width.
    With `inputs_only` each matrix is padded along its inputs, and its scales are not."""

    hidden: int
    width: int
    inputs_only: bool = False

    def factor(self, recipe: WeightRecipe, hidden: int, width: int) -> Fraction:
        """Bytes of gate, up and down projections of this hidden size and width of a rank, by their own."""
        wider = Fraction(ceil(hidden / self.hidden) * self.hidden, hidden)
        deeper = Fraction(ceil(width / self.width) * self.width, width)
        if not self.inputs_only:
            return wider * deeper
        values = recipe.bits / (recipe.bits + Fraction(recipe.scale_bits, recipe.group_size))
        return 1 + values * ((2 * wider + deeper) / 3 - 1)


@dataclass(frozen=True, slots=True)
class WeightRecipe:
    """A weight quantization format.

    A scale of `scale_bits` (and a zero point of `zero_bits`) covers `group_size` input channels of
    `rows_per_scale` output channels; group size -1 means all input channels. A tensor also takes
    `bytes_per_tensor`, and `bytes_per_input` for each input channel. Unquantized elements take
    `plain_bytes`, those of `WIDENED` roles `widened_bytes` where an engine widens them; output head and
    embedding may have bits of their own. `stored_bytes`, the size of a local checkpoint, overrides the sum.
    `padding` is the engine's, of the experts in its memory."""

    name: str
    bits: int | Fraction
    group_size: int = -1
    rows_per_scale: int = 1
    scale_bits: int | Fraction = 16
    zero_bits: int = 0
    bytes_per_tensor: int = 0
    bytes_per_input: int = 0
    plain_bytes: int = UNQUANTIZED_BYTES
    widened_bytes: int | None = None
    roles: tuple[Role, ...] = ("linear", "expert")
    head_bits: int | Fraction = 16
    embedding_bits: int | Fraction = 16
    stored_bytes: int | None = None
    padding: ExpertPadding | None = None

    @property
    def label(self) -> str:
        """Display name: `int4 g128 asymmetric`."""
        if self.bits >= 16 or not (self.scale_bits or self.bytes_per_tensor):
            return self.name
        group = f" g{self.group_size}" if self.group_size > 0 else " per channel"
        return self.name + group + (" asymmetric" if self.zero_bits else "")

    def tensor_bytes(self, tensor: Tensor) -> int:
        """Bytes of one such tensor on disk and in memory."""
        bits = self.bits if tensor.role in self.roles else 16
        if tensor.role == "head":
            bits = self.head_bits
        elif tensor.role == "embedding":
            bits = self.embedding_bits
        if bits >= 16:
            widened = self.widened_bytes if tensor.role in WIDENED else None
            return tensor.num_elements * (widened or self.plain_bytes)
        groups = 1 if self.group_size < 0 else ceil(tensor.in_features / self.group_size)
        scales = groups * ceil(tensor.out_features / self.rows_per_scale)
        packed = tensor.num_elements * bits + scales * (self.scale_bits + self.zero_bits)
        return (
            ceil(Fraction(packed) / 8)
            + self.bytes_per_tensor
            + self.bytes_per_input * tensor.in_features
        )

    def as_run(self, shape: ModelShape, plain_bytes: int) -> WeightRecipe:
        """The recipe in memory, where an engine computes in `plain_bytes`. A decoder of ours in float32 keeps
        linears and embeddings of 16 bits as they are stored; all else, and all that transformers' modules
        hold, is in the engine's dtype."""
        if self.plain_bytes == plain_bytes:
            return self
        if plain_bytes > self.plain_bytes and model_family(shape.family) is not None:
            run = replace(self, widened_bytes=plain_bytes, stored_bytes=None)
        else:
            run = replace(self, plain_bytes=plain_bytes, stored_bytes=None)
            if self.bits >= 16:
                name = "float32" if plain_bytes == 4 else "bf16"
                run = replace(run, name=name, bits=8 * plain_bytes)
        if self.stored_bytes is None:
            return run
        tensors = [*shape.tensors()]
        stored_bytes = self.stored_bytes + run.bytes_of(tensors) - self.bytes_of(tensors)
        return replace(run, stored_bytes=stored_bytes)

    @property
    def embedding_bytes(self) -> float:
        return self.plain_bytes if self.embedding_bits >= 16 else float(self.embedding_bits) / 8

    def bytes_of(self, tensors: Iterable[Tensor]) -> int:
        return self.bytes_by_role(tensors).total()

    def bytes_by_role(self, tensors: Iterable[Tensor]) -> Counter[Role]:
        sizes: Counter[Role] = Counter()
        for tensor in tensors:
            sizes[tensor.role] += self.tensor_bytes(tensor) * tensor.count
        return sizes


BF16 = WeightRecipe("bf16", 16)
# NF4: an 8-bit scale per 64 weights, and a float32 scale per 256 of those.
_NF4_SCALE_BITS = 8 + Fraction(32, 256)
RECIPES = {
    recipe.name: recipe
    for recipe in (
        BF16,
        WeightRecipe("f16", 16),
        WeightRecipe("float32", 32, plain_bytes=4),
        WeightRecipe("fp8", 8),
        WeightRecipe("fp8-block", 8, group_size=128, rows_per_scale=128, scale_bits=32),
        WeightRecipe("mxfp8", 8, group_size=32, scale_bits=8),
        WeightRecipe("int8", 8),
        WeightRecipe("int4", 4, group_size=128, zero_bits=4),
        WeightRecipe("gptq", 4, group_size=128, zero_bits=4, bytes_per_input=4),
        WeightRecipe("nf4", 4, group_size=64, scale_bits=_NF4_SCALE_BITS),
        WeightRecipe("mxfp4", 4, group_size=32, scale_bits=8),
        WeightRecipe("nvfp4", 4, group_size=16, scale_bits=8, bytes_per_tensor=4),
    )
}
_FREE_GROUPS = ("int4", "int8", "gptq")
SHAPE_RECORD_BYTES = 16  # compressed-tensors: two int64 next to each packed weight


def recipe_for(
    name: str,
    shape: ModelShape,
    group_size: int | None = None,
    *,
    symmetric: bool | None = None,
    file_format: str | None = None,
    plain_bytes: int = UNQUANTIZED_BYTES,
) -> WeightRecipe:
    """The recipe `name` of `RECIPES` for this model; `plan_request.named_recipe` knows more names.

    Without a group size, int4 takes the largest of `GROUP_SIZES` that divides every quantized input
    dimension, as `llmopt quantize` does; -1 is one scale per output channel. int4 uses AWQ's layout unless
    symmetric, int8 that of compressed-tensors. Raises BadInput: an unknown name, a group size that does not
    divide a width or does not apply, or a format that does not support the scheme."""
    if name not in RECIPES:
        raise BadInput(f"no weight format {name!r}: choose {', '.join(RECIPES)}")
    recipe = RECIPES[name]
    if recipe.bits < 16:
        recipe = replace(recipe, plain_bytes=plain_bytes)
    if name not in _FREE_GROUPS:
        given = {
            "--group-size": group_size,
            "--symmetric/--asymmetric": symmetric,
            "--format": file_format,
        }
        if meaningless := [option for option, value in given.items() if value is not None]:
            only = ", ".join(_FREE_GROUPS)
            raise BadInput(f"{meaningless[0]} has no meaning for {name}: only {only}")
        return recipe
    if name != "gptq":
        recipe = _with_layout(recipe, symmetric, file_format)
    elif file_format is not None:
        raise BadInput("--format has no meaning for gptq, which is a format itself")
    if group_size is None and recipe.group_size < 0:
        return recipe
    return replace(recipe, group_size=chosen_group(recipe, shape, group_size))


def lighter_recipes(
    recipe: WeightRecipe, shape: ModelShape, plain_bytes: int
) -> list[WeightRecipe]:
    """fp8 and int4, if they have fewer bits than `recipe` and suit the model's widths."""
    lighter = []
    for name in ("fp8", "int4"):
        with suppress(BadInput):
            lighter.append(recipe_for(name, shape, plain_bytes=plain_bytes))
    return [other for other in lighter if other.bits < recipe.bits]


def _with_layout(
    recipe: WeightRecipe, symmetric: bool | None, file_format: str | None
) -> WeightRecipe:
    """The recipe with the metadata of the `awq` or `compressed-tensors` layout."""
    if file_format is None:
        file_format = FORMATS[recipe.bits == 8 or bool(symmetric)]
    if file_format not in FORMATS:
        raise BadInput(f"no format {file_format!r}: choose {', '.join(FORMATS)}")
    if symmetric is None:
        symmetric = file_format != "awq"
    if file_format == "awq":
        if recipe.bits != 4 or symmetric:
            raise BadInput("--format awq holds asymmetric int4 alone: use compressed-tensors")
        return replace(recipe, zero_bits=4, scale_bits=16)
    return replace(
        recipe,
        zero_bits=0 if symmetric else recipe.bits,
        scale_bits=8 * recipe.plain_bytes,
        bytes_per_tensor=SHAPE_RECORD_BYTES,
    )


def chosen_group(recipe: WeightRecipe, shape: ModelShape, group_size: int | None) -> int:
    """The group size that is asked for, or the largest that divides every quantized width."""
    if group_size == -1:
        return -1
    widths = sorted({t.in_features for t in shape.tensors() if t.role in recipe.roles})
    if group_size is None:
        fitting = [size for size in GROUP_SIZES if not any(width % size for width in widths)]
        if not fitting:
            raise BadInput(f"none of the group sizes {GROUP_SIZES} divides every width of {widths}")
        return fitting[0]
    if group_size < 1:
        raise BadInput(
            f"--group-size {group_size}: a positive number of input channels, or -1 for all"
        )
    for width in widths:
        if width % group_size:
            raise BadInput(f"--group-size {group_size} does not divide a layer's width of {width}")
    return group_size


def mean_recipe(name: str, shape: ModelShape, stored_bytes: int, plain_bytes: int) -> WeightRecipe:
    """The recipe of a quantization that is known by the bytes of its files alone: the mean bits of linears
    and experts, and of head and embedding too if linears would have less than one bit."""
    plain = replace(BF16, plain_bytes=plain_bytes)
    saved_bits = 8 * (plain.bytes_of(shape.tensors()) - stored_bytes)
    for tables in ((), ("head", "embedding")):
        roles = (*plain.roles, *tables)
        elements = sum(t.num_elements * t.count for t in shape.tensors() if t.role in roles)
        bits = 8 * plain_bytes - Fraction(saved_bits, elements or 1)
        if 1 <= bits < 16:
            others = bits if tables else 16
            return WeightRecipe(name, bits, scale_bits=0, head_bits=others, embedding_bits=others)
    return replace(BF16, name=name)


def weight_bytes(shape: ModelShape, recipe: WeightRecipe) -> int:
    """Bytes of all weights: the checkpoint's size if known, else the sum over the tensors."""
    return recipe.stored_bytes or recipe.bytes_of(shape.tensors())


def check_groups(shape: ModelShape, recipe: WeightRecipe, ranks: int, engine: str) -> None:
    """Raises BadInput where the ranks of vLLM or SGLang would have parts of groups, of which their integer
    linears have no scale (`awq.py`, `gptq.py`, `compressed_tensors_wNa16.py` of vLLM). Experts are not
    checked."""
    group = recipe.group_size
    is_dense = shape.experts is None and shape.latent is None
    if ranks == 1 or group < 0 or not recipe.name.startswith(("int", "gptq", "awq")):
        return
    inputs = {"o_proj": shape.num_heads * shape.head_dim, "down_proj": shape.intermediate_size}
    for name, width in inputs.items() if is_dense else ():
        if width % ranks == 0 and width // ranks % group and group < width:
            raise BadInput(
                f"{engine} cannot split groups of {group} input channels: {name} has {width:,}, a rank of "
                f"--tp {ranks} {width // ranks:,}: give another --tp, --pp, or weights in smaller groups"
            )


def weight_bytes_per_rank(
    shape: ModelShape,
    recipe: WeightRecipe,
    ranks: int,
    stage: range | None = None,
    expert_ranks: int | None = None,
    ep: int = 1,
) -> int:
    """Weight bytes on each of `ranks` tensor-parallel ranks, of one pipeline stage. K and V projections are
    split over at most the number of KV heads; norms, router and biases are replicated on every rank.
    `expert_ranks` is the number that the experts are split over, if it is larger, `ep` ways by expert and the
    rest by width."""
    parts = {"ranks": ranks, "kv_heads": min(ranks, shape.num_kv_heads), "whole": 1}
    experts = {**parts, "ranks": expert_ranks or ranks}
    divided: Counter[int] = Counter()
    added = Fraction(0)
    for t in shape.tensors(stage):
        split = (experts if t.role.startswith("expert") else parts)[t.shard]
        size = recipe.tensor_bytes(t) * t.count
        divided[split] += size
        if t.role == "expert" and recipe.padding is not None and shape.experts is not None:
            width = ceil(shape.experts.width * ep / split)
            added += (recipe.padding.factor(recipe, shape.hidden_size, width) - 1) * size / split
    total = sum(Fraction(size, split) for split, size in divided.items())
    if recipe.stored_bytes:
        total *= Fraction(recipe.stored_bytes, recipe.bytes_of(shape.tensors()))
    return ceil(total + added)


_WRITTEN = ("llama", "mistral", "qwen2", "qwen3")

Named = tuple[str, Entry]


def checkpoint_file_bytes(shape: ModelShape, recipe: WeightRecipe) -> int | None:
    """Bytes of all weight files of a model quantized to int4 or int8; None for a model type or
    a recipe that `llmopt quantize` does not support."""
    if shape.family not in _WRITTEN or recipe.name not in ("int4", "int8"):
        return None
    plain = "F32" if recipe.plain_bytes == 4 else "BF16"
    matrix = (shape.vocab_size, shape.hidden_size)
    others = {
        "model.embed_tokens.weight": (plain, matrix),
        "model.norm.weight": (plain, (shape.hidden_size,)),
    }
    if not shape.tied:
        others["lm_head.weight"] = (plain, matrix)
    layers = [dict(_layer_entries(shape, recipe, plain, n)) for n in range(shape.num_layers)]
    return sum(map(file_bytes, (*layers, others)))


def _layer_entries(
    shape: ModelShape, recipe: WeightRecipe, plain: str, index: int
) -> Iterator[Named]:
    """Names, dtypes and shapes of the tensors of one layer."""
    hidden, width = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    prefix = f"model.layers.{index}"
    for name, out_features, in_features, biased in (
        ("self_attn.q_proj", queries, hidden, shape.qkv_bias),
        ("self_attn.k_proj", keys, hidden, shape.qkv_bias),
        ("self_attn.v_proj", keys, hidden, shape.qkv_bias),
        ("self_attn.o_proj", hidden, queries, shape.output_bias),
        ("mlp.gate_proj", width, hidden, shape.mlp_bias),
        ("mlp.up_proj", width, hidden, shape.mlp_bias),
        ("mlp.down_proj", hidden, width, shape.mlp_bias),
    ):
        yield from _linear_entries(recipe, plain, f"{prefix}.{name}", out_features, in_features)
        if biased:
            yield f"{prefix}.{name}.bias", (plain, (out_features,))
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}.{norm}.weight", (plain, (hidden,))
    if shape.qk_norm:
        for norm in ("q_norm", "k_norm"):
            yield f"{prefix}.self_attn.{norm}.weight", (plain, (shape.head_dim,))


def _linear_entries(
    recipe: WeightRecipe, plain: str, name: str, out_features: int, in_features: int
) -> Iterator[Named]:
    bits = recipe.bits
    groups = 1 if recipe.group_size < 0 else in_features // recipe.group_size
    if recipe.bytes_per_tensor == 0:  # AWQ stores no weight_shape
        yield f"{name}.qweight", ("I32", (in_features, out_features * bits // 32))
        yield f"{name}.qzeros", ("I32", (groups, out_features * bits // 32))
        yield f"{name}.scales", ("F16", (groups, out_features))
        return
    yield f"{name}.weight_packed", ("I32", (out_features, in_features * bits // 32))
    yield f"{name}.weight_scale", (plain, (out_features, groups))
    yield f"{name}.weight_shape", ("I64", (2,))
    if recipe.zero_bits:
        yield f"{name}.weight_zero_point", ("I32", (out_features * bits // 32, groups))
