"""Conversion of a quantized checkpoint without the original model: to another format, or to float weights.

A weight moves to the other format's grid exactly where that holds its numbers, else it is requantized.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from ...base.atomic_io import atomic_folder, check_absent, raw_bytes, write_atomically
from ...base.errors import BadInput
from ...base.progress import Progress, Silent
from ...base.version import VERSION
from ..base.scheme import Scheme
from ..check.engines import loaders
from ..check.loaders import CheckpointContents, loads_in
from ..families.registry import type_of
from ..formats.registry import (
    FORMATS,
    checkpoint_format,
    quantized_modules,
    read_quantized,
    tensor_names,
)
from ..gguf.assemble import assemble, gguf_name
from ..gguf.mix import mix_of
from ..kinds.base.format import CACHE_SCALES, KV_SCALES, WeightFormat, has_fp4_cache
from ..kinds.base.kind import kind_of
from ..kinds.base.tensor import QuantizedTensor, require_finite, zeroed_rows
from ..kinds.registry import KINDS, scheme_class, scheme_record
from ..methods.registry import check_format
from ..model.checkpoint import INDEX_NAME, Checkpoint, read_json
from ..model.parameters import model_parameters, unquantized_modules
from ..plan.journal import sha256_of, weight_digests
from ..plan.manifest import (
    CARD_NAME,
    MANIFEST_NAME,
    Conversion,
    conversion_card,
    describe_files,
    tensor_record,
    to_json,
)
from ..plan.selection import Shapes
from ..source.models import short_name
from .plain import PLAIN, dequantize_checkpoint, refuse_unplaced, write_shards

_OF_PROJECTION = re.compile(r"\.[kv]_proj(?=\.[kv]_scale$)")
_UNFINISHED = ".converting"  # unlike the suffix of an unfinished `quantize`, which must stay


def convert(
    source: Checkpoint,
    target: str,
    output: Path,
    *,
    allow_loss: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Write `source` in the format `target` (`PLAIN`: dequantized), a shard in memory at a time, atomically.
    BadInput: `output` exists, a damaged source, or a weight would change without `allow_loss`."""
    if target == PLAIN:
        return dequantize_checkpoint(source, output, progress or Silent())
    check_format(target)
    if checkpoint_format(source).name == target:
        raise BadInput(f"{source.folder} is in the format {target} already")
    check_absent(output)
    with atomic_folder(output, output.name + _UNFINISHED) as work:
        return _Job(source, FORMATS[target], work, allow_loss, progress or Silent()).run(output)


class _Job:
    """A conversion: the source, the target format, and the shards written so far."""

    def __init__(
        self,
        source: Checkpoint,
        target: WeightFormat,
        work: Path,
        allow_loss: bool,
        progress: Progress,
    ) -> None:
        self._source, self._target, self._work = source, target, work
        self._allow_loss, self._progress = allow_loss, progress
        self._modules = quantized_modules(source)
        manifest = source.folder / MANIFEST_NAME
        self._manifest = read_json(manifest) if manifest.is_file() else None
        self._digests = {
            record["module"]: record["sha256"]
            for record in (self._manifest or {}).get("modules", [])
        }
        self._records: list[dict[str, Any]] = []
        self._schemes: dict[str, Scheme] = {}
        self._shapes: Shapes = {}
        self._plain: list[str] = []  # tensors that are copied

    def run(self, output: Path) -> Conversion:
        kv_cache = self._kv_cache()
        parameters = model_parameters(self._source)
        taken = {name for module in self._modules for name in tensor_names(self._source, module)}
        plain = [name for name in self._source.names if name not in taken]
        kept = [name for name in plain if not name.endswith(CACHE_SCALES)]
        refuse_unplaced(self._source, kept, parameters)
        plain = kept if kv_cache is None else plain
        write_shards(self._work, self._tensors(plain), self._source.release)
        ignore = unquantized_modules(self._source, self._modules, parameters)
        config = {k: v for k, v in self._source.config.items() if k != "quantization_config"}
        for companion, content in self._source.companions().items():
            write_atomically(self._work / companion, content)
        if self._target.name == "gguf":
            self._assemble(config, output.name)
        stored = kv_cache or (None, "tensor")
        quantization = self._target.full_config(self._schemes, ignore, *stored)
        quantization = self._target.completed_config(quantization, self._work)
        config["quantization_config"] = quantization
        write_atomically(self._work / "config.json", to_json(config))
        for file_name, content in self._target.config_files(quantization).items():
            write_atomically(self._work / file_name, to_json(content))
        manifest = self._new_manifest()
        write_atomically(self._work / MANIFEST_NAME, to_json(manifest))
        written = CheckpointContents(
            type_of(config),
            self._shapes,
            self._schemes,
            ignore,
            [*self._plain, *(f"{module}.weight" for module in self._shapes)],
            parameters,
            architecture=str(next(iter(config.get("architectures") or ()), "")),
        )
        result = Conversion(
            output=output,
            source_format=checkpoint_format(self._source).name,
            target_format=self._target.name,
            scheme=manifest["scheme"],
            modules={record["module"]: record for record in self._records},
            loads_in=loads_in(loaders(written, self._target.name)),
        )
        write_atomically(self._work / CARD_NAME, conversion_card(result, manifest))
        return result

    def _tensors(self, plain: Sequence[str]) -> Iterator[dict[str, torch.Tensor]]:
        """The output tensors: module by module, then the unquantized ones."""
        self._progress.start("converting", len(self._modules), "modules")
        for module in sorted(self._modules):
            tensor = read_quantized(self._source, module)
            parts = tensor.parts()
            for part, digest in self._digests.get(module, {}).items():
                if part in parts and sha256_of(raw_bytes(parts[part])) != digest:
                    raise BadInput(
                        f"{self._source.folder}: {part} of {module} are not those that were computed: "
                        "see llmopt verify"
                    )
            converted = requantize(module, tensor, self._target)
            if converted.reason and not self._allow_loss:
                raise BadInput(
                    f"{module}: {converted.reason}. --allow-loss requantizes it to "
                    f"{converted.tensor.scheme.label}, which changes it by {converted.error:.2e} of "
                    "its square"
                )
            self._schemes[module] = converted.tensor.scheme
            self._shapes[module] = converted.tensor.shape
            self._records.append(
                {"module": module, "source_scheme": scheme_record(tensor.scheme)}
                | tensor_record(converted.tensor)
                | {"error": converted.error, "reason": converted.reason}
            )
            yield self._target.pack(module, converted.tensor)
            self._progress.advance()
        self._progress.finish()
        for name in plain:
            self._plain.append(name)
            stored = name  # formats differ in the names of the KV cache's scales
            if name.endswith(KV_SCALES) and self._target.holds_kv_scales:
                stored = self._target.kv_scale_name(_OF_PROJECTION.sub("", name))
            yield {stored: self._source.tensor(name)}

    def _kv_cache(self) -> tuple[str, str] | None:
        """Dtype and strategy of the KV cache's scales, if the target format can store them."""
        scale_names = [name for name in self._source.names if name.endswith(KV_SCALES)]
        if not scale_names:
            return None
        config = self._source.quantization_config or {}
        record = config.get("kv_cache_scheme") or {}
        is_fp8 = record.get("type") != "int" and not has_fp4_cache(config)
        if self._target.holds_kv_scales and is_fp8:
            return "fp8", record.get("strategy", "tensor")
        if not self._allow_loss:
            raise BadInput(
                f"format {self._target.name} cannot store the KV cache's scales, such as {scale_names[0]}: "
                "--allow-loss leaves them out"
            )
        return None

    def _assemble(self, config: dict[str, Any], name: str) -> None:
        write_atomically(self._work / "config.json", to_json(config))
        blocks = [self._target.config({"m": s}, [])["types"]["m"] for s in self._schemes.values()]
        type_name = mix_of(max(dict.fromkeys(blocks), key=blocks.count))
        shards = Checkpoint(self._work)
        assemble(shards, [], self._work / gguf_name(name, type_name), self._schemes, type_name)
        used = set(shards.shard_of.values())
        shards.release()
        for shard in (*used, INDEX_NAME):
            (self._work / shard).unlink()

    def _new_manifest(self) -> dict[str, Any]:
        labels = [scheme.label for scheme in self._schemes.values()]
        origin = self._manifest or {}
        return {
            "llmopt": VERSION,
            "torch": version("torch"),
            "model": origin.get("model", short_name(self._source.path)),
            "converted_from": {
                "format": checkpoint_format(self._source).name,
                "method": origin.get("method"),
                "signature": origin.get("signature"),
                "sha256": weight_digests(self._source),
            },
            "format": self._target.name,
            "scheme": ", ".join(label for label, _ in Counter(sorted(labels)).most_common()),
            "modules": self._records,
            "files": describe_files(self._work),
        }


@dataclass(frozen=True, slots=True)
class Requantized:
    """A weight on the target's grid, its `error` `|W - W'|² / |W|²`, and the reason; exact: 0 and empty."""

    tensor: QuantizedTensor
    error: float = 0.0
    reason: str = ""


def requantize(module: str, tensor: QuantizedTensor, target: WeightFormat) -> Requantized:
    """An equivalent that `target` can store, or a requantization. BadInput: it has no grid for it."""
    exact, reason = _exact(module, tensor, target)
    if exact is not None:
        return Requantized(exact)
    plain = tensor.without_activations()
    if plain is not tensor and (exact := _exact(module, plain, target)[0]) is not None:
        return Requantized(exact, reason=reason)
    weight = tensor.dequantize()
    require_finite(weight, module)
    scheme = _nearest_scheme(module, tensor, target)
    # The 16-bit dtype that the model most likely uses.
    scales = tensor.parts().get("scales")
    is_half = scales is not None and scales.dtype == torch.float16
    dtype = target.scale_dtype(torch.float16 if is_half else torch.bfloat16, scheme)
    rounded = kind_of(scheme).round(weight, dtype, name=module)
    zeroed_rows(weight, rounded, module)
    energy = float(weight.double().square().sum())
    lost = float((weight.double() - rounded.dequantize().double()).square().sum())
    return Requantized(rounded, lost / energy if energy else 0.0, reason)


def _exact(
    module: str, tensor: QuantizedTensor, target: WeightFormat
) -> tuple[QuantizedTensor | None, str]:
    """An exact equivalent on a grid of `target`, or the first reason why there is none."""
    reason = ""
    for form in tensor.forms():
        try:
            _check(module, form.scheme, form, target)
            dtype = partial(target.scale_dtype, scheme=form.scheme)
            stored = form.stored_as(
                None if target.keeps_scale_dtypes else dtype, target.inverts_global_scales
            )
        except BadInput as error:
            reason = reason or str(error)
        else:
            return target.held(stored), ""
    return None, reason


def _check(module: str, scheme: Scheme, tensor: QuantizedTensor, target: WeightFormat) -> None:
    target.check_scheme(scheme)
    target.check(module, *tensor.shape, scheme)


def _nearest_scheme(module: str, tensor: QuantizedTensor, target: WeightFormat) -> Scheme:
    source = tensor.scheme
    ranked = [pair for kind in KINDS for pair in scheme_class(kind).nearest_to(source)]
    for _, scheme in sorted(ranked, key=itemgetter(0)):
        try:
            _check(module, scheme, tensor, target)
            return scheme
        except BadInput:
            continue
    raise BadInput(
        f"{module}: format {target.name} has no grid for {source.label} weights of "
        f"{tensor.out_features} × {tensor.in_features}"
    )
