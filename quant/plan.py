"""Everything that can be known to go wrong before any work is done."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from .checkpoint import Checkpoint
from .errors import BadInput
from .families import Family, family_of
from .formats.base import WeightFormat
from .formats.registry import FORMATS
from .methods.base import Method, SchemeOptions
from .methods.registry import METHODS
from .scheme import PER_CHANNEL, Scheme

DEFAULT_GROUP_SIZES = (128, 64, 32, 16)
DEFAULT_SEQ_LEN = 256
_Entry = TypeVar("_Entry")
_BYTES_OF = {"F16": 2, "BF16": 2, "F32": 4}
_LAYER_TENSOR = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class QuantizeRequest:
    """What was asked for. None means: choose, and say what was chosen.

    Attributes:
        model: folder of the source checkpoint.
        output: folder to create.
        group_size: None takes the largest usual size that divides every quantized width.
        symmetric: None takes what the format prefers.
        format: None takes the format that belongs to the method, if it can hold the scheme.
        calibration: see `calibration.load_calibration`.
        seq_len: tokens in a sample; None is 256 or the model's context, whichever is less.
        ignore: regular expressions searched in module names; what matches stays as it is.
        restart: throw away the unfinished work of an earlier run.
        model_name: how the records call the model; empty: the name of its folder.
    """

    model: Path
    output: Path
    method: str = "awq"
    bits: int = 4
    group_size: int | None = None
    symmetric: bool | None = None
    format: str | None = None
    calibration: str | None = None
    num_samples: int = 64
    seq_len: int | None = None
    ignore: tuple[str, ...] = ()
    seed: int = 0
    restart: bool = False
    model_name: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """A request that was checked against the checkpoint.

    Attributes:
        modules: `(out_features, in_features)` of every linear to quantize, by full name.
        schemes: what each of them becomes.
        ignored: linears that stay as they are because they were asked to.
        seq_len: tokens in a calibration sample.
        notes: choices made for the user, one line each.
    """

    checkpoint: Checkpoint
    family: Family
    method: Method
    format: WeightFormat
    modules: dict[str, tuple[int, int]]
    schemes: dict[str, Scheme]
    ignored: tuple[str, ...]
    seq_len: int
    notes: tuple[str, ...]

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return int(self.checkpoint.config["num_hidden_layers"])

    @property
    def label(self) -> str:
        """The schemes in use, the commonest first."""
        labels = [scheme.label for scheme in self.schemes.values()]
        return ", ".join(sorted(set(labels), key=lambda label: (-labels.count(label), label)))

    @property
    def loads_in(self) -> str:
        """Who can read the result: for several schemes, what holds for each."""
        readers = [self.format.loads_in(scheme) for scheme in dict.fromkeys(self.schemes.values())]
        return "; ".join(dict.fromkeys(readers))

    @property
    def quantized_bytes(self) -> int:
        """Bytes that the quantized linears will take on disk, without headers."""
        bits = (
            self.schemes[name].bits_per_weight(*shape) * shape[0] * shape[1]
            for name, shape in self.modules.items()
        )
        return int(sum(bits)) // 8

    @property
    def plain_bytes(self) -> int:
        """Bytes of the same linears in the source."""
        return sum(
            out_features * in_features * _BYTES_OF[self.checkpoint.dtype_name(f"{name}.weight")]
            for name, (out_features, in_features) in self.modules.items()
        )


def make_plan(request: QuantizeRequest) -> Plan:
    """Check a request against the headers of the checkpoint.

    Raises:
        BadInput: anything that would make the work fail later; the message names the module, file or
            option.
    """
    method = _known(METHODS, request.method, "method")
    weight_format = _known(FORMATS, request.format or _default_format(request), "format")
    symmetric = request.symmetric
    if symmetric is None:
        symmetric = weight_format.name != "awq"
    # Widths are checked before the group size is chosen: what cannot be packed at all comes first.
    probe = method.scheme(SchemeOptions(request.bits, PER_CHANNEL, symmetric))
    weight_format.check_scheme(probe)

    checkpoint = Checkpoint(request.model)
    if checkpoint.quantization_config is not None:
        raise BadInput(f"{request.model} is quantized already: start from the original checkpoint")
    family = family_of(checkpoint.config)
    seq_len = _seq_len(request, checkpoint)
    linears = _linears(checkpoint, family)
    ignored = _ignored(request.ignore, list(linears))
    modules = {name: shape for name, shape in linears.items() if name not in ignored}
    if not modules:
        raise BadInput("--ignore matches every linear of the model: nothing is left to quantize")
    for name, (out_features, in_features) in modules.items():
        weight_format.check(name, out_features, in_features, probe)
    group_size, notes = _group_size(request.group_size, modules)
    scheme = method.scheme(SchemeOptions(request.bits, group_size, symmetric))
    for name, (out_features, in_features) in modules.items():
        weight_format.check(name, out_features, in_features, scheme)
    if weight_format.name == "compressed-tensors" and not symmetric:
        notes.append(
            "note: transformers loads asymmetric compressed-tensors checkpoints only with "
            "CompressedTensorsConfig(dequantize=True); --symmetric needs nothing"
        )
    return Plan(
        checkpoint=checkpoint,
        family=family,
        method=method,
        format=weight_format,
        modules=modules,
        schemes=dict.fromkeys(modules, scheme),
        ignored=ignored,
        seq_len=seq_len,
        notes=tuple(notes),
    )


def _known(table: Mapping[str, _Entry], name: str, kind: str) -> _Entry:
    if name not in table:
        raise BadInput(f"unknown {kind} {name!r}: choose one of {', '.join(sorted(table))}")
    return table[name]


def _default_format(request: QuantizeRequest) -> str:
    """AWQ goes into the format of its name wherever that can hold it."""
    fits_awq = request.bits == 4 and request.symmetric is not True
    return "awq" if request.method == "awq" and fits_awq else "compressed-tensors"


def _seq_len(request: QuantizeRequest, checkpoint: Checkpoint) -> int:
    context = checkpoint.config.get("max_position_embeddings", DEFAULT_SEQ_LEN)
    if not isinstance(context, int) or context < 1:
        raise BadInput(f"{checkpoint.folder}/config.json has no usable max_position_embeddings")
    if request.seq_len is None:
        return min(DEFAULT_SEQ_LEN, context)
    if request.seq_len > context:
        raise BadInput(
            f"--seq-len {request.seq_len} is longer than the model's context of {context} tokens"
        )
    return request.seq_len


def _linears(checkpoint: Checkpoint, family: Family) -> dict[str, tuple[int, int]]:
    """Shapes of all linears of all layers, or BadInput naming the tensor that is missing or odd."""
    num_layers = checkpoint.config.get("num_hidden_layers")
    if not isinstance(num_layers, int) or num_layers < 1:
        raise BadInput(f"{checkpoint.folder}/config.json has no usable num_hidden_layers")
    held = {int(m.group(1)) for name in checkpoint.names if (m := _LAYER_TENSOR.match(name))}
    if held != set(range(num_layers)):
        raise BadInput(
            f"{checkpoint.folder} holds {len(held)} decoder layers, but its config says {num_layers}"
        )
    shapes: dict[str, tuple[int, int]] = {}
    for index in range(num_layers):
        for linear in family.linears:
            name = f"model.layers.{index}.{linear}"
            if f"{name}.weight" not in checkpoint:
                raise BadInput(f"{checkpoint.folder} has no tensor '{name}.weight'")
            dtype, shape = (
                checkpoint.dtype_name(f"{name}.weight"),
                checkpoint.shape(f"{name}.weight"),
            )
            if dtype not in _BYTES_OF or len(shape) != 2:
                raise BadInput(
                    f"{name}.weight is {dtype} {list(shape)}: only F16, BF16 and F32 matrices "
                    "can be quantized"
                )
            shapes[name] = (shape[0], shape[1])
    return shapes


def _ignored(patterns: tuple[str, ...], names: list[str]) -> tuple[str, ...]:
    chosen: set[str] = set()
    for pattern in patterns:
        try:
            matches = {name for name in names if re.search(pattern, name)}
        except re.error as error:
            raise BadInput(f"--ignore {pattern!r} is no regular expression: {error}") from error
        if not matches:
            raise BadInput(f"--ignore {pattern!r} matches no linear, such as {names[0]}")
        chosen |= matches
    return tuple(name for name in names if name in chosen)


def _group_size(asked: int | None, modules: dict[str, tuple[int, int]]) -> tuple[int, list[str]]:
    """The group size to use, and what to say about it; a size that was asked for is taken as it is."""
    if asked is not None:
        return asked, []
    preferred = DEFAULT_GROUP_SIZES[0]
    for size in DEFAULT_GROUP_SIZES:
        if all(in_features % size == 0 for _, in_features in modules.values()):
            if size == preferred:
                return size, []
            odd = next(name for name, shape in modules.items() if shape[1] % preferred)
            return size, [
                f"note: group size {size}, the largest usual one that divides every width "
                f"({odd} has {modules[odd][1]} inputs)"
            ]
    smallest = DEFAULT_GROUP_SIZES[-1]
    odd = next(name for name, shape in modules.items() if shape[1] % smallest)
    raise BadInput(
        f"no usual group size divides the {modules[odd][1]} inputs of {odd}: "
        "give one with --group-size, -1 for one scale per output channel"
    )
