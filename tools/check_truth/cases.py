"""The checkpoints: which tool writes what of which family. `make.py` has the makers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Case:
    """A checkpoint to make.

    Attributes:
        tool: package that writes it, a key of `make.MAKERS`.
        family: key of `models.FAMILIES`.
        name: the recipe in words, unique with the tool and the family.
    """

    tool: str
    family: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        return f"{self.tool}-{self.family}-{self.name}"

    def task(self) -> dict[str, Any]:
        return asdict(self) | {"folder": self.folder}


def int_weights(**fields: Any) -> dict[str, Any]:
    """A config group of compressed-tensors: integer weights, 4 bits in groups of 32 unless told otherwise."""
    common = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    return {"targets": ["Linear"], "weights": common | {"group_size": 32} | fields}


def llmc(family: str, name: str, scheme: Any, **options: Any) -> Case:
    """By llm-compressor: a preset scheme, or config groups."""
    key = "scheme" if isinstance(scheme, str) else "config_groups"
    return Case("llmcompressor", family, name, {key: scheme, **options})


def rounded(family: str, name: str, form: str, **options: Any) -> Case:
    """By auto-round, in one of its export formats."""
    return Case("autoround", family, name, {"format": form, **options})


def gptq(family: str, name: str, **options: Any) -> Case:
    return Case("gptqmodel", family, name, options)


def bnb(family: str, name: str, **options: Any) -> Case:
    return Case("bitsandbytes", family, name, options)


def gguf(family: str, kind: str) -> Case:
    return Case("llamacpp", family, kind, {"type": kind})


NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
KV_FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
BY_CHANNEL = {"num_bits": 8, "strategy": "channel", "group_size": None}
MIXED = {
    "attention": int_weights(**BY_CHANNEL) | {"targets": ["re:.*self_attn.*"]},
    "mlp": int_weights() | {"targets": ["re:.*mlp.*_proj$"]},
}
CASES: tuple[Case, ...] = (
    Case("transformers", "llama", "plain"),
    Case("transformers", "gemma2", "plain"),
    Case("transformers", "llama", "fp8-block", {"fp8": True}),
    llmc("llama", "w4a16", "W4A16"),
    llmc("llama-192", "w4a16", "W4A16"),
    llmc("llama-192", "w4a16-g32", {"g": int_weights()}),
    llmc("llama-344", "w4a16-g32", {"g": int_weights()}),
    llmc("llama-tied", "w4a16", "W4A16"),
    llmc("llama", "w4a16-lm-head", "W4A16", ignore=[]),
    llmc("llama", "w4a16-kv-fp8", "W4A16", kv_cache_scheme=KV_FP8),
    llmc("llama", "mixed-w8-w4", MIXED),
    llmc("llama", "gptq-actorder", {"g": int_weights(actorder="weight")}, gptq=True),
    llmc("llama", "w3a16-g32", {"g": int_weights(num_bits=3)}),
    llmc("qwen2", "w4a16-asym", "W4A16_ASYM"),
    llmc("qwen2", "awq-w4a16-asym", "W4A16_ASYM", awq=True),
    llmc("qwen3", "w4a16-g32", {"g": int_weights()}),
    llmc("gemma3_text", "w4a16", "W4A16"),
    llmc("phi3", "w4a16", "W4A16"),
    llmc("qwen3_moe", "w4a16", "W4A16"),
    llmc("mixtral", "w4a16-g32", {"g": int_weights()}),
    llmc("granite", "w8a16", "W8A16"),
    llmc("llama", "w8a8", "W8A8"),
    llmc("gemma2", "w8a8", "W8A8"),
    llmc("olmo2", "w4a8", "W4A8"),
    llmc("mistral", "w4afp8", "W4AFP8"),
    llmc("mistral", "fp8-dynamic", "FP8_DYNAMIC"),
    llmc("qwen3", "fp8-static", "FP8"),
    llmc("olmo2", "fp8-block", "FP8_BLOCK"),
    llmc("mixtral", "fp8-dynamic", "FP8_DYNAMIC"),
    llmc("granite", "nvfp4", "NVFP4"),
    llmc("llama", "nvfp4a16", "NVFP4A16"),
    llmc("qwen3", "mxfp4a16", "MXFP4A16"),
    llmc("llama", "mxfp4", "MXFP4"),
    llmc("llama", "mxfp8", "MXFP8"),
    rounded("llama", "native", "auto_round"),
    rounded("llama", "native-w2g32", "auto_round", bits=2, group_size=32),
    rounded("qwen3", "gptq", "auto_gptq"),
    rounded("qwen2", "awq-asym", "auto_awq", sym=False),
    rounded("mistral", "awq-sym", "auto_awq"),
    rounded("granite", "nvfp4", "llm_compressor", scheme="NVFP4"),
    rounded("llama", "mxfp4", "auto_round", scheme="MXFP4"),
    rounded("olmo2", "fp8", "llm_compressor", scheme="FP8_STATIC"),
    rounded("llama", "gguf-q4_k_m", "gguf:q4_k_m", scheme="gguf:q4_k_m"),
    gptq("llama", "v1", format="gptq"),
    gptq("llama-192", "v1", format="gptq"),
    gptq("llama", "asym", format="gptq", sym=False),
    gptq("qwen2", "v2-asym", format="gptq_v2", sym=False),
    gptq("qwen3", "desc-act", desc_act=True),
    gptq("mistral", "w8", bits=8),
    gptq("llama", "w3", bits=3),
    gptq("granite", "w2-g32", bits=2, group_size=32),
    gptq("qwen3_moe", "g32", group_size=32),
    gptq("phi3", "channel", group_size=-1, act_group_aware=False),
    gptq("olmo2", "awq", method="awq", format="gemm"),
    bnb("llama", "nf4", **NF4),
    bnb("qwen3", "nf4-double", **NF4, bnb_4bit_use_double_quant=True),
    bnb("gemma3_text", "fp4", load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    bnb("phi3", "int8", load_in_8bit=True),
    bnb("mixtral", "nf4", **NF4),
    Case("modelopt", "llama", "fp8", {"config": "FP8_DEFAULT_CFG"}),
    Case("modelopt", "qwen2", "fp8-kv", {"config": "FP8_DEFAULT_CFG", "kv": "FP8_KV_CFG"}),
    Case("modelopt", "qwen3", "nvfp4", {"config": "NVFP4_DEFAULT_CFG"}),
    Case("modelopt", "mistral", "int4-awq", {"config": "INT4_AWQ_CFG"}),
    Case("modelopt", "granite", "w4a8-awq", {"config": "W4A8_AWQ_BETA_CFG"}),
    Case("modelopt", "qwen3_moe", "fp8", {"config": "FP8_DEFAULT_CFG"}),
    gguf("llama", "Q4_K_M"),
    gguf("llama", "Q8_0"),
    gguf("llama", "IQ4_XS"),
    gguf("llama", "Q2_K"),
    gguf("llama-192", "Q4_K_M"),
    gguf("llama-344", "Q8_0"),
    gguf("qwen2", "Q5_K_M"),
    gguf("qwen3", "Q4_0"),
    gguf("qwen3_moe", "Q4_K_M"),
    gguf("gemma3_text", "Q8_0"),
    gguf("phi3", "Q6_K"),
    gguf("olmo2", "Q3_K_M"),
    gguf("granite", "IQ4_NL"),
    gguf("llama", "TQ1_0"),
)  # fmt: skip
