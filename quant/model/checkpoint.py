"""A safetensors checkpoint on disk: config and tensors, with all shard headers checked on opening."""

from __future__ import annotations

import json
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ...base.errors import BadInput

if TYPE_CHECKING:
    import torch

    from ...base.atomic_io import Entry

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MANIFEST_NAME = "llmopt_quantization.json"
HF_QUANT_CONFIG = "hf_quant_config.json"
MAPPED_SHARDS = 2  # mapped at a time: pages that were read stay resident until a shard is unmapped
TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("chat_template*", "additional_chat_templates/*"),
)
# Files that a copy needs next to its config and weights: tokenizer, processor, generation config, licence,
# and modules of sentence-transformers.
_COMPANIONS = (
    *("generation_config.json", "preprocessor_config.json", "processor_config.json"),
    *("video_preprocessor_config.json", "tekken.json", "LICENSE*", "NOTICE*", *TOKENIZER_FILES),
    *("modules.json", "*sentence*.json", "[0-9]_*/**/*"),
)
GGUF_SUFFIX, GGUF_MAGIC = ".gguf", b"GGUF"
EXPERT = re.compile(r"\.experts\.(\d+)\.")


def expert_of(module: str) -> int | None:
    """The number of the expert that a linear belongs to; None: to none."""
    expert = EXPERT.search(module)
    return int(expert[1]) if expert else None


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def kind_name(module: str) -> str:
    """A name for all that differ in layer or expert alone: `model.layers.*.mlp.up_proj`."""
    return _NUMBER.sub("*", module)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or `BadInput` naming the file and the line."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise BadInput(f"{path} is missing") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not valid JSON ({error}): it may be half-written") from error
    except RecursionError as error:
        raise BadInput(f"{path} is nested too deeply to be one of ours") from error
    if not isinstance(value, dict):
        raise BadInput(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def model_config(path: Path) -> dict[str, Any]:
    """A `config.json`, with other names of a `quantization_config` replaced: `compression_config` of older
    compressed-tensors, and MLX's `quantization`, which no format reads. BadInput: as `read_json`."""
    config = read_json(path)
    older = {"compression_config": "compressed-tensors", "quantization": "mlx"}
    for name, method in older.items():
        value = config.get(name)
        if isinstance(value, dict) and config.get("quantization_config") is None:
            config["quantization_config"] = {"quant_method": method, **config.pop(name)}
    return config


def check_kinds(path: Path, value: Any, kinds: Any) -> None:
    """Raise BadInput where a value of a file is not of the kind that its readers need: `kind_fault`."""
    if fault := kind_fault(value, kinds, ""):
        raise BadInput(f"{path}: {fault}; it was changed by hand or is damaged: write it anew")


def kind_fault(value: Any, kind: Any, at: str) -> str:
    """Place of a JSON value of another kind, as `metrics.ttft is 'x'`, or empty. A kind is a type, None, a
    list (of elements), a mapping (optional keys, `*`: others), or a tuple of alternatives."""
    if isinstance(kind, tuple):
        faults = [kind_fault(value, option, at) for option in kind]
        return "" if "" in faults else faults[-1]
    inner: Iterable[tuple[Any, Any, Any]] = ()
    if isinstance(kind, list):
        fits = isinstance(value, list)
        inner = ((number, item, kind[0]) for number, item in enumerate(value)) if fits else ()
    elif isinstance(kind, dict):
        fits = isinstance(value, dict)
        every = kind.get("*")
        names = (value if every else kind.keys() & value.keys()) if fits else ()
        inner = ((name, value[name], kind.get(name, every)) for name in names)
    else:
        fits = value is None if kind is None else isinstance(value, kind)
    if not fits:
        return f"{at or 'the whole'} is {reprlib.repr(value)}"
    faults = (kind_fault(part, its, f"{at}.{name}".lstrip(".")) for name, part, its in inner)
    return next(filter(None, faults), "")


def indexed_shards(folder: Path) -> dict[str, str] | None:
    """The shard of each tensor by a folder's index. BadInput: it has no `weight_map`. None without it, or
    with `model.safetensors`, which transformers then loads."""
    if (folder / SINGLE_NAME).is_file() or not (folder / INDEX_NAME).is_file():
        return None
    weight_map = read_json(folder / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadInput(f"{folder / INDEX_NAME} has no weight_map")
    return weight_map


class Checkpoint:
    """A folder with `config.json` and safetensors shards, single or indexed.

    Opening reads every shard's header, so that a missing or truncated file is reported by name at once.
    Raises BadInput: no config, no weights, a shard that is missing, cut off, or lacks an indexed tensor.

    Attributes:
        path: the folder, or the single file, that was opened.
        source_type: type of the GGUF file that the weights are dequantized from; None: they are as stored.
        source_tokenizer: the keys of a GGUF file for its tokenizer; None: a tokenizer.json has it.
        notes: notes for the user, where its tensors are not read as they are on disk.
        trust_remote_code: True if code that the checkpoint brings may be run, to build its model.
    """

    folder: Path
    path: Path
    trust_remote_code: bool = False
    source_type: str | None = None
    source_tokenizer: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    _place: Callable[[torch.Tensor], torch.Tensor] = staticmethod(lambda tensor: tensor)

    def __init__(self, folder: Path | str, *, trust_remote_code: bool = False):
        self.folder = self.path = Path(folder)
        self.trust_remote_code = trust_remote_code
        self.config = model_config(self.folder / "config.json")
        self._handles: dict[str, Any] = {}
        if (self.folder / SINGLE_NAME).is_file():
            names = self._open(SINGLE_NAME).keys()
            self.shard_of: dict[str, str] = dict.fromkeys(names, SINGLE_NAME)
        elif weight_map := indexed_shards(self.folder):
            self.shard_of = weight_map
        else:
            raise BadInput(
                f"{self.folder} has no weights: neither {SINGLE_NAME} nor {INDEX_NAME} is there"
            )
        for shard in sorted(set(self.shard_of.values())):
            shard_names = set(self._open(shard).keys())
            lacking = [n for n, s in self.shard_of.items() if s == shard and n not in shard_names]
            if lacking:
                raise BadInput(
                    f"{self.folder / shard} lacks {lacking[0]!r}, which the index places there"
                )

    def _open(self, shard: str) -> Any:
        handle = self._handles.get(shard)
        if handle is None:  # threads that load layers come here together: each step is atomic
            from safetensors import SafetensorError, safe_open

            path = self.folder / shard
            if not path.is_file():
                raise BadInput(f"{path} is missing: the checkpoint is incomplete")
            for mapped in list(self._handles)[: -MAPPED_SHARDS + 1 or None]:
                self._handles.pop(mapped, None)
            try:
                handle = self._handles[shard] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:  # whose message names no file
                raise BadInput(
                    f"{path} is cut off or damaged ({error}): fetch or write it again"
                ) from error
        return handle

    def read_ahead(self) -> None:
        """Prefetch the shards into the page cache (`posix_fadvise`)."""
        if not hasattr(os, "posix_fadvise"):
            return
        for shard in sorted(set(self.shard_of.values())):
            with (self.folder / shard).open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    def release(self) -> None:
        self._handles.clear()

    @cached_property
    def names(self) -> list[str]:
        return sorted(self.shard_of)

    @property
    def text_config(self) -> dict[str, Any]:
        """The part of `config.json` that describes the decoder: all of it, unless there is more than text."""
        part = self.config.get("text_config")
        return part if isinstance(part, dict) else self.config

    @property
    def quantization_config(self) -> dict[str, Any] | None:
        """The `quantization_config`, None for plain; ModelOpt's may be in `hf_quant_config.json` alone."""
        config = self.config.get("quantization_config")
        if config is None:
            return self._modelopt_config
        mixed = config.get("quant_algo") == "MIXED_PRECISION" and "quantized_layers" not in config
        return self._modelopt_config or config if mixed else config

    @cached_property
    def _modelopt_config(self) -> dict[str, Any] | None:
        return modelopt_quantization(self.folder)

    def generation_config(self) -> dict[str, Any]:
        """The `generation_config.json`; empty without it."""
        path = self.folder / "generation_config.json"
        return read_json(path) if path.is_file() else {}

    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer: of the generation config, else of the model's config."""
        listed = self.generation_config().get("eos_token_id", self.config.get("eos_token_id"))
        ids = listed if isinstance(listed, list) else [listed]
        return frozenset(token for token in ids if token is not None)

    def companions(self) -> dict[str, bytes]:
        return files_of(self.folder, _COMPANIONS)

    def __contains__(self, name: str) -> bool:
        return name in self.shard_of

    def placed(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """The same checkpoint, whose tensors `place` moves to a device before they are unpacked."""
        other = copy(self)
        other._place = move
        return other

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self.shard_of:
            raise BadInput(f"{self.folder} has no tensor {name!r}")
        return self._place(self._open(self.shard_of[name]).get_tensor(name))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open(self.shard_of[name]).get_slice(name).get_shape())

    def dtype_name(self, name: str) -> str:
        return self._open(self.shard_of[name]).get_slice(name).get_dtype()

    def entry(self, name: str) -> Entry:
        return self.dtype_name(name), self.shape(name)

    def tensors(self, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
        for name in self.names:
            if name.startswith(prefix):
                yield name, self.tensor(name)

    @property
    def weight_bytes(self) -> int:
        return sum((self.folder / shard).stat().st_size for shard in set(self.shard_of.values()))


def files_of(folder: Path, patterns: Iterable[str] = ("**/*",)) -> dict[str, bytes]:
    """Contents of a folder's files by relative path."""
    paths = {path for pattern in patterns for path in folder.glob(pattern)}
    files = (path for path in sorted(paths) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def modelopt_quantization(folder: Path) -> dict[str, Any] | None:
    """ModelOpt's `quantization_config` by its own file, which its older exports alone have; None without."""
    path = folder / HF_QUANT_CONFIG
    return {"quant_method": "modelopt", **read_json(path)} if path.is_file() else None


def gguf_file_of(path: Path) -> Path | None:
    """The GGUF file of a path: itself, by name or first bytes, or a folder's only one; BadInput: several."""
    if path.is_file():
        if path.suffix == GGUF_SUFFIX:
            return path
        try:
            with path.open("rb") as file:
                return path if file.read(len(GGUF_MAGIC)) == GGUF_MAGIC else None
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise BadInput(f"{path} cannot be read: {reason}") from error
    if (path / INDEX_NAME).is_file() or (path / SINGLE_NAME).is_file():
        return None
    files = sorted(path.glob(f"*{GGUF_SUFFIX}"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise BadInput(f"{path} holds several GGUF files ({names}): give the path of one of them")
    return files[0] if files else None
