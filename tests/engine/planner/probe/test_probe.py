"""The probe against real caches of tiny random models on the CPU, and against the table."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.engine.cache.kv_cache import kv_block_bytes
from llmopt.engine.model.adapter.adapter import TransformersModel
from llmopt.engine.model.layers.spec import LoadingOptions
from llmopt.engine.planner import catalog
from llmopt.engine.planner.cache_size import kv_dtype
from llmopt.engine.planner.catalog import find_model, shape_of, table_configs
from llmopt.engine.planner.engine_rules import RULES, CacheKnobs
from llmopt.engine.planner.probed_shape import ProbedShape
from llmopt.engine.planner.stored_recipe import stored_recipe
from llmopt.engine.planner.weights import weight_bytes
from llmopt.engine.probe.facts import CachedTensor, ProbedModel
from llmopt.engine.probe.measure import DataFreeMode, cache_shapes
from llmopt.engine.probe.oracle import probe
from llmopt.quant.families.config import current_names, has_table_rule, model_shape
from llmopt.quant.source.models import open_checkpoint

from tools.survey.plan_column import PlanColumn

from ....support.survey.case import Case, surveyed_types, unlisted_types

# One of each law: state, latent, indexer, compressed, shared layers, windows beside state, convolution, a cache
# that is filled and not handed out, and positions.
MECHANISMS = (
    "qwen3_next",
    "mamba2",
    "deepseek_v32",
    "deepseek_v4",
    "gemma3n_text",
    "granite4_vision",
    "lfm2",
    "nemotron_h",
    "qwen4_exp_text",
)
# A table model of each family: the rest is held by `tools/model_survey.py` and the family's tiny models.
ORACLE_OF = (
    "llama-3.1-70b", "mistral-7b-v0.1", "mixtral-8x7b", "qwen2.5-7b", "qwen3-8b", "qwen3-30b-a3b",
    "gemma-2-9b", "phi-3-mini-4k", "gpt-oss-20b", "gpt2", "falcon-7b", "deepseek-v3", "llama-4-scout",
)  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.sweep(4)
@pytest.mark.parametrize("model_type", MECHANISMS)
def test_the_plan_is_that_of_a_real_cache(model_type: str, tmp_path: Path) -> None:
    case = Case(model_type, surveyed_types()[model_type], tmp_path)
    verdict = PlanColumn().verdict(case)
    assert (verdict.outcome, verdict.detail) == ("exact", "probe")


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", ORACLE_OF)
def test_probe_and_table_agree(name: str) -> None:
    raw = current_names(table_configs()[name])
    raw = raw.get("text_config", raw)  # the table's row is the text model
    table = model_shape(raw)
    probed = ProbedShape.from_facts(probe(raw), raw)
    assert probed.num_parameters == table.num_parameters
    assert probed.num_active_parameters == table.num_active_parameters
    rule = RULES["transformers"]
    for length in (4, 512, 20_000):
        args = (length, 2, CacheKnobs())
        assert rule.kv_bytes(probed, *args) == rule.kv_bytes(table, *args)
    assert (probed.tied, probed.max_context) == (table.tied, table.max_context)


def test_a_mask_on_the_meta_device_has_one_hit() -> None:
    values, mask = torch.empty(3, 5, 7, device="meta"), torch.empty(3, 5, device="meta").bool()
    with DataFreeMode(10):
        assert values[mask].shape == (1, 7)


def test_every_type_of_transformers_is_listed() -> None:
    assert list(unlisted_types()) == []


def test_bundled_answers_are_those_of_the_bundled_models() -> None:
    """A model of the table needs no torch: by its rule or by a kept answer."""
    kept = json.loads(catalog.ANSWERS.read_text())
    without_rule = [raw for raw in table_configs().values() if not has_table_rule(raw)]
    assert {catalog.config_hash(current_names(raw)) for raw in without_rule} == set(kept), (
        "python -m tools.probe_table"
    )


def test_a_vision_model_counts_all_its_parts() -> None:
    shape = shape_of(table_configs()["gemma-3-4b"])
    assert isinstance(shape, ProbedShape)
    assert shape.num_parameters == 4_300_079_472
    assert shape.measured.num_parameters("text") == 3_880_263_168
    assert (
        sum(shape.measured.num_parameters(part) for part in ("vision", "projector")) == 419_816_304
    )


def test_an_answer_is_kept_by_config_and_read_again(
    monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    raw = {"model_type": "olmo2", **TINY}
    first = catalog.probed(raw)
    (kept,) = (own_cache / "llmopt" / "probe").iterdir()
    monkeypatch.setattr("llmopt.engine.probe.oracle.probe", _must_not_run)
    again = catalog.probed({**raw, "_name_or_path": "elsewhere"})
    assert again.as_dict() == first.as_dict()
    kept.write_text("{")
    with pytest.raises(AssertionError, match="probed again"):
        catalog.probed(raw)


TINY: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def test_positions_in_a_cache_are_no_keys(tmp_path: Path) -> None:
    """Qwen4's indexer keeps three int64 positions of a token in transformers' cache: 24 bytes beside keys, values
    and indexer keys of 160. The engine derives them, and pages the 160."""
    case = Case("qwen4_exp_text", surveyed_types()["qwen4_exp_text"], tmp_path)
    with torch.no_grad():
        small, large = (
            cache_shapes(case.model(input_ids=torch.zeros(1, n).long()).past_key_values)
            for n in (8, 9)
        )
    # Of the module: bytes of bfloat16 that a ninth token adds, and of int64.
    grown = {p: prod(large[p][0]) - prod(small[p][0]) for p in large}
    in_floats, in_integers = (
        sum(count * size for path, count in grown.items() if large[path][2] is is_float)
        for is_float, size in ((True, 2), (False, 8))
    )
    assert (in_floats, in_integers) == (160, 24)
    shape = ProbedShape.from_facts(probe(case.raw), case.raw)
    assert shape.kv_bytes_per_token(2) == in_floats
    assert shape.indexer_elements == 16
    nine, eight = (
        {name: rule.kv_bytes(shape, n, 2, CacheKnobs(block_size=1)) for name, rule in RULES.items()}
        for n in (9, 8)
    )
    assert nine["llmopt"] - eight["llmopt"] == in_floats
    assert nine["transformers"] - eight["transformers"] == in_floats + in_integers
    case.model.save_pretrained(tmp_path)
    model = TransformersModel(
        open_checkpoint(tmp_path), LoadingOptions(torch.device("cpu"), torch.bfloat16)
    )
    assert kv_block_bytes(model.kv_layouts, torch.bfloat16, 1) == in_floats


def _must_not_run(*_: object, **__: object) -> ProbedModel:
    raise AssertionError("probed again")


def test_configs_that_were_refused_are_planned() -> None:
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
           "shared_expert_intermediate_size": 32}  # fmt: skip
    assert shape_of({"model_type": "qwen2_moe", **TINY, **moe, "sliding_window": 0}).num_parameters
    gemma = {"model_type": "gemma3n_text", **surveyed_types()["gemma3n_text"]}
    sized = {**TINY, **gemma, "intermediate_size": [96] * 10}
    assert shape_of(sized).num_parameters


def test_unknown_and_remote_code_are_one_line() -> None:
    with pytest.raises(BadInput, match=r"installed transformers \d.*written by 9\.9.*upgrade"):
        shape_of({"model_type": "of_tomorrow", "transformers_version": "9.9"})
    remote = {"model_type": "of_someone", "auto_map": {"AutoConfig": "config.Config"}}
    with pytest.raises(BadInput, match="--trust-remote-code"):
        shape_of(remote)
    with pytest.raises(BadInput, match="refuses the olmo2 config"):
        shape_of({"model_type": "olmo2", **TINY, "hidden_size": "wide"})
    with pytest.raises(BadInput, match="num_hidden_layers is 10000000"):
        shape_of({"model_type": "olmo2", **TINY, "num_hidden_layers": 10_000_000})
    with pytest.raises(BadInput, match="has no model_type"):
        shape_of({"model_type": ["llama"]})
    with pytest.raises(BadInput, match="encoder-decoder"):
        shape_of({"model_type": "bart", "d_model": 64})


def test_remote_code_runs_only_when_trusted(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "config.py").write_text(f"open({str(ran)!r}, 'w')\nclass Config: pass\n")
    raw = {"model_type": "of_someone", "auto_map": {"AutoConfig": "config.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(BadInput):
        shape_of(raw, tmp_path)
    assert not ran.exists()
    with pytest.raises(BadInput):  # this code is no model, but it was run
        shape_of(raw, tmp_path, trust_remote_code=True)
    assert ran.exists()


def _hybrid() -> ProbedShape:
    """Eight layers: six with a state of 1,000 B, two of attention with 2 heads x 64."""
    cache = tuple(
        CachedTensor("conv_states", layer, 500, 1, 2, "constant") for layer in range(6)
    ) + tuple(
        CachedTensor(name, layer, 2, 64, 2, "growing")
        for layer in (6, 7)
        for name in ("keys", "values")
    )
    facts = ProbedModel(
        "hybrid", "0", 8, 256, 4, 2, 64, 512, 1000, 4096, True, 0, 0, 0, 0, (), cache
    )
    return ProbedShape.from_facts(facts, {})


def test_state_is_in_every_sum() -> None:
    shape = _hybrid()
    assert shape.state_bytes == 6000
    assert shape.kv_bytes_per_token(2) == 2 * 2 * 2 * 64 * 2 == 1024
    assert shape.kv_bytes(100, 2) == 100 * 1024 + 6000
    assert shape.kv_bytes(100, 2, 16) == 112 * 1024 + 6000
    sizes = {name: rule.kv_bytes(shape, 100, 2, CacheKnobs()) for name, rule in RULES.items()}
    assert sizes["llmopt"] == 112 * 1024 + 6000
    assert sizes["transformers"] == 100 * 1024 + 6000
    assert sizes["llama.cpp"] == 256 * 1024 + 2 * 6000  # its state is float32
    # A page of 16 tokens x 512 B holds a state of 1,000 B; groups of 2 layers: 3 of state, 1 of attention.
    assert sizes["vllm"] == 2 * (3 + 7) * 16 * 512


def test_a_page_of_vllm_grows_to_hold_a_state() -> None:
    shape = _hybrid()
    big = (
        tuple(CachedTensor("conv_states", layer, 10_000, 1, 2, "constant") for layer in range(6))
        + shape.measured.cache[6:]
    )
    facts = ProbedModel("hybrid", "0", 8, 256, 4, 2, 64, 512, 1000, 4096, True, 0, 0, 0, 0, (), big)
    # 20,000 B need 40 tokens of 512 B: 48 with vLLM's alignment of 16.
    size = RULES["vllm"].kv_bytes(ProbedShape.from_facts(facts, {}), 100, 2, CacheKnobs())
    assert size == 2 * (3 + 3) * 48 * 512


def test_a_page_of_vllm_holds_the_columns_before_the_present_token() -> None:
    shape = shape_of(table_configs()["qwen3.5-27b"])
    assert isinstance(shape, ProbedShape)
    # vLLM's log: "Setting attention block size to 784 tokens ... Padding mamba page size by 0.13%".
    # 48 layers of state take a page each, 16 of attention one block, in groups of 16 layers.
    assert RULES["vllm"].kv_bytes(shape, 1, 2, CacheKnobs()) == (48 + 16) * 784 * 4 * 2 * 256 * 2
    conv, recurrent = (t for t in shape.layer_tensors if t.layer == 0)
    page = 2 * shape.served_state_elements(conv) + 4 * shape.served_state_elements(recurrent)
    assert 784 * 4 * 2 * 256 * 2 / page == pytest.approx(1.0013, abs=5e-5)
    # llama.cpp's `n_embd_r` is (kernel - 1) x channels, in float32.
    state = 48 * 4 * (3 * 10_240 + 786_432)
    assert RULES["llama.cpp"].kv_bytes(shape, 1, 2, CacheKnobs()) == state + 16 * 256 * 4096


@pytest.mark.parametrize(
    ("name", "billions", "unplanned"),
    [
        # Published totals; layers of multi-token prediction are no part of a plan.
        ("gemma-4-12b", 12.0, 0),
        ("nemotron-3.5-lightning-30b-a3b", 31.6, 0),  # as Nemotron 3 Nano, whose shape it has
        ("glm-5.3-flash", 321, 288 * 3 * 4096 * 2048),
        ("kimi-k3", 2780, 0),  # 2.8T, as its source has it
        ("qwen3.8-flash-next", 180, 4e9),  # 125B, 51B of n-gram embeddings and 4B
    ],
)
def test_models_of_the_autumn_have_their_published_size(
    name: str, billions: float, unplanned: float
) -> None:
    parameters = find_model(name).shape.num_parameters + unplanned
    assert parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_kimi_k3_is_as_its_sources_have_it() -> None:
    """104B active parameters, and 1.56 TB with experts in MXFP4 (JustVugg/colibri@779d044)."""
    model = find_model("kimi-k3")
    embedding = 163_840 * 7168  # of which a token reads a row
    active = model.shape.num_active_parameters - embedding
    assert active == pytest.approx(104e9, rel=0.005)
    assert weight_bytes(model.shape, stored_recipe(model.config)) == pytest.approx(
        1.56e12, rel=0.005
    )
    assert model.shape.kv_bytes_per_token(2) == 24 * 2 * (512 + 64)
    assert find_model("glm-5.3").shape == find_model("glm-5.2").shape


def test_ranks_share_heads_and_state() -> None:
    rank = _hybrid().cache_on_rank(4)
    assert rank.state_bytes == 6 * 125 * 2
    assert rank.kv_bytes_per_token(2) == 512  # two KV heads on four ranks: replicated


def test_kv_dtypes_are_exact_for_every_width() -> None:
    shape = shape_of(table_configs()["deepseek-v3.2"])
    latent = kv_dtype("fp8_ds_mla").bytes_per_element(shape)
    assert shape.kv_bytes_per_token(latent) == 61 * (656 + 132)
    gemma = shape_of(table_configs()["gemma-4-26b-a4b"])
    scaled = kv_dtype("int8_per_token_head").bytes_per_element(gemma)
    assert gemma.kv_bytes_per_extra_token(scaled) == 5 * 2 * 2 * (512 + 4)
    with pytest.raises(BadInput, match="does not cache"):
        kv_dtype("fp8_ds_mla").bytes_per_element(gemma)


def test_facts_survive_their_json() -> None:
    facts = shape_of(table_configs()["qwen3.5-27b"])
    assert isinstance(facts, ProbedShape)
    measured = facts.measured
    again = ProbedModel.from_dict(json.loads(json.dumps(measured.as_dict())))
    assert again.cache_bytes(512) == measured.cache_bytes(512)
    assert sorted(again.parameters, key=repr) == sorted(measured.parameters, key=repr)
