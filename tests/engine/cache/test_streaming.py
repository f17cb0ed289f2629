"""Attention sinks + sliding window (StreamingLLM): sink and window tokens stay, positions are cache positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.cli.main import main
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.core.llm import LLM
from llmopt.recipes import DATA, MODELS
from transformers import AutoModelForCausalLM, AutoTokenizer

from ...support.model_families import ADAPTED, FAMILIES, save_model

MODEL = MODELS / "stories3M"
SINKS, WINDOW = 4, 60


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    """2,000 tokens of held-out stories, four times the model's context."""
    text = (DATA / "evaluation.txt").read_text()
    return AutoTokenizer.from_pretrained(MODEL)(text).input_ids[:2000]


def engine(model: Any = MODEL, **options: Any) -> Engine:
    given = {"dtype": "float32", "num_threads": 1, "window": WINDOW, "attention_sinks": SINKS}
    return Engine(EngineConfig(model, **{**given, **options}))


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


def streaming_llm(model: Any, ids: torch.Tensor, sinks: int, window: int) -> torch.Tensor:
    """Xiao et al., section 3.2, word for word: keys are cached before their rotation, and at each token
    those in the cache are rotated (RoPE) by their cache position. Logits [tokens, vocab]."""
    config, count = model.config, len(ids)
    size = sinks + window
    visible = torch.zeros(count, size, dtype=torch.int64)
    filled = torch.zeros(count, size, dtype=torch.bool)
    for t in range(count):
        first = list(range(t + 1)) if t < size else [*range(sinks), *range(t - window + 1, t + 1)]
        visible[t, : len(first)] = torch.tensor(first)
        filled[t, : len(first)] = True
    place = filled.sum(1) - 1
    hidden = model.model.embed_tokens(ids)
    cos, sin = (x[0] for x in model.model.rotary_emb(hidden, torch.arange(size)[None]))
    groups = config.num_attention_heads // config.num_key_value_heads
    for layer in model.model.layers:
        own = layer.self_attn
        x = layer.input_layernorm(hidden)
        q, k, v = (
            part(x).view(count, -1, own.head_dim) for part in (own.q_proj, own.k_proj, own.v_proj)
        )
        q = rotated(q, cos[place][:, None], sin[place][:, None])
        keys = rotated(k[visible], cos[:, None], sin[:, None]).repeat_interleave(groups, dim=2)
        scores = torch.einsum("thd,tchd->thc", q, keys) * own.head_dim**-0.5
        scores = scores.masked_fill(~filled[:, None], float("-inf")).softmax(dim=-1)
        mixed = torch.einsum("thc,tchd->thd", scores, v[visible].repeat_interleave(groups, dim=2))
        hidden = hidden + own.o_proj(mixed.flatten(1))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return model.lm_head(model.model.norm(hidden))


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("sinks", "count"), [(SINKS, 700), (SINKS, 2000), (0, 700)])
def test_logits_are_those_of_the_paper(tokens, sinks, count):
    given = tokens[:count]
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with torch.inference_mode():
        expected = streaming_llm(model, torch.tensor(given), sinks, WINDOW)
    built = engine(attention_sinks=sinks, block_size=8, prefill_chunk_size=77, num_blocks=22)
    got = built.prompt_logits(given)
    assert expected.std() > 1
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=1e-3)
    assert built.stats.kv_blocks_used == 0


def test_a_long_stream_holds_a_constant_number_of_blocks(tokens):
    """A prompt of four contexts and a completion of two: no limit of length, no more blocks than at first."""
    built = engine(block_size=8, prefill_chunk_size=50, num_blocks=16, enable_prefix_caching=False)
    answer = 2000 - 900
    params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True, prompt_logprobs=0)
    built.add_request("a", tokens[:900], params)
    held, new, scored = [], [], None
    while built.has_unfinished():
        for output in built.step():
            new += output.new_token_ids
            scored = scored or output.prompt_logprobs
        built.scheduler.check_integrity()
        held.append(built.stats.kv_blocks_used)
    assert len(new) == answer
    assert max(held) <= built.scheduler.config.max_blocks(2000) == 16
    settled = held[100:-1]
    # The first block, and the window, which begins and ends inside a block.
    assert set(settled) <= {1 + 8, 1 + 9}
    assert built.stats.num_preemptions == 0
    # What was generated is what the same tokens would have been scored as.
    logits = engine().prompt_logits(tokens[:900] + new)
    assert logits[899:-1].argmax(-1).tolist() == new
    logprobs = logits[:899].log_softmax(-1).gather(1, torch.tensor(tokens[1:900])[:, None])[:, 0]
    assert scored is not None
    found = torch.tensor([one.logprob for one in scored[1:] if one is not None])
    torch.testing.assert_close(found, logprobs, atol=2e-3, rtol=1e-3)


def run(built: Engine, prompts: list[list[int]], n: int = 1) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=30, n=n, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        built.add_request(str(index), prompt, params)
    found: dict[tuple[int, int], list[int]] = {}
    while built.has_unfinished():
        for output in built.step():
            key = (int(output.request_id), output.index)
            found.setdefault(key, []).extend(output.new_token_ids)
        built.scheduler.check_integrity()
    assert built.stats.kv_blocks_used == 0
    return [found[key] for key in sorted(found)]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_tokens_depend_on_nothing_but_the_prompt(tokens, kv):
    prompts = [tokens[i * 90 : i * 90 + 20 + 67 * i % 200] for i in range(5)]
    prompts += [tokens[:400], tokens[:400] + tokens[900:910]]
    expected = run(engine(kv_cache_dtype=kv, enable_prefix_caching=False), prompts)
    for options in (
        {"max_num_seqs": 3, "block_size": 1, "num_blocks": 2000, "prefill_chunk_size": 7},
        {"max_num_batched_tokens": 33, "block_size": 4, "num_blocks": 500},
    ):
        built = engine(kv_cache_dtype=kv, **options)
        assert run(built, prompts) == expected
        assert run(built, prompts) == expected, "the second time with whatever is cached"
        assert built.stats.prefix_cache_hits > 300
    few = engine(kv_cache_dtype=kv, block_size=4, num_blocks=36, prefill_chunk_size=40)
    assert run(few, prompts) == expected
    assert few.stats.num_preemptions > 0, "the pool was meant to be too small"
    assert run(engine(kv_cache_dtype=kv, block_size=8), prompts[-1:], n=2) == expected[-1:] * 2


# Llama 4 norms queries behind their rotation, and scales those of layers without one by their position.
FULL = {"attention_chunk_size": None, "layer_types": ["full_attention"]}
NORMED = {**FULL, "no_rope_layers": [1], "attn_temperature_tuning": False}
SCALED = {**FULL, "no_rope_layers": [0], "floor_scale": 8}
ONE_LAYER: list[tuple[str, dict[str, Any]]] = [
    ("llama-3.1", {}),
    ("llama-linear-rope", {}),
    ("qwen2-yarn", {}),
    ("qwen3", {}),
    ("falcon-40b", {}),
    ("deepseek-v3", {}),
    ("llama-4", NORMED),
    ("llama-4", SCALED),
]


@pytest.mark.parametrize(("family", "changes"), ONE_LAYER)
def test_one_layer_attends_to_visible_tokens_alone(family, changes, tmp_path):
    """With a single layer the logits are the plain model's on the visible tokens alone."""
    kind, overrides = FAMILIES[family][:2]
    save_model(tmp_path, kind, {**overrides, "num_hidden_layers": 1, **changes})
    given = torch.randint(3, 500, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    stream = {"window": 20, "attention_sinks": 3}
    built = engine(tmp_path, block_size=4, max_num_batched_tokens=31, max_num_seqs=4, **stream)
    got = built.prompt_logits(given)
    plain = engine(tmp_path, block_size=4, window=None, attention_sinks=0)
    for t in (0, 11, 22, 23, 40, 150, 299):
        seen = given[: t + 1] if t < 23 else given[:3] + given[t - 19 : t + 1]
        expected = plain.prompt_logits(seen)[-1]
        torch.testing.assert_close(got[t], expected, atol=1e-4, rtol=1e-4)
    assert plain.prompt_logits(given[-20:])[-1].sub(got[-1]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("family", "options", "says"),
    [
        ("gpt-2", {}, "a learned vector for each of its 256 positions"),
        ("gemma-2", {}, "layers of this model have windows of their own"),
        ("llama-2", {"window": 254}, "together they exceed the model's context of 256 tokens"),
        ("lfm-2", {}, "a state has no window and no sinks"),
        ("bloom-alibi", {}, "window and attention_sinks are for the decoder's own model types"),
    ],
)
def test_models_that_cannot_stream_say_so(family, options, says, tmp_path):
    save_model(tmp_path, *{**FAMILIES, **ADAPTED}[family][:2])
    with pytest.raises(BadInput, match=says):
        engine(tmp_path, **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"window": None}, "attention_sinks = 4 are kept beside a window: give window too"),
        ({"window": 0}, "window = 0: need 1 or more"),
        ({"attention_sinks": -1}, "attention_sinks = -1: need 0 or more"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, says):
    with pytest.raises(BadInput, match=says):
        engine(**options)


def test_a_limit_of_length_is_kept_where_one_is_given(tokens):
    built = engine(max_model_len=1000)
    with pytest.raises(BadInput, match="exceed the context length of 1000 tokens"):
        built.add_request("a", tokens[:900], SamplingParams(max_tokens=200))
    llm = LLM(MODEL, window=WINDOW, attention_sinks=SINKS, num_threads=1, dtype="float32")
    (result,) = llm.generate([tokens[:700]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(result.token_ids) == 3


def test_the_command_line_names_both_options(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--attention-sinks", "4"])
    assert stop.value.code == 2
    assert "attention_sinks = 4 are kept beside a window" in capsys.readouterr().err
