"""The offline API on the trained models."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.engine import LLM, SamplingParams
from llmopt.recipes import DATA, MODELS


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("stories3M", dtype="float32", max_num_seqs=8)


def test_the_260k_model_tells_the_story_that_its_author_printed():
    """The beginning of what karpathy/llama2.c's doc/stories260K.md shows for temperature 0."""
    story = LLM("stories260K", dtype="float32").generate(
        "Once upon a time", SamplingParams(temperature=0, max_tokens=60)
    )[0]
    assert story.text.startswith(
        ", there was a little girl named Lily. She loved to play outside in the park. "
        "One day, she saw a big, red ball."
    )


def test_results_carry_text_tokens_and_reasons(llm):
    results = llm.generate(
        ["Once upon a time", [1, 403, 407]], SamplingParams(temperature=0, max_tokens=5)
    )
    assert [len(r.token_ids) for r in results] == [5, 5]
    assert [r.finish_reason for r in results] == ["length", "length"]
    assert results[0].prompt == "Once upon a time"
    assert results[1].prompt is None
    assert results[1].prompt_token_ids == [1, 403, 407]
    assert llm.engine.tokenizer.decode(results[0].token_ids).strip() in results[0].text


def test_the_stream_adds_up_to_the_result(llm):
    params = SamplingParams(temperature=0, max_tokens=30)
    whole = llm.generate("Tom and his dog", params)[0]
    outputs = list(llm.stream("Tom and his dog", params))
    assert "".join(output.new_text for output in outputs) == whole.text
    assert [t for output in outputs for t in output.new_token_ids] == whole.token_ids
    assert outputs[-1].finish_reason == whole.finish_reason
    assert [output.num_output_tokens for output in outputs] == list(range(1, 31))


def test_leaving_a_stream_frees_its_blocks(llm):
    for output in llm.stream("Tom", SamplingParams(temperature=0, max_tokens=100)):
        if output.num_output_tokens == 3:
            break
    assert not llm.engine.has_unfinished()
    assert llm.engine.stats.kv_blocks_used == 0


def test_a_story_ends_by_itself_unless_told_otherwise(llm):
    params = SamplingParams(temperature=0, max_tokens=100)
    story = (DATA / "evaluation.txt").read_text().split("\n\n")[0]
    ended = llm.generate(story[:-10], params)[0]
    assert ended.finish_reason == "stop"
    assert ended.completions[0].stop_reason is None
    assert ended.token_ids[-1] in llm.engine.eos_token_ids == {1, 2}
    assert "<s>" not in ended.text
    long = SamplingParams(temperature=0, max_tokens=len(ended.token_ids) + 5, ignore_eos=True)
    assert llm.generate(ended.prompt, long)[0].finish_reason == "length"
    least = SamplingParams(temperature=0, max_tokens=100, min_tokens=len(ended.token_ids) + 3)
    kept_on = llm.generate(ended.prompt, least)[0]
    assert len(kept_on.token_ids) > len(ended.token_ids)
    assert not llm.engine.eos_token_ids & set(kept_on.token_ids[: len(ended.token_ids) + 3])


def test_stop_strings_and_stop_tokens(llm):
    plain = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=40))[0]
    middle = plain.text.index("named")
    for include in (False, True):
        params = SamplingParams(
            temperature=0,
            max_tokens=40,
            stop=("named Li", "zzz"),
            include_stop_str_in_output=include,
        )
        stopped = llm.generate("Once upon a time", params)[0]
        assert stopped.text == plain.text[:middle] + ("named Li" if include else "")
        assert stopped.finish_reason == "stop"
        assert stopped.completions[0].stop_reason == "named Li"
        assert len(stopped.token_ids) < 40
    token = plain.token_ids[6]
    stopped = llm.generate(
        "Once upon a time", SamplingParams(temperature=0, max_tokens=40, stop_token_ids=(token,))
    )[0]
    assert stopped.token_ids == plain.token_ids[: plain.token_ids.index(token) + 1]
    assert stopped.completions[0].stop_reason == token


def test_a_token_that_ends_a_sequence_is_text_only_if_asked_for(llm):
    """vLLM's detokenizer: `stop_terminated and not include_stop_str_in_output`."""
    plain = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=40))[0]
    token = plain.token_ids[6]
    bias = {next(iter(llm.engine.eos_token_ids)): 100.0}
    for ending in ({"stop_token_ids": (token,)}, {"logit_bias": bias, "min_tokens": 4}):
        for stop in ((), ("zebra",)):  # with stop strings text is made on the engine's thread
            common = {"temperature": 0, "max_tokens": 40, "skip_special_tokens": False, **ending}
            texts = []
            for include in (False, True):
                params = SamplingParams(**common, stop=stop, include_stop_str_in_output=include)
                answer = llm.generate("Once upon a time", params)[0]
                assert answer.finish_reason == "stop"
                texts.append(answer.text)
            end = llm.engine.tokenizer.decode(answer.token_ids[-1:], skip_special_tokens=False)
            assert end.strip() and texts[1].removeprefix(texts[0]).strip() == end.strip()


def test_logprobs_agree_with_the_logits(llm):
    prompt = llm.engine.encode("Lily went to the park")
    result = llm.generate(
        [prompt], SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2)
    )[0]
    logprobs = llm.engine.prompt_logits([*prompt, *result.token_ids]).log_softmax(-1)
    assert result.logprobs is not None
    for i, entry in enumerate(result.logprobs):
        scores = logprobs[len(prompt) - 1 + i]
        assert entry.token_id == result.token_ids[i]
        assert entry.logprob == pytest.approx(scores[entry.token_id].item(), abs=1e-4)
        assert entry.rank == 1
        assert len(entry.top) == 3
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    for i, entry in enumerate(result.prompt_logprobs[1:], 1):
        assert entry is not None
        assert entry.token_id == prompt[i]
        assert entry.logprob == pytest.approx(logprobs[i - 1, prompt[i]].item(), abs=1e-4)


def test_prompt_logprobs_survive_chunks_and_preemption():
    tokens = list(range(3, 60))
    whole = LLM("stories3M", dtype="float32").generate(
        [tokens], SamplingParams(max_tokens=1, prompt_logprobs=0)
    )
    small = LLM("stories3M", dtype="float32", prefill_chunk_size=5, block_size=4, num_blocks=40)
    results = small.generate(
        [tokens, tokens],
        SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, prompt_logprobs=0),
    )
    assert small.engine.stats.num_preemptions
    for result in results:
        for a, b in zip(whole[0].prompt_logprobs[1:], result.prompt_logprobs[1:], strict=True):
            assert (a.token_id, a.logprob) == (b.token_id, pytest.approx(b.logprob, abs=1e-4))


def test_seeds_decide(llm):
    def say(seed):
        return llm.generate("Once", SamplingParams(temperature=1, max_tokens=20, seed=seed))[
            0
        ].token_ids

    assert say(1) == say(1) != say(2)
    first = LLM("stories260K", seed=3).generate(["Once"] * 2, SamplingParams(max_tokens=12))
    again = LLM("stories260K", seed=3).generate(["Once"] * 2, SamplingParams(max_tokens=12))
    assert [r.token_ids for r in first] == [r.token_ids for r in again]
    assert first[0].token_ids != first[1].token_ids, "requests without a seed must differ"
    assert say(-1) != say(-1), "as in vLLM, Ollama and llama.cpp, -1 is no seed"


@pytest.mark.parametrize(
    ("prompt", "params", "complaint"),
    [
        ("", {}, None),
        ([], {}, "the prompt is empty"),
        ([1, 512], {}, "token id 512 is outside the vocabulary of 512"),
        ([1] * 600, {}, "context length of 512"),
        ([1] * 500, {"max_tokens": 100}, "context length of 512"),
        ([1], {"logit_bias": {600: 1.0}}, "token id 600"),
        ([1], {"stop_token_ids": (-1,)}, "token id -1"),
    ],
)
def test_bad_requests_are_refused_and_leave_nothing(llm, prompt, params, complaint):
    if complaint is None:
        assert len(llm.generate([prompt], SamplingParams(max_tokens=2))[0].token_ids) == 2
        return
    with pytest.raises(BadInput, match=complaint):
        llm.generate([[1], prompt], SamplingParams(**params))
    assert not llm.engine.has_unfinished()
    assert llm.engine.stats.kv_blocks_used == 0


def test_the_longest_request_fits_exactly(llm):
    result = llm.generate(
        [[1] * 500], SamplingParams(max_tokens=None, ignore_eos=True, temperature=0)
    )[0]
    assert len(result.token_ids) == 12


def test_without_a_limit_a_request_runs_to_what_the_cache_holds():
    small = LLM("stories3M", num_blocks=4, block_size=16)
    result = small.generate(
        "Once", SamplingParams(max_tokens=None, ignore_eos=True, temperature=0)
    )[0]
    assert len(result.prompt_token_ids) + len(result.token_ids) == 4 * 16 + 1


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"dtype": "float16"}, "dtype 'float16'"),
        ({"device": "tpu"}, "device 'tpu'"),
        ({"scheduling_policy": "lifo"}, "choose fcfs, priority, shortest-prefill"),
        ({"max_model_len": 1000}, "exceeds the model's context of 512"),
        ({"kv_cache_memory_bytes": 100}, "does not hold one block"),
        ({"kv_cache_memory_bytes": 10**6, "num_blocks": 5}, "not both"),
        ({"max_num_seqs": 0}, "max_num_seqs = 0"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, "every running sequence needs a token"),
        ({"device": "cuda"}, "sees no CUDA device"),
    ],
)
def test_options_that_cannot_be_are_refused(options, complaint):
    if options == {"device": "cuda"} and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(BadInput, match=complaint):
        LLM("stories260K", **options)


def copy_model(tmp_path):
    return shutil.copytree(MODELS / "stories260K", tmp_path / "model")


def test_broken_checkpoints_are_named(tmp_path):
    with pytest.raises(BadInput, match="no model 'nowhere'"):
        LLM("nowhere")
    folder = copy_model(tmp_path)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadInput, match=r"model.safetensors is cut off or damaged"):
        LLM(folder)
    weights.unlink()
    with pytest.raises(BadInput, match="has no weights"):
        LLM(folder)
    (folder / "config.json").write_text('{"model_type": "lla')
    with pytest.raises(BadInput, match=r"config.json is not valid JSON"):
        LLM(folder)
    (folder / "config.json").unlink()
    with pytest.raises(BadInput, match=r"not a model: it has neither a config.json nor a .gguf"):
        LLM(folder)


def test_a_config_that_contradicts_the_weights_is_named(tmp_path):
    folder = copy_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 176}))
    with pytest.raises(
        BadInput, match=r"gate_proj.weight has shape \(172, 64\), but config.json makes it \(176"
    ):
        LLM(folder)
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with pytest.raises(BadInput, match=r"9 tensors have no place .* model.layers.4"):
        LLM(folder)
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 6}))
    with pytest.raises(BadInput, match=r"has no tensor 'model.layers.5"):
        LLM(folder)
