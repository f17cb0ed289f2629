"""Medusa and EAGLE heads: outputs of the published modules, published files, and broken ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.cli.main import main
from llmopt.engine import LLM, SamplingParams
from llmopt.engine.config.config import SpeculationConfig
from llmopt.engine.kernels.attention.dispatch import attention_kernels
from llmopt.engine.scheduling.draft_length import DraftLength
from llmopt.engine.scheduling.step_plan import ScheduledRow
from llmopt.engine.speculation.proposer import DraftTokens, SamplingRowOf
from llmopt.recipes import DATA, MODELS
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from ...support.heads_world import write_eagle, write_eagle3, write_medusa

PROMPTS = ["Once upon a time there was a little girl named Lily. She", "One day, Tom", "a"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


class PlainMedusa:
    """The published module, plainly."""

    def __init__(self, folder: Path, heads: int, blocks: int) -> None:
        found = load_file(folder / "medusa_lm_head.safetensors")
        self._found, self._heads, self._blocks = found, heads, blocks

    def __call__(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        scores = []
        for head in range(self._heads):
            x = hidden
            for block in range(self._blocks):
                linear = f"{head}.{block}.linear"
                x = x + functional.silu(
                    x @ self._found[f"{linear}.weight"].T + self._found[f"{linear}.bias"]
                )
            scores.append(x @ self._found[f"{head}.{self._blocks}.weight"].T)
        return scores


class PlainEagle:
    """The published module over a whole sequence, without a cache."""

    def __init__(self, folder: Path, model: Any) -> None:
        self._found = load_file(folder / "model.safetensors")
        self._model = model
        own = model.get_input_embeddings().weight.data
        self._embedding = self._found.get("embed_tokens.weight", own)
        self._config = LlamaConfig(**json.loads((folder / "config.json").read_text()))
        self._config._attn_implementation = "eager"
        self._layer: Any = LlamaDecoderLayer(self._config, 0)
        self._prepare()
        self._rotary = LlamaRotaryEmbedding(self._config)

    def _prepare(self) -> None:
        self._layer.input_layernorm = nn.Identity()
        self._load("layers.0.")

    def _load(self, prefix: str) -> None:
        own = {n.removeprefix(prefix): x for n, x in self._found.items() if n.startswith(prefix)}
        self._layer.load_state_dict(own)

    def known(self, tokens: Sequence[int]) -> torch.Tensor:
        """Hidden states that it continues from, at each token."""
        with torch.no_grad():
            return self._model.model(torch.tensor([list(tokens)])).last_hidden_state[0]

    @torch.no_grad()
    def __call__(self, tokens: Sequence[int], before: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([self._embedding[list(tokens)], before], dim=-1)
        hidden = functional.linear(joined, self._found["fc.weight"], self._found.get("fc.bias"))
        return self._layer(hidden[None], **self._past(len(tokens)))[0]

    def _past(self, size: int) -> dict[str, Any]:
        positions = torch.arange(size)[None]
        return {
            "attention_mask": torch.full((1, 1, size, size), float("-inf")).triu(1),
            "position_ids": positions,
            "position_embeddings": self._rotary(torch.zeros(1), positions),
        }

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.lm_head(hidden)


class PlainEagle3(PlainEagle):
    """The same of EAGLE-3, which fuses aux hidden states and has a vocabulary of its own."""

    def _prepare(self) -> None:
        config, size = self._config, 2 * self._config.hidden_size
        for name in ("q_proj", "k_proj", "v_proj"):
            out = getattr(self._layer.self_attn, name).out_features
            setattr(self._layer.self_attn, name, nn.Linear(size, out, bias=False))
        self._layer.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self._norm: Any = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self._norm.load_state_dict({"weight": self._found["norm.weight"]})
        self._load("midlayer.")

    def known(self, tokens: Sequence[int]) -> torch.Tensor:
        layers = len(self._model.model.layers)
        default = [2, layers // 2, layers - 3]
        aux_hidden_state_layers = getattr(self._config, "eagle_aux_hidden_state_layer_ids", default)
        with torch.no_grad():
            found = self._model.model(torch.tensor([list(tokens)]), output_hidden_states=True)
        states = torch.cat(
            [found.hidden_states[aux_layer][0] for aux_layer in aux_hidden_state_layers], dim=-1
        )
        return states @ self._found["fc.weight"].T

    @torch.no_grad()
    def __call__(self, tokens: Sequence[int], before: torch.Tensor) -> torch.Tensor:
        normed = self._layer.hidden_norm(before)
        embedded = self._layer.input_layernorm(self._embedding[list(tokens)])
        residual = normed if getattr(self._config, "norm_before_residual", False) else before
        mixed = self._layer.self_attn(
            hidden_states=torch.cat([embedded, normed], dim=-1)[None], **self._past(len(tokens))
        )
        hidden = residual + mixed[0][0]
        return hidden + self._layer.mlp(self._layer.post_attention_layernorm(hidden))

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        own = self._norm(hidden) @ self._found["lm_head.weight"].T
        scores = torch.full((512,), float("-inf"))
        scores[torch.arange(len(own)) + self._found["d2t"]] = own
        return scores


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODELS / "stories3M", dtype=torch.float32).eval()


def final_hidden(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        return model.model(torch.tensor([list(tokens)])).last_hidden_state[0]


Proposed = list[tuple[tuple[int, ...], DraftTokens]]


def watched(speculation: SpeculationConfig, **options: Any) -> tuple[Proposed, LLM]:
    """Draft tokens of an engine's proposer and their contexts, over a few prompts."""
    llm = LLM("stories3M", dtype="float32", num_threads=1, speculation=speculation, **options)
    scheduler = llm.engine.scheduler
    # The cost model would seldom draft far for so small a model.
    drafting = DraftLength(speculation.num_tokens, 0.0, speculation.width)
    scheduler.config = replace(scheduler.config, drafting=drafting)
    proposer = llm.engine.runner._proposer
    assert proposer is not None
    found: Proposed = []
    propose: Callable[..., Mapping[str, DraftTokens]] = proposer.propose

    def watch(rows: Sequence[ScheduledRow], draw: SamplingRowOf) -> Mapping[str, DraftTokens]:
        draft_tokens = propose(rows, draw)
        found.extend(
            (tuple(row.history), draft_tokens[row.sequence_id])
            for row in rows
            if row.sequence_id in draft_tokens
        )
        return draft_tokens

    proposer.propose = watch  # pyright: ignore[reportAttributeAccessIssue]
    llm.generate(PROMPTS, GREEDY)
    assert len(found) > 20
    return found, llm


@pytest.mark.parametrize("blocks", [1, 2])
def test_medusa_drafts_are_those_of_the_published_module(
    tmp_path: Path, model: Any, blocks: int
) -> None:
    folder = write_medusa(tmp_path, heads=3, blocks=blocks)
    plain = PlainMedusa(folder, 3, blocks)
    speculation = SpeculationConfig("medusa", folder, num_tokens=3, tree_width=2)
    found, _ = watched(speculation, prefill_chunk_size=5)
    for history, draft_tokens in found:
        scores = plain(final_hidden(model, history[:-1])[-1])
        for index, depth in enumerate(draft_tokens.tree.depths):
            likeliest = scores[depth - 1].topk(2).indices.tolist()
            assert draft_tokens.token_ids[index] in likeliest
        firsts = [
            t
            for t, d in zip(draft_tokens.token_ids, draft_tokens.tree.depths, strict=True)
            if d == 1
        ]
        assert int(scores[0].argmax()) in firsts


@pytest.mark.parametrize(
    ("options", "write", "head"),
    [
        ({"prefill_chunk_size": 5, "block_size": 4}, write_eagle, {}),
        ({"enable_prefix_caching": False}, write_eagle, {"bias": True, "embedding": True}),
        (
            {"prefill_chunk_size": 5, "block_size": 4},
            write_eagle3,
            {"aux_hidden_state_layers": [1, 2, 4]},
        ),
        ({}, write_eagle3, {"hidden": 128, "norms_residual": True}),
    ],
    ids=["chunks", "bias-embedding", "third", "third-narrow"],
)
def test_eagle_drafts_are_those_of_the_published_module(
    tmp_path: Path, model: Any, options: dict[str, Any], write: Any, head: dict[str, Any]
) -> None:
    """The reference recomputes the prefix for each draft token; the engine has it in a tree cache."""
    folder = write(tmp_path, **head)
    plain = (PlainEagle if write is write_eagle else PlainEagle3)(folder, model)
    found, _ = watched(SpeculationConfig("eagle", folder, num_tokens=3, tree_width=2), **options)
    assert max(draft_tokens.tree.depth for _, draft_tokens in found) > 1
    for history, draft_tokens in found:
        known = plain.known(history[:-1])
        for index, parent in enumerate(draft_tokens.tree.parents):
            before, path = known, []
            for draft_token in draft_tokens.tree.path(parent):
                after = plain([*history[1:], *path], before)
                before = torch.cat([before, after[-1:]])
                path.append(draft_tokens.token_ids[draft_token])
            after = plain([*history[1:], *path], before)
            likeliest = plain.scores(after[-1]).topk(2).indices.tolist()
            assert draft_tokens.token_ids[index] in likeliest


def test_vllms_names_and_pickled_files_give_the_same_drafts(tmp_path: Path) -> None:
    folders = [
        write_medusa(tmp_path / "a"),
        write_medusa(tmp_path / "b", file="medusa_lm_head.pt"),
    ]
    found = [watched(SpeculationConfig("medusa", folder, num_tokens=3))[0] for folder in folders]
    assert found[0] == found[1]
    for layout in ("authors", "vllm"):
        folder = write_medusa(tmp_path / layout, layout=layout, bias=False)
        found.append(watched(SpeculationConfig("medusa", folder, num_tokens=3))[0])
    assert found[2] == found[3] != found[0]
    pickled = write_eagle(tmp_path / "e", file="pytorch_model.bin")
    stored = write_eagle(tmp_path / "f")
    found = [watched(SpeculationConfig("eagle", folder))[0] for folder in (pickled, stored)]
    assert found[0] == found[1]


@pytest.mark.parametrize("write", [write_medusa, write_eagle, write_eagle3])
def test_random_heads_change_no_token(tmp_path: Path, write: Any) -> None:
    method = "medusa" if write is write_medusa else "eagle"
    params = SamplingParams(temperature=0.8, seed=5, n=2, max_tokens=20, ignore_eos=True)
    results = []
    for speculation in (None, SpeculationConfig(method, write(tmp_path), tree_width=4)):
        llm = LLM(
            "stories3M", dtype="float32", num_threads=1, block_size=4, speculation=speculation
        )
        results.append([one.completions for one in llm.generate(PROMPTS, params)])
    assert results[0] == results[1]
    tokens = llm.engine.encode(PROMPTS[0])
    plain = LLM("stories3M", dtype="float32", num_threads=1).engine
    assert torch.equal(llm.engine.prompt_logits(tokens), plain.prompt_logits(tokens))
    assert torch.equal(llm.engine.hidden_states(tokens), plain.hidden_states(tokens))


def test_memory_counts_the_heads_and_their_cache(tmp_path: Path) -> None:
    medusa = write_medusa(tmp_path / "m", heads=2)
    eagle = write_eagle(tmp_path / "e")
    sizes = {}
    for method, folder in (("medusa", medusa), ("eagle", eagle)):
        llm = LLM(
            "stories3M",
            dtype="float32",
            num_threads=1,
            num_blocks=20,
            speculation=SpeculationConfig(method, folder),
        )
        sizes[method] = llm.engine.memory
    heads = sum(x.nbytes for x in load_file(medusa / "medusa_lm_head.safetensors").values())
    layer = sum(x.nbytes for x in load_file(eagle / "model.safetensors").values())
    assert sizes["medusa"].draft_bytes == heads
    # One of six layers: the target has five.
    assert sizes["eagle"].draft_bytes == layer + sizes["eagle"].kv_cache_bytes // 5


def broken(tmp_path: Path, what: str) -> tuple[str, Path]:
    """A folder of heads with a fault, and the method that would read it."""
    folder = tmp_path / "heads"
    if what == "missing file":
        write_medusa(folder)
        (folder / "medusa_lm_head.safetensors").unlink()
    elif what == "cut off":
        write_medusa(folder)
        path = folder / "medusa_lm_head.safetensors"
        path.write_bytes(path.read_bytes()[:1000])
    elif what == "no pickle":
        write_medusa(folder, file="medusa_lm_head.pt")
        (folder / "medusa_lm_head.pt").write_bytes(b"not a pickle")
    elif what == "no config":
        write_medusa(folder)
        (folder / "config.json").unlink()
    elif what in ("hidden size", "eagle hidden size"):
        (write_medusa if what == "hidden size" else write_eagle)(folder, hidden=64)
    elif what in ("vocabulary", "eagle vocabulary"):
        (write_medusa if what == "vocabulary" else write_eagle)(folder, vocab=100)
    elif what == "medusa as eagle":
        write_medusa(folder, file="model.safetensors")
        (folder / "config.json").write_text(
            (write_eagle(tmp_path / "e") / "config.json").read_text()
        )
    elif what == "eagle as medusa":
        write_eagle(folder)
        return "medusa", folder
    else:
        changes = {
            "eagle of two layers": {"num_hidden_layers": 2},
            "eagle-3 of another size": {"target_hidden_size": 128},
            "eagle-3 of a deeper model": {"eagle_aux_hidden_state_layer_ids": [2, 16, 29]},
            "eagle-3 of other tokens": {"draft_vocab_size": 400},
        }
        write_eagle3(folder) if "-3" in what else write_eagle(folder)
        config = json.loads((folder / "config.json").read_text()) | changes[what]
        (folder / "config.json").write_text(json.dumps(config))
    return ("eagle" if "eagle" in what else "medusa"), folder


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("missing file", "has no heads: none of model.safetensors, medusa_lm_head.safetensors"),
        ("cut off", "is cut off or damaged"),
        ("no pickle", "is cut off or damaged"),
        ("no config", "is not a model: it has neither a config.json nor a .gguf file"),
        ("hidden size", "heads for a hidden size of 64; the model's is 256"),
        ("vocabulary", "heads for 100 tokens; the model has 512"),
        ("eagle hidden size", "a head for a hidden size of 64; the model's is 256"),
        ("eagle vocabulary", "a head for a vocabulary of 100; the model's is 512"),
        ("medusa as eagle", "no EAGLE head: the file has no fc.weight"),
        ("eagle as medusa", "no Medusa heads"),
        ("eagle of two layers", "it is one dense layer"),
        ("eagle-3 of another size", "a head for a hidden size of 128; the model's is 256"),
        ("eagle-3 of a deeper model", r"the layers \[2, 16, 29\]; the model has 5"),
        ("eagle-3 of other tokens", "d2t is torch.int64 of shape .300,., but .* 400 whole numbers"),
    ],
)
def test_broken_folders_are_refused_in_one_line(tmp_path: Path, what: str, words: str) -> None:
    method, folder = broken(tmp_path, what)
    with pytest.raises(BadInput, match=words) as refused:
        LLM("stories3M", num_threads=1, speculation=SpeculationConfig(method, folder))
    assert "\n" not in str(refused.value) and str(folder) in str(refused.value)


def test_the_command_line_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_medusa(tmp_path, hidden=64)
    with pytest.raises(SystemExit) as ended:
        main(["bench", "stories3M", "--speculative", "medusa", "--draft-model", str(folder)])
    assert ended.value.code == 2
    assert "the model's is 256" in capsys.readouterr().err


def fitted_heads(folder: Path, model: Any) -> None:
    """Linear heads in `folder`/medusa and /eagle, by least squares on calibration stories: what else their modules
    have is zero."""
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "stories3M")
    stories = (DATA / "calibration.txt").read_text(encoding="utf-8").split("\n\n")[:24]
    encoded = [tokenizer.encode(story)[:300] for story in stories]
    states = [final_hidden(model, tokens) for tokens in encoded]
    output = model.lm_head.weight.data

    def solved(inputs: list[torch.Tensor], wanted: list[torch.Tensor]) -> torch.Tensor:
        return torch.linalg.lstsq(torch.cat(inputs), torch.cat(wanted)).solution.T.contiguous()

    path = write_medusa(folder / "medusa", heads=2) / "medusa_lm_head.safetensors"
    tensors = {name: torch.zeros_like(tensor) for name, tensor in load_file(path).items()}
    for head in range(2):
        ahead = head + 1
        wanted = [state[ahead:] @ output.T for state in states]
        tensors[f"{head}.1.weight"] = solved([state[:-ahead] for state in states], wanted)
    save_file(tensors, path)
    path = write_eagle(folder / "eagle") / "model.safetensors"
    tensors = {name: torch.zeros_like(tensor) for name, tensor in load_file(path).items()}
    embedded = [model.get_input_embeddings().weight.data[tokens[1:]] for tokens in encoded]
    joined = [torch.cat([e, s[:-1]], -1) for e, s in zip(embedded, states, strict=True)]
    tensors["fc.weight"] = solved(joined, [state[1:] for state in states])
    save_file(tensors, path)


@pytest.mark.whole
def test_fitted_heads_predict_better_than_chance(tmp_path: Path, model: Any) -> None:
    """Far from good, but far from chance, and the same tokens as without."""
    fitted_heads(tmp_path, model)
    expected: list[list[int]] = []
    for method in (None, "medusa", "eagle"):
        speculation = None
        if method is not None:
            speculation = SpeculationConfig(method, tmp_path / method, tree_width=4)
        llm = LLM("stories3M", dtype="float32", num_threads=1, speculation=speculation)
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        tokens = [one.token_ids for one in llm.generate(PROMPTS, params)]
        expected = expected or tokens
        assert tokens == expected
        if method is not None:
            assert llm.engine.stats.num_accepted_tokens > 10


@pytest.mark.parametrize("method", ["eagle", "draft"])
def test_attention_is_chosen_for_the_cache_that_it_reads(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the head and of the draft model: a kernel that takes no 8-bit caches may not serve one."""
    chosen: list[Any] = []

    def watched(*query: Any) -> Any:
        chosen.append(query[4])
        return attention_kernels(*query)

    for module in ("speculation.eagle", "model.decoder.decoder"):
        monkeypatch.setattr(f"llmopt.engine.{module}.attention_kernels", watched)
    folder = write_eagle(tmp_path) if method == "eagle" else MODELS / "stories260K"
    options: dict[str, Any] = {"speculation": SpeculationConfig(method, folder), "num_blocks": 9}
    LLM("stories3M", device="cpu", kv_cache_dtype="int8", max_model_len=64, **options)
    assert chosen == [torch.int8] * 2
