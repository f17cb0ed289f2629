"""Proof that a checkpoint on disk holds what was computed, or at least holds together."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .checkpoint import Checkpoint, read_json
from .errors import BadInput
from .journal import sha256_of_file
from .manifest import MANIFEST_NAME
from .progress import Progress, Silent
from .raw_reader import READERS, Codes, read_headers
from .read import checkpoint_format, module_scheme, quantized_modules, tensor_names
from .scheme import IntScheme, Scheme

PROVEN = "proven: the files hold what was computed"
UNPROVEN = "read, not proven: no manifest"
FAILED = "failed"
_DECODER_LINEAR = re.compile(r"\.layers\.\d+\..*(?:proj|fc\d|linear)$")


@dataclass(slots=True)
class VerifyReport:
    """What was found.

    Attributes:
        passed: what was checked and held, one line each.
        failures: what did not hold, naming the module or the file.
        bits_per_weight: of the quantized linears with scales and zeros, as stored.
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

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self.failures


def verify(folder: Path | str, progress: Progress | None = None) -> VerifyReport:
    """Read a quantized checkpoint with the independent reader and hold it against its manifest.

    A checkpoint without a manifest, written by another tool, gets the checks that need none.

    Raises:
        BadInput: no quantized checkpoint, a kind that cannot be read, or a file that is cut off.
    """
    progress = progress or Silent()
    folder = Path(folder)
    if not folder.is_dir():
        raise BadInput(f"{folder} is no folder: give one that holds a quantized checkpoint")
    report = VerifyReport(folder)
    manifest_path = folder / MANIFEST_NAME
    manifest = read_json(manifest_path) if manifest_path.is_file() else None
    if manifest is not None:
        _check_files(report, manifest)
    try:
        checkpoint = Checkpoint(folder)
        weight_format = checkpoint_format(checkpoint)
        modules = sorted(quantized_modules(checkpoint))
        schemes = {module: module_scheme(checkpoint, module) for module in modules}
    except BadInput:
        if report.failures:  # a damaged header: the digest has already named the file
            report.status = FAILED
            return report
        raise
    report.quant_method, report.scheme, report.num_modules = (
        weight_format.name,
        ", ".join(dict.fromkeys(scheme.label for scheme in schemes.values())),
        len(modules),
    )
    config = checkpoint.quantization_config or {}
    _check_coverage(report, checkpoint, modules, config, manifest)
    entries = read_headers(sorted({folder / name for name in checkpoint.shard_of.values()}))
    _, reader = READERS[weight_format.name]
    recorded = {m["module"]: m for m in manifest["modules"]} if manifest is not None else None
    stored = weights = 0
    progress.start("verifying", len(modules), "modules")
    for module in modules:
        try:
            codes = reader(entries, module, config)
        except (KeyError, ValueError) as error:
            report.failures.append(f"{module} cannot be read: {error}")
        else:
            _check_module(report, module, codes, schemes[module])
            weights += codes.codes.size
            for name in tensor_names(checkpoint, module):
                stored += entries[name].stop - entries[name].start
            if recorded is not None and module in recorded:
                _check_digests(report, module, codes, recorded[module])
        progress.advance()
    progress.finish()
    _check_size(report, stored, weights)
    if not report.failures:
        report.passed.append(f"{len(modules)} modules: codes in range, scales finite and not zero")
        if recorded is not None:
            report.passed.append("codes, scales and zeros of every module are those computed")
            report.status = PROVEN
    else:
        report.status = FAILED
    return report


def _check_files(report: VerifyReport, manifest: dict[str, Any]) -> None:
    """Sizes and digests of all files. A shard of another size was cut off, which is no checkpoint at all."""
    before = len(report.failures)
    for name, facts in _part(report, manifest, "files", dict).items():
        path = report.folder / name
        if not path.is_file():
            raise BadInput(f"{path} is missing: the checkpoint is incomplete")
        size = path.stat().st_size
        if size < facts["bytes"] and name.endswith(".safetensors"):
            raise BadInput(f"{path} is cut off: {size} bytes of {facts['bytes']}")
        if sha256_of_file(path) != facts["sha256"]:
            report.failures.append(f"{name} is not the file that was written: its bytes differ")
    _part(report, manifest, "modules", list)
    if len(report.failures) == before:
        report.passed.append(f"{len(manifest['files'])} files have the digests of the manifest")


def _part(report: VerifyReport, manifest: dict[str, Any], key: str, kind: type) -> Any:
    if not isinstance(manifest.get(key), kind):
        raise BadInput(f"{report.folder / MANIFEST_NAME} has no {key}: it is no manifest of llmopt")
    return manifest[key]


def _check_coverage(
    report: VerifyReport,
    checkpoint: Checkpoint,
    modules: list[str],
    config: dict[str, Any],
    manifest: dict[str, Any] | None,
) -> None:
    """Every module that was meant to be quantized is, and nothing else."""
    if manifest is not None:
        intended = {module["module"] for module in manifest["modules"]}
        report.failures += [
            f"{name} was quantized, but has no codes" for name in intended - {*modules}
        ]
        report.failures += [
            f"{name} has codes that nobody computed" for name in {*modules} - intended
        ]
        report.failures.sort()
    else:
        excused = _excused(config)
        plain = [
            name.removesuffix(".weight")
            for name in checkpoint.names
            if name.endswith(".weight") and _DECODER_LINEAR.search(name.removesuffix(".weight"))
        ]
        report.failures += [
            f"{name} is not quantized, and the config does not say that it should not be"
            for name in plain
            if not excused(name)
        ]
    if not report.failures:
        report.passed.append("every linear that should be quantized is")


def _excused(config: dict[str, Any]) -> Callable[[str], bool]:
    """Whether the config leaves a module out: AWQ by substring, compressed-tensors by name or `re:`."""
    substrings = config.get("modules_to_not_convert") or []
    ignored = config.get("ignore") or []

    def excused(name: str) -> bool:
        return any(part in name for part in substrings) or any(
            re.match(entry[3:], name) if entry.startswith("re:") else entry == name
            for entry in ignored
        )

    return excused


def _check_module(report: VerifyReport, module: str, codes: Codes, scheme: Scheme) -> None:
    """What must hold of any module: shapes that fit together, numbers that are numbers."""
    out_features, in_features = codes.codes.shape
    assert isinstance(scheme, IntScheme)
    groups = scheme.num_groups(in_features) if scheme.divides(in_features) else -1
    expected = (out_features, groups)
    if codes.scales.shape != expected or codes.zeros.shape != expected:
        report.failures.append(
            f"{module}: scales {codes.scales.shape} and zeros {codes.zeros.shape} do not fit "
            f"{codes.codes.shape} weights of {scheme.label}"
        )
    if not np.isfinite(codes.scale_values).all():
        report.failures.append(f"{module} has scales that are NaN or infinite")
    elif (codes.scale_values == 0).any():
        report.failures.append(f"{module} has scales that are zero")


def _check_digests(report: VerifyReport, module: str, codes: Codes, record: dict[str, Any]) -> None:
    for part in ("codes", "scales", "zeros"):
        data = np.ascontiguousarray(getattr(codes, part)).tobytes()
        if hashlib.sha256(data).hexdigest() != record["sha256"][part]:
            report.failures.append(f"{module}: its {part} are not those that were computed")


def _check_size(report: VerifyReport, stored: int, weights: int) -> None:
    """The quantized linears must take less room than they did in 16 bits."""
    if not stored or not weights:
        return
    report.bits_per_weight = stored * 8 / weights
    report.ratio = weights * 2 / stored
    if report.ratio <= 1:
        report.failures.append(
            f"the quantized linears take {stored:,} bytes, more than the {weights * 2:,} of 16 bits"
        )
    else:
        report.passed.append(
            f"{report.bits_per_weight:.2f} bits per weight, {report.ratio:.2f} × less than 16 bits"
        )
