"""NVIDIA ModelOpt's format (`quant_method: modelopt`), read by TensorRT-LLM, vLLM and SGLang.

Layouts in `docs/formats.md`. All scales are multipliers: `weight_scale_2 = max|w| / (448 * 6)`, and NVFP4's
`input_scale`, are reciprocals of compressed-tensors'. Source: `modelopt/torch/export`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from ...base.errors import BadInput
from ...base.version import VERSION
from ..base.scheme import Scheme
from ..kinds.base.containers import ModelOptAlgorithms
from ..kinds.base.format import Config, Skips, Stored, TensorSource, WeightFormat
from ..kinds.base.kind import storage_of
from ..kinds.base.raw import Entries, Raw
from ..kinds.base.tensor import QuantizedTensor
from ..kinds.registry import classes_in
from ..model.checkpoint import HF_QUANT_CONFIG

_PARTS = [
    part for kind in classes_in("modelopt") if (part := storage_of(kind).modelopt) is not None
]


def _part(scheme: Scheme) -> ModelOptAlgorithms:
    part = storage_of(scheme).modelopt
    assert part is not None, "its algorithm was looked up before"
    return part


ALGORITHMS: dict[str, Scheme] = {
    name: scheme for part in _PARTS for name, scheme in part.algorithms.items()
}
"""The scheme that each `quant_algo` stores."""

MIXED = "MIXED_PRECISION"
_LATENT = ("kv_a_proj_with_mqa", "kv_a_proj")


class ModelOptFormat(WeightFormat):
    """ModelOpt's unified checkpoints: FP8 and NVFP4."""

    name = "modelopt"
    inverts_global_scales = True
    holds_kv_scales = True
    markers: tuple[str, ...] = (".weight_scale",)
    suffixes: tuple[str, ...] = (".weight", ".weight_scale", ".weight_scale_2", ".input_scale")
    # Of `config_groups`, which repeats what `quant_algo` says in the words of compressed-tensors.
    irrelevant: tuple[str, ...] = ("weights", "input_activations", "output_activations", "targets")

    def skips(self, config: Config) -> Skips:
        """Whole names and shell wildcards."""
        excluded = config.get("quantization", config).get("exclude_modules")
        wildcards = config.get("ignore") or excluded or ()
        return lambda name: any(fnmatchcase(name, entry) for entry in wildcards)

    def check_scheme(self, scheme: Scheme) -> None:
        _algorithm(scheme)

    def check(self, module: str, out_features: int, in_features: int, scheme: Scheme) -> None:
        self.check_scheme(scheme)
        _part(scheme).check(module, out_features, in_features, scheme)

    def scale_dtype(self, weights: torch.dtype, scheme: Scheme) -> torch.dtype:
        return torch.float32

    def pack(self, module: str, tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
        return _part(tensor.scheme).pack(module, tensor)

    def unpack(self, module: str, source: TensorSource, config: Config) -> QuantizedTensor:
        scheme = self.scheme(config, module)
        return _part(scheme).unpack(Stored(source, module), scheme)

    def kv_fields(self, kv_cache: str, strategy: str, modules: Collection[str]) -> dict[str, Any]:
        if strategy != "tensor":
            what = f"--kv-cache-strategy {strategy}"
            raise BadInput(f"{what}: format modelopt has a scale for each layer")
        if any(name.endswith(_LATENT) for name in modules):
            why = "format modelopt has no names for scales of latent attention"
            raise BadInput(f"--kv-cache: {why}")
        return {"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}

    def config(self, schemes: Mapping[str, Scheme], ignore: Sequence[str]) -> dict[str, Any]:
        algorithms = {module: _algorithm(scheme) for module, scheme in schemes.items()}
        kinds = list(dict.fromkeys(algorithms.values()))
        groups = {f"group_{n}": _group(ALGORITHMS[kind]) for n, kind in enumerate(kinds)}
        config: dict[str, Any] = {
            "quant_method": self.name,
            "quant_algo": kinds[0] if len(kinds) == 1 else MIXED,
            "ignore": list(ignore),
            "producer": {"name": "llmopt", "version": VERSION},
        }
        if len(kinds) == 1:
            config["config_groups"] = groups
        else:
            config["quantized_layers"] = {
                module: {"quant_algo": kind} | _group_size(ALGORITHMS[kind])
                for module, kind in algorithms.items()
            }
        return config

    def read_config(self, config: Config, modules: Collection[str]) -> None:
        self.scheme(config, min(modules))
        for section in (config, config.get("quantization") or {}):
            for part in ("config_groups", "quantized_layers"):
                for entry in (section.get(part) or {}).values():
                    for key in ("quant_algo", "group_size"):  # `scheme` reads a module's own
                        entry.get(key)

    def scheme(self, config: Config, module: str) -> Scheme:
        fields: Config = config.get("quantization", config)
        algorithm = str(fields.get("quant_algo")).upper()
        if algorithm == MIXED:
            layers: Mapping[str, Config] = fields.get("quantized_layers") or {}
            name = module  # or a module that it lies in, such as all experts of a layer
            while name and name not in layers:
                name = name.rpartition(".")[0]
            if not name:
                raise BadInput(f"no entry of quantized_layers is for {module}")
            fields = layers[name]
            algorithm = str(fields.get("quant_algo")).upper()
        if algorithm not in ALGORITHMS:
            raise BadInput(
                f"quant_method modelopt with quant_algo {algorithm} is not supported: "
                f"only {', '.join(ALGORITHMS)} and {MIXED}"
            )
        scheme = ALGORITHMS[algorithm]
        size, only = fields.get("group_size"), _group_size(scheme).get("group_size")
        if only is not None and size not in (None, only):
            what = f"quant_method modelopt with {algorithm} in groups of {size}"
            raise BadInput(f"{what} is not supported: only {only}")
        groups = (config.get("config_groups") or {}).values()
        if algorithm == "NVFP4" and groups and not any(g.get("input_activations") for g in groups):
            return ALGORITHMS["W4A16_NVFP4"]  # as vLLM reads it
        return scheme

    def kv_scale_name(self, name: str) -> str:
        parent, _, leaf = name.rpartition(".")
        return f"{parent}.{leaf[0]}_proj.{leaf}"

    def config_files(self, config: dict[str, Any]) -> dict[str, dict[str, Any]]:
        return {HF_QUANT_CONFIG: hf_quant_config(config)}

    @staticmethod
    def read_raw(entries: Entries, module: str, config: dict[str, Any]) -> Raw:
        """Read a module a second time, with numpy alone; the dtype of its weight says which kind it is."""
        dtype = entries[f"{module}.weight"].dtype
        part = next((part for part in _PARTS if part.raw_dtype == dtype), None)
        if part is None:
            raise ValueError(f"{dtype} where codes belong")
        return part.read_raw(entries, module, config)


def hf_quant_config(config: Config) -> dict[str, Any]:
    """The content of `hf_quant_config.json`, from the `quantization_config` of `ModelOptFormat`."""
    algorithm = config["quant_algo"]
    fields: dict[str, Any] = {
        "quant_algo": algorithm,
        "kv_cache_quant_algo": "FP8" if config.get("kv_cache_scheme") else None,
    }
    if algorithm == MIXED:
        fields["quantized_layers"] = config["quantized_layers"]
    else:
        fields |= _group_size(ALGORITHMS[algorithm])
    fields["exclude_modules"] = config["ignore"]
    return {"producer": config["producer"], "quantization": fields}


def _algorithm(scheme: Scheme) -> str:
    for algorithm, stored in ALGORITHMS.items():
        if stored == scheme:
            return algorithm
    labels = ", ".join(stored.label for stored in ALGORITHMS.values())
    raise BadInput(f"format modelopt cannot hold {scheme.label} weights: only {labels}")


def _group_size(scheme: Scheme) -> dict[str, int]:
    return _part(scheme).group_size(scheme)


def _group(scheme: Scheme) -> dict[str, Any]:
    """An entry of `config_groups`, without which vLLM takes NVFP4 inputs as quantized."""
    fields = {"dynamic": False, "num_bits": scheme.bits, "type": "float"} | _group_size(scheme)
    inputs = None if scheme.activations is None else dict(fields)
    if inputs is not None:
        inputs["dynamic"] = bool(scheme.activations and scheme.activations.dynamic)
    return {"input_activations": inputs, "weights": fields, "targets": ["Linear"]}


FORMAT = ModelOptFormat()
