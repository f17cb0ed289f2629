"""What each engine keeps for a sequence, against the published tables, and bytes of each KV type."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.engine.planner.cache_size import KV_DTYPES, kv_dtype
from llmopt.engine.planner.catalog import find_model, model_names
from llmopt.engine.planner.engine_rules import RULES, CacheKnobs, engine_rule
from llmopt.engine.planner.probed_shape import ProbedShape
from llmopt.quant.families.config import model_shape
from llmopt.quant.families.shapes import ModelShape

GIB = 2**30
K128 = 131072

# GiB of one sequence in bf16: every layer whole and each within its window, both at 4k, 32k and 128k;
# then vLLM with steps of 8192 tokens and llama.cpp, at 128k.
TABLE = {
    "llama-2-7b": ((2, 16, 64), None, 64, 64),
    "llama-2-13b": ((3.125, 25, 100), None, 100, 100),
    "llama-2-70b": ((1.25, 10, 40), None, 40, 40),
    "llama-3-8b": ((0.5, 4, 16), None, 16, 16),
    "llama-3.1-8b": ((0.5, 4, 16), None, 16, 16),
    "llama-3.1-70b": ((1.25, 10, 40), None, 40, 40),
    "llama-3.1-405b": ((1.969, 15.75, 63), None, 63, 63),
    "llama-3.2-1b": ((0.125, 1, 4), None, 4, 4),
    "llama-3.2-3b": ((0.438, 3.5, 14), None, 14, 14),
    "llama-4-scout": ((0.75, 6, 24), (0.75, 2.625, 7.125), 8.25, 7.195),
    "mistral-7b-v0.1": ((0.5, 4, 16), (0.5, 0.5, 0.5), 1.502, 0.562),
    "mistral-7b-v0.3": ((0.5, 4, 16), None, 16, 16),
    "mixtral-8x7b": ((0.5, 4, 16), None, 16, 16),
    "mixtral-8x22b": ((0.875, 7, 28), None, 28, 28),
    "qwen2.5-0.5b": ((0.047, 0.375, 1.5), None, 1.5, 1.5),
    "qwen2.5-7b": ((0.219, 1.75, 7), None, 7, 7),
    "qwen2.5-72b": ((1.25, 10, 40), None, 40, 40),
    "qwen3-0.6b": ((0.438, 3.5, 14), None, 14, 14),
    "qwen3-8b": ((0.562, 4.5, 18), None, 18, 18),
    "qwen3-32b": ((1, 8, 32), None, 32, 32),
    "qwen3-30b-a3b": ((0.375, 3, 12), None, 12, 12),
    "qwen3-235b-a22b": ((0.734, 5.875, 23.5), None, 23.5, 23.5),
    "deepseek-v3": ((0.268, 2.145, 8.578), None, 8.578, 8.578),
    "gpt-oss-20b": ((0.188, 1.5, 6), (0.097, 0.753, 3.003), 3.191, 3.018),
    "gpt-oss-120b": ((0.281, 2.25, 9), (0.145, 1.129, 4.504), 4.786, 4.526),
    "deepseek-v2": ((0.264, 2.109, 8.438), None, 8.438, 8.438),
    "gemma-2-9b": ((1.312, 10.5, 42), (1.312, 5.906, 21.656), 22.971, 21.738),
    "gemma-2-27b": ((1.438, 11.5, 46), (1.438, 6.469, 23.719), 25.159, 23.809),
    "gemma-3-4b": ((0.531, 4.25, 17), (0.191, 0.738, 2.613), 3.557, 2.67),
    "gemma-3-27b": ((1.938, 15.5, 62), (0.719, 2.906, 10.406), 14.226, 10.609),
    "phi-3-mini-4k": ((1.5, 12, 48), (0.75, 0.75, 0.75), 3.756, 0.938),
    "phi-4": ((0.781, 6.25, 25), None, 25, 25),
    "falcon-40b": ((0.469, 3.75, 15), None, 15, 15),
    "gpt2": ((0.141, 1.125, 4.5), None, 4.5, 4.5),
}
KNOBS = CacheKnobs(block_size=16, step_tokens=8192, ubatch_tokens=512)


def shape(name: str) -> ModelShape:
    return find_model(name).shape


def gib(engine: str, name: str, tokens: int = K128, knobs: CacheKnobs = KNOBS) -> float:
    return RULES[engine].kv_bytes(shape(name), tokens, 2, knobs) / GIB


def slots(engine: str, model: ModelShape, tokens: int, knobs: CacheKnobs = KNOBS) -> int:
    rule = RULES[engine]
    return rule.kv_bytes(model, tokens, 1, knobs) // rule.cached_elements(model)


def test_the_bundled_models_are_in_the_table() -> None:
    assert set(TABLE) <= set(model_names())


@pytest.mark.parametrize("name", TABLE)
def test_the_table_is_reproduced(name: str) -> None:
    naive, aware, vllm, llama_cpp = TABLE[name]
    model = shape(name)
    tolerance: dict[str, Any] = {"abs": 5.001e-4}  # the table has three decimals
    lengths = (4096, 32768, K128)
    whole = [model.without_windows().kv_bytes(length, 2) / GIB for length in lengths]
    assert whole == pytest.approx(naive, **tolerance)
    seen = [model.kv_bytes(length, 2) / GIB for length in lengths]
    assert seen == pytest.approx(aware or naive, **tolerance)
    assert gib("vllm", name) == pytest.approx(vllm, **tolerance)
    assert gib("llama.cpp", name) == pytest.approx(llama_cpp, **tolerance)
    # One table for all layers: a window counts where every layer has one, and then as vLLM's does.
    own = naive[-1] if None in model.windows else vllm
    assert gib("llmopt", name) == pytest.approx(own, **tolerance)


@pytest.mark.parametrize(
    ("name", "groups", "padding"),
    [("llama-4-scout", 4, 0), ("gpt-oss-20b", 2, 0), ("gemma-3-4b", 7, 1), ("gemma-3-27b", 7, 8)],
)
def test_vllm_pads_odd_classes_to_groups_of_one_size(name: str, groups: int, padding: int) -> None:
    model = shape(name)
    # At a single block every layer of every group holds one, and a windowed one its spare block too.
    kept = slots("vllm", model, 16, CacheKnobs(block_size=16))
    full = sum(window is None for window in model.windows)
    spare = 0 if model.chunked else 16 * (model.num_layers - full + padding)
    assert kept - spare == 16 * (model.num_layers + padding)
    assert (model.num_layers + padding) % groups == 0


def test_vllm_keeps_everything_without_its_hybrid_manager() -> None:
    whole = CacheKnobs(frees_windows=False)
    assert gib("vllm", "gemma-3-27b", knobs=whole) == 62
    assert gib("vllm", "mistral-7b-v0.1", knobs=whole) == 16


def test_vllm_windows_grow_with_the_step() -> None:
    small = CacheKnobs(step_tokens=2048)
    assert gib("vllm", "gemma-3-27b", knobs=small) < gib("vllm", "gemma-3-27b")


def test_short_sequences_are_rounded_to_blocks_by_each_engine() -> None:
    model = shape("llama-3.1-8b")
    per_layer = {name: slots(name, model, 100) // 32 for name in RULES}
    assert per_layer == {"llmopt": 112, "vllm": 112, "llama.cpp": 256, "transformers": 100}


def test_transformers_keeps_one_token_less_than_a_window() -> None:
    assert slots("transformers", shape("mistral-7b-v0.1"), K128) == 32 * 4095
    assert slots("transformers", shape("mistral-7b-v0.1"), 100) == 32 * 100


def test_transformers_copies_the_heads_of_the_new_falcon_layout() -> None:
    per_token = RULES["transformers"].kv_bytes(shape("falcon-40b"), 1, 2, KNOBS)
    assert per_token == 1_966_080
    assert shape("falcon-40b").kv_bytes_per_token(2) == 122_880
    # Falcon-7B has one KV head and is not copied.
    assert RULES["transformers"].kv_bytes(shape("falcon-7b"), 1, 2, KNOBS) == 8_192


def test_a_latent_is_cached_as_it_is_by_all() -> None:
    assert {gib(engine, "deepseek-v3") for engine in RULES} == {70_272 * K128 / GIB}


def test_vllm_keeps_the_recurrent_states_of_some_families_in_16_bits() -> None:
    """Mamba-2 of Nemotron has float32 by its config, that of Granite 4 the model's dtype; SGLang has float32."""
    wide = shape("nemotron-3-nano-30b-a3b")
    assert isinstance(wide, ProbedShape)
    narrow = replace(wide, family="granitemoehybrid")
    states: dict[str, int] = {"vllm": 0, "sglang": 0}
    for tensor in wide.layer_tensors:
        if tensor.law == "constant":
            is_recurrent = tensor.name.endswith("recurrent_states")
            elements = wide.served_state_elements(tensor)
            states["vllm"] += 2 * elements
            states["sglang"] += (4 if is_recurrent else 2) * elements
    # One page for each state layer and each attention layer, of at least the bytes of a state.
    layers = {t.layer for t in wide.layer_tensors if t.law == "constant"}
    share = 1 + len({t.layer for t in wide.growing}) / len(layers)
    for engine, num_bytes in states.items():
        size = engine_rule(engine).kv_bytes(narrow, 1, 2, KNOBS)
        assert num_bytes * share <= size <= 1.1 * num_bytes * share, engine
    sizes = [engine_rule(engine).kv_bytes(wide, 1, 2, KNOBS) for engine in states]
    assert sizes == 2 * [engine_rule("sglang").kv_bytes(narrow, 1, 2, KNOBS)]


def test_unknown_engines_are_refused() -> None:
    with pytest.raises(BadInput, match="no engine 'tgi'"):
        engine_rule("tgi")
    with pytest.raises(BadInput, match="the nearest is sglang"):
        engine_rule("sglan")


@pytest.mark.parametrize(
    ("name", "element"),
    [
        ("bf16", Fraction(2)),
        ("float32", Fraction(4)),
        ("fp8", Fraction(1)),
        ("fp8_per_token_head", 1 + Fraction(4, 128)),
        ("int8", 1 + Fraction(4, 128)),
        ("nvfp4", Fraction(1, 2) + Fraction(1, 16)),
        ("q8_0", Fraction(34, 32)),
        ("q5_1", Fraction(24, 32)),
        ("q4_0", Fraction(18, 32)),
    ],
)
def test_bytes_of_an_element(name: str, element: Fraction) -> None:
    model = shape("llama-3.1-70b")
    assert kv_dtype(name).bytes_per_element(model) == element
    assert model.kv_bytes_per_token(element) == 80 * 2 * 8 * 128 * element


def test_all_types_are_tested_and_some_engine_stores_each() -> None:
    assert set(KV_DTYPES) == {name for rule in RULES.values() for name in rule.kv_dtypes}


def test_the_scale_of_a_head_weighs_more_on_a_narrow_one() -> None:
    phi = shape(
        "phi-3-mini-4k"
    )  # 96 wide: 4 / 96 is no binary fraction, and must not be rounded up
    element = kv_dtype("int8").bytes_per_element(phi)
    assert phi.kv_bytes_per_token(element) == 32 * 2 * 32 * (96 + 4)
    latent = shape("deepseek-v3")
    assert latent.kv_bytes_per_token(kv_dtype("int8").bytes_per_element(latent)) == 61 * (576 + 4)


def test_types_that_do_not_divide_a_head_are_refused() -> None:
    narrow = model_shape({**find_model("gpt2").config, "n_head": 48})  # heads of 16
    with pytest.raises(BadInput, match="blocks of 32 elements"):
        kv_dtype("q8_0").bytes_per_element(narrow)
    with pytest.raises(BadInput, match="no KV dtype 'int3'"):
        kv_dtype("int3")
