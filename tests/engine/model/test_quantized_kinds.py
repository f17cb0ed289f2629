"""Every grid in every format: the engine's logits against dequantized weights and activations."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from compressed_tensors.quantization.utils.helpers import compute_dynamic_scales_and_zp
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.kernels.elementwise.reference import (
    fake_quantize_activations,
    fake_quantize_inputs,
)
from llmopt.engine.kernels.linear.quantized_linear import prepare_quantized_linear
from llmopt.quant.base.scheme import Activations
from llmopt.quant.kinds.codebook.scheme import CodebookScheme
from llmopt.quant.kinds.fp4.kind import global_scale_of
from llmopt.quant.kinds.fp4.scheme import Fp4Scheme
from llmopt.quant.kinds.fp8.scheme import FloatScheme
from llmopt.quant.kinds.integer.scheme import IntScheme
from llmopt.quant.kinds.lookup.scheme import LookupScheme
from llmopt.quant.kinds.vectorwise.scheme import VectorwiseScheme
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ...support.quantized_world import quantized, random_model, write_checkpoint

TOKENS = torch.randint(3, 512, (1, 40), generator=torch.Generator().manual_seed(0))
INT8 = Activations("int8")
STATIC_INT8 = Activations("int8", "tensor", dynamic=False)
STATIC_FP8 = Activations("fp8", "tensor", dynamic=False)
NVFP4_INPUTS = Activations("nvfp4", "group16", dynamic=False)
MXFP4_INPUTS = Activations("mxfp4", "group32")

WEIGHTS_ONLY = [
    ("gptq", IntScheme(2, 32, True)),
    ("gptq", IntScheme(3, 64, False)),
    ("gptq", IntScheme(4, 32, True, permuted=True)),
    ("gptq", IntScheme(8, -1, True)),
    ("awq", IntScheme(4, 32, False)),
    ("awq", IntScheme(4, 64, False)),
    ("compressed-tensors", IntScheme(3, 16, True)),
    ("compressed-tensors", IntScheme(4, -1, False)),
    ("compressed-tensors", IntScheme(8, 64, False)),
    ("compressed-tensors", FloatScheme("tensor")),
    ("compressed-tensors", Fp4Scheme("nvfp4")),
    ("compressed-tensors", Fp4Scheme("mxfp4")),
    ("modelopt", Fp4Scheme("nvfp4")),
    ("modelopt", FloatScheme("block")),
    ("bitsandbytes", CodebookScheme("nf4")),
    ("bitsandbytes", CodebookScheme("nf4", double_quant=True)),
    ("bitsandbytes", CodebookScheme("fp4")),
    ("squeezellm", LookupScheme(3)),
    ("squeezellm", LookupScheme(4, 0.0045)),
]
ROUNDED_INPUTS = [
    ("compressed-tensors", IntScheme(8, -1, True, INT8)),
    ("compressed-tensors", IntScheme(8, -1, True, STATIC_INT8)),
    ("compressed-tensors", FloatScheme("channel", Activations("fp8"))),
    ("compressed-tensors", FloatScheme("tensor", STATIC_FP8)),
    ("compressed-tensors", FloatScheme("block", Activations("fp8", "group128"))),
    ("compressed-tensors", Fp4Scheme("nvfp4", NVFP4_INPUTS)),
    ("compressed-tensors", Fp4Scheme("mxfp4", MXFP4_INPUTS)),
    ("modelopt", Fp4Scheme("nvfp4", NVFP4_INPUTS)),
    ("modelopt", FloatScheme("tensor", STATIC_FP8)),
    ("fp8", FloatScheme("block", Activations("fp8", "group128"))),
    ("bitsandbytes", VectorwiseScheme(4.0)),
]


def name_of(case: tuple[str, Any]) -> str:
    return f"{case[0]} {case[1].label}"


def engine(folder: Path, dtype: str = "float32", **options: Any) -> Engine:
    return Engine(EngineConfig(folder, dtype=dtype, device="cpu", **options))


def our_logits(folder: Path, dtype: str = "float32") -> torch.Tensor:
    return engine(folder, dtype).prompt_logits(TOKENS[0].tolist())


def their_logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits[0]


@pytest.mark.parametrize("case", WEIGHTS_ONLY, ids=name_of)
def test_weights_alone(case, tmp_path):
    model = random_model()
    weights = write_checkpoint(tmp_path, model, *case)
    assert len(weights) == 14
    for name, weight in weights.items():
        model.get_submodule(name).weight.data = weight.dequantize()
    expected = their_logits(model)
    torch.testing.assert_close(our_logits(tmp_path), expected, atol=1e-4, rtol=1e-4)
    exact, fast = expected.log_softmax(-1), our_logits(tmp_path, "bfloat16").log_softmax(-1)
    assert (exact.exp() * (exact - fast)).sum(-1).mean() < 2e-2


def assert_agree(
    scheme: Any, got: torch.Tensor, expected: torch.Tensor, plain: torch.Tensor
) -> None:
    """Logits, compared with how far quantization itself moves them from `plain`.

    The last bit of a sum decides where an input goes that lies halfway between two codes, and moves its
    token and those after it; those before agree. Dynamic int8 puts the largest input of every
    token at 127.5 steps, so that there any may; in compressed-tensors as here.
    """
    errors, moves = (got - expected).norm(dim=1), (expected - plain).norm(dim=1)
    assert errors.norm() < 0.2 * moves.norm()
    if not (scheme.activations == INT8 and isinstance(scheme, IntScheme)):
        assert errors.kthvalue(3).values < 1e-4 * moves.median()


@pytest.mark.parametrize("case", ROUNDED_INPUTS, ids=name_of)
def test_weights_and_inputs(case, tmp_path):
    model, scheme = random_model(), case[1]
    for name, weight in write_checkpoint(tmp_path, model, *case).items():
        linear = model.get_submodule(name)
        linear.weight.data = weight.dequantize()
        scale = weight.parts().get("input_scale")
        linear.register_forward_pre_hook(
            lambda _, inputs, scale=scale: fake_quantize_inputs(inputs[0], scheme, scale)
        )
    plain = their_logits(random_model())
    expected, got = their_logits(model), our_logits(tmp_path)
    assert_agree(scheme, got, expected, plain)


@pytest.mark.parametrize("case", ROUNDED_INPUTS[:5], ids=name_of)
def test_weights_and_inputs_as_transformers_reads_them(case, tmp_path):
    model = random_model(hidden_size=256, intermediate_size=384, num_attention_heads=8)
    write_checkpoint(tmp_path, model, *case)
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    plain, expected, got = their_logits(model), their_logits(theirs), our_logits(tmp_path)
    assert_agree(case[1], got, expected, plain)


@pytest.mark.parametrize(
    ("activations", "args"),
    [
        (INT8, {"type": "int", "strategy": "token", "dynamic": True}),
        (STATIC_INT8, {"type": "int", "strategy": "tensor"}),
        (Activations("fp8"), {"type": "float", "strategy": "token", "dynamic": True}),
        (STATIC_FP8, {"type": "float", "strategy": "tensor"}),
        (
            Activations("fp8", "group128"),
            {"type": "float", "strategy": "group", "group_size": 128, "dynamic": True},
        ),
        (
            Activations("int8", "group128"),
            {"type": "int", "strategy": "group", "group_size": 128, "dynamic": True},
        ),
    ],
    ids=lambda x: getattr(x, "label", ""),
)
def test_inputs_round_as_in_compressed_tensors(activations, args):
    x = torch.randn(1, 9, 256, generator=torch.Generator().manual_seed(0)) * 3
    x[0, 4], x[0, :, 7] = 0, x[0, :, 7] * 30
    theirs = QuantizationArgs(num_bits=8, symmetric=True, **args)
    scale, zero = torch.tensor([0.04]), torch.zeros(1)
    ours = fake_quantize_activations(x[0], activations, scale)
    if activations.dynamic:
        scale, zero = compute_dynamic_scales_and_zp(x, theirs, torch.nn.Identity())
    expected = fake_quantize(x, scale, zero, theirs)[0]
    torch.testing.assert_close(ours, expected, atol=0, rtol=1e-6)
    assert not torch.equal(ours, x[0])


@pytest.mark.parametrize("preset", ["NVFP4", "MXFP4"])
def test_4_bit_inputs_round_as_in_compressed_tensors(preset):
    x = torch.randn(1, 9, 256, generator=torch.Generator().manual_seed(0)) * 3
    x[0, 4], x[0, :, 7] = 0, x[0, :, 7] * 30
    theirs = PRESET_SCHEMES[preset]["input_activations"]
    ours, whole = MXFP4_INPUTS, None
    if preset == "NVFP4":
        ours, whole = NVFP4_INPUTS, global_scale_of(x.abs().max())
    scale, zero = compute_dynamic_scales_and_zp(x, theirs, torch.nn.Identity(), whole)
    expected = fake_quantize(x, scale, zero, theirs, global_scale=whole)[0]
    assert torch.equal(fake_quantize_activations(x[0], ours, whole), expected)
    assert not torch.equal(expected, x[0])


def test_the_last_run_of_channels_may_be_short():
    x = torch.randn(3, 200, generator=torch.Generator().manual_seed(0))
    runs = Activations("fp8", "group128")
    parts = [fake_quantize_activations(part, Activations("fp8")) for part in x.split(128, dim=1)]
    torch.testing.assert_close(
        fake_quantize_activations(x, runs), torch.cat(parts, 1), atol=0, rtol=0
    )


def test_outliers_keep_their_bits_and_do_not_stretch_the_range():
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    x[2, 11], x[3, 40] = 60.0, -6.0
    rounded = fake_quantize_inputs(x, VectorwiseScheme(6.0))
    assert rounded[2, 11] == 60 and rounded[3, 40] == -6
    rest = x.clone()
    rest[2, 11] = rest[3, 40] = 0
    step = rest.abs().amax(1, keepdim=True) / 127
    small = rest != 0
    torch.testing.assert_close(rounded[small], ((rest / step).round() * step)[small])
    everything = fake_quantize_inputs(x, VectorwiseScheme(0.0))
    assert (everything[2] == 0).sum() > 10, "without a threshold an outlier swallows its token"


@pytest.mark.parametrize(
    "case", [ROUNDED_INPUTS[0], ROUNDED_INPUTS[5], ROUNDED_INPUTS[6]], ids=name_of
)
def test_a_request_does_not_feel_its_neighbours(case, tmp_path):
    """One token with outliers would change a scale or a column of others if they shared it."""
    write_checkpoint(tmp_path, random_model(), *case)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=3)
    prompts = [TOKENS[0, :n].tolist() for n in (5, 17, 9)]

    def run(chosen: list[int]) -> dict[str, list[float]]:
        built = engine(tmp_path, num_blocks=64, block_size=16)
        for index in chosen:
            built.add_request(str(index), prompts[index], params)
        logprobs: dict[str, list[float]] = {str(index): [] for index in chosen}
        while built.has_unfinished():
            for output in built.step():
                logprobs[output.request_id] += [t.logprob for t in output.logprobs or ()]
        return logprobs

    alone = {str(i): run([i])[str(i)] for i in range(3)}
    together = run([0, 1, 2])
    for index, logprobs in alone.items():
        torch.testing.assert_close(together[index], logprobs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("tied", [True, False])
def test_a_quantized_head(tied, tmp_path):
    """A tied head that was quantized is a weight of its own beside the embedding."""
    model = random_model(tie_word_embeddings=tied)
    scheme = IntScheme(4, 32, True)
    weights = write_checkpoint(tmp_path, model, "compressed-tensors", scheme, head=True)
    assert "lm_head" in weights
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    for name, weight in weights.items():
        model.get_submodule(name).weight.data = weight.dequantize()
    torch.testing.assert_close(our_logits(tmp_path), their_logits(model), atol=1e-4, rtol=1e-4)


def test_scales_of_a_quantized_cache_leave_a_float_cache_alone(tmp_path, caplog):
    write_checkpoint(tmp_path, random_model(), "gptq", IntScheme(4, 32, True))
    before = our_logits(tmp_path)
    assert not caplog.records
    path = tmp_path / "model.safetensors"
    scales = {
        f"model.layers.{layer}.self_attn.{side}_scale": torch.tensor([0.1])
        for layer in range(2)
        for side in "kv"
    }
    save_file(load_file(path) | scales, path, metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.WARNING):
        assert torch.equal(our_logits(tmp_path), before)
    assert not caplog.records


def test_codes_of_four_bits_lie_two_to_a_byte():
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    for scheme in (CodebookScheme("nf4"), LookupScheme(4), IntScheme(3, 64, False)):
        kernel = prepare_quantized_linear(quantized(weight, scheme, torch.float16), torch.float32)
        assert kernel.weight_bytes < 256 * 256 * 0.65
