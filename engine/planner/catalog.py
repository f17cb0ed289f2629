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
    SINGLE_NAME,
    gguf_file_of,
    indexed_shards,
    read_json,
)
from ...recipes import MODELS as BUNDLED
from ..probe.facts import ProbedModel
from .probed_shape import ProbedShape
from .weights import (
    BF16,
    UNQUANTIZED_BYTES,
    WeightRecipe,
    recipe_for,
    stored_quantization,
    stored_recipe,
)

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


def stored_weight_bytes(folder: Path) -> int | None:
    """Bytes of all tensors in a folder, without headers and padding; None if it has no weights.

    Raises:
        BadInput: a shard that the index names is missing, or a header is damaged.
    """
    if (folder / SINGLE_NAME).is_file():
        return _tensor_bytes(folder / SINGLE_NAME) or None
    listed = indexed_shards(folder) or {}
    shards = sorted({*listed.values()} or {path.name for path in folder.glob("*.safetensors")})
    return sum(_tensor_bytes(folder / shard) for shard in shards) or None


def _tensor_bytes(path: Path) -> int:
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(_LENGTH_BYTES))
            if length > _MAX_HEADER_BYTES:
                raise ValueError("its header has no sensible length")
            header = json.loads(file.read(length))
        spans = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        return sum(stop - start for start, stop in spans)
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
        """Where its sizes come from: the table's rules, or a probe of transformers' module."""
        if isinstance(self.shape, ProbedShape):
            return f"probe of transformers {self.shape.measured.transformers_version}"
        return "table"

    @property
    def plain_bytes(self) -> int:
        """Bytes per element of unquantized tensors; of a wrapped model, its text model's."""
        text = self.config.get("text_config") or {}
        dtype = next(
            (
                part[key]
                for part in (self.config, text)
                for key in ("dtype", "torch_dtype")
                if part.get(key)
            ),
            None,
        )
        return 4 if dtype == "float32" else UNQUANTIZED_BYTES

    def as_stored(self) -> WeightRecipe:
        """The recipe of the stored checkpoint; bytes from its headers override those of the recipe.

        Raises:
            BadInput: an unknown quantization, and no local checkpoint to read its size from.
        """
        try:
            recipe = stored_recipe(self.config)
        except BadInput:
            if self.stored_bytes is None:
                raise
            method = (stored_quantization(self.config) or {}).get("quant_method")
            recipe = replace(BF16, name=str(method))
        if recipe is BF16 and self.plain_bytes == 4:
            recipe = recipe_for("float32", self.shape)
        return replace(recipe, plain_bytes=self.plain_bytes, stored_bytes=self.stored_bytes)


@cache
def _table() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("models.json").read_text(encoding="utf-8"))


def model_names() -> list[str]:
    """Model names in the bundled table."""
    return list(_table()["models"])


def aliases() -> dict[str, str]:
    """The table's model that each alias means."""
    return {name: entry["means"] for name, entry in _table()["aliases"].items()}


def table_configs() -> dict[str, dict[str, Any]]:
    """The raw config of every model in the bundled table."""
    return {name: entry["config"] for name, entry in _table()["models"].items()}


def shape_of(
    raw: dict[str, Any], folder: Path | None = None, *, trust_remote_code: bool = False
) -> ModelShape:
    """The shape of a config: by the table where it has a rule, else as probed.

    Raises:
        BadInput: the config is invalid, or transformers does not know it either.
    """
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

    Raises:
        BadInput: no model of that name (close matches are named), an unsupported config, or a failed
            download.
    """
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
    elif key not in models and (known := _published(key) or _begun(key)):
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
    owner, _, name = hub_id.partition("/")
    for key, entry in _table()["models"].items():
        found = re.search(rf"{re.escape(owner)}(?:--|/)([\w.-]+)", entry["source"].lower())
        if name and found and _untuned(found[1].partition("_config")[0]) == _untuned(name):
            return key
    return None


def _untuned(name: str) -> str:
    return re.sub(r"^meta-|-(instruct|chat|it|hf)$", "", name)


def _begun(name: str) -> str | None:
    """The one model of the table whose name begins so, as `qwen3-235b` begins `qwen3-235b-a22b`."""
    found = [key for key in _table()["models"] if key.startswith(f"{name}-")]
    return found[0] if len(found) == 1 else None


def _from_hub(hub_id: str, unknown: str, trust_remote_code: bool) -> PlannedModel:
    from huggingface_hub import hf_hub_download

    offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
    try:
        path = Path(hf_hub_download(hub_id, "config.json", local_files_only=offline))
    except Exception as error:  # the hub client raises many types; the user needs one line
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        where = "the local hub cache (HF_HUB_OFFLINE is set)" if offline else "the hub"
        raise BadInput(f"{unknown}; {where} did not give it: {reason}") from error
    config = read_json(Path(path))
    shape = shape_of(config, Path(path).parent, trust_remote_code=trust_remote_code)
    return PlannedModel(hub_id, shape, config, f"the hub, {hub_id}/config.json")


def _from_file(path: Path, name: str, trust_remote_code: bool) -> PlannedModel:
    config = read_json(path)
    shape = shape_of(config, path.parent, trust_remote_code=trust_remote_code)
    stored = stored_weight_bytes(path.parent) if path.name == "config.json" else None
    return PlannedModel(name, shape, config, str(path), stored_bytes=stored)


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
    """The bundled or cached answer for this config; else the model is probed and the answer kept.

    Raises:
        BadInput: the model cannot be probed.
    """
    key = config_hash(raw)
    if (entry := _bundled().get(key)) is not None:
        return ProbedModel.from_dict(entry)
    path = cache_folder() / f"{key}-{version('transformers')}.json"
    if (answer := _read(path)) is not None:
        return answer
    from ..probe.oracle import probe

    answer = probe(raw, folder, trust_remote_code=trust_remote_code)
    _keep(path, answer)
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
"""Answers for models of the table, which `tools/probe_table.py` writes."""


@cache
def _bundled() -> Mapping[str, Any]:
    return json.loads(ANSWERS.read_text(encoding="utf-8"))


def _read(path: Path) -> ProbedModel | None:
    """A kept answer; None if there is none, or it is damaged."""
    try:
        return ProbedModel.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(path: Path, answer: ProbedModel) -> None:
    """Write an answer; a folder that cannot be written costs the next call its time, not this one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(answer.as_dict()).encode())
    except (OSError, BadInput):
        return
