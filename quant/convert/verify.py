"""Verification of a quantized checkpoint: digests against the manifest, and consistency checks."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...base.errors import BadInput
from ...base.progress import Progress, Silent
from ..check.coverage import model_faults, skipped_by
from ..formats.registry import checkpoint_format, module_scheme, quantized_modules, tensor_names
from ..kinds.base.raw import Entries, Raw, read_headers, read_numbers
from ..model.checkpoint import GGUF_SUFFIX, Checkpoint, read_json
from ..model.parameters import model_parameters
from ..plan.journal import sha256_of_file
from ..plan.manifest import MANIFEST_NAME
from ..source.models import check_local, open_checkpoint, refuse_mock
from ..stream.calls import kv_heads

PROVEN = "proven: the files hold what was computed"
UNPROVEN = "read, not proven: no manifest"
FAILED = "failed"
_ATTENTION_LINEAR = re.compile(
    r"^(?!.*(?:vision|visual)).*\.layers\.(\d+)\.(self_attn\.\w+_proj)\."
)
_DECODER_LINEAR = re.compile(r"\.layers\.\d+\..*(?:proj|fc\d|linear)$")


@dataclass(slots=True)
class VerifyReport:
    """The result of a verification.

    Attributes:
        passed: checks that passed, one line each.
        failures: checks that failed, naming the module or the file.
        unchecked: checks that could not be made, with the reason.
        bits_per_weight: stored bits of the quantized linears, with scales and zeros, over their weights.
        ratio: bytes of the same linears in 16 bits over bytes as stored.
    """

    folder: Path
    status: str = UNPROVEN
    quant_method: str = ""
    scheme: str = ""
    num_modules: int = 0
    bits_per_weight: float = 0.0
    ratio: float = 0.0
    passed: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.failures


def verify(
    folder: Path | str, progress: Progress | None = None, *, trust_remote_code: bool = False
) -> VerifyReport:
    """Read a checkpoint with the second readers, numpy alone, and compare it with its manifest, if any.
    BadInput: no quantized checkpoint, a kind that cannot be read, or a file that is cut off."""
    progress = progress or Silent()
    folder = Path(folder)
    check_local(folder)
    refuse_mock(folder, "verify")
    report = VerifyReport(folder)
    home = folder if folder.is_dir() else folder.parent
    path = home / MANIFEST_NAME
    manifest = read_json(path) if path.is_file() else None
    if manifest is not None and home != folder and folder.name not in manifest.get("files", {}):
        manifest = None  # of other files in that folder
    if manifest is not None:
        _check_files(report, manifest)
    try:
        checkpoint = open_checkpoint(folder, trust_remote_code=trust_remote_code)
        weight_format = checkpoint_format(checkpoint)
        modules = sorted(quantized_modules(checkpoint))
        schemes = {module: module_scheme(checkpoint, module) for module in modules}
    except BadInput:
        if report.failures:  # a damaged header: the digest has already named the file
            report.status = FAILED
            return report
        raise
    report.quant_method, report.num_modules = weight_format.name, len(modules)
    report.scheme = ", ".join(dict.fromkeys(scheme.label for scheme in schemes.values()))
    config = checkpoint.quantization_config or {}
    _check_coverage(report, checkpoint, modules, manifest)
    paths = sorted({checkpoint.folder / name for name in checkpoint.shard_of.values()})
    if weight_format.name == "gguf":
        from ..kinds.ggml.formats import read_gguf_headers

        entries, config = read_gguf_headers(paths[0])
    else:
        entries = read_headers(paths)
    _check_cache_scales(report, entries, checkpoint)
    recorded = {m["module"]: m for m in manifest["modules"]} if manifest is not None else None
    stored = weights = 0
    progress.start("verifying", len(modules), "modules")
    for module in modules:
        try:
            raw = weight_format.read_raw(entries, module, config)
        except KeyError as error:
            report.failures.append(f"{module} cannot be read: there is no tensor {error}")
        except ValueError as error:
            report.failures.append(f"{module} cannot be read: {error}")
        else:
            weights += math.prod(raw.shape)
            stored += sum(entries[name].nbytes for name in tensor_names(checkpoint, module))
            _check_module(report, module, raw, (recorded or {}).get(module))
        progress.advance()
    progress.finish()
    _check_size(report, stored, weights)
    report.unchecked += [
        f"{name}: {record['zeroed_rows']} rows of tiny weights became zeros"
        for name, record in (recorded or {}).items()
        if record.get("zeroed_rows")
    ]
    if not report.failures:
        report.passed.append(f"{len(modules)} modules: shapes fit, numbers finite, scales not zero")
        if recorded is not None:
            report.passed.append("all parts of every module are those computed")
            report.status = PROVEN
    else:
        report.status = FAILED
    return report


def _check_files(report: VerifyReport, manifest: dict[str, Any]) -> None:
    """Compare sizes and SHA-256 of all files. A shard of the wrong size is truncated: BadInput."""
    before = len(report.failures)
    for key, kind in (("files", dict), ("modules", list)):
        if not isinstance(manifest.get(key), kind):
            raise BadInput(
                f"{report.folder / MANIFEST_NAME} has no {key}: it is no manifest of llmopt"
            )
    for name, facts in manifest["files"].items():
        path = (report.folder if report.folder.is_dir() else report.folder.parent) / name
        if not path.is_file():
            raise BadInput(f"{path} is missing: the checkpoint is incomplete")
        size = path.stat().st_size
        if size < facts["bytes"] and name.endswith((".safetensors", GGUF_SUFFIX)):
            raise BadInput(f"{path} is cut off: {size} bytes of {facts['bytes']}")
        if sha256_of_file(path) != facts["sha256"]:
            report.failures.append(f"{name} is not the file that was written: its bytes differ")
    if len(report.failures) == before:
        report.passed.append(f"{len(manifest['files'])} files have the digests of the manifest")


def _check_coverage(
    report: VerifyReport,
    checkpoint: Checkpoint,
    modules: list[str],
    manifest: dict[str, Any] | None,
) -> None:
    """Exactly the modules that should be quantized are quantized, and every parameter is there."""
    config = checkpoint.quantization_config or {}
    is_gguf = config.get("quant_method") == "gguf"
    if manifest is not None:
        intended = {module["module"] for module in manifest["modules"]}
        # The output head of a GGUF file gets llama.cpp's type when the file is put together.
        rounded = {"lm_head"} if is_gguf else set()
        report.failures += [
            f"{name} was quantized, but has no codes" for name in intended - {*modules}
        ]
        report.failures += [
            f"{name} has codes, but is not in the manifest"
            for name in {*modules} - intended - rounded
        ]
        report.failures.sort()
    parameters = model_parameters(checkpoint)
    if not isinstance(parameters, str):
        faults = model_faults(checkpoint, modules, parameters)
        report.failures += [fault.message for fault in faults]
        if not report.failures:
            report.passed.append("every parameter of the model is in the files")
    else:
        report.unchecked.append(f"the parameters of the model: {parameters}")
    if manifest is None and isinstance(parameters, str):
        skipped = skipped_by(config)
        plain = {
            module
            for name in checkpoint.names
            if _DECODER_LINEAR.search(module := name.removesuffix(".weight")) and module != name
        }
        if is_gguf:  # rows that are no multiple of ggml's block stay as they are
            plain = {name for name in plain if checkpoint.shape(f"{name}.weight")[-1] % 32 == 0}
        report.failures += [
            f"{name} is not quantized, and the config does not say that it should not be"
            for name in sorted(plain - {*modules})
            if not skipped(name)
        ]
        report.failures += _lacking(checkpoint)
    if not report.failures:
        report.passed.append("every linear that should be quantized is")


def _lacking(checkpoint: Checkpoint) -> list[str]:
    """Missing layers, and layers that lack an attention linear which all others have."""
    layers_of: dict[str, set[int]] = {}
    for name in checkpoint.names:
        if match := _ATTENTION_LINEAR.search(name):
            layers_of.setdefault(match[2], set()).add(int(match[1]))
    layers = set().union(*layers_of.values())
    num_layers = checkpoint.config.get("num_hidden_layers", len(layers))
    if len(layers) not in (0, num_layers):
        return [f"{len(layers)} decoder layers are there, but config.json says {num_layers}"]
    return [
        f"layer {(layers - having).pop()} has no {linear}, which all other layers have"
        for linear, having in sorted(layers_of.items())
        if len(having) == len(layers) - 1 > 1
    ]


def _check_cache_scales(report: VerifyReport, entries: Entries, checkpoint: Checkpoint) -> None:
    config, text = checkpoint.config, checkpoint.text_config
    record = (config.get("quantization_config") or {}).get("kv_cache_scheme") or {}
    expected = {1}
    if record.get("strategy") == "attn_head":
        expected = {kv_heads(text), text.get("num_global_key_value_heads") or kv_heads(text)}
    for name in sorted(entries):
        if name.endswith((".k_scale", ".v_scale")):
            _, scale = read_numbers(entries[name])
            if scale.size not in expected:
                report.failures.append(f"{name} holds {scale.size} scales, not {max(expected)}")
            if not (np.isfinite(scale).all() and (scale > 0).all()):
                report.failures.append(f"{name} is no usable scale of the cache")


def _check_module(
    report: VerifyReport, module: str, raw: Raw, record: Mapping[str, Any] | None
) -> None:
    """Check the numbers of a module, and compare their digests with its record in the manifest."""
    report.failures += [f"{module} {problem}" for problem in raw.problems]
    for part, numbers in raw.numbers.items():
        if not np.isfinite(numbers).all():
            report.failures.append(f"{module} has {part} that are NaN or infinite")
        elif part == "scales" and (numbers == 0).any():
            report.failures.append(f"{module} has scales that are zero")
    digests = {} if record is None else record["sha256"]
    # Integer weights stored as ggml blocks have other scales there; only the codes are compared.
    shared = digests.keys() & raw.parts.keys() if "data" in raw.parts else digests.keys()
    for part in sorted(shared):
        if part not in raw.parts:
            report.failures.append(f"{module}: its {part} are not stored")
            continue
        data = np.ascontiguousarray(raw.parts[part]).tobytes()
        if hashlib.sha256(data).hexdigest() != digests[part]:
            report.failures.append(f"{module}: its {part} are not those that were computed")


def _check_size(report: VerifyReport, stored: int, weights: int) -> None:
    if not stored or not weights:
        return
    report.bits_per_weight, report.ratio = stored * 8 / weights, weights * 2 / stored
    if report.ratio <= 1:
        report.failures.append(
            f"the quantized linears take {stored:,} bytes, more than the {weights * 2:,} of 16 bits"
        )
    else:
        report.passed.append(
            f"{report.bits_per_weight:.2f} bits per weight, {report.ratio:.2f} × less than 16 bits"
        )
