"""The registry of quantization kinds: a line each, by which a manifest's record finds its scheme.

A kind is a folder `quant/kinds/<kind>/`: its scheme, without torch, in `scheme.py`; its tensor, grid and
rounding behind the `KIND` of `kind.py`; how it is stored, and who loads it, behind the `STORAGE` of
`formats.py` (see `quant/kinds/base/kind.py`).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ...base.errors import BadInput
from ..base.scheme import Activations, Scheme
from .codebook.scheme import CodebookScheme
from .e8p.scheme import E8pScheme
from .fp4.scheme import Fp4Scheme
from .fp8.scheme import FloatScheme
from .ggml.scheme import GgufScheme
from .integer.scheme import IntScheme
from .lookup.scheme import LookupScheme
from .trellis.scheme import TrellisScheme
from .vectorwise.scheme import VectorwiseScheme

SCHEMES: list[type[Scheme]] = [
    IntScheme,
    FloatScheme,
    CodebookScheme,
    Fp4Scheme,
    VectorwiseScheme,
    LookupScheme,
    GgufScheme,
    TrellisScheme,
    E8pScheme,
]

SHARED_FORMATS = ("bitsandbytes", "compressed-tensors", "modelopt")
"""Those that hold several kinds."""


def format_names() -> tuple[str, ...]:
    """All weight formats, as `--format` takes them."""
    return tuple(sorted((*SHARED_FORMATS, *(name for one in SCHEMES for name in one.format_names))))


def scheme_record(scheme: Scheme) -> dict[str, Any]:
    """A scheme for JSON; `read_scheme` undoes it."""
    fields: Any = scheme
    return {"grid": scheme.kind_name, **asdict(fields)}


def read_scheme(record: dict[str, Any]) -> Scheme:
    """The scheme that `scheme_record` wrote.

    Raises:
        BadInput: no such kind, or fields that it does not have.
    """
    fields = dict(record)
    kind_name = fields.pop("grid", "int")
    cls: Any = next((cls for cls in SCHEMES if cls.kind_name == kind_name), None)
    try:
        if cls is None:
            raise TypeError("unknown grid")
        if fields.get("activations"):
            fields["activations"] = Activations(**fields["activations"])
        return cls(**fields)
    except TypeError as error:
        raise BadInput(f"no scheme can be made of {record}: {error}") from error
