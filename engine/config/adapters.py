"""LoRA adapters of an engine: by name, each with a salt of its own, and only of kinds that can be served."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from ...quant.adapters.settings import LoraSettings
from ...quant.base.errors import BadInput


def servable_settings(folder: Path) -> LoraSettings:
    """The settings of an adapter that is applied beside its base.

    Raises:
        BadInput: see `LoraSettings.read`; or a DoRA adapter, which rescales the base's own weights.
    """
    settings = LoraSettings.read(folder)
    if settings.is_dora:
        raise BadInput(
            f"{settings.path}: use_dora = True: such an adapter cannot be served beside its base: merge it "
            "with llmopt merge"
        )
    return settings


def parse_adapters(words: Sequence[str]) -> dict[str, Path]:
    """Adapters by name, from words of the form NAME=FOLDER, or FOLDER, whose name it then is.

    Raises:
        BadInput: another form, or a duplicate name.
    """
    adapters: dict[str, Path] = {}
    for word in words:
        name, equals, folder = word.partition("=")
        if not equals:
            name, folder = Path(word).name, word
        if not (name and folder):
            raise BadInput(f"--lora {word!r}: write NAME=FOLDER")
        if name in adapters:
            raise BadInput(f"--lora {word!r}: the name {name!r} was given twice")
        adapters[name] = Path(folder).expanduser()
    return adapters


def adapter_salt(adapter: str | None, salt: bytes) -> bytes:
    """The salt of prefix-cache hashes: keys and values depend on the adapter."""
    if adapter is None:
        return salt
    return blake2b(salt, key=blake2b(adapter.encode()).digest(), digest_size=32).digest()
