"""Tiny random models of every supported family: our logits against transformers', in float32."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import transformers
from llmopt.base.errors import BadInput
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.model.decoder.reader import model_spec
from llmopt.engine.model.layers.embedding import rope_frequencies
from llmopt.engine.model.layers.spec import ModelSpec
from llmopt.engine.model.layers.state import state_bytes_per_sequence
from llmopt.engine.planner.catalog import shape_of
from llmopt.quant.families.spec_parts import RopeSpec
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.recipes import MODELS

from ...support.model_families import ADAPTED, FAMILIES, LLAMA3_ROPE, VOCAB, save_model
from ...support.releases import skip_wrong_modules


@pytest.fixture(scope="module", params=[*FAMILIES, *ADAPTED])
def checkpoint(request, tmp_path_factory):
    """(folder, transformers' model) of a family."""
    folder = tmp_path_factory.mktemp("model") / request.param
    model = save_model(folder, *{**FAMILIES, **ADAPTED}[request.param][:2])
    skip_wrong_modules(model)
    return folder, model


def engine(folder, **options) -> Engine:
    given = {"dtype": "float32", "device": "cpu", "num_threads": 1, "max_model_len": 256}
    return Engine(EngineConfig(folder, **given, **options))


@pytest.mark.sweep(32)
def test_logits_agree_with_transformers(checkpoint):
    folder, model = checkpoint
    built = engine(folder, block_size=4, num_blocks=40, max_num_batched_tokens=17)
    tokens = torch.randint(3, VOCAB, (1, 90), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens).logits[0]
    got = built.prompt_logits(tokens[0].tolist())  # in chunks of 17, through the paged cache
    assert expected.std() > 0.1, "the model is too flat for the comparison to mean anything"
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.sweep(16)
def test_greedy_tokens_of_a_batch_agree_with_transformers(checkpoint):
    folder, model = checkpoint
    tokens = torch.randint(3, VOCAB, (100,), generator=torch.Generator().manual_seed(2)).tolist()
    # The third shares a prefix with the first; each is longer than windows and original contexts.
    prompts = [tokens[:50], tokens[50:90], tokens[:40] + tokens[90:]]
    expected = [
        model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False,
            max_new_tokens=8, min_new_tokens=8,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]  # fmt: skip
    built = engine(folder, block_size=4, num_blocks=60, prefill_chunk_size=13)
    got: list[list[int]] = [[] for _ in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=8, min_tokens=8)
    for index, prompt in enumerate(prompts):
        built.add_request(str(index), prompt, params)
        built.step()
    while built.has_unfinished():
        for output in built.step():
            got[int(output.request_id)].extend(output.new_token_ids)
    assert got == expected
    assert built.stats.prefix_cache_hits >= 20


@pytest.mark.sweep(12)
def test_the_cache_has_the_planned_size(checkpoint, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder, _ = checkpoint
    built = engine(folder, block_size=4, num_blocks=5)
    if folder.name in ADAPTED:
        token_bytes = ADAPTED[folder.name][3] * 4
    else:
        config = Checkpoint(folder).config
        planned = shape_of(config, folder)
        token_bytes = planned.kv_bytes_per_token(4)
        states = state_bytes_per_sequence(built.runner.decoder.state_layouts)
        assert states == planned.state_bytes
        layouts = model_spec(config).kv_layouts  # it is a family of the decoder
        assert sum(layout.num_elements for layout in layouts) * 4 == token_bytes
    assert built.memory.kv_cache_bytes == 6 * 4 * token_bytes


WINDOWED = {"mistral-sliding": 7, "mixtral": 11, "phi-3": 9, "gemma-3": None, "llama-4": None}


@pytest.mark.parametrize("family", WINDOWED)
def test_blocks_behind_every_window_are_returned(family, tmp_path):
    """Where every layer has a window, a sequence holds no more than it; else it keeps all."""
    save_model(tmp_path, *FAMILIES[family])
    built = engine(tmp_path, block_size=4, num_blocks=60, enable_prefix_caching=False)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    built.add_request("a", list(range(3, 43)), params)
    held = []
    while built.has_unfinished():
        built.step()
        built.scheduler.check_integrity()
        held.append(built.stats.kv_blocks_used)
    window = WINDOWED[family]
    if window is None:
        assert max(held) == 25
    else:
        assert max(held[1:]) <= 1 + -(-window // 4)
    assert held[-1] == 0


def test_a_bf16_model_stays_close_to_float32():
    tokens = list(range(3, 200))
    exact, rounded = (
        Engine(EngineConfig("stories3M", dtype=dtype, num_threads=1)).prompt_logits(tokens)
        for dtype in ("float32", "bfloat16")
    )
    exact, rounded = exact.log_softmax(-1), rounded.log_softmax(-1)
    divergence = (exact.exp() * (exact - rounded)).sum(-1).mean()
    assert 0 < divergence < 5e-3


def test_longrope_says_that_short_sequences_have_the_long_factors(tmp_path, caplog):
    """transformers changes factors at the original length, here 32 tokens; cached keys are rotated."""
    model = save_model(tmp_path, *FAMILIES["phi-4-longrope-partial"][:2])
    tokens = torch.randint(3, VOCAB, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens).logits[0]
    options = {"dtype": "float32", "device": "cpu", "num_threads": 1}
    short = Engine(EngineConfig(tmp_path, **options, max_model_len=32))
    assert not [record for record in caplog.records if record.name.startswith("llmopt")]
    got = short.prompt_logits(tokens[0].tolist())
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    long = Engine(EngineConfig(tmp_path, **options))
    (record,) = (record for record in caplog.records if record.name.startswith("llmopt"))
    assert "up to 32 tokens: set max_model_len = 32" in record.getMessage()
    assert (long.prompt_logits(tokens[0].tolist()) - expected).abs().max() > 0.01


def spec(**changes) -> ModelSpec:
    config = json.loads((MODELS / "stories3M" / "config.json").read_text())
    return model_spec({**config, **changes})


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not one of"),
        ({"model_type": None}, "model_type None"),
        ({"hidden_act": "glu"}, "hidden_act 'glu'"),
        ({"is_causal": False}, "is_causal false"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "rope_type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2}}, "lacks low_freq_factor"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"vocab_size": "many"}, "vocab_size is .many. in the config"),
    ],
)
def test_what_the_decoder_does_not_cover_is_refused(changes, complaint):
    with pytest.raises(BadInput, match=complaint):
        spec(**changes)


def test_embedding_models_that_attend_to_later_tokens_are_refused(tmp_path):
    """gte-Qwen2 and others say `is_causal: false` under a decoder's type, and transformers follows it."""
    save_model(tmp_path, *FAMILIES["qwen2"])
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"is_causal": False}))
    with pytest.raises(BadInput, match="a token attends to the tokens after it"):
        engine(tmp_path, num_blocks=8)


def test_a_missing_key_is_named():
    config = json.loads((MODELS / "stories3M" / "config.json").read_text())
    del config["hidden_size"]
    with pytest.raises(BadInput, match="hidden_size is missing in the llama config"):
        model_spec(config)


def test_both_spellings_of_rope_are_read():
    new = RopeSpec.from_config({"rope_parameters": LLAMA3_ROPE})
    scaling = {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"}
    old = RopeSpec.from_config({"rope_theta": 500000.0, "rope_scaling": scaling})
    assert torch.equal(rope_frequencies(new, 64)[0], rope_frequencies(old, 64)[0])


LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
BY_KIND = {
    kind: {"rope_type": "default", "rope_theta": 3e4}
    for kind in ("full_attention", "sliding_attention")
}
RIVALS = {
    "both names": {"model_type": "qwen3", "rope_parameters": {"rope_theta": 5e5}, "rope_scaling": {**LINEAR, "rope_theta": 5e5}},
    "both lengths": {"model_type": "qwen2", "rope_parameters": YARN, "original_max_position_embeddings": 32},
    "both lengths of llama 3": {"model_type": "llama", "rope_parameters": LLAMA3_ROPE, "original_max_position_embeddings": 16},
    "both widths": {
        "model_type": "phi3", "partial_rotary_factor": 0.5,
        "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25},
    },
    "null": {"model_type": "gpt_oss", "rope_parameters": None, "rope_scaling": None},
    "by kind": {"model_type": "gemma3_text", "num_hidden_layers": 6, "rope_parameters": BY_KIND, "rope_scaling": LINEAR},
}  # fmt: skip


@pytest.mark.parametrize("case", RIVALS)
def test_of_two_spellings_of_rope_the_one_counts_that_transformers_takes(case):
    """YaRN may be added to a config of transformers 5 by its older name."""
    read = spec(**copy.deepcopy(RIVALS[case]))
    raw = json.loads((MODELS / "stories3M" / "config.json").read_text()) | RIVALS[case]
    config = transformers.AutoConfig.for_model(**copy.deepcopy(raw))
    config.standardize_rope_params()  # as its modules do
    theirs = config.rope_parameters
    for rope, kind in zip((read.ropes[0], read.ropes[-1]), reversed(BY_KIND), strict=True):
        expected = theirs.get(kind, theirs)
        assert (rope.kind, rope.theta) == (expected["rope_type"], expected["rope_theta"])
        for name in ("factor", "original_max_position_embeddings"):
            assert rope.parameters.get(name) == expected.get(name)
    part = theirs.get("partial_rotary_factor", 1.0)
    assert read.rotary_width == int(read.shape.head_dim * part)


def test_a_base_frequency_that_rope_scaling_would_drop_is_asked_for():
    """transformers goes on with its class's default then, whatever `rope_parameters` say."""
    both = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_scaling": YARN}
    with pytest.raises(BadInput, match="rope_scaling counts before rope_parameters, and lacks its"):
        spec(model_type="qwen3", **both)


def test_the_default_of_a_model_type_is_no_other_base_frequency():
    """A YaRN without a base frequency, where `rope_parameters` has the default of Mixtral's class."""
    both = {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": YARN}
    assert spec(model_type="mixtral", rope_theta=None, **both).ropes[0].theta == 1e6


def test_parts_of_a_head_that_differ_by_layer_type_are_refused():
    """One width is rotated in all layers."""
    parts = zip(BY_KIND.items(), (0.5, 1.0), strict=True)
    rope = {kind: {**given, "partial_rotary_factor": part} for (kind, given), part in parts}
    with pytest.raises(BadInput, match=r"partial_rotary_factor 0\.5 and 1\.0 in one model"):
        types = {"layer_types": [*rope], "num_hidden_layers": len(rope)}
        spec(model_type="ministral", rope_parameters=rope, **types)


def test_a_part_of_each_head_is_not_rotated_where_engines_disagree():
    """vLLM's Llama reads `partial_rotary_factor`; the one of transformers rotates the whole head."""
    for stray in ({"partial_rotary_factor": 0.5}, {"rope_scaling": {"partial_rotary_factor": 0.5}}):
        with pytest.raises(
            BadInput, match=r"partial_rotary_factor 0\.5 rotates a part of each head"
        ):
            spec(model_type="llama", **stray)
    assert spec(model_type="llama", partial_rotary_factor=1.0).rotary_width == 32


def test_earlier_spellings_of_phi3_and_gemma3_mean_the_same():
    """Files on the hub were written before transformers 5 and leave out what their class knows."""
    longrope = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    base = {"model_type": "phi3", "original_max_position_embeddings": 64}
    old = spec(**base, rope_scaling={**longrope, "type": "su"}).ropes[0]
    new = spec(**base, rope_parameters={**longrope, "rope_type": "longrope"}).ropes[0]
    assert old == new and new.kind == "longrope" and new.parameters["factor"] == 8.0
    gemma = {"model_type": "gemma3_text", "sliding_window": 16, "rope_parameters": None}
    local, *_, everywhere = spec(
        **gemma, num_hidden_layers=6, rope_theta=5e5, rope_local_base_freq=2e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    ).ropes  # fmt: skip
    assert (local.theta, local.kind) == (2e4, "default")
    assert (everywhere.theta, everywhere.kind) == (5e5, "linear")


def test_mistrals_window_defaults_as_its_class_does():
    base = {"model_type": "mistral"}
    assert spec(**base).shape.windows == (4096,) * 5
    assert spec(**base, sliding_window=None).shape.windows == (None,) * 5
    assert (
        spec(model_type="qwen2", sliding_window=32, use_sliding_window=False).shape.windows
        == (None,) * 5
    )
