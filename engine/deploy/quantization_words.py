"""Options by which an engine is told of a checkpoint's quantization, or the reason why it cannot load it.

Sources: the parsers of vLLM 0.32.0 (`modelopt.py`), SGLang
0.5.23 (`model_config.py`, `modelopt_quant.py`) and TensorRT-LLM 1.2 (`_torch/model_config.py`, `mode.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...base.errors import BadInput
from ...quant.check.kernels import Question, codes_of_config, engine_rules, kernel_for
from ...quant.model.checkpoint import HF_QUANT_CONFIG
from ..planner.catalog import StoredQuantization
from ..planner.devices import Device

MIXED = "MIXED_PRECISION"
_NVFP4 = ("NVFP4", "NVFP4_AWQ", "W4A16_NVFP4")
VLLM_METHODS: Mapping[str, str] = {
    "FP8": "modelopt",
    "FP8_PER_CHANNEL_PER_TOKEN": "modelopt",
    "FP8_PB_WO": "modelopt",
    "NVFP4": "modelopt_fp4",
    "W4A16_NVFP4": "modelopt_fp4",
    "MXFP8": "modelopt_mxfp8",
    MIXED: "modelopt_mixed",
}
"""`--quantization` by `quant_algo`."""
SGLANG_METHODS: Mapping[str, str] = {
    "FP8": "modelopt_fp8",
    **dict.fromkeys(_NVFP4, "modelopt_fp4"),
    "MXFP8": "mxfp8",
    MIXED: "modelopt_mixed",
}
TRTLLM_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "fp8_pb_wo", "NVFP4", MIXED)
"""Spelled as in `hf_quant_config.json`: it compares them as they are."""


def quantization_words(
    engine: str, stored: StoredQuantization | None, device: Device
) -> Sequence[str]:
    """The engine's options for the checkpoint's weights: none where it finds out by itself. Raises
    `BadInput`: the engine cannot load them, or not on this device."""
    if stored is None or engine == "llmopt":
        return []
    if engine == "trtllm" and stored.method == "modelopt":
        _check_trtllm(stored)
    if stored.method != "modelopt" or engine == "trtllm":
        _check_kernels(engine, stored, device)
        return []
    methods = VLLM_METHODS if engine == "vllm" else SGLANG_METHODS
    algorithm = stored.algorithm.upper()
    if algorithm not in methods:
        raise _refused(engine, stored, f"it loads {', '.join(methods)}")
    in_layers = {name.upper() for name in stored.layer_algorithms}
    if engine == "sglang" and algorithm == MIXED and not in_layers & {*_NVFP4}:
        raise _refused("sglang", stored, "it takes mixed checkpoints with NVFP4 layers alone")
    _check_kernels(engine, stored, device)
    return ["--quantization", methods[algorithm]]


def _check_trtllm(stored: StoredQuantization) -> None:
    if stored.has_hf_file is False:
        raise _refused("trtllm", stored, f"it reads {HF_QUANT_CONFIG}, which is missing")
    algorithms = {stored.algorithm, *stored.layer_algorithms}
    if unknown := algorithms - {*TRTLLM_ALGORITHMS}:
        listed, known = ", ".join(sorted(unknown)), ", ".join(TRTLLM_ALGORITHMS)
        raise _refused("trtllm", stored, f"it has no {listed}, only {known}")


def _check_kernels(engine: str, stored: StoredQuantization, device: Device) -> None:
    """Refuse what the rules of `llmopt check` say that the engine has no kernel for on the device."""
    if engine not in engine_rules():
        return
    release = engine_rules()[engine].version(None)
    for codes in codes_of_config(stored.config):
        answer = kernel_for(Question(engine, release, stored.method, codes, device.capability))
        if answer.answer == "does not":
            remedy = ": write it as --format modelopt" if engine == "trtllm" else ""
            raise _refused(engine, stored, f"on {device.name}: {answer.reason}{remedy}")


def _refused(engine: str, stored: StoredQuantization, reason: str) -> BadInput:
    return BadInput(f"--engine {engine} cannot load a checkpoint in {stored.label}: {reason}")
