"""Modules that a config calls quantized or plain, against those that the files hold."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from ...base.errors import BadInput
from ..formats.registry import FORMATS, format_of, names_with_weights
from ..kinds.base.format import Skips, WeightFormat
from ..model.architecture import HEAD
from ..model.checkpoint import Checkpoint
from ..model.parameters import ModelParameters, by_kind, plain_linears
from .findings import Finding, Severity


def model_faults(
    checkpoint: Checkpoint, modules: Collection[str], parameters: ModelParameters
) -> Iterator[Finding]:
    """Findings about missing and undeclared modules, one for each kind of module."""
    names = names_with_weights(checkpoint, modules)
    apart = parameters.experts_apart(names)  # which loaders take that keep each expert by itself
    missing = [name for name in parameters.missing(names) if name.rpartition(".")[0] not in apart]
    text = "of the model is in no file: the checkpoint is incomplete"
    yield from found_by_kind("missing-parameter", missing, text)
    config = checkpoint.quantization_config
    if not config or not (weight_format := _format(config)).lists_plain(config):
        return
    skipped = weight_format.skips(config)
    plain_list = weight_format.plain_list
    unlisted = plain_list is not None and config.get(plain_list) is None
    leaves_the_head = unlisted or weight_format.plain_head
    disk_names: dict[str, str] = {}
    for disk, loaded in parameters.loaded_from(names).items():
        disk_names |= dict.fromkeys(loaded.parameters, disk.removesuffix(".weight"))
    undeclared = [
        name
        for name in plain_linears(parameters, modules)
        if f"{name}.weight" not in missing
        and not skipped(name)
        and not skipped(disk_names.get(f"{name}.weight", name))
        and not (name == HEAD and leaves_the_head)
    ]
    text = "is not quantized, and the config does not say that it should not be"
    for kind in by_kind(undeclared):  # the head is no linear in vLLM, which leaves it alone
        severity = "suspect" if kind == HEAD else "broken"
        yield Finding("undeclared-plain", kind, f"{kind} {text}", severity)
    skipped_codes = [module for module in sorted(modules) if skipped(module)]
    text = "is quantized, but the config tells loaders to skip it"
    yield from found_by_kind("quantized-though-ignored", skipped_codes, text)


def found_by_kind(
    code: str, names: Iterable[str], text: str, severity: Severity = "broken"
) -> Iterator[Finding]:
    """A finding for each kind of the names, which begins its sentence."""
    for kind in by_kind(names):
        yield Finding(code, kind, f"{kind} {text}", severity)


def skipped_by(config: Mapping[str, Any]) -> Skips:
    """True where the config excludes a module from quantization, by the rule of the format's owner."""
    return _format(config).skips(config)


def _format(config: Mapping[str, Any]) -> WeightFormat:
    try:
        return format_of(config)
    except BadInput:  # unknown: transformers' rules
        return FORMATS["fp8"]
