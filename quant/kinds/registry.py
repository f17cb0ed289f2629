"""The registry of quantization kinds: a line each, by which a name finds the modules of a kind.

A kind is a folder: its scheme, without torch, in `scheme.py`; `KIND` in `kind.py`; `STORAGE` in `formats.py`
(see `quant/kinds/base/kind.py`), imported when they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from importlib import import_module
from typing import Any, NamedTuple

from ..base.scheme import Scheme


class KindEntry(NamedTuple):
    """A kind's line: its scheme's module and class, formats of its own, and formats with other kinds."""

    module: str
    scheme: str
    formats: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()


KINDS = {
    "int": KindEntry(".integer.scheme", "IntScheme", ("awq", "gptq"), ("compressed-tensors",)),
    "float": KindEntry(".fp8.scheme", "FloatScheme", ("fp8",), ("compressed-tensors", "modelopt")),
    "codebook": KindEntry(".codebook.scheme", "CodebookScheme", shared=("bitsandbytes",)),
    "fp4": KindEntry(".fp4.scheme", "Fp4Scheme", shared=("compressed-tensors", "modelopt")),
    "vectorwise": KindEntry(".vectorwise.scheme", "VectorwiseScheme", shared=("bitsandbytes",)),
    "lookup": KindEntry(".lookup.scheme", "LookupScheme", ("squeezellm",)),
    "gguf": KindEntry(".ggml.scheme", "GgufScheme", ("gguf",)),
    "trellis": KindEntry(".trellis.scheme", "TrellisScheme", ("exl3",)),
    "e8p": KindEntry(".e8p.scheme", "E8pScheme", ("quip",)),
}
"""The kinds, by the name that manifests record."""


def format_names() -> tuple[str, ...]:
    """The names of all formats, sorted."""
    return tuple(sorted({name for kind in KINDS.values() for name in kind.formats + kind.shared}))


def scheme_class(kind_name: str) -> type[Scheme]:
    """The class of a kind's schemes, imported now; KeyError for an unknown kind."""
    entry = KINDS[kind_name]
    return getattr(import_module(entry.module, __package__), entry.scheme)


def classes_in(format_name: str) -> Iterator[type[Scheme]]:
    """The scheme classes of the kinds that a format holds, each imported when its turn comes."""
    for name, entry in KINDS.items():
        if format_name in entry.formats + entry.shared:
            yield scheme_class(name)


def scheme_record(scheme: Scheme) -> dict[str, Any]:
    fields: Any = scheme
    return {"grid": scheme.kind_name, **asdict(fields)}
