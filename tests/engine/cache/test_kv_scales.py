"""Calibrated scales of a checkpoint in an fp8 KV cache: those of each head, or one for all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.llm import LLM
from llmopt.engine.kernels.attention import dispatch
from llmopt.engine.kernels.attention.paged_tensor import PagedTensor
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.request import QuantizeRequest
from llmopt.recipes import MODELS
from safetensors.torch import load_file, save_file

from ...support.model_families import FAMILIES, save_model

FP8 = torch.float8_e4m3fn
QUICK: dict[str, Any] = {"num_samples": 4, "seq_len": 64, "held_out": 0, "kv_cache": "fp8"}


def test_static_scales_round_as_the_formula_and_clip() -> None:
    paged = PagedTensor.zeros(2, 4, 2, 8, torch.device("cpu"), FP8)
    x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0)) * 100
    static = torch.tensor([0.5, 0.1])
    paged.write(x, torch.tensor([1, 2, 5]), static)
    expected = (x / static[:, None]).clamp(-448, 448).to(FP8).float() * static[:, None]
    back = paged.read(torch.arange(2), torch.float32).flatten(0, 1)[[1, 2, 5]]
    assert torch.equal(back, expected)
    assert back[:, 1].abs().max() == pytest.approx(44.8)
    int8 = PagedTensor.zeros(2, 4, 2, 8, torch.device("cpu"), torch.int8)
    int8.write(x, torch.tensor([1, 2, 5]), static)  # fp8's are not int8's: each vector has its own
    assert (int8.read(torch.arange(2), torch.float32).flatten(0, 1)[[1, 2, 5]] - x).abs().max() < 2


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_the_cache_holds_the_scales_of_the_checkpoint(tmp_path: Path, strategy: Any) -> None:
    source = MODELS / "stories3M"
    quantize(
        QuantizeRequest(
            source, tmp_path / "out", "rtn", bits=8, kv_cache_strategy=strategy, **QUICK
        )
    )
    options: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "max_model_len": 128}
    llm = LLM(str(tmp_path / "out"), kv_cache_dtype="fp8", **options)
    text = llm.generate("Once upon a time")[0].text
    plain = LLM(str(tmp_path / "out"), **options).generate("Once upon a time")[0].text
    assert text[:20] == plain[:20]
    checkpoint = Checkpoint(tmp_path / "out")
    for index, layer in enumerate(llm.engine.runner.cache.layers):
        for letter, paged in (("k", layer.keys), ("v", layer.values)):
            stored = checkpoint.tensor(f"model.layers.{index}.self_attn.{letter}_scale").flatten()
            assert paged.scales is not None
            written = paged.scales.flatten(0, 1)
            written = written[written[:, 0] > 0]
            assert len(written) and torch.equal(written, stored.expand_as(written))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("family", ["stories3M", "deepseek-v3"])
def test_queries_and_outputs_take_the_scales_of_a_cache_without(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The codes are those of a cache with scales, and so is the attention; in the engine, here on a CPU."""
    monkeypatch.setattr("llmopt.engine.cache.kv_cache.refuses_triton", lambda _: None)
    monkeypatch.setattr(dispatch, "_refuses_native", lambda _: "it computes in another order")
    source = MODELS / family
    if family in FAMILIES:
        source = tmp_path / "model"
        save_model(source, *FAMILIES[family])
    given: dict[str, Any] = dict(QUICK)
    given |= {"group_size": -1} if family in FAMILIES else {"kv_cache_strategy": "attn_head"}
    quantize(QuantizeRequest(source, tmp_path / "out", "rtn", bits=8, **given))
    found = []
    for name in ("fp8", "fp8_e4m3"):
        options: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "max_model_len": 64}
        llm = LLM(str(tmp_path / "out"), kv_cache_dtype=name, **options)
        params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=1, ignore_eos=True)
        (answer,) = llm.generate([[1, 20, 30, 40, 50]], params)
        parts = [part for layer in llm.engine.runner.cache.layers for part in layer.parts]
        # Five tokens of prompt, and all of the answer but the last, whose keys nobody reads.
        codes = [part[1, :10].view(torch.uint8) for part in parts if part.itemsize == 1]
        assert answer.logprobs is not None
        found.append((codes, [(each.token_id, each.logprob) for each in answer.logprobs]))
    (codes, wanted), (alone, got) = found
    assert torch.equal(codes[0][:5], alone[0][:5]) and bool(codes[0].any(-1).any(-1).all())
    # A deeper layer's inputs differ by the order of sums: a value halfway between two codes may take either.
    steps = torch.cat(
        [(a.int() - b.int()).abs().flatten() for a, b in zip(codes, alone, strict=True)]
    )
    assert int(steps.max()) <= 1 and float(steps.float().mean()) < 0.01
    tolerance = 1e-2 if steps.any() else 1e-4
    assert [token for token, _ in got] == [token for token, _ in wanted]
    assert [each for _, each in got] == pytest.approx([each for _, each in wanted], abs=tolerance)


def test_latents_are_cached_by_the_scale_of_the_checkpoint(tmp_path: Path) -> None:
    save_model(tmp_path / "model", *FAMILIES["deepseek-v3"])
    model = tmp_path / "model"
    quantize(QuantizeRequest(model, tmp_path / "out", "rtn", bits=8, group_size=-1, **QUICK))
    llm = LLM(str(tmp_path / "out"), kv_cache_dtype="fp8", dtype="float32", num_threads=1)
    llm.generate([[1, 2, 3, 4]])
    stored = Checkpoint(tmp_path / "out").tensor("model.layers.0.self_attn.k_scale")
    scales = llm.engine.runner.cache.layers[0].keys.scales
    assert scales is not None and set(scales[1, :4].unique().tolist()) == {float(stored)}


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json"])
def test_scales_of_an_nvfp4_cache_are_not_those_of_fp8(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "out"
    quantize(QuantizeRequest(MODELS / "stories3M", folder, "rtn", bits=8, **QUICK))
    if name == "config.json":
        config = json.loads((folder / name).read_text())
        config["quantization_config"]["kv_cache_scheme"]["num_bits"] = 4
    else:
        config = {"quantization": {"kv_cache_quant_algo": "NVFP4"}}
    (folder / name).write_text(json.dumps(config))
    options: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "max_model_len": 128}
    with caplog.at_level("WARNING"):
        LLM(str(folder), kv_cache_dtype="fp8", **options)
    assert "has scales for a quantized KV cache; they are not used" in caplog.text


def test_a_wrong_number_of_scales_is_refused(tmp_path: Path) -> None:
    stories = MODELS / "stories3M"
    quantize(QuantizeRequest(stories, tmp_path / "out", "rtn", bits=8, **QUICK))
    shard = tmp_path / "out" / "model-layer-00001.safetensors"
    tensors = load_file(shard) | {"model.layers.1.self_attn.v_scale": torch.ones(3)}
    save_file(tensors, shard)
    with pytest.raises(BadInput, match=r"v_scale holds 3 values and must hold positive scales"):
        LLM(str(tmp_path / "out"))
    assert EngineConfig(tmp_path / "out").kv_cache_dtype == "auto"
