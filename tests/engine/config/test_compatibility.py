"""Every pair of features runs, in sets of up to five that cover all pairs, or is refused at start with its line in
docs/measured/feature-pairs.md."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.engine import LLM, SamplingParams
from llmopt.engine.config.compatibility import (
    ALTERNATIVES,
    FEATURES,
    REFUSALS,
    refusal_line,
    refuse,
)
from llmopt.engine.config.config import EngineConfig, SpeculationConfig
from llmopt.quant.kinds.integer.scheme import IntScheme
from llmopt.recipes import MODELS

from ...support.heads_world import write_eagle, write_medusa
from ...support.lora_world import write_adapter
from ...support.model_families import LATENT, save_model
from ...support.quantized_world import write_checkpoint

ROOT = Path(__file__).parents[3]
PROMPTS = [[1, 403, 407, 261, 403, 407, 261], [1, 403, 407, 261, 403, 407, 300, 301]]

ENGINE: dict[str, dict[str, Any]] = {
    "chunks": {"prefill_chunk_size": 3},
    "no-prefix-cache": {"enable_prefix_caching": False},
    "policy": {"scheduling_policy": "shortest-prefill"},
    "overlap": {"async_scheduling": True},
    "eager": {"enforce_eager": True},
    "swap": {"swap_space_bytes": 2**20},
    "kv-fp8": {"kv_cache_dtype": "fp8"},
    "kv-int8": {"kv_cache_dtype": "int8"},
    "ngram": {"speculation": SpeculationConfig("ngram", ngram_min=1)},
    "draft": {"speculation": SpeculationConfig("draft", MODELS / "stories260K")},
    "medusa": {"speculation": SpeculationConfig("medusa", "the checkpoint's")},
    "eagle": {"speculation": SpeculationConfig("eagle", "the checkpoint's")},
    "rejection": {"speculation": SpeculationConfig("ngram", ngram_min=1, acceptance="rejection")},
    "streams": {"window": 6, "attention_sinks": 2},
    "kv-budget": {"kv_budget": 4, "kv_eviction": "h2o"},
    "lora": {"loras": {"own": "the checkpoint's"}},
    "tensor-parallel": {"tensor_parallel_size": 2},
    "activations-8": {"cpu_activations": 8},
}
CHECKPOINT = ("windows", "latents", "quantized", "transformers", "states")
REQUEST = ("completions", "mask", "prompt-logprobs")
MODELS_OF_FEATURES = {
    *(
        frozenset({*names.split(), *more})
        for more in ((), ("quantized",))
        for names in ("", "windows", "latents", "transformers", "states")
    ),
    *(
        frozenset(names.split())
        for names in ("transformers states", "states windows", "transformers windows")
    ),
}
"""Features of a checkpoint that one model of these tests has together."""
# Two of a checkpoint's features that no model of these tests has both of.
SEPARATE = [frozenset({"latents", other}) for other in ("windows", "transformers", "states")]
# A change of these alone leaves every greedy token what it was.
LOSSLESS = {
    *("chunks", "no-prefix-cache", "policy", "overlap", "eager", "swap", "prompt-logprobs"),
    *("ngram", "draft", "medusa", "eagle", "rejection"),
}
# A process per tensor-parallel shard takes seconds to start: these share a few engines.
DIVIDED = (
    {"chunks", "policy", "overlap", "swap", "kv-int8", "ngram", "streams", "lora"},
    {"no-prefix-cache", "kv-fp8", "draft", "rejection", "activations-8", "quantized", "windows"},
    {"medusa", "eager"},
    {"eagle"},
)


class FirstHalf:
    """A token mask that suppresses ids from 256 on."""

    def allowed(self, prompt: Any, output: Any) -> torch.Tensor:
        return torch.arange(512) < 256


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[frozenset[str], Path]:
    """A small model for every set of features that a checkpoint brings, with an adapter and heads beside it."""
    root = tmp_path_factory.mktemp("checkpoints")
    window = {"sliding_window": 5, "intermediate_size": 128}
    found: dict[frozenset[str], Path] = {}

    def write_beside(folder: Path, model: Any) -> None:
        write_adapter(folder / "adapter", model, ("q_proj", "down_proj"))
        write_medusa(folder / "medusa", hidden=64)
        write_eagle(folder / "eagle", hidden=64)

    def add(names: tuple[str, ...], config: str, overrides: dict[str, Any]) -> Any:
        folder = root / "-".join(("model", *names))
        model = save_model(folder, config, overrides)
        write_beside(folder, model)
        found[frozenset(names)] = folder
        return model

    def quantize(names: tuple[str, ...], model: Any) -> None:
        folder = root / "-".join(("quantized", *names))
        scheme = IntScheme(bits=4, group_size=32, symmetric=True)
        write_checkpoint(folder, model, "compressed-tensors", scheme)
        write_beside(folder, model)
        found[frozenset((*names, "quantized"))] = folder

    quantize((), add((), "LlamaConfig", {"intermediate_size": 128}))
    quantize(("windows",), add(("windows",), "MistralConfig", window))
    latents = {**LATENT, "kv_lora_rank": 32, "q_lora_rank": None, "first_k_dense_replace": 3}
    latents |= {"intermediate_size": 128}
    quantize(("latents",), add(("latents",), "DeepseekV2Config", latents))
    quantize(("transformers",), add(("transformers",), "ArceeConfig", {"intermediate_size": 128}))
    states: dict[str, Any] = {"layer_types": ["conv", "full_attention", "conv"]}
    states |= {"intermediate_size": 128, "block_auto_adjust_ff_dim": False}
    quantize(("states",), add(("states",), "Lfm2Config", states))
    add(("transformers", "states"), "Lfm3Config", {"layer_types": states["layer_types"]})
    mixed = {"layer_types": ["conv", "sliding_attention", "full_attention"], "sliding_window": 5}
    add(("states", "windows"), "Lfm3Config", mixed)
    add(("transformers", "windows"), "Starcoder2Config", window)
    assert set(found) == MODELS_OF_FEATURES
    return found


@pytest.fixture(scope="module")
def engines(checkpoints) -> Any:
    """The engine with some features, made once."""
    made: dict[frozenset[str], LLM] = {}

    def open_with(names: frozenset[str]) -> LLM:
        own = names - set(REQUEST)
        if own not in made:
            folder = checkpoints[own & set(CHECKPOINT)]
            options: dict[str, Any] = {}
            for name in own - set(CHECKPOINT):
                options |= ENGINE[name]
            if method := own & {"ngram", "draft", "medusa", "eagle"}:
                (method,) = method
                asked = ENGINE[method]["speculation"]
                if "rejection" in own:
                    asked = replace(asked, acceptance="rejection")
                if method in ("medusa", "eagle"):
                    asked = replace(asked, draft_model=folder / method)
                options["speculation"] = asked
            if "lora" in own:
                options["loras"] = {"own": folder / "adapter"}
            made[own] = LLM(
                folder, dtype="float32", num_threads=1, block_size=4, num_blocks=64, **options
            )
        return made[own]

    return open_with


def tokens(llm: LLM, names: frozenset[str]) -> list[list[int]]:
    """Greedy tokens of the first completions under the features of `names` that a request has."""
    lora = "own" if "lora" in names else None
    options: dict[str, Any] = {"n": 2, "best_of": 3} if "completions" in names else {}
    options |= {"token_mask": FirstHalf()} if "mask" in names else {}
    options |= {"prompt_logprobs": 1} if "prompt-logprobs" in names else {}
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, **options)
    results = llm.generate(PROMPTS, params, lora=lora)
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert len(result.completions) == params.n
        assert (result.prompt_logprobs is None) == ("prompt-logprobs" not in names)
        assert len(result.token_ids) == 6 and len(prompt) == len(result.prompt_token_ids)
        assert "mask" not in names or max(result.token_ids) < 256
    return [result.token_ids for result in results]


def go_together(names: frozenset[str]) -> bool:
    """True if these features can be on at once, in a model that these tests have."""
    pairs = [frozenset(pair) for pair in combinations(names, 2)]
    refused = any(pair in REFUSALS or pair in ALTERNATIVES for pair in pairs)
    return not refused and names & set(CHECKPOINT) in MODELS_OF_FEATURES


def covering_array(names: Sequence[str], most: int = 5) -> list[frozenset[str]]:
    """Sets of at most `most` features in which every pair that can be on at once is, greedily."""
    left = [pair for pair in map(frozenset, combinations(names, 2)) if go_together(pair)]
    rows: list[frozenset[str]] = []
    while left:
        row = left[0]
        while len(row) < most:
            larger = [
                row | {name} for name in names if name not in row and go_together(row | {name})
            ]
            best = max(larger, key=lambda row: sum(pair <= row for pair in left), default=row)
            if sum(pair <= best for pair in left) == sum(pair <= row for pair in left):
                break
            row = best
        rows.append(row)
        left = [pair for pair in left if not pair <= row]
    return rows


ELSEWHERE = frozenset({"tensor-parallel", "images"})
"""Divided models have the next test; images have tests/engine/multimodal/test_image_features.py."""
ROWS = covering_array([name for name in FEATURES if name not in ELSEWHERE])


@pytest.mark.parametrize("names", ROWS, ids=lambda names: " x ".join(sorted(names)))
def test_features_run_together(engines, names):
    lossless = names & LOSSLESS
    together = tokens(engines(names), names)
    assert together == tokens(engines(names - lossless), names - lossless)
    llm = engines(names)
    llm.engine.scheduler.check_integrity()
    assert llm.engine.stats.kv_blocks_used == 0


def test_every_pair_runs_or_is_refused_with_its_line(engines):
    for pair in map(frozenset, combinations(FEATURES, 2)):
        if pair not in REFUSALS:
            is_exempt = pair in ALTERNATIVES or pair in SEPARATE or pair & ELSEWHERE
            assert is_exempt or any(pair <= row for row in ROWS)
        elif "images" not in pair and pair not in SEPARATE and pair not in ALTERNATIVES:
            with pytest.raises(BadInput) as refused:
                engines(pair)
            assert str(refused.value).startswith(f"{refusal_line(pair)}: {REFUSALS[pair]}")
            assert "\n" not in str(refused.value)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("others", DIVIDED, ids=["plain", "quantized", "medusa", "eagle"])
def test_a_divided_model_goes_with_everything(engines, others):
    alone, divided = frozenset(others), frozenset({"tensor-parallel", *others})
    llm = engines(divided)
    try:
        for own in (frozenset[str](), *(frozenset({name}) for name in REQUEST)):
            found = tokens(llm, divided | own)
            # Each shard quantizes its own slice of a token to 8 bits, unlike a single process.
            if "activations-8" not in others:
                assert found == tokens(engines(alone), alone | own)
    finally:
        llm.engine.close()


def test_every_feature_meets_a_divided_model():
    met = {"tensor-parallel", *set().union(*DIVIDED), *REQUEST}
    # Models of transformers' modules: tests/engine/tensor_parallel/test_divided_modules.py; of latents:
    # tests/engine/tensor_parallel/test_tensor_parallel.py.
    refused = {other for pair in REFUSALS if "tensor-parallel" in pair for other in pair}
    # Images: tests/engine/multimodal/test_image_features.py.
    assert met | refused == set(FEATURES) - {"transformers", "latents", "images"}


def test_what_a_config_asks_for_is_what_turns_a_feature_on():
    for name, options in ENGINE.items():
        of_draft_tokens = {"ngram"} if name == "rejection" else set()
        assert EngineConfig(**options).features == {name, *of_draft_tokens}
    assert EngineConfig().features == frozenset()
    assert set(FEATURES) == {*ENGINE, *CHECKPOINT, *REQUEST, "images"}


def test_more_than_two_are_refused_for_the_pair_that_does_not_go():
    with pytest.raises(
        BadInput, match=r"transformers do not go together: window and.*\(model_type x\)"
    ):
        refuse(["streams", "chunks", "transformers"], "model_type x")
    refuse(["tensor-parallel", "chunks", "windows"])


def test_the_matrix_of_the_docs_is_the_present_one():
    tool = ROOT / "tools" / "feature_table.py"
    found = subprocess.run([sys.executable, tool, "--check"], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


def test_a_stale_table_is_noticed(tmp_path):
    (tmp_path / "tools").mkdir()
    for name in ("feature_table.py", "document_part.py"):
        shutil.copy(ROOT / "tools" / name, tmp_path / "tools")
    page = Path("docs", "measured", "feature-pairs.md")
    present = (ROOT / page).read_text(encoding="utf-8")
    (tmp_path / page).parent.mkdir(parents=True)
    (tmp_path / page).write_text(present.replace("** prompt lookup |", "** prompt look-up |"))
    words = [sys.executable, tmp_path / "tools" / "feature_table.py"]
    stale = subprocess.run([*words, "--check"], capture_output=True, text=True)
    assert stale.returncode == 1 and "not the present one" in stale.stderr
    assert subprocess.run(words).returncode == 0
    assert (tmp_path / page).read_text(encoding="utf-8") == present
