"""A quantized checkpoint against transformers' model of its config: nothing lacks, and nothing is undeclared.

Every parameter must be in the files, as a tensor or as codes, and every linear without codes must be one that
the `quantization_config` tells loaders to leave alone: else they look for codes that are not there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from fnmatch import translate
from typing import Any

from ..model.checkpoint import Checkpoint
from ..model.parameters import ModelParameters
from ..plan.unquantized import by_kind, plain_linears
from ..request.selection import HEAD
from .read import tensor_names

# Formats whose readers leave the output projection alone unless told otherwise.
_HEAD_IS_PLAIN = ("awq", "exl3", "gptq", "squeezellm", "gguf", "QUiP")


def model_failures(
    checkpoint: Checkpoint, modules: Collection[str], parameters: ModelParameters
) -> list[str]:
    """What is missing or undeclared, one line for each kind of module."""
    stored = {name for module in modules for name in tensor_names(checkpoint, module)}
    names = [*(name for name in checkpoint.names if name not in stored)]
    names += [f"{module}.weight" for module in modules]
    apart = parameters.experts_apart(names)  # which loaders take that keep each expert by itself
    missing = [name for name in parameters.missing(names) if name.rpartition(".")[0] not in apart]
    failures = [
        f"{kind} of the model is in no file: the checkpoint is incomplete"
        for kind in by_kind(missing)
    ]
    config = checkpoint.quantization_config or {}
    if not _lists_what_is_plain(config):
        return failures
    skipped = skipped_by(config)
    disk_names: dict[str, str] = {}
    for disk, loaded in parameters.loaded_from(names).items():
        disk_names |= dict.fromkeys(loaded.parameters, disk.removesuffix(".weight"))
    undeclared = [
        name
        for name in plain_linears(parameters, modules)
        if f"{name}.weight" not in missing
        and not skipped(name)
        and not skipped(disk_names.get(f"{name}.weight", name))
        and not (name == HEAD and config["quant_method"] in _HEAD_IS_PLAIN)
    ]
    failures += [
        f"{kind} is not quantized, and the config does not say that it should not be"
        for kind in by_kind(undeclared)
    ]
    return failures + [
        f"{kind} is quantized, but the config tells loaders to skip it"
        for kind in by_kind(module for module in sorted(modules) if skipped(module))
    ]


def _lists_what_is_plain(config: Mapping[str, Any]) -> bool:
    """Whether loaders take every linear that the config does not exclude as quantized."""
    method = config.get("quant_method")
    if method == "gptq":  # else loaders look which linears have codes
        return bool(config.get("dynamic"))
    if method == "compressed-tensors":
        groups = (config.get("config_groups") or {}).values()
        return any("Linear" in (group.get("targets") or ()) for group in groups)
    return method != "gguf"


def skipped_by(config: Mapping[str, Any]) -> Callable[[str], bool]:
    """A predicate: whether the config excludes a module from quantization.

    AWQ, fp8 and bitsandbytes list substrings of the name; compressed-tensors names, `re:` patterns or
    module classes; GPTQ patterns under `dynamic` that begin with `-:`; ModelOpt names and shell wildcards.
    EXL3 lists the quantized ones.
    """
    if "tensor_storage" in config:
        return lambda name: name not in config["tensor_storage"]
    substrings = [
        part
        for key in ("modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules")
        for part in config.get(key) or []
    ]
    excluded = config.get("quantization", config).get("exclude_modules")
    ignored = config.get("ignore") or excluded or []
    patterns = [entry[3:] for entry in ignored if entry.startswith("re:")]
    patterns += [translate(entry) for entry in ignored if "*" in entry and entry[:3] != "re:"]
    patterns += [key[2:] for key in config.get("dynamic") or {} if key.startswith("-:")]

    def skipped(name: str) -> bool:
        return (
            name in ignored
            or any(part in name for part in substrings)
            or any(re.match(pattern, name) for pattern in patterns)
        )

    return skipped
