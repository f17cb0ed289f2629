"""Findings about a checkpoint's structure: lists of its config, scales, output head, KV cache, ranks, and the
files next to its weights.

Headers and configs alone are read; `damage` looks at values. A list of a config is tried entry by entry with
the rule of the format's owner (`skipped_by`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from math import ceil
from pathlib import Path
from typing import Any

from ...base.errors import BadInput
from ..kinds.base.format import CACHE_SCALES, matches
from ..model.architecture import HEAD
from ..model.checkpoint import read_json
from .contents import Contents, StoredLinear
from .coverage import found_by_kind, model_faults, skipped_by
from .findings import Finding, Severity
from .headers import HeaderCheckpoint

_LISTS = (
    *("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers"),
    "llm_int8_skip_modules",
)
_SCALES = (".weight_scale", ".weight_scale_inv", ".scales")
_GLOBAL_SCALES = (".weight_scale_2", ".weight_global_scale")
_INPUT_SCALES = (".input_scale", ".input_global_scale", ".activation_scale")
_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in")
_FLOATS = frozenset({"F16", "BF16", "F32"})
_SCALE_DTYPES = {"nvfp4": {"F8_E4M3"}, "mxfp4": {"U8", "F8_E8M0"}, "mxfp8": {"U8", "F8_E8M0"}}


def structure_findings(contents: Contents, ranks: int = 1) -> list[Finding]:
    """Everything that is wrong or suspect by headers and configs, on each of `ranks`."""
    findings = [*contents.findings, *_ranks(contents, ranks), *companion_findings(contents)]
    checkpoint = contents.checkpoint
    if isinstance(checkpoint, HeaderCheckpoint):
        findings += [*_lists(contents), *_groups(contents), *_kv_cache(contents)]
        if checkpoint.has_values:
            findings += [*_scales(contents), *_embeddings_and_head(contents)]
            readable = not contents.refusal and all(f.code != "bad-pattern" for f in findings)
            if readable and not isinstance(contents.parameters, str):
                modules = [linear.module for linear in contents.linears]
                findings += model_faults(checkpoint, modules, contents.parameters)
    return findings


def _lists(contents: Contents) -> Iterator[Finding]:
    """Entries of the lists of plain modules that name nothing."""
    config = contents.checkpoint.quantization_config or {}
    fields = config.get("quantization") or config
    known = _paths(contents)
    for key in _LISTS:
        entries = fields.get(key)
        for entry in entries if isinstance(entries, list) else ():
            try:
                skips = skipped_by({"quant_method": contents.method, key: [entry]})
                is_used = any(map(skips, known))
            except BadInput as error:
                yield Finding("bad-pattern", str(entry), str(error))
                continue
            if not is_used:
                text = f"{key} lists {entry}, and no module has that name"
                yield Finding("unused-ignore", str(entry), text, "suspect")


def _paths(contents: Contents) -> set[str]:
    """Every module of the files and of the model, and what they lie in."""
    names = contents.checkpoint.names
    if not isinstance(contents.parameters, str):
        names = [*names, *contents.parameters.names, *contents.parameters.linears]
    paths = {HEAD, *names}
    for name in names:
        while name := name.rpartition(".")[0]:
            paths.add(name)
    return paths


def _groups(contents: Contents) -> Iterator[Finding]:
    """Targets of compressed-tensors' groups that match nothing, or a linear twice."""
    config = contents.checkpoint.quantization_config or {}
    groups = config.get("config_groups") or {}
    if contents.method != "compressed-tensors" or not isinstance(groups, Mapping):
        return
    modules = [linear.module for linear in contents.linears]
    owners: Counter[str] = Counter()
    for name, group in groups.items():
        targets = [str(target) for target in group.get("targets") or ()]
        patterns = [target for target in targets if target.startswith("re:") or "." in target]
        taken: set[str] = set()
        for target in patterns:
            try:
                pattern = target.removeprefix("re:")
                is_pattern = pattern != target
                members = {
                    m for m in modules if (matches(pattern, m) if is_pattern else m == target)
                }
            except BadInput as error:
                yield Finding("bad-pattern", target, str(error))
                continue
            taken |= members
            if not members:
                text = f"{name} has the target {target}, which no quantized linear matches"
                yield Finding("unused-target", target, text, "suspect")
        owners.update(taken)
    twice = [module for module in modules if owners[module] > 1]
    text = "is matched by targets of several groups: loaders differ in the one that they take"
    yield from found_by_kind("overlapping-targets", twice, text, "suspect")


def _scales(contents: Contents) -> Iterator[Finding]:
    """Scales that are missing, of another dtype, or of another shape than their codes."""
    checkpoint = contents.checkpoint
    missing: dict[str, list[str]] = {}
    odd_dtypes: dict[str, list[str]] = {}
    odd_shapes: list[str] = []
    for linear in contents.linears:
        expected: list[tuple[str, ...]] = [_SCALES] if _has_scales(contents, linear) else []
        if linear.codes.kind == "nvfp4":
            expected.append(_GLOBAL_SCALES)
        if linear.codes.static:
            expected.append(_INPUT_SCALES)
        for endings in expected:
            if not any(f"{linear.module}{ending}" in checkpoint for ending in endings):
                missing.setdefault(" or ".join(endings), []).append(linear.module)
        for ending in _SCALES if expected else ():
            if (name := f"{linear.module}{ending}") in checkpoint:
                dtype = checkpoint.dtype_name(name)
                if dtype not in _SCALE_DTYPES.get(linear.codes.kind, _FLOATS | {"F8_E8M0"}):
                    odd_dtypes.setdefault(dtype, []).append(name)
                if not _fits(linear, checkpoint.shape(name)):
                    odd_shapes.append(name)
    for name in _lone_codes(contents):
        missing.setdefault(" or ".join(_SCALES), []).append(name.removesuffix(".weight"))
    for endings, modules in missing.items():
        yield from found_by_kind("missing-scale", modules, f"has codes and no tensor {endings}")
    for dtype, names in odd_dtypes.items():
        text = f"holds {dtype}, which is no dtype of its scales: it was converted"
        yield from found_by_kind("wrong-scale-dtype", names, text)
    text = "does not fit its codes: groups are lost"
    yield from found_by_kind("wrong-scale-shape", odd_shapes, text)


def _has_scales(contents: Contents, linear: StoredLinear) -> bool:
    names = (f"{linear.module}.{ending}" for ending in ("weight_packed", "qweight", "weight"))
    is_coded = contents.method in ("compressed-tensors", "gptq", "awq", "fp8", "modelopt")
    return is_coded and any(name in contents.checkpoint for name in names)


def _lone_codes(contents: Contents) -> Iterator[str]:
    """Weights in a dtype of codes, of modules that are not recognised as quantized."""
    quantized = {linear.module for linear in contents.linears}
    for name in contents.checkpoint.names:
        is_weight = name.endswith(".weight") and name.removesuffix(".weight") not in quantized
        if is_weight and contents.checkpoint.dtype_name(name) in ("F8_E4M3", "F8_E5M2", "I8", "U8"):
            yield name


def _fits(linear: StoredLinear, shape: tuple[int, ...]) -> bool:
    codes, size = linear.codes, linear.shape
    if size is None or codes.group <= 0 or codes.kind == "fp8-block" or len(size) != 2:
        return True
    groups = ceil(size[1] / codes.group)
    return sorted(shape) == sorted((size[0], groups))


def _embeddings_and_head(contents: Contents) -> Iterator[Finding]:
    """Output head, embedding and multi-token prediction layers."""
    checkpoint, text = contents.checkpoint, contents.checkpoint.text_config
    modules = {linear.module for linear in contents.linears}
    if HEAD in modules:
        tied = bool(text.get("tie_word_embeddings"))
        what = "and tied to the embedding, which has no codes" if tied else "as engines may refuse"
        severity: Severity = "suspect" if tied else "note"
        yield Finding("quantized-lm-head", HEAD, f"{HEAD} is quantized, {what}", severity)
    for name in sorted(modules):
        if name.endswith(_EMBEDDINGS):
            why = f"{name} is quantized: it is looked up by row, and most engines want floats"
            yield Finding("quantized-embedding", name, why, "suspect")
    size = text.get("vocab_size")
    tables = tuple(f"{name}.weight" for name in _EMBEDDINGS)
    for name in (name for name in checkpoint.names if name.endswith(tables)):
        rows = checkpoint.shape(name)[:1]
        if rows and isinstance(size, int) and rows[0] < size and not name.count("vis"):
            why = f"{name} has {rows[0]:,} rows, and the config a vocabulary of {size:,}"
            yield Finding("wrong-vocabulary", name, why)
    predicted = text.get("num_nextn_predict_layers") or text.get("mtp_num_hidden_layers") or 0
    layers = text.get("num_hidden_layers") or 0
    has_them = any("mtp." in name or f".layers.{layers}." in name for name in checkpoint.names)
    if predicted and not has_them:
        why = f"the config has {predicted} multi-token prediction layers, and the files none"
        yield Finding("missing-mtp-layers", "config.json", why, "suspect")


def _kv_cache(contents: Contents) -> Iterator[Finding]:
    config = contents.checkpoint.quantization_config or {}
    fields: Mapping[str, Any] = config.get("quantization") or config
    scheme = fields.get("kv_cache_scheme")
    scales = [name for name in contents.checkpoint.names if name.endswith(CACHE_SCALES)]
    is_static = isinstance(scheme, Mapping) and not scheme.get("dynamic")
    declared = is_static or fields.get("kv_cache_quant_algo")
    if is_static and not scales:
        why = "the config has a static scheme of the KV cache, and no file has its scales"
        yield Finding("missing-kv-scales", "kv_cache_scheme", f"{why}: engines take 1", "suspect")
    if scales and not declared:
        text = "is a scale of the KV cache, which the config does not announce"
        yield from found_by_kind("undeclared-kv-scales", scales, text, "suspect")


def _ranks(contents: Contents, ranks: int) -> Iterator[Finding]:
    """Heads that the ranks do not divide; KV heads are copied where the ranks are a multiple of them."""
    text = contents.checkpoint.text_config
    heads = text.get("num_attention_heads")
    if isinstance(heads, int) and heads % ranks:
        why = f"{heads} attention heads cannot be split over {ranks} ranks"
        yield Finding("heads-per-rank", "num_attention_heads", why)
    groups = text.get("num_key_value_heads")
    if isinstance(groups, int) and groups % ranks and ranks % groups:
        why = f"{groups} KV heads can neither be split over {ranks} ranks nor be copied to them"
        yield Finding("heads-per-rank", "num_key_value_heads", why)
    size = text.get("vocab_size")
    if isinstance(size, int) and size % ranks:
        why = f"a vocabulary of {size:,} is padded for {ranks} ranks"
        yield Finding("vocabulary-per-rank", "vocab_size", why, "note")


_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


def companion_findings(contents: Contents) -> Iterator[Finding]:
    """Missing and contradictory companions; of a GGUF file its keys have them."""
    folder = contents.checkpoint.folder
    if contents.gguf is not None:
        if "tokenizer.ggml.tokens" not in contents.gguf.metadata:
            why = "the file has no tokenizer: llama.cpp cannot read text with it"
            yield Finding("missing-tokenizer", contents.gguf.path.name, why, "suspect")
        return
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        why = f"none of {', '.join(_TOKENIZERS)} is there: servers cannot read text"
        yield Finding("missing-tokenizer", "tokenizer.json", why, "suspect")
    try:
        tokenizer = _read(folder, "tokenizer_config.json")
        generation = _read(folder, "generation_config.json")
        vocabulary = _read(folder, "tokenizer.json")
        processor = _read(folder, "processor_config.json")
    except BadInput as error:
        yield Finding("damaged-json", str(folder), str(error))
        return
    has_template = "chat_template" in {**tokenizer, **processor} or any(
        folder.glob("*chat_template*")
    )
    if tokenizer and not has_template:
        yield Finding(
            "no-chat-template", "tokenizer_config.json", "there is no chat template", "note"
        )
    if not generation:
        why = "there is none: engines sample and end by their own defaults"
        yield Finding("no-generation-config", "generation_config.json", why, "note")
    yield from _end_tokens(contents.checkpoint.text_config, tokenizer, generation, vocabulary)


def _read(folder: Path, name: str) -> dict[str, Any]:
    return read_json(folder / name) if (folder / name).is_file() else {}


def _end_tokens(
    config: Mapping[str, Any],
    tokenizer: Mapping[str, Any],
    generation: Mapping[str, Any],
    vocabulary: Mapping[str, Any],
) -> Iterator[Finding]:
    """End tokens of config, generation config and tokenizer, which have to share one."""
    size, ids = config.get("vocab_size"), _ids(config.get("eos_token_id"))
    generated = _ids(generation.get("eos_token_id"))
    for token in sorted(ids | generated):
        if isinstance(size, int) and token >= size:
            why = f"end token {token} is beyond the vocabulary of {size:,}"
            yield Finding("token-beyond-vocabulary", "eos_token_id", why)
    if ids and generated and not ids & generated:
        why = (
            f"config.json ends with {sorted(ids)}, generation_config.json with {sorted(generated)}"
        )
        yield Finding("end-tokens-differ", "generation_config.json", why, "suspect")
    named = tokenizer.get("eos_token")
    text = named.get("content") if isinstance(named, Mapping) else named
    if not isinstance(text, str) or not vocabulary:
        return
    added = {
        entry.get("content"): entry.get("id") for entry in vocabulary.get("added_tokens") or ()
    }
    known = (vocabulary.get("model") or {}).get("vocab")
    token = added.get(text, known.get(text) if isinstance(known, Mapping) else None)
    listed = generated or ids
    if token is not None and listed and token not in listed | ids:
        why = f"the tokenizer ends with {text} ({token}), the configs with {sorted(listed | ids)}"
        yield Finding("end-tokens-differ", "tokenizer_config.json", why, "suspect")


def _ids(value: Any) -> set[int]:
    return {token for token in (value if isinstance(value, list) else [value]) if token is not None}
