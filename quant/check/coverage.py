"""Modules that a config calls quantized or plain, against those that the files hold."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from ..formats.registry import tensor_names
from ..kinds.base.format import matches
from ..model.architecture import HEAD
from ..model.checkpoint import Checkpoint
from ..model.parameters import ModelParameters, by_kind, plain_linears
from .findings import Finding

# Formats whose readers leave the output projection alone unless told otherwise.
_HEAD_IS_PLAIN = ("awq", "exl3", "gptq", "squeezellm", "gguf", "QUiP")


def model_faults(
    checkpoint: Checkpoint, modules: Collection[str], parameters: ModelParameters
) -> Iterator[Finding]:
    """Findings about missing and undeclared modules, one for each kind of module."""
    stored = {name for module in modules for name in tensor_names(checkpoint, module)}
    names = [*(name for name in checkpoint.names if name not in stored)]
    names += [f"{module}.weight" for module in modules]
    apart = parameters.experts_apart(names)  # which loaders take that keep each expert by itself
    missing = [name for name in parameters.missing(names) if name.rpartition(".")[0] not in apart]
    yield from _faults(
        "missing-parameter", missing, "of the model is in no file: the checkpoint is incomplete"
    )
    config = checkpoint.quantization_config or {}
    if not config or not _lists_what_is_plain(config):
        return
    skipped = skipped_by(config)
    # Where there is no list, transformers adds the output projection to the plain modules.
    method = config["quant_method"]
    lists = {"bitsandbytes": "llm_int8_skip_modules", "fp8": "modules_to_not_convert"}
    unlisted = method in lists and config.get(lists[method]) is None
    leaves_the_head = unlisted or method in _HEAD_IS_PLAIN
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
    yield from _faults("quantized-though-ignored", skipped_codes, text)


def _faults(code: str, names: Iterable[str], text: str) -> Iterator[Finding]:
    for kind in by_kind(names):
        yield Finding(code, kind, f"{kind} {text}")


def _lists_what_is_plain(config: Mapping[str, Any]) -> bool:
    """True if loaders take every linear that the config does not exclude as quantized."""
    method = config.get("quant_method")
    if method == "gptq":  # else loaders look which linears have codes
        return bool(config.get("dynamic"))
    if method == "compressed-tensors":
        groups = (config.get("config_groups") or {}).values()
        return any("Linear" in (group.get("targets") or ()) for group in groups)
    return method != "gguf"


def skipped_by(config: Mapping[str, Any]) -> Callable[[str], bool]:
    """A predicate: whether the config excludes a module from quantization, by the rule of the format's owner.

    | format | what it lists, and when an entry means a module |
    | --- | --- |
    | awq | parts of names, as AutoAWQ and vLLM search for them |
    | compressed-tensors | whole names and `re:` patterns |
    | exl3 | the quantized modules |
    | gptq | patterns under `dynamic`; the first that matches excludes if it begins with `-:` |
    | modelopt | whole names and shell wildcards |
    | others | names between dots, ends of names, patterns up to a dot, as transformers takes them |
    """
    method = config.get("quant_method")
    if "tensor_storage" in config:
        return lambda name: name not in config["tensor_storage"]
    if method == "gptq":
        # A pattern of GPTQModel has a sign, or none for "+:".
        rules = [
            (rule[:2] == "-:", re.sub(r"^[-+]:", "", rule)) for rule in config.get("dynamic") or {}
        ]
        return lambda name: next((skips for skips, rule in rules if matches(rule, name)), False)
    if method == "compressed-tensors":
        ignored = config.get("ignore") or ()
        return lambda name: any(
            matches(entry[3:], name) if entry.startswith("re:") else entry == name
            for entry in ignored
        )
    if method == "modelopt":
        excluded = config.get("quantization", config).get("exclude_modules")
        wildcards = config.get("ignore") or excluded or ()
        return lambda name: any(fnmatchcase(name, entry) for entry in wildcards)
    keys = ("modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules")
    entries = [entry for key in keys for entry in config.get(key) or ()]
    if method == "awq":
        return lambda name: any(entry in name for entry in entries)
    return lambda name: any(_lists(entry, name) for entry in entries)


def _lists(entry: str, name: str) -> bool:
    """True if an entry is for a module: `should_convert_module` of transformers 5.23, or a part of its name.
    `mlp.gate` is for `layers.0.mlp.gate`, and not for `layers.0.mlp.gate_proj`."""
    if f".{entry}." in f".{name}." or name.endswith(entry):
        return True
    try:
        return re.match(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))", name) is not None
    except re.error:
        return False
