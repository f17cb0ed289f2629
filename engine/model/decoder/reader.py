"""Checkpoint reader: a `config.json` as the decoder's `ModelSpec`, and weights by name as projections.

`load_layers` loads layers by several threads: one reads and packs its weights beside the others. The reader
tracks which tensors are unread. `ModelShape` has all sizes of the spec; the model's family adds the
architecture choices, and raises `NotCovered` for features that the decoder does not implement.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from ....base.errors import BadInput
from ....quant.families.config import complete, current_names, is_classifier
from ....quant.families.registry import all_families, model_family, type_of
from ....quant.families.spec_parts import CLAMPED_SWIGLU, Names, NotCovered
from ....quant.formats.registry import quantized_modules, read_quantized, tensor_names
from ....quant.gguf.checkpoint import GgufCheckpoint
from ....quant.kinds.base.format import CACHE_SCALES, has_fp4_cache
from ....quant.kinds.base.tensor import QuantizedTensor
from ....quant.kinds.fp4.formats import METHOD, check_mxfp4, mxfp4_names, read_mxfp4
from ....quant.model.checkpoint import Checkpoint, modelopt_quantization
from ...base.device import placed_on
from ...kernels.elementwise.dispatch import RowKernelQuery
from ...kernels.linear.linear import HALVES, keeps_halves
from ...kernels.linear.native_linear import LooksUpRows, native_lookup
from ..layers.mlp import ACTIVATIONS
from ..layers.parallel import Shard, WeightSlice, take, take_rows
from ..layers.projection import LinearSite, Projection
from ..layers.spec import LoadingOptions, ModelSpec

_log = logging.getLogger(__name__)


class CheckpointReader:
    """Reads weights by module name onto the device in the engine's dtype, and tracks which are unread.
    Quantized ones stay so; with `input_bits` 8 their kernels may quantize activations."""

    def __init__(
        self, checkpoint: Checkpoint, options: LoadingOptions, shard: Shard | None = None
    ) -> None:
        self._shard = shard
        self._checkpoint = placed_on(options.device, checkpoint)
        self.device, self._dtype = options.device, options.dtype
        self._input_bits = options.input_bits
        # MXFP4 checkpoints quantize fused expert tensors, not modules.
        config = checkpoint.quantization_config or {}
        self._has_mxfp4 = config.get("quant_method") == METHOD
        if self._has_mxfp4:
            check_mxfp4(config)
        self._quantized = set() if self._has_mxfp4 else quantized_modules(checkpoint)
        configs = (config, modelopt_quantization(checkpoint.folder))
        self._has_fp4_cache = any(map(has_fp4_cache, configs))
        self._unread = set(checkpoint.names)
        self.linears: dict[str, LinearSite] = {}
        """Location of each linear that was read as a projection."""
        self.takes_adapters = options.takes_adapters
        """True if LoRA adapters may change the linears, so that none may lose its place."""

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint

    def weight(self, name: str, *shape: int) -> torch.Tensor:
        return self._float(name, shape, None)

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._float(name, shape, dtype or self._dtype)

    def _float(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> torch.Tensor:
        tensor = self._checkpoint.tensor(name)
        if tuple(tensor.shape) != shape:
            raise BadInput(
                f"{self._checkpoint.path}: {name} has shape {tuple(tensor.shape)}, "
                f"but config.json makes it {shape}"
            )
        if not tensor.is_floating_point():
            raise BadInput(f"{self._checkpoint.path}: {name} holds {tensor.dtype}, not floats")
        self._unread.discard(name)
        if dtype is None:
            stays = tensor.dtype in HALVES and keeps_halves(self.device, self._dtype)
            dtype = tensor.dtype if stays else self._dtype
        moved = tensor.to(self.device, dtype)
        # A tensor that still aliases the mapped file would keep all of the file in memory.
        is_mapped = moved.device.type == "cpu" and moved.data_ptr() == tensor.data_ptr()
        return moved.clone() if is_mapped else moved

    def packed_table(self, name: str, rows: int, width: int) -> Projection | None:
        """An embedding [rows, width] in ggml's blocks, packed for row lookup; None: floats, or no kernel."""
        if self.device.type != "cpu" or not isinstance(self._checkpoint, GgufCheckpoint):
            return None
        weight = self._checkpoint.blocks(name)
        if weight is None or weight.shape != (rows, width) or native_lookup().library is None:
            return None
        packed = self.stacked([weight], None)
        if not isinstance(packed.kernel, LooksUpRows):
            return None
        self._unread.discard(name)
        return packed

    def vector(self, name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        """A float vector [size], which may be stored as a row [1, size]."""
        is_row = name in self._checkpoint and len(self._checkpoint.shape(name)) == 2
        return self.tensor(name, *((1, size) if is_row else (size,)), dtype=dtype).view(size)

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._checkpoint.shape(name) if name in self else None

    def same(self, first: str, second: str) -> bool:
        return torch.equal(self._checkpoint.tensor(first), self._checkpoint.tensor(second))

    def release(self) -> None:
        self._checkpoint.release()

    def rows(self, size: int) -> RowKernelQuery:
        return RowKernelQuery(self.device.type, self._dtype, size)

    def drop_linears(self, prefix: str) -> None:
        for name in list(self.linears):  # other threads add theirs meanwhile
            if name.startswith(prefix):
                self.linears.pop(name)

    def numbers(self, name: str, size: int) -> torch.Tensor:
        tensor = self._checkpoint.tensor(name)
        if tuple(tensor.shape) != (size,) or tensor.is_floating_point():
            raise BadInput(
                f"{self._checkpoint.path}: {name} is {tensor.dtype} of shape {tuple(tensor.shape)}, but "
                f"config.json makes it {size} whole numbers"
            )
        self._unread.discard(name)
        return tensor.to(self.device, torch.int64)

    def has_weight(self, module: str) -> bool:
        return f"{module}.weight" in self or self.is_quantized(module)

    def is_quantized(self, module: str) -> bool:
        return module in self._quantized

    def projection(
        self,
        modules: Sequence[str],
        in_features: int,
        out_features: Sequence[int],
        *,
        bias: bool,
        transposed: bool = False,
        weight_slice: WeightSlice | None = None,
    ) -> Projection:
        """Stacked linears of one input, or this rank's `weight_slice`; `transposed` ones are [in, out]."""
        part = weight_slice or WeightSlice()
        rows, columns = part.rows or ((),) * len(modules), part.columns
        weights: list[torch.Tensor | QuantizedTensor] = []
        biases: list[torch.Tensor] = []
        for module, out, runs in zip(modules, out_features, rows, strict=True):
            if transposed:
                weight = self.weight(f"{module}.weight", in_features, out).T.contiguous()
            else:
                weight = self._weight(module, out, in_features)
            weights.append(take(module, weight, runs, columns))
            if bias:
                whole = self.tensor(f"{module}.bias", out)
                biases.append(take_rows(whole, runs) if runs else whole)
        if columns is not None and self._shard is not None and self._shard.rank:
            biases.clear()  # row-parallel: only rank 0 adds the bias
        projection = self.stacked(weights, torch.cat(biases) if biases else None)
        if columns is not None and self._shard is not None:
            projection.then(self._shard.group.all_reduce)
        begin = 0
        for module, out, runs, weight in zip(modules, out_features, rows, weights, strict=True):
            outputs = slice(begin, begin + weight.shape[0])
            begin = outputs.stop
            self.linears[module] = LinearSite(projection, outputs, out, in_features, runs, columns)
        return projection

    def stacked(
        self, weights: Sequence[torch.Tensor | QuantizedTensor], bias: torch.Tensor | None
    ) -> Projection:
        return Projection(weights, bias, self._dtype, self._input_bits)

    def experts(
        self,
        projection: str,
        num_experts: int,
        out_features: int,
        in_features: int,
        transposed: bool = False,
    ) -> Sequence[torch.Tensor | QuantizedTensor]:
        """Expert weights [out, in], of [experts, in, out] ([experts, out, in]: `transposed`) or MXFP4."""
        if not self._has_mxfp4:
            if transposed:
                return self.weight(projection, num_experts, out_features, in_features).unbind()
            whole = self.weight(projection, num_experts, in_features, out_features)
            return whole.transpose(1, 2).unbind()
        self._unread.difference_update(mxfp4_names(projection))
        codes = read_mxfp4(self._checkpoint, projection, num_experts, out_features, in_features)
        return [weight.to(self.device) for weight in codes]

    def dense(self, module: str, out_features: int, in_features: int) -> torch.Tensor:
        weight = self._weight(module, out_features, in_features)
        is_plain = isinstance(weight, torch.Tensor)
        return weight.to(self._dtype) if is_plain else weight.dequantize(self._dtype)

    def kv_scales(self, layer: str, num_heads: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Calibrated scales of a layer's fp8 KV cache, float32 [num_heads] or [1], or None. `k_scale` and
        `v_scale` are the attention's (compressed-tensors) or its projections' (ModelOpt)."""
        if self._has_fp4_cache:
            return None
        scales: list[torch.Tensor] = []
        for letter in "kv":
            names = (f"{letter}_scale", f"{letter}_proj.{letter}_scale")
            paths = [f"{layer}self_attn.{name}" for name in names]
            path = next((path for path in paths if path in self._checkpoint.shard_of), None)
            if path is None:
                return None
            scale = self._checkpoint.tensor(path).float().flatten()
            if scale.numel() not in (1, num_heads) or not bool((scale > 0).all()):
                raise BadInput(
                    f"{self._checkpoint.path}: {path} holds {scale.numel()} values and must hold positive "
                    f"scales, 1 or {num_heads} (one for each KV head)"
                )
            self._unread.discard(path)
            scales.append(scale.to(self.device))
        return scales[0], scales[1]

    def finish(self, may_remain: Callable[[str], bool]) -> None:
        """Raise `BadInput` for tensors still unread, unless they are cache scales or `may_remain`."""
        scales = tuple(name for name in self._unread if name.endswith(CACHE_SCALES))
        if scales:
            _log.warning(
                "%s has scales for a quantized KV cache; they are not used: the cache keeps the "
                "engine's dtype",
                self._checkpoint.folder,
            )
        left = sorted(
            name
            for name in self._unread.difference(scales)
            if not name.endswith(".g_idx") and not may_remain(name)
        )
        if left:
            raise BadInput(
                f"{self._checkpoint.path}: {len(left)} tensors have no place in the model that "
                f"config.json describes, the first is {left[0]}"
            )

    def _weight(
        self, module: str, out_features: int, in_features: int
    ) -> torch.Tensor | QuantizedTensor:
        if module not in self._quantized:
            return self.weight(f"{module}.weight", out_features, in_features)
        weight = read_quantized(self._checkpoint, module)
        if weight.shape != (out_features, in_features):
            raise BadInput(
                f"{self._checkpoint.path}: {module} unpacks to {weight.shape}, "
                f"but config.json makes it {(out_features, in_features)}"
            )
        self._unread -= tensor_names(self._checkpoint, module)
        return weight.to(self.device)


def decoder_base(checkpoint: Checkpoint, spec: ModelSpec) -> str:
    """Prefix of the decoder's tensors, where an embedding lies next to layers. NotCovered: other names;
    BadInput: no embedding, or several decoders."""
    table, first = f"{spec.names.embedding}.weight", spec.names.layer.format(0)
    tables = (name for name in checkpoint.names if name == table or name.endswith(f".{table}"))
    bases = [name.removesuffix(table) for name in tables]
    if len(bases) > 1:
        bases = [base for base in bases if _holds(checkpoint, base + first)]
    if len(bases) > 1:
        raise BadInput(f"{checkpoint.path} holds several decoders: {', '.join(sorted(bases))}")
    modules = (*spec.names.qkv, spec.names.output)
    if spec.shape.latent is not None:
        modules = ("self_attn.kv_a_proj_with_mqa", "self_attn.o_proj")
    elif spec.parts_of(0).state is not None:
        modules = (f"{spec.names.state_mixer}.out_proj",)
    for module in modules if spec.multimodal else ():
        name = f"{bases[0] if bases else spec.names.bases[0]}{first}{module}"
        if not _holds(checkpoint, f"{name}."):
            raise NotCovered(f"{checkpoint.path} has no {name}")
    if not bases:
        raise BadInput(f"{checkpoint.path} has no tensor {spec.names.bases[0] + table!r}")
    return bases[0]


def _holds(checkpoint: Checkpoint, prefix: str) -> bool:
    return any(name.startswith(prefix) for name in checkpoint.names)


T = TypeVar("T")

MOST_LOADERS = 8
"""Layers in hand at once: each holds its unpacked codes until they are packed."""


def load_layers(load: Callable[[int], T], count: int, device: torch.device) -> list[T]:
    """`load` of every index below `count`, on a CPU by torch's threads; the first exception is raised."""
    threads = torch.get_num_threads()
    loaders = min(threads, MOST_LOADERS, count)
    if device.type != "cpu" or loaders < 2:
        return [load(index) for index in range(count)]
    pool = ThreadPoolExecutor(
        loaders, initializer=torch.set_num_threads, initargs=(threads // loaders,)
    )
    try:
        return list(pool.map(load, range(count)))
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


Config = Mapping[str, Any]
_PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id")


def supported_model_types() -> tuple[str, ...]:
    return tuple(family.name for family in all_families() if family.choices is not None)


def model_spec(raw: Config) -> ModelSpec:
    """Parse a raw `config.json`, or its text model's. NotCovered: unsupported; BadInput: invalid values."""
    raw = current_names(raw)
    multimodal = isinstance(raw.get("text_config"), Mapping)
    config = text_config(raw) if multimodal else raw
    family = model_family(type_of(config))
    if family is None or family.rules is None or family.choices is None:
        raise NotCovered(
            f"config.json: model_type {config.get('model_type')!r} is not one of the decoder's own "
            f"({', '.join(supported_model_types())})"
        )
    try:
        if family.rules.defaults is not None:
            _, config = complete(config)
        elif not multimodal:
            config = text_config(config)
        config = family.prepare(config)
        if not config.get("is_causal", True):  # as transformers' `create_causal_mask` reads it
            raise NotCovered("config.json: is_causal false is not supported")
        shape = family.shape(config)
        dtype = config.get("dtype") or config.get("torch_dtype")
        defaults: dict[str, Any] = {
            "shape": shape,
            "names": Names(),
            "dtype": str(dtype or "float32"),
            "norm_eps": float(config.get("rms_norm_eps", 1e-6)),
            "rotary_width": shape.head_dim,
            "attention_scale": shape.head_dim**-0.5,
            "activation": config.get("hidden_act", "silu"),
            "multimodal": multimodal,
            "is_classifier": is_classifier(raw),
        }
        spec = ModelSpec(**{**defaults, **family.choices(shape, config)})
    except NotCovered:
        raise
    except BadInput as error:
        text = str(error)
        raise BadInput(text if "config" in text else f"config.json: {text}") from error
    except KeyError as error:
        raise BadInput(f"config.json lacks {error.args[0]!r}") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise BadInput(f"config.json: {error}") from error
    if spec.activation not in (*ACTIVATIONS, CLAMPED_SWIGLU):
        raise NotCovered(f"config.json: hidden_act {spec.activation!r} is not supported")
    return spec


def text_config(raw: Config) -> dict[str, Any]:
    """Config of a text model with every default. NotCovered: an unknown type; BadInput: its class refuses. Of
    a multimodal checkpoint, as in transformers, the outer `tie_word_embeddings` counts. Its placeholder
    tokens are `placeholder_token_ids`; a text model has none."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from ....quant.model.auto import read_config

    if type_of(raw) not in CONFIG_MAPPING:
        raise NotCovered(
            f"config.json: model_type {raw.get('model_type')!r} is unknown to transformers"
        )
    outer = read_config(raw)
    inner = outer.get_text_config(decoder=True)
    config = inner.to_dict()
    for usual, name in getattr(inner, "attribute_map", {}).items():
        config.setdefault(usual, getattr(inner, name, None))
    if (tied := getattr(outer, "tie_word_embeddings", None)) is not None:
        config["tie_word_embeddings"] = tied
    placeholders = () if outer is inner else (getattr(outer, name, None) for name in _PLACEHOLDERS)
    config["placeholder_token_ids"] = tuple(token for token in placeholders if token is not None)
    # A token of text attends to later ones (PaliGemma's prefix).
    if config.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise NotCovered("config.json: use_bidirectional_attention is not supported")
    return {**config, "dtype": config.get("dtype") or raw.get("dtype") or raw.get("torch_dtype")}
