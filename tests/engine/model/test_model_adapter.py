"""Models run through transformers' modules: their batches, and which are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.config.config import EngineConfig, SpeculationConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.model.adapter.adapter import TransformersModel
from llmopt.engine.model.adapter.packed import PackedForward
from llmopt.engine.model.adapter.sequential import SequentialForward
from llmopt.engine.model.layers.spec import LoadingOptions
from llmopt.engine.model.layers.state import state_bytes_per_sequence
from llmopt.engine.planner.cache_size import size_states
from llmopt.quant.families.spec_parts import NotCovered
from llmopt.quant.model.checkpoint import Checkpoint

from ...support.model_families import ADAPTED, FAMILIES, SHAPE, VOCAB, save_model


def adapted(folder: Path, dtype: torch.dtype = torch.float32) -> TransformersModel:
    return TransformersModel(Checkpoint(folder), LoadingOptions(torch.device("cpu"), dtype))


@pytest.mark.parametrize("family", ADAPTED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_takes_one_pass_for_all_sequences_where_it_can(family, dtype, tmp_path):
    config_class, overrides, way, _ = ADAPTED[family]
    save_model(tmp_path, config_class, overrides)
    model = adapted(tmp_path, dtype)
    assert type(model._forward).__name__ == way
    plain = sum(parameter.nbytes for parameter in model._model.parameters())
    assert model.bytes_held == plain
    table = 0 if model._model.config.tie_word_embeddings else VOCAB * 64 * dtype.itemsize
    assert model.bytes_per_step == plain - table


# Beside the config: elements of a token in the cache, and bytes of a sequence's state in float32.
STATES = {
    "convolutions": (
        "Lfm2Config",
        {"layer_types": ["full_attention", "conv", "full_attention"]},
        (2 * 2 * 4 * 8, 64 * 3 * 4),
    ),
    "RWKV": (
        "RwkvConfig",
        {"num_hidden_layers": 2, "attention_hidden_size": 64, "context_length": 256},
        (0, 5 * 64 * 2 * 4),
    ),
    "windows beside convolutions": (
        "Lfm3Config",
        {
            "layer_types": ["conv", "sliding_attention", "full_attention"],
            "sliding_window": 5,
            "head_dim": 8,
        },
        (2 * 2 * 4 * 8, 64 * 7 * 4),
    ),
}


@pytest.mark.parametrize("state", STATES)
def test_what_a_cache_holds_is_paged_or_kept_in_slots(state, tmp_path):
    config_class, overrides, (elements, state_bytes) = STATES[state]
    save_model(tmp_path, config_class, overrides)
    model = adapted(tmp_path)
    assert sum(layout.num_elements for layout in model.kv_layouts) == elements
    assert state_bytes_per_sequence(model.state_layouts) == state_bytes


def test_a_pass_that_is_a_little_off_is_not_taken(tmp_path, monkeypatch):
    """Jamba's modules lose their state between chunks, which moves the logits of small weights by so much."""
    save_model(tmp_path, "Olmo2Config", {})
    exact = PackedForward.__call__
    monkeypatch.setattr(PackedForward, "__call__", lambda *inputs: exact(*inputs) * 1.00005)
    assert type(adapted(tmp_path)._forward).__name__ == "SequentialForward"


NOT_ITS_OWN = "llmopt.engine.model.adapter.open.model_spec"
"""Decides for the native decoder, which has these families as well."""


def refuse(_: dict[str, Any]) -> None:
    raise NotCovered("it is to run through transformers")


@pytest.mark.sweep(1)
@pytest.mark.parametrize("family", ["qwen3-next", "qwen3.5", "lfm-2", "granite-4"])
def test_hybrids_decode_in_one_pass(family, tmp_path, monkeypatch):
    """Sequences of several lengths, one of a single token, and one that joins while the others decode."""
    monkeypatch.setattr(NOT_ITS_OWN, refuse)
    save_model(tmp_path, *FAMILIES[family])
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=1, ignore_eos=True)

    def answers() -> dict[str, list[Any]]:
        built: Any = Engine(EngineConfig(tmp_path, device="cpu", dtype="float32", num_threads=1))
        passes.append(built.runner.decoder._forward.batched)
        found: dict[str, list[Any]] = {}

        def step() -> None:
            for output in built.step():
                found.setdefault(output.request_id, []).extend(output.logprobs)

        for index, prompt in enumerate(([3, 4, 5, 6, 7], [9], [11, 12, 13])):
            built.add_request(str(index), prompt, params)
            for _ in range(2 if index else 1):
                step()
        while built.has_unfinished():
            step()
        built.close()
        return found

    passes: list[Any] = []
    in_one_pass = answers()
    monkeypatch.setattr(SequentialForward, "batch_decode", lambda self: self.missing)
    by_sequence = answers()
    assert passes[0] is not None and passes[1] is None
    for request, wanted in by_sequence.items():
        assert [each.token_id for each in in_one_pass[request]] == [
            each.token_id for each in wanted
        ]
        for each, other in zip(in_one_pass[request], wanted, strict=True):
            assert each.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_a_state_in_the_modules_is_refused(tmp_path):
    save_model(tmp_path, "RecurrentGemmaConfig", {"lru_width": 64, "head_dim": 8})
    with pytest.raises(BadInput, match="its state is in its modules") as refusal:
        adapted(tmp_path)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "options",
    [
        {"swap_space_bytes": 2**20},
        {"speculation": SpeculationConfig("ngram")},
    ],
    ids=["swap", "ngram"],
)
def test_what_does_not_go_with_a_state_is_refused(options, tmp_path):
    save_model(tmp_path, *STATES["convolutions"][:2])
    with pytest.raises(BadInput, match="constant state do not go together") as refusal:
        Engine(EngineConfig(tmp_path, device="cpu", num_threads=1, **options))
    assert "\n" not in str(refusal.value)


def test_states_are_bounded_by_memory():
    bounded = size_states(100, 4, caching=True, memory_bytes=1400)
    assert (bounded.num_sequences, bounded.num_checkpoints, bounded.num_bytes) == (4, 2, 700)
    assert size_states(100, 4, caching=True, memory_bytes=600).num_sequences == 2
    assert size_states(100, 4, caching=True, memory_bytes=100).num_slots == 1
    assert size_states(100, 4, caching=False, memory_bytes=None).num_slots == 4
    assert size_states(0, 4, caching=True, memory_bytes=100).num_bytes == 0


def changed(folder: Path, **changes) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "no_such_type"}, "not known to the installed transformers [0-9.]+.*upgrade"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}, "needs code that its checkpoint"),
        ({"model_type": "t5"}, "is no causal or image-text model"),
        ({"hidden_size": 72}, "does not load"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
        ({"quantization_config": {"quant_method": "awq"}}, "says quant_method .awq., but no tensor"),
    ],
)  # fmt: skip
def test_what_transformers_cannot_serve_is_refused(changes, complaint, tmp_path):
    save_model(tmp_path, "ArceeConfig", {})
    with pytest.raises(BadInput, match=complaint) as refusal:
        adapted(changed(tmp_path, **changes))
    assert "\n" not in str(refusal.value)


def test_a_model_whose_cached_results_differ_from_its_own_is_refused(tmp_path, monkeypatch):
    save_model(tmp_path, "BloomConfig", {"hidden_size": 64, "n_layer": 2, "n_head": 8})
    monkeypatch.setattr(TransformersModel, "_agrees", lambda *_: False)
    with pytest.raises(BadInput, match=r"does not run over a paged cache: .*the results differ"):
        adapted(tmp_path)


def test_a_family_with_an_option_that_the_decoder_lacks_goes_to_transformers(tmp_path):
    save_model(tmp_path, "GPT2Config", {
        "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": SHAPE["max_position_embeddings"],
        "scale_attn_by_inverse_layer_idx": True,
    })  # fmt: skip
    built = Engine(EngineConfig(tmp_path, dtype="float32", device="cpu", num_threads=1))
    assert isinstance(built.runner.decoder, TransformersModel)


def test_a_model_without_a_context_length_needs_one(tmp_path):
    save_model(tmp_path, *ADAPTED["bloom-alibi"][:2])
    with pytest.raises(BadInput, match="names no context length: give max_model_len"):
        Engine(EngineConfig(tmp_path, dtype="float32", device="cpu", num_threads=1))


CODE = """from transformers import Olmo2Config, Olmo2ForCausalLM
class Config(Olmo2Config):
    model_type = "of_someone"
class Model(Olmo2ForCausalLM):
    config_class = Config
"""


def test_code_of_a_checkpoint_runs_where_it_is_trusted(tmp_path):
    model = save_model(tmp_path, "Olmo2Config", {})
    (tmp_path / "modeling_own.py").write_text(CODE)
    auto_map = {"AutoConfig": "modeling_own.Config", "AutoModelForCausalLM": "modeling_own.Model"}
    changed(tmp_path, model_type="of_someone", auto_map=auto_map)
    options: dict = {"dtype": "float32", "device": "cpu", "num_threads": 1}
    with pytest.raises(BadInput, match="needs code that its checkpoint brings"):
        Engine(EngineConfig(tmp_path, **options))
    built = Engine(EngineConfig(tmp_path, trust_remote_code=True, **options))
    tokens = torch.arange(3, 40)
    with torch.no_grad():
        expected = model(tokens[None]).logits[0]
    torch.testing.assert_close(built.prompt_logits(tokens.tolist()), expected, atol=1e-4, rtol=1e-4)
