"""`WeightFormat`: one on-disk format; and the bit packing and checks that formats share."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from ....base.errors import BadInput
from ...base.consumed import Consumed
from ...base.scheme import Scheme
from .raw import Entries, Raw
from .tensor import QuantizedTensor

SchemeT = TypeVar("SchemeT", bound=Scheme)
Config = Mapping[str, Any]
Skips = Callable[[str], bool]
"""A predicate of a module's full name: the `quantization_config` excludes it from quantization."""
RawReader = Callable[[Entries, str, dict[str, Any]], Raw]
"""A second reader of a format, with numpy alone: headers, a module's name and the `quantization_config`."""
COMPUTE_DTYPE = "bfloat16"
"""The compute dtype of bitsandbytes' kernels, which cast to the model's dtype afterwards."""
KV_SCALES = (".k_scale", ".v_scale")
"""Endings of the names of a quantized KV cache's scales."""
CACHE_SCALES = (*KV_SCALES, ".q_scale", ".k_proj.output_scale", ".v_proj.output_scale")
"""Endings of all scales for an 8-bit cache and attention that vLLM and compressed-tensors write."""
_PROVENANCE = (
    # The lists of what stays plain (the files decide that, and `verify` compares), and the KV cache.
    "ignore ignored_layers exclude_modules modules_to_not_convert quant_method llm_int8_skip_modules "
    "kv_cache_scheme kv_cache_quant_algo producer provider "
    # How transformers and AutoAWQ run a checkpoint, and how AutoGPTQ, GPTQModel and optimum made it.
    "dequantize run_compressed use_optimized_inference backend do_fuse fuse_max_seq_len modules_to_fuse "
    "exllama_config use_exllama disable_exllama use_cuda_fp16 tokenizer dataset model_seqlen "
    "max_input_length batch_size pad_token_id cache_block_outputs block_name_to_quantize damp_percent meta "
    "module_name_preceding_first_block modules_in_block_to_quantize damp_auto_increment true_sequential "
    "act_group_aware hyb_act mse gptaq v2 v2_alpha foem model_name_or_path model_file_base_name method "
    "pack_impl failsafe offload_to_disk offload_to_disk_path vram_strategy static_groups "
    # How auto-round tuned the codes.
    "autoround_version amp enable_minmax_tuning enable_norm_bias_tuning data_type enable_quanted_input "
    "gradient_accumulate_steps iters lr minmax_lr nsamples low_gpu_mem_usage low_cpu_mem_usage "
    "quant_block_list to_quant_block_names seqlen supported_types scale_dtype static_kv_dtype "
    "static_kv_granularity static_attention_granularity act_data_type act_dynamic act_group_size act_sym"
)
PROVENANCE = frozenset(_PROVENANCE.split())
"""Keys of a `quantization_config` that leave the meaning of the weights alone, whatever the format.

Of transformers 5.23, AutoGPTQ, AutoAWQ 0.2.9, GPTQModel 7.7, auto-round 0.16 and ModelOpt 0.47.
"""


def has_fp4_cache(config: Config | None) -> bool:
    """True if a `quantization_config` announces an NVFP4 cache. Its scales are amax / 2688."""
    fields = (config or {}).get("quantization") or config or {}
    algorithm = str(fields.get("kv_cache_quant_algo")).upper()
    scheme = fields.get("kv_cache_scheme")
    is_fp4 = isinstance(scheme, Mapping) and scheme.get("num_bits") == 4
    return is_fp4 or algorithm.startswith("NVFP4")


_STREAM = 32  # codes after which a dense bit stream is word-aligned again, for every width


class TensorSource(Protocol):
    """A lookup of tensors by name: a `Checkpoint` or a stand-in."""

    def tensor(self, name: str) -> torch.Tensor: ...

    def __contains__(self, name: str, /) -> bool: ...


class WeightFormat(ABC):
    """One on-disk format: its tensors, its `quantization_config`, and its limits.

    Attributes:
        markers: suffixes of tensor names whose presence marks a quantized module.
        suffixes: suffixes of all tensors that a quantized module may have (without the bias).
        rounds_to: scheme of method rtn in a format that holds no integers.
        keeps_scale_dtypes: True if readers accept scales of any dtype, so that none is cast.
        inverts_global_scales: True if reciprocals of scales of whole weights are stored.
        holds_kv_scales: True if scales of a quantized KV cache are stored too.
        irrelevant: keys of its own, next to `PROVENANCE`, that leave the meaning of the weights alone.
        plain_head: True if readers leave the output projection alone unless told otherwise.
        plain_list: key of the list without which transformers leaves the output projection alone.
        read_raw: the second reader, which shares no code with `pack` and `unpack`.
    """

    name: str
    markers: tuple[str, ...]
    suffixes: tuple[str, ...]
    rounds_to: Scheme | None = None
    keeps_scale_dtypes: bool = False
    inverts_global_scales: bool = False
    holds_kv_scales: bool = False
    irrelevant: tuple[str, ...] = ()
    plain_head: bool = False
    plain_list: str | None = None
    read_raw: RawReader

    @property
    def quant_method(self) -> str:
        return self.name

    @abstractmethod
    def check_scheme(self, scheme: Scheme) -> None:
        """Raises BadInput where the format cannot store such a scheme."""

    def check(self, module: str, out_features: int, in_features: int, scheme: Scheme) -> None:
        self.check_scheme(scheme)

    def scale_dtype(self, weights: torch.dtype, scheme: Scheme) -> torch.dtype:
        return torch.float16

    def held(self, tensor: QuantizedTensor) -> QuantizedTensor:
        """A weight that the format can hold, as the kind that it stores; itself, but for ggml's blocks."""
        return tensor

    @abstractmethod
    def pack(self, module: str, tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
        """Pack one module; tensors by full name."""

    @abstractmethod
    def unpack(self, module: str, source: TensorSource, config: Config) -> QuantizedTensor:
        """Unpack one module; BadInput where the tensors contradict the `quantization_config`."""

    @abstractmethod
    def config(self, schemes: Mapping[str, Scheme], ignore: Sequence[str]) -> dict[str, Any]:
        """The `quantization_config` of schemes by full name. BadInput: they cannot be mixed."""

    def kv_fields(self, kv_cache: str, strategy: str, modules: Collection[str]) -> dict[str, Any]:
        """The fields of the `quantization_config` for scales of a KV cache; BadInput where it has none."""
        return {}

    def kv_scale_name(self, name: str) -> str:
        return name

    def full_config(
        self,
        schemes: Mapping[str, Scheme],
        ignore: Sequence[str],
        kv_cache: str | None,
        strategy: str = "tensor",
    ) -> dict[str, Any]:
        fields = {} if kv_cache is None else self.kv_fields(kv_cache, strategy, schemes)
        return self.config(schemes, ignore) | fields

    @abstractmethod
    def scheme(self, config: Config, module: str) -> Scheme:
        """A module's scheme, from the `quantization_config`; BadInput where it is not supported."""

    def check_config(self, config: Config, modules: Collection[str]) -> None:
        """Raises BadInput where the `quantization_config` of linears has a key that nothing here reads."""
        section = Consumed(config)
        self.read_config(section, modules)
        known = PROVENANCE.union(self.irrelevant)
        section.refuse_unread(known, f"quant_method {self.quant_method}: the quantization_config")

    def read_config(self, config: Config, modules: Collection[str]) -> None:
        """Read everything that says what the weights mean; raises BadInput where it is not supported."""
        self.scheme(config, min(modules))

    def lists_plain(self, config: Config) -> bool:
        """True if loaders take every linear that the `quantization_config` does not exclude as quantized."""
        return True

    def skips(self, config: Config) -> Skips:
        """The rule by which the format's owner takes a module as excluded from quantization.

        Here names between dots, ends of names, and patterns up to a dot, as transformers takes them.
        """
        entries = plain_entries(config)
        return lambda name: any(_lists(entry, name) for entry in entries)

    def expect(self, config: Config, **values: tuple[Any, ...]) -> None:
        """Raises BadInput where a key of a `quantization_config` is set to none of its `values`."""
        for key, known in values.items():
            if (value := config.get(key)) is not None and value not in known:
                raise BadInput(
                    f"quant_method {self.quant_method} with {key} {value!r} is not supported: "
                    f"only {' and '.join(map(str, known))}"
                )

    def config_files(self, config: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """JSON files beside `config.json`, by name, from the `quantization_config`."""
        return {}

    def completed_config(self, config: dict[str, Any], folder: Path) -> dict[str, Any]:
        """The `quantization_config` with what it says of the shards in their folder, if it lists them."""
        return config


def held_scheme(name: str, scheme: Scheme, wanted: type[SchemeT], rest: str = "") -> SchemeT:
    """The scheme itself, or BadInput where format `name` holds schemes of class `held` only."""
    if not isinstance(scheme, wanted):
        raise BadInput(f"format {name} cannot hold {scheme.label} weights{rest}")
    return scheme


def only_scheme(name: str, schemes: Mapping[str, Scheme]) -> Scheme:
    """The one scheme of all modules, or BadInput where format `name` cannot mix several."""
    kinds = list(dict.fromkeys(schemes.values()))
    if len(kinds) != 1:
        labels = ", ".join(scheme.label for scheme in kinds)
        raise BadInput(f"format {name} holds one scheme for all modules, not {labels}")
    return kinds[0]


def pack_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes uint8 `[..., n]` into one bit stream, LSB first: int32 `[..., ceil(n * bits / 32)]`."""
    num_words = -(-codes.shape[-1] * bits // 32)
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % _STREAM))
    if 8 % bits == 0:  # whole codes per byte, and words are consecutive bytes
        per_byte = 8 // bits
        packed = padded[..., 0::per_byte].clone(memory_format=torch.contiguous_format)
        for index in range(1, per_byte):
            packed |= padded[..., index::per_byte] << (bits * index)
        return packed.view(torch.int32)[..., :num_words].contiguous()
    planes = padded.unflatten(-1, (-1, _STREAM)).movedim(-1, 0).contiguous()
    words = torch.zeros((bits, *planes.shape[1:]), dtype=torch.int32, device=codes.device)
    for index in range(_STREAM):
        word, shift = divmod(index * bits, 32)
        fields = planes[index].to(torch.int32)
        words[word] |= fields << shift
        if shift + bits > 32:
            words[word + 1] |= fields >> (32 - shift)
    return words.movedim(0, -1).flatten(-2)[..., :num_words].contiguous()


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Inverse of `pack_words`: uint8 `[..., n]`, the whole codes in int32 `[..., words]`."""
    if 8 % bits == 0:
        # Flat first: strides of an axis of length 1 may be anything, and `view` depends on them.
        packed = words.reshape(-1).view(torch.uint8).view(*words.shape[:-1], -1)
        codes = torch.empty(*packed.shape, 8 // bits, dtype=torch.uint8, device=words.device)
        for index in range(8 // bits):
            torch.bitwise_right_shift(packed, index * bits, out=codes[..., index])
        return codes.bitwise_and_(2**bits - 1).flatten(-2)
    count = words.shape[-1] * 32 // bits
    stream = torch.nn.functional.pad(words, (0, -words.shape[-1] % bits))
    planes = stream.unflatten(-1, (-1, bits)).movedim(-1, 0).contiguous()
    codes = torch.empty((_STREAM, *planes.shape[1:]), dtype=torch.uint8, device=words.device)
    for index in range(_STREAM):
        word, shift = divmod(index * bits, 32)
        # A right shift extends the sign: only the lowest `32 - shift` bits are valid.
        fields = (planes[word] >> shift) & (2 ** min(bits, 32 - shift) - 1)
        if shift + bits > 32:
            fields |= planes[word + 1] << (32 - shift)
        codes[index] = fields & (2**bits - 1)
    return codes.movedim(0, -1).flatten(-2)[..., :count].contiguous()


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)


def expect_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor itself, or BadInput when its shape is not the one that the config implies."""
    if tuple(tensor.shape) != shape:
        raise BadInput(
            f"{name} has shape {tuple(tensor.shape)}, but its quantization_config implies {shape}"
        )
    return tensor


def expect_dtype(name: str, tensor: torch.Tensor, *dtypes: torch.dtype) -> torch.Tensor:
    """The tensor itself, or BadInput when its dtype is none of `dtypes`."""
    if tensor.dtype not in dtypes:
        wanted, stored = " or ".join(map(dtype_name, dtypes)), dtype_name(tensor.dtype)
        raise BadInput(f"{name} holds {stored}, but the format has {wanted} there")
    return tensor


class Stored:
    """The tensors of one module, by the ending of their names; BadInput for a missing or a wrong one."""

    def __init__(self, source: TensorSource, module: str):
        self.source, self.module = source, module

    def __contains__(self, ending: str) -> bool:
        return f"{self.module}.{ending}" in self.source

    def tensor(
        self, ending: str, *dtypes: torch.dtype, shape: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        """A tensor of one of `dtypes` (none: of any), and of a shape where one is given."""
        name = f"{self.module}.{ending}"
        tensor = self.source.tensor(name)
        if shape is not None:
            expect_shape(name, tensor, shape)
        return expect_dtype(name, tensor, *dtypes) if dtypes else tensor

    def matrix(self, ending: str, *dtypes: torch.dtype) -> torch.Tensor:
        name = f"{self.module}.{ending}"
        tensor = self.source.tensor(name)
        if tensor.dim() != 2:
            shapes = f"{tuple(tensor.shape)}, but the format has a matrix there"
            raise BadInput(f"{name} has shape {shapes}")
        return expect_dtype(name, tensor, *dtypes)

    def weight_shape(self) -> tuple[int, int]:
        out_features, in_features = self.tensor("weight_shape", shape=(2,)).tolist()
        return out_features, in_features

    def group_index(self, ending: str, in_features: int, groups: int) -> torch.Tensor:
        """The group of each input channel, int32 `[in]`."""
        index = self.tensor(ending, torch.int32, torch.int64, shape=(in_features,)).to(torch.int32)
        if int(index.min()) < 0 or int(index.max()) >= groups:
            raise BadInput(f"{self.module}.{ending} names groups outside 0..{groups - 1}")
        return index


def matches(pattern: str, module: str) -> bool:
    """True if a regular expression of a config matches a module's name (`re.match`)."""
    try:
        return re.match(pattern, module) is not None
    except re.error as error:
        raise BadInput(
            f"the quantization_config has {pattern!r}, which is no regular expression: {error}"
        ) from error


def plain_entries(config: Config) -> list[str]:
    """Entries of the lists of plain modules that transformers, bitsandbytes and AutoAWQ write."""
    keys = ("modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules")
    return [entry for key in keys for entry in config.get(key) or ()]


def _lists(entry: str, name: str) -> bool:
    """True if an entry is for a module: `should_convert_module` of transformers 5.23, or a part of its name.
    `mlp.gate` is for `layers.0.mlp.gate`, and not for `layers.0.mlp.gate_proj`."""
    if f".{entry}." in f".{name}." or name.endswith(entry):
        return True
    try:
        return re.match(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))", name) is not None
    except re.error:
        return False


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
