"""A mixture of experts in EXL3: widths mixed under a target, scales tuned, and the engine's logits."""

from __future__ import annotations

from pathlib import Path

from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.quant.convert.verify import PROVEN, verify
from llmopt.quant.formats.registry import quantized_modules, read_quantized
from llmopt.quant.methods.options import MethodOptions
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.request import QuantizeRequest
from safetensors.torch import load_file, save_file

from ...support.model_families import save_model
from ...support.native_paths import needs_compiler

pytestmark = needs_compiler  # the search of trellis codes

SHAPE = {
    "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 1,
    "num_experts": 2, "num_experts_per_tok": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
    "head_dim": 32, "max_position_embeddings": 256,
}  # fmt: skip


def test_experts_are_mixed_tuned_proven_and_run(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "Qwen3MoeConfig", SHAPE)
    target = 2.75  # a quarter of a bit is scales
    request = QuantizeRequest(
        tmp_path / "model",
        tmp_path / "out",
        method="trellis",
        num_samples=4,
        seq_len=32,
        held_out=2,
        target_bpw=target,
        options=MethodOptions(asymmetric=True, finetune_steps=4, batch_size=2),
    )
    result = quantize(request)
    assert verify(result.output).status == PROVEN
    records = result.manifest["modules"]
    assert len(records) == 10 and len({record["scheme"]["bits"] for record in records}) > 1
    assert target - 0.3 < result.manifest["summary"]["bits_per_weight"] <= target
    search = result.manifest["search"]
    assert search["taken"] == "mixed" and search["mixed"]["kl"] < search["uniform"]["kl"]
    assert not list(tmp_path.glob("*.statistics"))

    plain = load_file(tmp_path / "model/model.safetensors")
    checkpoint = Checkpoint(result.output)
    for module in quantized_modules(checkpoint):
        plain[f"{module}.weight"] = read_quantized(checkpoint, module).dequantize()
    save_file(plain, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    tokens = [1, 7, 30, 5, 44, 12]
    logits = [
        Engine(EngineConfig(folder, dtype="float32", device="cpu")).prompt_logits(tokens)
        for folder in (result.output, tmp_path / "model")
    ]
    assert (logits[0] - logits[1]).norm() < 2e-3 * logits[1].norm()
