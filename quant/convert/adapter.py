"""LoRA adapters as PEFT writes them: settings (`adapter_config.json`) and weights, checked."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...base.errors import BadInput
from ..base.consumed import Consumed
from ..model.checkpoint import TOKENIZER_FILES, files_of, read_json

if TYPE_CHECKING:
    import torch


CONFIG_NAME = "adapter_config.json"
_SETTINGS = "tokenizer_config.json"
# Fields of the training and of the file, which do not change how weights are read.
_IRRELEVANT = (
    *("corda_config", "eva_config", "exclude_modules", "layers_pattern", "loftq_config"),
    *("layers_to_transform", "lora_dropout", "lora_ga_config", "runtime_config", "task_type"),
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "megatron_config"),
    *("megatron_core", "peft_version", "qalora_group_size", "revision"),
    *("rank_pattern", "alpha_pattern"),  # whose keys are patterns of modules
)
_KEEPS_THE_BASE = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the weights of the base model as they are."""
WEIGHTS_NAME = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_SUFFIXES = (
    *(".lora_A.weight", ".lora_B.weight"),
    *(".lora_magnitude_vector", ".lora_magnitude_vector.weight"),
)


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Rank, scale and target modules of an adapter; the patterns override them for single modules.

    Attributes:
        is_dora: True if a magnitude per output channel is learned next to the direction (DoRA, Liu et al.,
            arXiv:2402.09353).
        is_transposed: True if the base stores these weights as [in, out] (`fan_in_fan_out`, Conv1D).

    Source: `LoraConfig` of PEFT, and Kalajdzievski, "A Rank Stabilization Scaling Factor for
    Fine-Tuning with LoRA" (arXiv:2312.03732) for `rank_stabilized`.
    """

    path: Path
    rank: int
    alpha: float
    rank_stabilized: bool
    is_dora: bool
    is_transposed: bool
    targets: str | tuple[str, ...]
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    @classmethod
    def read(cls, folder: Path) -> LoraSettings:
        """The settings of an adapter folder. BadInput: a field is missing, invalid, or not supported."""
        path = folder / CONFIG_NAME
        raw = Consumed(read_json(path))
        if (kind := raw.get("peft_type")) != "LORA":
            raise BadInput(f"{path}: peft_type is {kind!r}: only LORA adapters can be read")
        if raw.get("bias", "none") != "none":
            raise BadInput(
                f"{path}: bias = {raw['bias']!r}: adapters with biases are not supported"
            )
        if (start := raw.get("init_lora_weights")) not in _KEEPS_THE_BASE:
            raise BadInput(
                f"{path}: init_lora_weights = {start!r} changes the base model's weights: convert the "
                "adapter to a plain one with PEFT"
            )
        targets: Any = raw.get("target_modules")
        is_list = isinstance(targets, list) and all(isinstance(name, str) for name in targets)
        if not isinstance(targets, str) and not (targets and is_list):
            raise BadInput(f"{path}: target_modules is {targets!r}: it needs names or a pattern")
        settings = cls(
            path,
            rank=_number(path, "r", raw.get("r"), int),
            alpha=_number(path, "lora_alpha", raw.get("lora_alpha"), float),
            rank_stabilized=bool(raw.get("use_rslora")),
            is_dora=bool(raw.get("use_dora")),
            is_transposed=bool(raw.get("fan_in_fan_out")),
            targets=targets if isinstance(targets, str) else tuple(targets),
            rank_pattern=_pattern(path, "rank_pattern", raw, int),
            alpha_pattern=_pattern(path, "alpha_pattern", raw, float),
        )
        raw.refuse_unread(_IRRELEVANT, str(path))
        return settings

    def targets_module(self, module: str) -> bool:
        if self.targets == "all-linear":
            return True
        if isinstance(self.targets, str):
            return re.fullmatch(self.targets, module) is not None
        return any(module == name or module.endswith(f".{name}") for name in self.targets)

    def rank_of(self, module: str) -> int:
        return _find(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        rank, alpha = self.rank_of(module), _find(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)


def _find(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    keys = (key for key in pattern if re.fullmatch(rf"(?:.*\.)?(?:{key})", module))
    return pattern[key] if (key := next(keys, None)) is not None else default


def _number(path: Path, field: str, value: Any, kind: type) -> Any:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not (whole or (kind is float and isinstance(value, float))) or not 0 < value < math.inf:
        raise BadInput(f"{path}: {field} is {value!r}: need a number above 0")
    return value


def _pattern(path: Path, field: str, raw: Mapping[str, Any], kind: type) -> dict[str, Any]:
    pattern = raw.get(field) or {}
    if not isinstance(pattern, Mapping):
        raise BadInput(f"{path}: {field} is {pattern!r}, not an object")
    for key, value in pattern.items():
        _number(path, f"{field}[{key!r}]", value, kind)
        try:
            re.compile(key)
        except re.error as error:
            raise BadInput(f"{path}: {field}: {key!r} is no pattern: {error}") from error
    return dict(pattern)


def with_tokenizer_of(
    folder: Path, files: Mapping[str, bytes]
) -> tuple[Mapping[str, bytes], str | None]:
    """The base's files with the tokenizer and chat template that an adapter was trained with, which TRL,
    Unsloth and Axolotl save; as they were, and a note, where its ids are not the base's."""
    own = files_of(folder, TOKENIZER_FILES)
    theirs, ours = (_vocabulary(part.get("tokenizer.json"), folder) for part in (own, files))
    others = sorted({*theirs.items()} ^ {*ours.items()}) if theirs else []
    is_bare = bool(own) and not theirs and not all("chat_template" in name for name in own)
    if others or is_bare:
        why = f"the ids of {len(others)} tokens, such as {others[0][0]!r}, differ from the base's"
        return files, f"note: {folder}: tokenizer and chat template are not taken: " + (
            "there is no tokenizer.json to compare" if is_bare else why
        )
    settings, named = json.loads(own.get(_SETTINGS, b"{}")), "chat_template"
    if named in settings or any(named in name for name in own):
        files = {name: content for name, content in files.items() if named not in name}
    elif own and named in (base := json.loads(files.get(_SETTINGS, b"{}"))):
        own[_SETTINGS] = json.dumps({**settings, named: base[named]}).encode()
    return {**files, **own}, None


def _vocabulary(content: bytes | None, folder: Path) -> dict[str, int]:
    from tokenizers import Tokenizer

    if content is None:
        return {}
    try:
        return Tokenizer.from_buffer(content).get_vocab()
    except Exception as error:  # the package has no type of its own
        raise BadInput(f"{folder}: a tokenizer.json is damaged: {error}") from error


class LoraPair(NamedTuple):
    """LoRA A and B: `y += x @ down.T @ up.T`; float32 [rank, in], and [out, rank] with the scale in it."""

    down: torch.Tensor
    up: torch.Tensor


class AdapterWeights:
    """Tensors of an adapter, by targeted modules. BadInput: missing, damaged, no LoRA, or no target."""

    def __init__(self, folder: Path, settings: LoraSettings) -> None:
        self.path = folder / WEIGHTS_NAME
        self.settings = settings
        self._tensors = _read(self.path)
        self.modules = sorted({self._module_of(name) for name in self._tensors})
        if not self.modules:
            raise BadInput(f"{self.path} holds no tensor")
        for module in self.modules:
            if not settings.targets_module(module):
                raise BadInput(
                    f"{settings.path}: target_modules does not name {module}, which has weights"
                )

    def pair(self, module: str, out_features: int, in_features: int) -> LoraPair:
        """A and B of a module. Raises BadInput: naming the tensor that is missing or misshapen."""
        rank = self.settings.rank_of(module)
        down = self._tensor(f"{module}.lora_A.weight", (rank, in_features), rank)
        up = self._tensor(f"{module}.lora_B.weight", (out_features, rank), rank)
        return LoraPair(down, up * self.settings.scale_of(module))

    def magnitude(self, module: str, out_features: int) -> torch.Tensor:
        """DoRA's magnitude of each output channel, float32 [out]. Raises BadInput: missing or misshapen."""
        name = f"{module}.lora_magnitude_vector"
        if f"{_PREFIX}{name}" not in self._tensors:
            name = f"{name}.weight"
        return self._tensor(name, (out_features,), self.settings.rank_of(module))

    def _tensor(self, name: str, shape: tuple[int, ...], rank: int) -> torch.Tensor:
        tensor = self._tensors.get(f"{_PREFIX}{name}")
        if tensor is None:
            raise BadInput(f"{self.path} lacks {_PREFIX}{name}")
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            raise BadInput(
                f"{self.path}: {_PREFIX}{name} is {tensor.dtype} {tuple(tensor.shape)}, but the model and "
                f"r = {rank} in {self.settings.path.name} make it floats of {shape}"
            )
        return tensor.float()

    def _module_of(self, name: str) -> str:
        for suffix in _SUFFIXES:
            if name.startswith(_PREFIX) and name.endswith(suffix):
                return name.removeprefix(_PREFIX).removesuffix(suffix)
        raise BadInput(f"{self.path}: {name} is not a lora_A or lora_B weight of a linear")


def _read(path: Path) -> Mapping[str, torch.Tensor]:
    if not path.is_file():
        other = path.with_suffix(".bin")
        hint = f": {other.name} is a pickle, save it as safetensors" if other.is_file() else ""
        raise BadInput(f"{path} is missing{hint}")

    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise BadInput(
            f"{path} is cut off or damaged ({error}): fetch or write it again"
        ) from error
