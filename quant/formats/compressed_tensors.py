"""compressed-tensors format, read by transformers, vLLM and this engine.

Layouts are the kinds' (`CompressedLayouts`); here are the `config_groups`, by which a module finds its layout
and scheme. With several schemes groups list modules; with several layouts it is `mixed-precision`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from ...base.errors import BadInput
from ..base.scheme import Scheme
from ..kinds.base.containers import CompressedLayouts, unsupported
from ..kinds.base.format import Config, Skips, Stored, TensorSource, WeightFormat, matches
from ..kinds.base.kind import storage_of
from ..kinds.base.raw import Entries, Raw
from ..kinds.base.tensor import QuantizedTensor
from ..kinds.registry import classes_in

MIXED = "mixed-precision"
_NAIVE = "naive-quantized"  # an older name of the two layouts with a `weight` tensor
_EXPERT = re.compile(r".*\.experts\.\d+\..*")
# `kv_cache_scheme`: static per-tensor fp8 scales, the only kind that vLLM reads besides those per head.
_KV_CACHE = {"num_bits": 8, "type": "float", "symmetric": True}


def _parts() -> Iterator[CompressedLayouts]:
    parts = (storage_of(kind).compressed_tensors for kind in classes_in("compressed-tensors"))
    return (part for part in parts if part is not None)


def _part(scheme: Scheme) -> CompressedLayouts:
    part = storage_of(scheme).compressed_tensors
    if part is None:
        raise BadInput(f"format compressed-tensors cannot hold {scheme.label} weights")
    return part


def layout_of(scheme: Scheme) -> str:
    layout = _part(scheme).layout_of(scheme)
    if layout is None:
        why = " (its library dropped permuted groups)" if scheme.permuted else ""
        raise BadInput(f"format compressed-tensors cannot hold {scheme.label} weights{why}")
    return layout


def group_of(scheme: Scheme, targets: list[str]) -> dict[str, Any]:
    """One entry of `config_groups`. The library rejects unknown keys."""
    part, activations = _part(scheme), scheme.activations
    return {
        "targets": targets,
        "weights": {"num_bits": scheme.bits, "dynamic": False} | part.weights(scheme),
        "input_activations": None if activations is None else part.inputs(activations),
        "output_activations": None,
    }


def find_group(config: Config, module: str) -> tuple[str, Config]:
    """Layout and `config_groups` entry of a module, by name, `re:` or class `Linear`; else BadInput. As in
    `match_targets` 0.20: of patterns the first sorted, of groups with one target the last."""
    entries = _groups(config)
    owners = {target: group for group in entries.values() for target in group.get("targets") or []}
    patterns = sorted(target for target in owners if target.startswith("re:"))
    if (group := owners.get(module)) is None:
        group = owners.get(next((t for t in patterns if matches(t[3:], module)), "Linear"))
    if group is None and len(entries) == 1:
        group = next(iter(entries.values()))
    if group is None:
        raise BadInput(f"no entry of config_groups is for {module}")
    return str(group.get("format") or config.get("format")), group


def _groups(config: Config) -> dict[str, Config]:
    """The entries of `config_groups`, each of which quantizes weights, or BadInput."""
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise unsupported("no config_groups")
    for name, group in groups.items():
        if not isinstance(group, Mapping) or not group.get("weights"):
            raise unsupported(f"config_groups.{name}, which describes no weights,")
    return dict(groups)


def read_group(layout: str, group: Config) -> tuple[str, Scheme]:
    """Layout (never the naive name) and scheme of an entry of `config_groups`; BadInput if not supported."""
    if layout == _NAIVE:
        weights = group.get("weights") or {}
        naive = next((p.naive for p in _parts() if p.naive and p.describes(weights)), None)
        layout = naive or layout
    part = next((part for part in _parts() if layout in part.layouts), None)
    if part is None:
        *names, last = (name for part in _parts() for name in part.layouts)
        raise BadInput(
            f"quant_method compressed-tensors with format {layout!r} is not supported: "
            f"only {', '.join(names)} and {last}"
        )
    return layout, part.scheme(layout, group)


class CompressedTensorsFormat(WeightFormat):
    """compressed-tensors: integers of 2 to 8 bits, int8, fp8, NVFP4 and MXFP4 with or without activations."""

    name = "compressed-tensors"
    keeps_scale_dtypes = True
    holds_kv_scales = True
    irrelevant: tuple[str, ...] = (
        *("version", "quantization_status", "global_compression_ratio", "targets", "format"),
        # Of weights and inputs: how they were calibrated, and what the tensors and their dtypes say.
        *("observer", "observer_kwargs", "actorder", "dynamic", "scale_dtype", "zp_dtype"),
        *("group_size", "block_structure", "strategy"),
        *("global_sparsity", "sparsity_structure", "registry_requires_subclass"),  # of a dense file
    )
    markers: tuple[str, ...] = (".weight_packed", ".weight_scale")
    suffixes: tuple[str, ...] = (
        *(".weight_packed", ".weight", ".weight_scale", ".weight_zero_point", ".weight_shape"),
        *(".weight_g_idx", ".weight_global_scale", ".input_global_scale", ".input_scale"),
        ".input_zero_point",
    )

    def lists_plain(self, config: Config) -> bool:
        groups = (config.get("config_groups") or {}).values()
        return any("Linear" in (group.get("targets") or ()) for group in groups)

    def skips(self, config: Config) -> Skips:
        """Whole names and `re:` patterns."""
        ignored = config.get("ignore") or ()
        return lambda name: any(
            matches(entry[3:], name) if entry.startswith("re:") else entry == name
            for entry in ignored
        )

    def check_scheme(self, scheme: Scheme) -> None:
        layout_of(scheme)

    def check(self, module: str, out_features: int, in_features: int, scheme: Scheme) -> None:
        _part(scheme).check(module, out_features, in_features, scheme)
        activations = scheme.activations
        if activations is not None and activations.granularity == "group128" and in_features % 128:
            raise BadInput(
                f"{module} has {in_features} inputs, and readers of compressed-tensors quantize inputs in "
                "groups of 128 only where that divides them: leave it out with --ignore"
            )

    def scale_dtype(self, weights: torch.dtype, scheme: Scheme) -> torch.dtype:
        return weights

    def pack(self, module: str, tensor: QuantizedTensor) -> dict[str, torch.Tensor]:
        return _part(tensor.scheme).pack(module, tensor)

    def unpack(self, module: str, source: TensorSource, config: Config) -> QuantizedTensor:
        layout, scheme = read_group(*find_group(config, module))
        return _part(scheme).unpack(Stored(source, module), layout, scheme)

    def read_config(self, config: Config, modules: Collection[str]) -> None:
        self.scheme(config, min(modules))
        for group in _groups(config).values():
            read_group(str(group.get("format") or config.get("format")), group)
        if (config.get("sparsity_config") or {}).get("format") not in (None, "dense"):
            raise unsupported("sparsity_config")
        _refuse_online(config.get("transform_config") or {})

    def config(self, schemes: Mapping[str, Scheme], ignore: Sequence[str]) -> dict[str, Any]:
        members: dict[Scheme, list[str]] = {}
        for module, scheme in schemes.items():
            members.setdefault(scheme, []).append(module)
        layouts = {scheme: layout_of(scheme) for scheme in members}
        mixed = len(set(layouts.values())) > 1
        groups = {}
        experts = {scheme for scheme, names in members.items() if any(map(_EXPERT.match, names))}
        for index, (scheme, modules) in enumerate(members.items()):
            targets = modules
            if experts == {scheme}:  # by a pattern transformers finds the scheme of what it merges
                others = (name for name in modules if not _EXPERT.match(name))
                targets = [f"re:{_EXPERT.pattern}", *others]
            group = group_of(scheme, ["Linear"] if len(members) == 1 else targets)
            groups[f"group_{index}"] = group | ({"format": layouts[scheme]} if mixed else {})
        return {
            "quant_method": self.name,
            "format": MIXED if mixed else next(iter(layouts.values())),
            "quantization_status": "compressed",
            "config_groups": groups,
            # vLLM looks the schemes of linears in fused experts up by the names that they would have.
            "ignore": [
                *ignore,
                *(f"re:{re.escape(n)}\\..*" for n in ignore if n.endswith(".experts")),
            ],
            "kv_cache_scheme": None,
        }

    def kv_fields(self, kv_cache: str, strategy: str, modules: Collection[str]) -> dict[str, Any]:
        """`k_scale` and `v_scale` lie beside the attention layers, or one for each KV head."""
        return {"kv_cache_scheme": _KV_CACHE | {"strategy": strategy, "dynamic": False}}

    def scheme(self, config: Config, module: str) -> Scheme:
        return read_group(*find_group(config, module))[1]

    @staticmethod
    def read_raw(entries: Entries, module: str, config: dict[str, Any]) -> Raw:
        """Read a module a second time: its group of the config, then its kind's layout, with numpy alone."""

        def rank(target: tuple[str, Any]) -> tuple[int, str]:
            name, _ = target
            if name == module:
                return 0, ""
            if name.startswith("re:") and re.match(name[3:], module):
                return 1, name
            return (2, "") if name == "Linear" else (3, "")

        groups = list(config["config_groups"].values())
        targets = [(name, group) for group in groups for name in group.get("targets") or [""]]
        _, group = min(reversed(targets), key=rank)  # the last of equal targets
        part = next(part for part in _parts() if part.describes(group["weights"]))
        return part.read_raw(entries, module, group.get("format") or config.get("format"), group)


def _refuse_online(transforms: Config) -> None:
    """Raise BadInput for transforms of activations (R3, R4, QuIP); those of weights are stored."""
    for name, scheme in (transforms.get("config_groups") or {}).items():
        for transform in scheme.get("apply") or ():
            if transform.get("location") not in ("weight_input", "weight_output"):
                raise unsupported(
                    f"transform_config: {name} transforms the {transform.get('location')} while the model "
                    "runs, which"
                )
        for key in ("type", "randomize", "requires_grad", "head_dim", "precision"):
            scheme.get(key)


FORMAT = CompressedTensorsFormat()
