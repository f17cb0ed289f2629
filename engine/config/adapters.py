"""LoRA adapters of an engine: by name, each with a salt of its own, and only of kinds that can be served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

from ...base.atomic_io import expanded
from ...base.errors import BadInput
from ...quant.convert.adapter import LoraSettings


def servable_settings(folder: Path) -> LoraSettings:
    """Settings of an adapter next to its base. BadInput: as `LoraSettings.read`, or DoRA."""
    settings = LoraSettings.read(folder)
    if settings.is_dora:
        raise BadInput(
            f"{settings.path}: use_dora = True: such an adapter cannot be served beside its base: merge it "
            "with llmopt merge"
        )
    return settings


def parse_adapters(entries: Sequence[str]) -> dict[str, Path]:
    """Adapters by name, from words NAME=FOLDER, or FOLDER for both; BadInput: duplicates, or another form."""
    adapters: dict[str, Path] = {}
    for word in entries:
        name, equals, folder = word.partition("=")
        if not equals:
            name, folder = Path(word).name, word
        if not (name and folder):
            raise BadInput(f"--lora {word!r}: write NAME=FOLDER")
        if name in adapters:
            raise BadInput(f"--lora {word!r}: the name {name!r} was given twice")
        adapters[name] = expanded(folder)
    return adapters


_SEPARATOR = "\0"


def adapter_name(key: str) -> str:
    return key.partition(_SEPARATOR)[0]


class LoadedAdapters:
    """Adapters by name; weights, requests and prefixes of one share its key. `retired` are the keys of those
    that are unloaded, and whose weights are held for their last requests."""

    def __init__(self, folders: Mapping[str, Path], max_loras: int | None = None) -> None:
        self.max_loras = len(folders) if max_loras is None else max_loras
        self._keys = {name: name for name in folders}
        self.retired: set[str] = set()
        self._num_loaded = 0

    def key(self, name: str) -> str:
        if name not in self._keys:
            raise BadInput(
                f"no adapter {name!r}: this engine has {', '.join(self._keys) or 'none'}"
            )
        return self._keys[name]

    def add(self, name: str, *, load_inplace: bool = False) -> str:
        """A new key for an adapter; BadInput: its name is taken without `load_inplace`, or `max_loras`
        reached."""
        if name in self._keys and not load_inplace:
            raise BadInput(f"adapter {name!r} is loaded already: unload it, or say load_inplace")
        others = len(self._keys.keys() - {name})
        in_use = len(self.retired)
        if others + in_use >= self.max_loras:
            note = f", {in_use} of them unloaded and still in use" if in_use else ""
            raise BadInput(
                f"{others + in_use} adapters are loaded{note}: --max-loras {self.max_loras}"
            )
        if name in self._keys:
            self.remove(name)
        self._num_loaded += 1
        key = self._keys[name] = f"{name}{_SEPARATOR}{self._num_loaded}"
        return key

    def remove(self, name: str) -> None:
        self.retired.add(self.key(name))
        del self._keys[name]


def adapter_salt(adapter: str, salt: bytes) -> bytes:
    """The salt of prefix-cache hashes: keys and values depend on the adapter."""
    return blake2b(salt, key=blake2b(adapter.encode()).digest(), digest_size=32).digest()
