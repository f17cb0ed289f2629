"""Model lookup: the bundled table, an alias, a config file, a checkpoint folder, a GGUF file, or a hub id.

Stored bytes are read from headers, without loading tensors. Of a model without a rule in the table the
probe's answer is read by config hash, the bundled models' whatever is installed, others' from a cache in the
user's folder. It is valid for one transformers version: its modules define the cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...base.atomic_io import expanded, write_atomically
from ...base.errors import BadInput
from ...quant.families.config import (
    check_depth,
    check_type,
    current_names,
    has_table_rule,
    model_shape,
)
from ...quant.families.shapes import ModelShape
from ...quant.kinds.ggml.scheme import GGUF_BLOCKS
from ...quant.model.checkpoint import (
    GGUF_SUFFIX,
    HF_QUANT_CONFIG,
    SINGLE_NAME,
    gguf_file_of,
    indexed_shards,
    model_config,
    modelopt_quantization,
)
from ...recipes import MODELS as BUNDLED
from ..base.units import format_gib
from ..probe.facts import PARTS, ProbedModel
from .probed_shape import ProbedShape
from .stored_recipe import stored_quantization, stored_recipe
from .weights import BF16, UNQUANTIZED_BYTES, WeightRecipe, mean_recipe, recipe_for


def stored_weight_bytes(folder: Path) -> int | None:
    """Bytes of all tensors in a folder, without headers and padding; None if it has no weights. Raises
    BadInput: a shard that the index names is missing, or a header is damaged."""
    if (folder / SINGLE_NAME).is_file():
        return _tensor_bytes(folder / SINGLE_NAME) or None
    listed = indexed_shards(folder) or {}
    shards = sorted({*listed.values()} or {path.name for path in folder.glob("*.safetensors")})
    return sum(_tensor_bytes(folder / shard) for shard in shards) or None


def _tensor_bytes(path: Path) -> int:
    from ...quant.kinds.base.raw import read_headers

    try:
        return sum(entry.nbytes for entry in read_headers([path]).values())
    except FileNotFoundError as error:
        raise BadInput(f"{path} is missing: the checkpoint is incomplete") from error
    except (OSError, struct.error, ValueError, KeyError, TypeError) as error:
        raise BadInput(
            f"{path} is cut off or damaged ({error}): fetch or write it again"
        ) from error


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model to plan for. `note` explains the name if an alias was resolved; `stored_bytes` is the size of
    the checkpoint's tensors, if there is a local checkpoint. Its shape is the table's, or was probed."""

    name: str
    shape: ModelShape
    config: dict[str, Any]
    source: str
    note: str | None = None
    stored_bytes: int | None = None

    @property
    def how(self) -> str:
        """Where its sizes come from: the table's rules, a probe of transformers' module, or its source."""
        if isinstance(self.shape, ProbedShape):
            version = self.shape.measured.transformers_version
            return f"probe of transformers {version}" if version else "its published layers"
        return "table"

    @property
    def parts(self) -> dict[str, int]:
        """Parameters of the text model, the vision tower and the projector, where there are any."""
        if not isinstance(self.shape, ProbedShape):
            return {"text": self.shape.num_parameters}
        sizes = {part: self.shape.measured.num_parameters(part) for part in PARTS}
        return {part: size for part, size in sizes.items() if size}

    @property
    def plain_bytes(self) -> int:
        """Bytes per element of unquantized tensors; of a wrapped model, its text model's."""
        return 4 if _dtype(self.config) == "float32" else UNQUANTIZED_BYTES

    def as_stored(self) -> WeightRecipe:
        """The recipe of the stored checkpoint; bytes from its headers override those of the recipe. Raises
        BadInput: an unknown quantization, and no local checkpoint to read its size from."""
        try:
            recipe = stored_recipe(self.config)
        except BadInput:
            if self.stored_bytes is None:
                raise
            method = str((stored_quantization(self.config) or {}).get("quant_method"))
            recipe = mean_recipe(method, self.shape, self.stored_bytes, self.plain_bytes)
        if self.stored_bytes is None and self.shape.experts is None and recipe.roles == ("expert",):
            raise BadInput("the attention is not quantized: give --weights, or the folder")
        if recipe is BF16 and self.plain_bytes == 4:
            recipe = recipe_for("float32", self.shape)
        return replace(recipe, plain_bytes=self.plain_bytes, stored_bytes=self.stored_bytes)


@cache
def _table() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("models.json").read_text(encoding="utf-8"))


def model_names() -> list[str]:
    return list(_table()["models"])


def aliases() -> dict[str, str]:
    return {name: entry["means"] for name, entry in _table()["aliases"].items()}


def table_configs() -> dict[str, dict[str, Any]]:
    return {name: entry["config"] for name, entry in _table()["models"].items()}


def shape_of(
    raw: dict[str, Any], folder: Path | None = None, *, trust_remote_code: bool = False
) -> ModelShape:
    """The shape of a config: by the table where it has a rule, else as probed. Raises BadInput: the config is
    invalid, or transformers does not know it either."""
    check_type(raw)
    if has_table_rule(raw):
        return model_shape(raw)
    renamed = dict(current_names(raw))
    check_depth(renamed)
    facts = probed(renamed, folder, trust_remote_code=trust_remote_code)
    return ProbedShape.from_facts(facts, renamed)


def find_model(name: str, *, trust_remote_code: bool = False) -> PlannedModel:
    """Look up a model: a folder, a config.json or a GGUF file, a table name, an alias, a bundled checkpoint,
    or a hub id. Only a hub id uses the network. Code of a checkpoint is run only with `trust_remote_code`.
    Raises BadInput: no model of that name (close matches are named), an unsupported config, or a failed
    download."""
    path = expanded(name)
    if path.exists() and (file := gguf_file_of(path)) is not None:
        return _from_gguf(file, trust_remote_code)
    if path.is_dir():
        return _from_file(path / "config.json", path.name, trust_remote_code)
    if path.is_file():
        label = path.parent.name if path.name == "config.json" else path.stem
        return _from_file(path, label, trust_remote_code)
    key, models, aliases = name.lower(), _table()["models"], _table()["aliases"]
    note = None
    if alias := aliases.get(key):
        key = alias["means"]
        note = f"{name} means {key}: {alias['because']}"
    elif key not in models:
        known = _published(key)
        # One model of the table alone that begins so: `qwen3-235b` of `qwen3-235b-a22b`.
        if known is None and len(longer := [k for k in models if k.startswith(f"{key}-")]) == 1:
            known = longer[0]
        if known is not None:
            key, note = known, f"{name} means {known}, as the table has it"
    if entry := models.get(key):
        shape = shape_of(entry["config"])
        return PlannedModel(key, shape, entry["config"], entry["source"], note)
    if (BUNDLED / name / "config.json").is_file():
        return _from_file(BUNDLED / name / "config.json", name, trust_remote_code)
    if _HUB_ID.fullmatch(name) and not name.endswith((".json", GGUF_SUFFIX)):
        return _from_hub(name, _unknown(name, [*models, *aliases]), trust_remote_code)
    raise BadInput(_unknown(name, [*models, *aliases]))


def _published(hub_id: str) -> str | None:
    """The table's model that a hub id names: its publisher's, the tuned sibling of one shape included."""

    def untuned(model: str) -> str:
        return re.sub(r"^meta-|-(instruct|chat|it|hf)$", "", model)

    owner, _, name = hub_id.partition("/")
    for key, entry in _table()["models"].items():
        match = re.search(rf"{re.escape(owner)}(?:--|/)([\w.-]+)", entry["source"].lower())
        if name and match and untuned(match[1].partition("_config")[0]) == untuned(name):
            return key
    return None


def _from_hub(hub_id: str, unknown: str, trust_remote_code: bool) -> PlannedModel:
    from huggingface_hub import get_safetensors_metadata, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
    try:
        path = Path(hf_hub_download(hub_id, "config.json", local_files_only=offline))
    except Exception as error:  # the hub client raises many types; the user needs one line
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        where = "the local hub cache (HF_HUB_OFFLINE is set)" if offline else "the hub"
        raise BadInput(f"{unknown}; {where} did not give it: {reason}") from error
    config = model_config(path)
    shape = shape_of(config, path.parent, trust_remote_code=trust_remote_code)
    if not stored_quantization(config):
        with suppress(EntryNotFoundError):  # most repositories have no such file
            hf_hub_download(hub_id, HF_QUANT_CONFIG, local_files_only=offline)
    config = _with_quantization(config, path.parent)
    model = PlannedModel(hub_id, shape, config, f"the hub, {hub_id}/config.json")
    try:
        model.as_stored()
    except BadInput:  # the headers of the files say what the config does not
        with suppress(Exception):  # what the hub does not give is refused by name, by `as_stored`
            files = {} if offline else get_safetensors_metadata(hub_id).files_metadata
            tensors = (tensor for file in files.values() for tensor in file.tensors.values())
            spans = [tensor.data_offsets for tensor in tensors]
            return replace(model, stored_bytes=sum(stop - start for start, stop in spans) or None)
    return model


def _from_file(path: Path, name: str, trust_remote_code: bool) -> PlannedModel:
    config, stored = model_config(path), None
    shape = shape_of(config, path.parent, trust_remote_code=trust_remote_code)
    if path.name == "config.json":
        stored = stored_weight_bytes(path.parent)
        config = _with_quantization(config, path.parent)
    return PlannedModel(name, shape, config, str(path), stored_bytes=stored)


def _with_quantization(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A config with ModelOpt's quantization where another file of the checkpoint alone has that."""
    stored = None if stored_quantization(config) else modelopt_quantization(folder)
    return config if stored is None else {**config, "quantization_config": stored}


def _from_gguf(path: Path, trust_remote_code: bool) -> PlannedModel:
    """A model of a GGUF file: the config of its keys, and the bytes of its tensors by its header."""
    from ...quant.gguf.container import GgufFile
    from ...quant.gguf.read_config import stored_config

    file = GgufFile(path)
    config = stored_config(file)
    shape = shape_of(config, path.parent, trust_remote_code=trust_remote_code)
    types = {t.name: t.type for t in file.tensors.values() if t.type in GGUF_BLOCKS}
    if types:
        config["quantization_config"] = {"quant_method": "gguf", "types": types}
    stored = sum(tensor.nbytes for tensor in file.tensors.values())
    return PlannedModel(path.stem, shape, config, str(path), stored_bytes=stored)


def _unknown(name: str, known: list[str]) -> str:
    if name.endswith((".json", GGUF_SUFFIX)) or name.startswith((".", "/", "~")):
        return (
            f"no model at {name}: give a folder with a config.json, the path of one, or a GGUF file"
        )
    close = get_close_matches(name.lower().rsplit("/", 1)[-1], known, n=4, cutoff=0.5)
    hint = f"close: {', '.join(close)}" if close else f"known: {', '.join(known)}"
    return f"no model {name!r} in the bundled table ({hint}); a folder, config.json or GGUF file works too"


FORMAT = 1
"""Raised whenever the probe measures something else: answers of another format are not read."""
# Fields that name files, tokens and versions and change no size.
_NO_SIZE = frozenset({"_name_or_path", "transformers_version", "architectures"})


def probed(
    raw: Mapping[str, Any], folder: Path | None = None, *, trust_remote_code: bool = False
) -> ProbedModel:
    """The bundled or cached answer for this config; else the model is probed and the answer kept. Raises
    BadInput: the model cannot be probed."""
    key = config_hash(raw)
    if (entry := _bundled().get(key)) is not None:
        return ProbedModel.from_dict(entry)
    path = cache_folder() / f"{key}-{version('transformers')}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):  # no kept answer, or a damaged one
        return ProbedModel.from_dict(json.loads(path.read_text(encoding="utf-8")))
    from ..probe.oracle import probe

    answer = probe(raw, folder, trust_remote_code=trust_remote_code)
    # A folder that cannot be written costs the next call its time, not this one.
    with suppress(OSError, BadInput):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(answer.as_dict()).encode())
    return answer


def config_hash(raw: Mapping[str, Any]) -> str:
    """SHA-256 of a config's fields, whatever their order."""
    sized = {key: value for key, value in raw.items() if key not in _NO_SIZE}
    text = json.dumps([FORMAT, sized], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def cache_folder() -> Path:
    """Folder of the kept answers: llmopt/probe in `XDG_CACHE_HOME` or `~/.cache`."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "llmopt" / "probe"


ANSWERS = Path(__file__).with_name("bundled.json")
"""Answers for models of the table, which `python -m tools.probe_table` writes."""


@cache
def _bundled() -> Mapping[str, Any]:
    return json.loads(ANSWERS.read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts by which a model is described, from its config and headers: parameters (None for a family without
    a rule in the table, which only a probe would count), stored format such as `GGUF Q4_K_M`, `gptq int4` or
    `bfloat16`, bytes of the tensors, and the longest context in tokens, if they are known."""

    family: str
    num_parameters: int | None
    weights: str
    stored_bytes: int | None
    context: int | None

    @property
    def line(self) -> str:
        """`llama, 135M parameters, GGUF Q4_1, 92.10 MiB, context 8,192`."""
        count = self.num_parameters
        size = count and (f"{count / 1e9:.3g}B" if count >= 1e9 else f"{count / 1e6:.3g}M")
        parts = (
            self.family,
            size and f"{size} parameters",
            self.weights,
            self.stored_bytes and format_gib(self.stored_bytes),
            self.context and f"context {self.context:,}",
        )
        return ", ".join(part for part in parts if part)


def facts_of(path: Path) -> ModelFacts:
    """The facts of a folder with a `config.json`, or of a GGUF file; only headers are read. Raises BadInput:
    a damaged config or header."""
    if (file := gguf_file_of(path)) is not None:
        from ...quant.gguf.container import GgufFile
        from ...quant.gguf.mix import file_type
        from ...quant.gguf.read_config import stored_config

        opened = GgufFile(file)
        config, tensors = stored_config(opened), opened.tensors.values()
        blocks = [tensor.type for tensor in tensors if tensor.type in GGUF_BLOCKS]
        kinds = blocks or [tensor.type for tensor in tensors if len(tensor.shape) > 1]
        weights = f"GGUF {file_type(opened, blocks) if blocks else kinds[0]}"
        stored_bytes = sum(tensor.nbytes for tensor in tensors)
    else:
        config, weights, stored_bytes = model_config(path / "config.json"), "", None
    # The shape refuses fields of a wrong kind, so it is before the others.
    num_parameters = model_shape(config).num_parameters if has_table_rule(config) else None
    if file is None:
        weights = _stored_weights(_with_quantization(config, path))
        stored_bytes = stored_weight_bytes(path)
    context = (config.get("text_config") or config).get("max_position_embeddings")
    return ModelFacts(
        str(config.get("model_type")),
        num_parameters,
        weights,
        stored_bytes,
        context if isinstance(context, int) else None,
    )


def _dtype(config: Mapping[str, Any]) -> str | None:
    """The dtype of a config; of a wrapped model it may be its text model's."""
    parts = (config, config.get("text_config") or {})
    dtypes = (part.get(key) for part in parts for key in ("dtype", "torch_dtype"))
    return next(filter(None, dtypes), None)


def _stored_weights(config: Mapping[str, Any]) -> str:
    """The quantization's method and grid, else the dtype."""
    stored = stored_quantization(config)
    if stored is None:
        return str(_dtype(config) or "bfloat16").removeprefix("torch.")
    method = str(stored.get("quant_method"))
    try:
        name = stored_recipe(config).name
    except BadInput:
        return method
    return name if name.startswith(method) else f"{method} {name}"


_SCALED_KV_DTYPES = {"FP8": "fp8", "NVFP4": "nvfp4"}
"""The planner's name by ModelOpt's `kv_cache_quant_algo`."""


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """The quantization that a checkpoint's files name. ModelOpt's facts are in `quantization_config` of
    `config.json`, and in `hf_quant_config.json`, the only file of the two that TensorRT-LLM 1.2.1 reads.

    Attributes:
        method: `quant_method`.
        algorithm: ModelOpt's `quant_algo` as it is spelled, for other methods empty.
        layer_algorithms: algorithms of a mixed checkpoint.
        kv_dtype: the planner's name of the KV cache's dtype that there are scales for; None without.
        has_hf_file: True if there is `hf_quant_config.json`; None where only `config.json` was seen.
        config: `quantization_config`.
    """

    method: str
    algorithm: str
    layer_algorithms: frozenset[str]
    kv_dtype: str | None
    has_hf_file: bool | None
    config: Mapping[str, Any]

    @property
    def label(self) -> str:
        return f"{self.method} {self.algorithm}".strip()


def stored_quantization_of(model: PlannedModel) -> StoredQuantization | None:
    """The quantization of a model's checkpoint; None for a plain one. Raises `BadInput`:
    `hf_quant_config.json` is no JSON object."""
    folder = Path(model.source).parent
    is_local = Path(model.source).is_file()
    has_file = (folder / HF_QUANT_CONFIG).is_file() if is_local else None
    config = dict(model.config.get("quantization_config") or {})
    if has_file and (not config or config.get("quant_method") == "modelopt"):
        config = modelopt_quantization(folder) or {}
    if not config:
        return None
    method = str(config.get("quant_method"))
    fields = config.get("quantization") or config
    layers = fields.get("quantized_layers") or {}
    algorithms = frozenset(str(layer.get("quant_algo")) for layer in layers.values())
    if method != "modelopt":
        return StoredQuantization(method, "", algorithms, None, has_file, config)
    cache, scheme = fields.get("kv_cache_quant_algo"), fields.get("kv_cache_scheme")
    if isinstance(scheme, Mapping) and (scheme.get("type"), scheme.get("num_bits")) == ("float", 8):
        cache = cache or "FP8"
    kv_dtype, algorithm = _SCALED_KV_DTYPES.get(str(cache).upper()), str(fields.get("quant_algo"))
    return StoredQuantization(method, algorithm, algorithms, kv_dtype, has_file, config)
