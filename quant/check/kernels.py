"""Rules of other engines as data: the kernel that serves codes on a card, with the source of each rule.

`rules/engines.json` has the versions, methods and architectures of each engine (`tools/engine_rules.py`
reads them from wheels), `rules/kernels.json` a row for each set of codes with the kernels in the order of
their cards. Compute capabilities are written as CUDA's without the dot: 90 for 9.0. No torch: `deploy` asks
them for a config alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ...base.errors import BadInput
from ...base.processor import processor_flags

Answer = Literal["loads", "does not", "unknown"]
_RULES = Path(__file__).with_name("rules")
CPU = 0
"""This machine's processor, where a card would have its compute capability."""


@dataclass(frozen=True, slots=True)
class Codes:
    """Stored codes of a linear, by what engines choose a kernel for.

    Attributes:
        kind: `int4`, `fp8`, `fp8-block`, `nvfp4`, `mxfp4`, `nf4`, a ggml type ...; empty: not known.
        group: input channels that share a scale; -1: a scale per output channel or for the whole weight.
        symmetric: False for codes with zero points.
        inputs: dtype that inputs are quantized to (`int8`, `fp8`, `nvfp4` ...); empty: none.
        static: True for calibrated input scales.
        permuted: True if groups follow an order of the channels that is stored (`g_idx`).
    """

    kind: str
    label: str
    group: int = -1
    symmetric: bool = True
    inputs: str = ""
    static: bool = False
    permuted: bool = False

    @property
    def key(self) -> str:
        """Name in the rules: `int4`, `int8+int8`, `fp8+fp8`."""
        return f"{self.kind}+{self.inputs}" if self.inputs else self.kind


@dataclass(frozen=True, slots=True)
class KernelAnswer:
    """The answer for codes: the kernel, or why there is none.

    Attributes:
        kernel: name of the kernel that serves them; of any card all, with their cards.
        reason: violated rule, or what a fallback means; empty: none.
        falls_back: True if the engine's fast kernel does not serve them.
        source: file and version that the rule is from.
    """

    answer: Answer
    kernel: str = ""
    reason: str = ""
    falls_back: bool = False
    source: str = ""


@dataclass(frozen=True, slots=True)
class EngineRules:
    """An engine's names: versions, the newest first, quantization methods, and architectures."""

    name: str
    source: str
    versions: Sequence[str]
    methods: Sequence[str]
    architectures: Sequence[str]
    lacking: Mapping[str, Sequence[str]]

    def version(self, wanted: str | None) -> str:
        """The full version of a prefix, the newest by default; BadInput for one without rules."""
        fitting = (v for v in self.versions if wanted is None or f"{v}.".startswith(f"{wanted}."))
        if (version := next(fitting, None)) is None:
            known = ", ".join(self.versions)
            raise BadInput(
                f"--engine-version {wanted}: rules of {self.name} are known for {known} alone"
            )
        return version

    def has(self, name: str, version: str) -> bool:
        known = name in self.methods or name in self.architectures
        return known and name not in self.lacking.get(version, ())


@cache
def engine_rules() -> Mapping[str, EngineRules]:
    """The rules of vLLM, SGLang and TensorRT-LLM, by the engine's name on the command line."""
    data = json.loads((_RULES / "engines.json").read_text(encoding="utf-8"))
    return {engine: EngineRules(**entry) for engine, entry in data.items()}


@cache
def kernel_rows() -> tuple[Mapping[str, Any], ...]:
    return tuple(json.loads((_RULES / "kernels.json").read_text(encoding="utf-8")))


@dataclass(frozen=True, slots=True)
class Question:
    """Codes of a method in an engine's version, on a card (None: any; `CPU`: this machine's processor), in a
    matrix of a rank (outputs, inputs), where it is known; an expert's or not."""

    engine: str
    version: str
    method: str
    codes: Codes
    capability: int | None = None
    shape: tuple[int, int] | None = None
    is_expert: bool = False


def kernel_for(question: Question) -> KernelAnswer:
    """The kernel of an engine for codes, by the rows of the rules."""
    codes, capability = question.codes, question.capability
    if not codes.kind:
        reason = f"codes of {question.method} are not described in its config"
        return KernelAnswer("unknown", reason=reason)
    rows = [*_rows(question)]
    fitting = [row for row in rows if _refusal(row, question) is None]
    if not fitting:
        refusals = (reason for row in rows if (reason := _refusal(row, question)))
        where = " on a processor" if capability == CPU else ""
        reason = next(refusals, f"no kernel for {codes.label} of {question.method}{where}")
        return KernelAnswer("does not", reason=reason, source=rows[0]["source"] if rows else "")
    if capability == CPU:
        return KernelAnswer("loads", fitting[0]["cpu"], source=fitting[0]["source"])
    kernels = [(kernel, row) for row in fitting for kernel in row["kernels"]]
    row = fitting[-1]
    if capability is None:
        names = ", ".join(dict.fromkeys(_label(kernel) for kernel, _ in kernels))
        answer = KernelAnswer("loads", names, source=row["source"])
        return _on_tiles(row, question, answer)
    for kernel, row in kernels:
        if kernel.get("from", 0) <= capability <= kernel.get("to", capability):
            falls_back = "falls_back" in kernel
            reason = "the fast kernel needs another card" if falls_back else ""
            answer = KernelAnswer("loads", kernel["name"], reason, falls_back, row["source"])
            return _on_tiles(row, question, answer)
    names = ", ".join(_label(kernel) for kernel, _ in kernels)
    reason = (
        row.get("otherwise") or f"on compute capability {capability / 10:.1f} there is no {names}"
    )
    return KernelAnswer("does not", reason=reason, source=row["source"])


def _label(kernel: Mapping[str, Any]) -> str:
    """A kernel with the compute capabilities that it serves: `Marlin (7.5 and newer)`."""
    first, last = kernel.get("from", 0), kernel.get("to")
    if last is None:
        return f"{kernel['name']} ({first / 10:.1f} and newer)" if first else kernel["name"]
    cards = f"{first / 10:.1f}" if first == last else f"{first / 10:.1f} to {last / 10:.1f}"
    return f"{kernel['name']} ({cards})"


def _rows(question: Question) -> Iterator[Mapping[str, Any]]:
    field = "cpu" if question.capability == CPU else "kernels"
    for row in kernel_rows():
        is_lacking = question.version in row.get("lacking", ())
        is_here = row["engine"] == question.engine and not is_lacking
        is_meant = question.codes.key in row["codes"] and question.method in row["methods"]
        if is_here and is_meant and row.get(field):
            yield row


def _refusal(row: Mapping[str, Any], question: Question) -> str | None:
    """Why a row is not for these codes; None: it is."""
    codes, shape, on_cpu = question.codes, question.shape, question.capability == CPU
    name = row["cpu"] if on_cpu else row["kernels"][0]["name"]
    if codes.group not in row.get("groups", (codes.group,)):
        sizes = ", ".join(str(size) for size in row["groups"] if size > 0)
        return f"{name} has no groups of {codes.group}, only {sizes} and rows"
    if row.get("symmetric") and not codes.symmetric:
        return f"{name} takes symmetric codes alone"
    if row.get("static", codes.static) != codes.static:
        return f"{name} has {'static' if row['static'] else 'dynamic'} inputs"
    if on_cpu and row.get("needs") and row["needs"] not in processor_flags():
        return f"{name} needs a processor with {row['needs']}"
    if question.is_expert and not row.get("experts", True):
        return f"{name} is for linears, not for experts"
    if shape is None:
        return None
    if codes.group > 0 and codes.kind != "fp8-block" and shape[1] % codes.group:
        return f"it needs whole groups of {codes.group} on every rank, not {shape[1]} inputs"
    multiple = row.get("multiple", 1)
    if shape[0] % multiple or shape[1] % multiple:
        return f"{name} needs multiples of {multiple}, not {shape[0]} × {shape[1]}"
    return None


def _on_tiles(row: Mapping[str, Any], question: Question, answer: KernelAnswer) -> KernelAnswer:
    """The answer for a shape that is no multiple of the row's tiles (outputs, inputs)."""
    tiles, shape = row.get("tiles"), question.shape
    if tiles is None or shape is None or not (shape[0] % tiles[0] or shape[1] % tiles[1]):
        return answer
    reason = f"its tiles are {tiles[0]} outputs × {tiles[1]} inputs"
    if fallback := row.get("fallback"):
        return replace(answer, kernel=fallback, reason=reason, falls_back=True)
    return replace(answer, answer="unknown", kernel="", reason=f"{reason}, which it does not check")


_MODELOPT = {
    "FP8": ("fp8", "fp8", True),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8", "fp8", False),
    "FP8_PB_WO": ("fp8-block", "", False),
    "NVFP4": ("nvfp4", "nvfp4", True),
    "NVFP4_AWQ": ("nvfp4", "nvfp4", True),
    "W4A16_NVFP4": ("nvfp4", "", False),
    "MXFP8": ("mxfp8", "mxfp8", False),
    "W4A16_AWQ": ("awq4", "", False),
    "W4A8_AWQ": ("awq4", "fp8", False),
}
"""Kind, inputs, and static inputs of each `quant_algo` of ModelOpt."""


def codes_of_config(config: Mapping[str, Any]) -> tuple[Codes, ...]:
    """The codes that a `quantization_config` describes; empty kind where it does not say."""
    method = str(config.get("quant_method"))
    try:
        if method == "compressed-tensors":
            return tuple(_of_group(group) for group in config["config_groups"].values())
        if method == "modelopt":
            fields = config.get("quantization") or config
            layers = (fields.get("quantized_layers") or {}).values()
            names = [str(layer.get("quant_algo")) for layer in layers] or [fields["quant_algo"]]
            return tuple(_of_algorithm(str(name)) for name in dict.fromkeys(names))
        if method == "mxfp4":
            return (Codes("mxfp4", "mxfp4", 32),)
        if method == "fp8":
            block = config.get("weight_block_size")
            kind, size = ("fp8-block", block[1]) if block else ("fp8", -1)
            static = config.get("activation_scheme") == "static"
            return (Codes(kind, kind, size, inputs="fp8", static=static),)
        if method in ("auto-round", "intel/auto-round", "gptq", "awq"):
            if (dtype := str(config.get("data_type", "int"))) != "int":
                kind = f"{dtype.replace('_', '')[:4]}{config['bits']}"  # mx_fp and 4: mxfp4
                inputs = kind if config.get("act_bits", 16) < 16 else ""
                return (Codes(kind, kind, int(config["group_size"]), inputs=inputs),)
            bits, group = int(config["bits"]), int(config.get("group_size", -1))
            symmetric = bool(config.get("sym", not config.get("zero_point", False)))
            label = f"int{bits} g{group}{'' if symmetric else ' asym'}"
            permuted = bool(config.get("desc_act"))
            return (Codes(f"int{bits}", label, group, symmetric, permuted=permuted),)
    except (KeyError, TypeError, ValueError, AttributeError):
        pass
    return (Codes("", method),)


def _of_algorithm(name: str) -> Codes:
    kind, inputs, static = _MODELOPT.get(name.upper(), ("", "", False))
    return Codes(kind, name, {"nvfp4": 16, "mxfp8": 32}.get(kind, -1), True, inputs, static)


def _of_group(group: Mapping[str, Any]) -> Codes:
    """Codes of an entry of compressed-tensors' `config_groups`."""
    weights, inputs = group["weights"], group.get("input_activations") or {}
    kind, read = _dtype(weights), _dtype(inputs).removesuffix("-block")
    size = weights.get("group_size") or -1
    symmetric = bool(weights.get("symmetric", True))
    label = f"{kind}{f' g{size}' if size > 0 else ''}{'' if symmetric else ' asym'}"
    return Codes(
        kind,
        f"{label}, inputs {read}" if read else label,
        size,
        symmetric,
        read,
        static=inputs.get("strategy") == "tensor" and not inputs.get("dynamic"),
    )


def _dtype(fields: Mapping[str, Any]) -> str:
    """Name of the dtype that the library's `QuantizationArgs` describe."""
    if not fields:
        return ""
    bits, size = fields["num_bits"], fields.get("group_size")
    if fields.get("type") != "float":
        return f"int{bits}"
    is_block = fields.get("strategy") == "block"
    names = {8: "fp8-block" if is_block else "mxfp8" if size == 32 else "fp8"}
    return names.get(bits, "nvfp4" if size == 16 else "mxfp4")
