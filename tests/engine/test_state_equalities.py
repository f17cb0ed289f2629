"""Greedy tokens are transformers', however they are scheduled: of models with constant state, sparse indexers,
latents, shared keys and values, and of wrapped ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.model.decoder.decoder import Decoder
from llmopt.recipes import MODELS as BUNDLED
from transformers import AutoTokenizer

from ..support.model_families import FAMILIES, LATENT, SHAPE, save_model
from ..support.releases import skip_before, skip_wrong_modules
from ..support.survey.case import Case, spread_weights, surveyed_types

MAX_TOKENS = 10
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gated delta net and attention": (
        "Qwen3NextConfig",
        {
            **LINEAR, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "short convolutions and attention": (
        "Lfm2Config",
        {"layer_types": ["conv", "full_attention", "conv"]},
    ),
    "Mamba 2 and attention": FAMILIES["granite-4"],
    "Mamba 2, attention, MLP or experts in a layer": FAMILIES["nemotron-h-moe"],
    "windows beside convolutions": (
        "Lfm3Config",
        {"layer_types": ["conv", "sliding_attention", "full_attention"], "sliding_window": 5},
    ),
    "Mamba, a token at a time": ("MambaConfig", {"state_size": 8, "num_hidden_layers": 2}),
    "lightning attention in a cache of its own": (
        "MiniMaxConfig",
        {"num_local_experts": 2, "head_dim": 16, "layer_types": ["linear_attention", "full_attention", "full_attention"]},
    ),
    "compressed keys and values": (
        "DeepseekV4Config",
        {
            "head_dim": 16, "q_lora_rank": 24, "o_groups": 8, "o_lora_rank": 16, "sliding_window": 6,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "index_n_heads": 32, "index_head_dim": 16, "index_topk": 2,
            "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"],
            "mlp_layer_types": ["moe"] * 3,
            "compress_rates": {"heavily_compressed_attention": 8, "compressed_sparse_attention": 4},
        },
    ),
    # Of few heads no score is positive, and top-k chooses among equals by the shape of the step.
    "index keys beside latents": (
        "DeepseekV32Config",
        {**LATENT, "n_group": 1, "topk_group": 1, "index_topk": 8, "index_n_heads": 32, "index_head_dim": 16},
    ),
}  # fmt: skip
# Those of the engine's own decoder, and the tensors of their states.
OWN = {
    "gated delta net and attention": 4, "short convolutions and attention": 2, "Mamba 2 and attention": 4,
    "Mamba 2, attention, MLP or experts in a layer": 2,
}  # fmt: skip
# Of the survey's tiny configs.
SURVEYED = {
    "latents in transformers' modules": "glm4_moe_lite",
    "layers that share keys and values": "gemma3n_text",
    "a decoder whose layers share them": "gemma4_text",
    "a text model inside a multimodal one": "ernie4_5_vl_moe",
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "async, no prefix cache": {"async_scheduling": True, "enable_prefix_caching": False},
    "chunks, preemption": {"prefill_chunk_size": 3, "num_blocks": 16, "max_num_seqs": 5},
    "async, batch mix": {"async_scheduling": True, "max_num_seqs": 2, "max_num_batched_tokens": 12},
}


def surveyed_model(model_type: str, folder: Path) -> Any:
    """A random model of the survey's config for a type, saved with the bundled tokenizer beside it."""
    model = spread_weights(Case(model_type, surveyed_types()[model_type], folder).model)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "stories260K", trust_remote_code=False)
    tokenizer.save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=[*MODELS, *SURVEYED])
def served(request, tmp_path_factory) -> tuple[Path, list[list[int]], list[list[int]]]:
    """A checkpoint, prompts of which two share a beginning, and transformers' continuations."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    if request.param in SURVEYED:
        model = surveyed_model(SURVEYED[request.param], folder)
        ids = torch.randint(10, 100, (60,)).tolist()
    else:
        model = save_model(folder, *MODELS[request.param])
        skip_wrong_modules(model)
        ids = torch.randint(3, SHAPE["vocab_size"], (60,)).tolist()
    if model.config.model_type == "deepseek_v4":
        skip_before("5.23", "the cache of DeepSeek V4 does not tell its lengths")
    prompts = [ids[:9], ids[:5], [*ids[:8], *ids[20:29]], ids[30:31], ids[31:44]]
    expected = []
    for prompt in prompts:
        whole = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=MAX_TOKENS, eos_token_id=None
        )
        expected.append(whole[0, len(prompt) :].tolist())
    return folder, prompts, expected


@pytest.mark.parametrize("name", OWN)
def test_the_decoder_runs_what_it_covers(name, tmp_path):
    save_model(tmp_path, *MODELS[name])
    built = engine(tmp_path)
    assert isinstance(built.runner.decoder, Decoder)
    assert len(built.runner.decoder.state_layouts) == OWN[name]
    built.close()


def engine(folder: Path, **options: Any) -> Engine:
    options = {"block_size": 4, "num_blocks": 80, "max_model_len": 64, **options}
    return Engine(EngineConfig(folder, dtype="float32", device="cpu", num_threads=1, **options))


def run(built: Engine, prompts: list[list[int]], **params: Any) -> list[list[int]]:
    """Two requests at once, then one with every step; integrity holds after each."""
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, **params)
    waiting, tokens = list(enumerate(prompts)), [[] for _ in prompts]
    first = 2
    while waiting or built.has_unfinished():
        for index, prompt in waiting[:first]:
            built.add_request(str(index), prompt, greedy)
        del waiting[:first]
        first = 1
        for output in built.step():
            assert output.index == 0 or params
            if output.index == params.get("n", 1) - 1:
                tokens[int(output.request_id)].extend(output.new_token_ids)
        built.scheduler.check_integrity()
    assert built.stats.kv_blocks_used == 0
    return tokens


@pytest.mark.sweep(24)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_schedule_leaves_the_tokens_as_they_are(served, schedule):
    folder, prompts, expected = served
    built = engine(folder, **SCHEDULES[schedule])
    assert run(built, prompts) == expected
    assert run(built, prompts) == expected, "the second time from what is cached"
    built.close()
    if "mix" not in schedule:  # its two checkpoints are overwritten before the second time
        assert (built.stats.prefix_cache_hits > 0) == ("no prefix" not in schedule)
    assert (built.stats.num_preemptions > 0) == ("preemption" in schedule)


@pytest.mark.sweep(5)
def test_forks_go_on_from_their_parents_state(served):
    folder, prompts, expected = served
    built = engine(folder)
    assert run(built, prompts, n=3) == expected
    built.close()


@pytest.mark.sweep(5)
def test_hidden_states_of_several_prompts_take_a_slot_each(served):
    folder, prompts, _ = served
    built = engine(folder, max_num_seqs=2)
    alone = [built.prompt_logits(prompt)[-1] for prompt in prompts]
    for prompt, logits in zip(prompts, alone, strict=True):
        (token,) = run(built, [prompt])[0][:1]
        assert int(logits.argmax()) == token
    built.scheduler.check_integrity()
    built.close()


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    "options", [{"swap_space_bytes": 2**20}, {"tensor_parallel_size": 2}], ids=["swap", "parallel"]
)
def test_what_a_state_does_not_go_with_is_refused(served, options):
    folder, *_ = served
    built = None
    try:
        built = engine(folder, **options)
        assert not built.runner.decoder.state_layouts
    except BadInput as refusal:
        assert "\n" not in str(refusal)
        reasons = ("do not go together", "are not split", "plain attention alone are divided")
        assert any(reason in str(refusal) for reason in reasons)
    finally:
        if built is not None:
            built.close()
