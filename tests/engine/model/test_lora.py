"""LoRA adapters: the logits of the merged model, in any batch, over any base; and bad folders."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.engine import LLM, SamplingParams
from llmopt.engine.config.adapters import parse_adapters
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.execution.step_loop import StepRecorder
from llmopt.engine.kernels.attention.dispatch import native_attention
from llmopt.engine.model.layers.projection import SlotMask, SlottedWeights
from llmopt.quant.kinds.integer.scheme import IntScheme
from llmopt.recipes import MODELS
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ...support.lora_world import ATTENTION, LINEARS, merge, write_adapter
from ...support.model_families import FAMILIES, VOCAB, save_model
from ...support.quantized_world import random_model, write_checkpoint
from ...support.releases import skip_wrong_modules

MODEL = MODELS / "stories3M"
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
TOKENS = torch.randint(3, 512, (60,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def base() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def folders(base, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        "all": write_adapter(root / "all", base, rank=8, alpha=16.0, seed=1),
        "some": write_adapter(root / "some", base, ("q_proj", "v_proj", "up_proj"), seed=2),
        "stable": write_adapter(root / "stable", base, ATTENTION, seed=3, use_rslora=True),
        "uneven": write_adapter(
            root / "uneven", base, seed=4, ranks={"q_proj": 2, "down_proj": 6},
            alpha_pattern={"layers.*.q_proj": 1.0, "up_proj": 20.0},
        ),
    }  # fmt: skip


SCALES: dict[str, Any] = {
    "all": 2.0,
    "some": 2.0,
    "stable": 4.0,
    "uneven": {**dict.fromkeys(LINEARS, 2.0), "q_proj": 0.5, "down_proj": 8 / 6, "up_proj": 5.0},
}


def build(folder: Path = MODEL, **options: Any) -> Engine:
    return Engine(EngineConfig(folder, dtype="float32", device="cpu", num_threads=1, **options))


@pytest.fixture(scope="module")
def engine(folders) -> Engine:
    return build(loras=folders, block_size=8, max_num_batched_tokens=64)


def generate(
    engine: Engine, requests: Sequence[tuple[list[int], str | None]]
) -> tuple[list[list[int]], list[int]]:
    """Greedy tokens of requests that run together, and how many of each prompt were cached."""
    tokens: list[list[int]] = [[] for _ in requests]
    cached = [0] * len(requests)
    for index, (prompt, lora) in enumerate(requests):
        engine.add_request(str(index), prompt, GREEDY, lora=lora)
    while engine.has_unfinished():
        for output in engine.step():
            tokens[int(output.request_id)].extend(output.new_token_ids)
            cached[int(output.request_id)] = output.num_cached_tokens
        engine.scheduler.check_integrity()
    return tokens, cached


@pytest.mark.parametrize("name", SCALES)
def test_logits_are_those_of_the_merged_model(base, engine, folders, name):
    merged = merge(copy.deepcopy(base), folders[name], SCALES[name])
    with torch.no_grad():
        expected, plain = (m(torch.tensor([TOKENS])).logits[0] for m in (merged, base))
    assert (expected - plain).abs().max() > 0.5, "the adapter is too weak to show"
    got = engine.prompt_logits(TOKENS, name)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(engine.prompt_logits(TOKENS), plain, atol=1e-4, rtol=1e-4)


def test_logits_are_those_of_peft(base, engine, folders):
    peft = pytest.importorskip("peft")
    model = peft.PeftModel.from_pretrained(copy.deepcopy(base), folders["uneven"])
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0]
    got = engine.prompt_logits(TOKENS, "uneven")
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


NAMES = [None, "all", "some", None, "stable", "uneven", "all", None]


def test_rows_of_a_batch_use_their_own_adapters(engine, folders):
    requests = [(TOKENS[3 * i : 20 + 4 * i], name) for i, name in enumerate(NAMES)]
    alone = [generate(engine, [request])[0][0] for request in requests]
    engine.reset_prefix_cache()
    assert generate(engine, requests)[0] == alone
    chunked = build(loras=folders, block_size=4, prefill_chunk_size=5, enable_prefix_caching=False)
    assert generate(chunked, requests)[0] == alone
    plain = build()
    without = generate(plain, [(prompt, None) for prompt, _ in requests])[0]
    assert [without[i] == alone[i] for i in range(8)] == [name is None for name in NAMES]


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}], ids=["serial", "async"])
def test_one_graph_serves_any_mix(folders, options):
    """Every decode step is replayed, whatever adapters its rows have, with the tokens of eager steps."""
    requests = [(TOKENS[3 * i : 20 + 4 * i], name) for i, name in enumerate(NAMES)]
    expected = generate(build(loras=folders, enforce_eager=True), requests)[0]
    engine = build(loras=folders, **options)
    engine.recorder = StepRecorder(engine.scheduler)
    assert generate(engine, requests)[0] == expected
    replayed = {step.replayed for step in engine.recorder.steps if step.decode_only}
    assert replayed == {native_attention().reason is None}


def test_the_delta_of_a_slot_is_rounded_as_an_eager_one():
    """1 + 2^-8 is 1 in bfloat16, and 1 more 2^-8 does not change it; their sum is 1 + 2^-7."""
    step = 2.0**-8
    slots = SlottedWeights([slice(0, 1)], 2, 3, 4, torch.zeros(0, dtype=torch.bfloat16))
    slots.put(2, slice(0, 1), torch.eye(2), torch.tensor([[1.0, step]]))
    slot_of_column = torch.arange(1, 4).repeat_interleave(4)
    y = torch.full((2, 1), step, dtype=torch.bfloat16)
    mask = SlotMask.of(torch.tensor([2, 0]), slot_of_column, torch.bfloat16)
    slots.add(torch.ones(2, 2, dtype=torch.bfloat16), y, mask)
    assert y.flatten().tolist() == [1.0, step]


@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
def test_an_adapter_that_is_not_finite_changes_no_other(folders, tmp_path, part):
    """Rows of others multiply it by 0 in a captured step, which makes no 0 of NaN."""
    broken = tmp_path / "broken"
    shutil.copytree(folders["all"], broken)
    tensors = load_file(broken / "adapter_model.safetensors")
    next(values for name, values in tensors.items() if part in name)[0, 0] = torch.nan
    save_file(tensors, broken / "adapter_model.safetensors")
    requests = [(TOKENS[3 * i : 20 + 4 * i], name) for i, name in enumerate((None, "some"))]
    expected = generate(build(loras=folders), requests)[0]
    loaded = build(loras={**folders, "broken": broken})
    assert generate(loaded, [*requests, (TOKENS[:9], "broken")])[0][:2] == expected
    assert generate(loaded, requests)[0] == expected


def test_an_adapter_that_is_loaded_later_is_replayed_from_a_slot(folders, tmp_path, base):
    """Slots are used again, by adapters of fewer linears too; one of a higher rank than theirs is eager."""
    high = write_adapter(tmp_path / "high", base, rank=20, seed=5)
    request, later = (TOKENS[:20], "poet"), build(max_loras=1)
    for place, folder in enumerate((folders["all"], folders["some"], high, folders["uneven"])):
        expected = generate(build(loras={"poet": folder}, enforce_eager=True), [request])[0]
        later.load_lora("poet", folder, load_inplace=place > 0)
        later.recorder = StepRecorder(later.scheduler)
        assert generate(later, [request])[0] == expected
        decodes = [step for step in later.recorder.steps if step.decode_only]
        is_replayed = native_attention().reason is None and folder is not high
        assert {step.replayed for step in decodes} == {is_replayed}


def test_adapters_share_no_prefix(engine):
    engine.reset_prefix_cache()
    prompt = TOKENS[:33]
    first, cached = generate(engine, [(prompt, "all")])
    assert cached == [0]
    for name in (None, "some"):
        assert generate(engine, [(prompt, name)])[1] == [0], "another adapter's keys and values"
    again, cached = generate(engine, [(prompt, "all"), (prompt, None), (prompt, "stable")])
    assert cached == [32, 32, 0]
    assert again[0] == first[0]


def test_preempted_requests_keep_their_adapters(engine, folders):
    requests = [(TOKENS[i : 24 + i], name) for i, name in enumerate(NAMES)]
    few = build(loras=folders, block_size=4, num_blocks=30, max_num_seqs=8)
    expected = generate(engine, requests)[0]
    assert generate(few, requests)[0] == expected
    assert few.stats.num_preemptions > 2, "the pool was meant to be too small"


def test_completions_of_a_fork_have_the_adapter_of_their_request(engine):
    params = SamplingParams(n=3, seed=9, max_tokens=8, ignore_eos=True)
    llm = LLM.__new__(LLM)
    llm.engine, llm._next_id = engine, 0
    forked = llm.generate([TOKENS[:21]], params, lora="some")[0]
    for index in range(3):
        own = SamplingParams(seed=9 + index, max_tokens=8, ignore_eos=True)
        alone = llm.generate([TOKENS[:21]], own, lora=["some"])[0]
        assert alone.token_ids == forked.completions[index].token_ids
    with pytest.raises(BadInput, match="2 adapters for 1 prompts"):
        llm.generate([TOKENS[:21]], params, lora=["some", None])


@pytest.mark.parametrize("bits", [4, 8])
def test_an_adapter_on_a_quantized_base(tmp_path, bits):
    model = random_model()
    scheme = IntScheme(bits, 32, symmetric=False)
    weights = write_checkpoint(tmp_path / "base", model, "compressed-tensors", scheme)
    adapter = write_adapter(tmp_path / "adapter", model)
    with torch.no_grad():
        for name, weight in weights.items():
            model.get_submodule(name).weight.copy_(weight.dequantize())
        expected = merge(model, adapter, 2.0)(torch.tensor([TOKENS])).logits[0]
    engine = build(tmp_path / "base", loras={"a": adapter})
    torch.testing.assert_close(engine.prompt_logits(TOKENS, "a"), expected, atol=1e-4, rtol=1e-4)


FUSED = {
    "phi-3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "gpt-2": ("c_attn", "c_proj", "c_fc"),
    "qwen3": LINEARS,
    "qwen2-moe": LINEARS,
    "glm-4": (*ATTENTION, "gate_up_proj", "down_proj"),
    "olmo-2": LINEARS,
    "gemma-4-shared-kv": (*LINEARS, "per_layer_input_gate", "per_layer_projection"),
    "cohere-2": LINEARS,
    "lfm-2": ("in_proj", "out_proj", "q_proj", "w1", "w2"),
    "qwen3-next": ("in_proj_qkvz", "in_proj_ba", "out_proj", *ATTENTION),
    "qwen3.5": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "q_proj"),
    "granite-4-dense": ("in_proj", "out_proj", "input_linear", "output_linear"),
    "nemotron-h": ("in_proj", "out_proj", "q_proj", "o_proj", "up_proj", "down_proj"),
}


@pytest.mark.parametrize("family", FUSED)
def test_families_with_stacked_and_transposed_weights(tmp_path, family):
    model = save_model(tmp_path / "base", *FAMILIES[family][:2])
    skip_wrong_modules(model)
    adapter = write_adapter(tmp_path / "adapter", model, FUSED[family], fan_in_fan_out=True)
    tokens = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        expected = merge(model, adapter, 2.0)(torch.tensor([tokens])).logits[0]
    engine = build(tmp_path / "base", loras={"a": adapter})
    torch.testing.assert_close(engine.prompt_logits(tokens, "a"), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type"),
        ({"use_dora": True}, "use_dora = True"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"r": 0}, "r is 0"),
        ({"r": 5}, "r = 5"),
        ({"lora_alpha": None}, "lora_alpha is None"),
        ({"rank_pattern": {"q_proj": 3}}, "r = 3"),
        ({"alpha_pattern": {"(": 3}}, "alpha_pattern"),
        ({"target_modules": None}, "target_modules is None"),
        ({"target_modules": ["q_proj"]}, "target_modules does not name"),
    ],
)
def test_configs_that_cannot_be_served_are_refused(tmp_path, folders, change, words):
    folder = shutil.copytree(folders["some"], tmp_path / "adapter")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(BadInput, match=r"adapter_config\.json") as refusal:
        build(loras={"a": folder})
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("layers.0.self_attn.q_proj", "layers.9.self_attn.q_proj"),
        ("model.layers.0.self_attn.q_proj", "lm_head"),
        ("lora_A.weight", "lora_magnitude_vector"),
        ("q_proj.lora_A", "q_proj.lora_B"),
    ],
)
def test_weights_that_fit_nowhere_are_refused(tmp_path, base, old, new):
    from safetensors.torch import load_file, save_file

    folder = write_adapter(tmp_path / "adapter", base, ("q_proj",), target_modules="all-linear")
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({name.replace(old, new): tensors[name] for name in reversed(tensors)}, path)
    with pytest.raises(BadInput, match=r"adapter_model\.safetensors"):
        build(loras={"a": folder})


def test_missing_and_damaged_files_are_named(tmp_path, folders, engine):
    with pytest.raises(BadInput, match=r"adapter_config\.json is missing"):
        build(loras={"a": tmp_path})
    folder = shutil.copytree(folders["some"], tmp_path / "adapter")
    (folder / "adapter_model.safetensors").write_bytes(b"\1\0")
    with pytest.raises(BadInput, match=r"adapter_model\.safetensors is cut off"):
        build(loras={"a": folder})
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(BadInput, match="pickle"):
        build(loras={"a": folder})
    with pytest.raises(BadInput, match="no adapter 'other'"):
        engine.prompt_logits(TOKENS, "other")


def test_other_linears_and_routed_experts_take_none(tmp_path, folders):
    save_model(tmp_path / "neox", "GPTNeoXConfig", {})
    with pytest.raises(BadInput, match="up_proj is no linear of this model"):
        build(tmp_path / "neox", loras={"a": folders["some"]}, max_model_len=64)
    model = save_model(tmp_path / "mixtral", *FAMILIES["mixtral"][:2])
    attention = write_adapter(tmp_path / "attention", model, ("q_proj", "o_proj"))
    tokens = TOKENS[:30]
    with torch.no_grad():
        expected = merge(copy.deepcopy(model), attention, 2.0)(torch.tensor([tokens])).logits[0]
    engine = build(tmp_path / "mixtral", loras={"a": attention})
    torch.testing.assert_close(engine.prompt_logits(tokens, "a"), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("words", [["=b"], ["a="], ["a=b", "a=c"], ["x/a", "y/a"]])
def test_words_of_the_command_line(words):
    with pytest.raises(BadInput, match="--lora"):
        parse_adapters(words)
    assert parse_adapters(["x=folder/y=z"]) == {"x": Path("folder/y=z")}
    assert parse_adapters(["folder/y"]) == {"y": Path("folder/y")}
