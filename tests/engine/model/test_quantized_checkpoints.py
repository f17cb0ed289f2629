"""Quantized checkpoints run packed, with the logits of their dequantized weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.quant.families.config import model_shape
from llmopt.quant.formats.registry import quantized_modules, read_quantized
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.request import QuantizeRequest
from llmopt.recipes import MODELS
from transformers import AutoModelForCausalLM

SOURCE = MODELS / "stories3M"
TOKENS = torch.randint(3, 512, (1, 120), generator=torch.Generator().manual_seed(0))

KINDS = {
    "awq": {"method": "awq"},
    "rtn-int4-g64-sym": {"method": "rtn", "group_size": 64},
    "rtn-int4-channel-asym": {"method": "rtn", "group_size": -1, "symmetric": False},
    "rtn-int8-channel": {"method": "rtn", "bits": 8, "group_size": -1},
    "awq-in-compressed-tensors": {
        "method": "awq",
        "format": "compressed-tensors",
        "group_size": 32,
    },
}


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("quantized") / request.param
    options: dict[str, Any] = KINDS[request.param]
    quantize(QuantizeRequest(SOURCE, folder, num_samples=4, seq_len=64, **options))
    return folder


def engine(folder: Path, dtype: str) -> Engine:
    return Engine(EngineConfig(folder, dtype=dtype, device="cpu"))


def dequantized_model(folder: Path) -> Any:
    """A plain float32 model with the weights that the codes stand for."""
    checkpoint = Checkpoint(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(SOURCE, dtype=torch.float32).eval()
    modules = quantized_modules(checkpoint)
    assert len(modules) == 35
    state = {f"{m}.weight": read_quantized(checkpoint, m).dequantize() for m in modules}
    # AWQ folds its scales into the norms, so those come from the checkpoint too.
    state |= {
        n: checkpoint.tensor(n).float() for n in checkpoint.names if n.endswith("norm.weight")
    }
    _, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    return model


@pytest.mark.sweep(2)
def test_float32_logits_are_those_of_the_dequantized_weights(checkpoint):
    with torch.no_grad():
        expected = dequantized_model(checkpoint)(TOKENS).logits[0]
    got = engine(checkpoint, "float32").prompt_logits(TOKENS[0].tolist())
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_bf16_kernels_stay_close(checkpoint):
    exact = engine(checkpoint, "float32").prompt_logits(TOKENS[0].tolist()).log_softmax(-1)
    fast = engine(checkpoint, "bfloat16").prompt_logits(TOKENS[0].tolist()).log_softmax(-1)
    assert (exact.exp() * (exact - fast)).sum(-1).mean() < 2e-2


def test_the_codes_stay_packed(checkpoint):
    plain = engine(SOURCE, "bfloat16").memory.weight_bytes_per_step
    for dtype in ("bfloat16", "float32"):
        packed = engine(checkpoint, dtype).memory.weight_bytes_per_step
        embedding = 512 * 256 * (2 if dtype == "bfloat16" else 4)
        assert packed - embedding < (plain - 512 * 256 * 2) * (
            0.6 if "int8" in checkpoint.name else 0.34
        )


def test_a_tied_head_counts_once_unless_its_kernel_copies_it():
    parameters = 3_083_008
    plain = engine(SOURCE, "float32").memory
    # The file's bfloat16 stays, the head included, beside norms in float32.
    assert plain.weight_bytes == plain.weight_bytes_per_step
    assert 2 <= plain.weight_bytes / parameters < 2.03
    copied = engine(SOURCE, "bfloat16").memory
    assert copied.weight_bytes_per_step == parameters * 2
    assert copied.weight_bytes - copied.weight_bytes_per_step in (0, 512 * 256 * 2)


def test_the_engine_has_the_planned_memory():
    built = Engine(
        EngineConfig(SOURCE, dtype="bfloat16", device="cpu", block_size=16, num_blocks=10)
    )
    shape = model_shape(Checkpoint(SOURCE).config)
    assert built.memory.kv_cache_bytes == (10 + 1) * 16 * shape.kv_bytes_per_token(2)
    given = Engine(
        EngineConfig(SOURCE, device="cpu", kv_cache_memory_bytes=10**6, dtype="bfloat16")
    )
    held = (
        given.stats.kv_blocks_total
        * given.scheduler.config.block_size
        * shape.kv_bytes_per_token(2)
    )
    assert 0 <= 10**6 - held < given.scheduler.config.block_size * shape.kv_bytes_per_token(2)


def test_compressed_tensors_loads_with_transformers_with_equal_logits(tmp_path):
    folder = tmp_path / "w4"
    quantize(QuantizeRequest(SOURCE, folder, method="rtn", num_samples=4, seq_len=64))
    theirs: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs(TOKENS).logits[0]
    got = engine(folder, "float32").prompt_logits(TOKENS[0].tolist())
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
