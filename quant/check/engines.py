"""Engines' answers about a checkpoint: whether each loads it, and the kernel of each kind of linear."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..families.registry import model_family
from ..plan.loaders import transformers_loads, vllm_loads
from .contents import Contents

Answer = Literal["loads", "does not", "unknown"]


@dataclass(frozen=True, slots=True)
class KernelAnswer:
    """An engine's answer for one kind of linear.

    Attributes:
        linears: names of the linears, with their number: `model.layers.*.mlp.up_proj (24)`.
        kernel: name of the kernel that serves them; empty without one.
        reason: requirement or violated rule; empty: none.
        falls_back: True if the kernel dequantizes, or is the slower of the engine's.
    """

    linears: str
    codes: str
    answer: Answer
    kernel: str = ""
    reason: str = ""
    falls_back: bool = False


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """An engine's answer for a checkpoint: of `version`, with the reason or the requirements."""

    engine: str
    version: str
    answer: Answer
    reason: str
    kernels: tuple[KernelAnswer, ...] = ()


@dataclass(frozen=True, slots=True)
class Target:
    """The engine's version, card and ranks. `capability` is CUDA's, as 90 for 9.0; None: any card."""

    version: str | None = None
    capability: int | None = None
    tensor_parallel: int = 1


def _llmopt(contents: Contents, target: Target) -> EngineAnswer:
    from ...base.version import VERSION

    family = str(contents.checkpoint.config.get("model_type"))
    known = model_family(family)
    if contents.refusal:
        answer, reason = "does not", contents.refusal
    elif known is None or known.choices is None:
        answer, reason = "does not", f"its engine does not run {family}"
    else:
        answer, reason = "loads", ""
    return EngineAnswer("llmopt", VERSION, answer, reason)


def _transformers(contents: Contents, target: Target) -> EngineAnswer:
    from importlib.metadata import version

    installed = version("transformers")
    if isinstance(contents.parameters, str):
        return EngineAnswer("transformers", installed, "does not", contents.parameters)
    if contents.loaders is None:
        return EngineAnswer("transformers", installed, "unknown", contents.refusal)
    if not contents.method:
        missing = contents.parameters.missing(contents.checkpoint.names)
        reason = f"{missing[0]} of its model is in no file" if missing else ""
        return EngineAnswer("transformers", installed, "does not" if missing else "loads", reason)
    loads, reason = transformers_loads(contents.loaders, contents.method)
    return EngineAnswer("transformers", installed, "loads" if loads else "does not", reason)


def _vllm(contents: Contents, target: Target) -> EngineAnswer:
    if not contents.method:
        return EngineAnswer("vllm", "0.32", "loads", "plain weights")
    if contents.loaders is None:
        return EngineAnswer("vllm", "0.32", "unknown", contents.refusal)
    loads, reason = vllm_loads(contents.loaders, contents.method, target.tensor_parallel)
    return EngineAnswer("vllm", "0.32", "loads" if loads else "does not", reason)


def _llama_cpp(contents: Contents, target: Target) -> EngineAnswer:
    if contents.checkpoint.path.is_file() and contents.checkpoint.path.suffix != ".json":
        return EngineAnswer("llama.cpp", "", "loads", "")
    return EngineAnswer("llama.cpp", "", "does not", "it reads GGUF files only")


def _no_rules(engine: str) -> Callable[[Contents, Target], EngineAnswer]:
    def answer(contents: Contents, target: Target) -> EngineAnswer:
        return EngineAnswer(engine, "", "unknown", "its rules are not known here")

    return answer


ENGINES: dict[str, Callable[[Contents, Target], EngineAnswer]] = {
    "vllm": _vllm,
    "sglang": _no_rules("sglang"),
    "trtllm": _no_rules("trtllm"),
    "llama.cpp": _llama_cpp,
    "transformers": _transformers,
    "llmopt": _llmopt,
}
"""Functions that answer for each engine, by its name."""
