"""KV eviction against the papers: kept sets, logits and memory, over full attention weights of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.cli.main import main
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.cache.compaction import kept_slots
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.core.llm import LLM
from llmopt.engine.scheduling.kv_eviction import KvEviction
from llmopt.engine.server.endpoints.page import snapshot
from llmopt.engine.server.requests.metrics import ServerMetrics
from llmopt.recipes import DATA, MODELS
from transformers import AutoModelForCausalLM, AutoTokenizer

from ...support.model_families import LATENT, save_model

MODEL = MODELS / "stories3M"
BUDGET, BLOCK, PROMPT, OUTPUT = 64, 8, 150, 30
METHODS = ("snapkv", "h2o")
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    """400 tokens of held-out stories."""
    text = (DATA / "evaluation.txt").read_text()
    return AutoTokenizer.from_pretrained(MODEL)(text).input_ids[:400]


def engine(model: Any = MODEL, **options: Any) -> Engine:
    usual = {"dtype": "float32", "num_threads": 1, "block_size": BLOCK, "num_blocks": 120}
    return Engine(EngineConfig(model, **{**usual, **options}))


def evicting(method: str, **options: Any) -> Engine:
    return engine(**{"kv_budget": BUDGET, "kv_eviction": method, **options})


def outputs(built: Engine, prompts: list[list[int]], params: SamplingParams) -> dict[Any, Any]:
    """Tokens and logprobs of every completion; the scheduler's integrity is checked after each step."""
    for number, prompt in enumerate(prompts):
        built.add_request(f"r{number}", prompt, params)
    made: dict[Any, Any] = {}
    while built.has_unfinished():
        for output in built.step():
            ids, logprobs = made.setdefault((output.request_id, output.index), ([], []))
            ids += output.new_token_ids
            logprobs += [each.logprob for each in output.logprobs or ()]
        built.scheduler.check_integrity()
    return made


def ids_of(made: dict[Any, Any]) -> dict[Any, list[int]]:
    return {name: ids for name, (ids, _) in made.items()}


class PaperReference:
    """The papers' procedure, word for word: weights of the whole sequence, with a mask for what is evicted.

    `alive` are the tokens, per layer and KV head, that are not evicted. A row of the mask sees what is alive
    when its token is computed.
    """

    def __init__(self, method: str, count: int) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            MODEL, dtype=torch.float32, attn_implementation="eager"
        )
        config = self.model.config
        self.method, self.layers = method, config.num_hidden_layers
        self.heads = config.num_key_value_heads
        self.group = config.num_attention_heads // self.heads
        self.visible = (
            torch.ones(count, count).tril().bool().expand(self.layers, self.heads, -1, -1)
        )
        self.visible = self.visible.clone()
        self.alive = [[list(range(count)) for _ in range(self.heads)] for _ in range(self.layers)]
        self._layer = 0
        for index, layer in enumerate(self.model.model.layers):
            layer.self_attn.register_forward_pre_hook(self._masking(index), with_kwargs=True)

    def _masking(self, index: int) -> Any:
        def hook(_: Any, args: Any, kwargs: Any) -> Any:
            count = kwargs["hidden_states"].shape[1]
            rows = self.visible[index, :, :count, :count].repeat_interleave(self.group, 0)
            mask = torch.zeros(rows.shape).masked_fill(~rows, torch.finfo(torch.float32).min)
            return args, {**kwargs, "attention_mask": mask[None]}

        return hook

    def forward(self, ids: list[int]) -> Any:
        with torch.inference_mode():
            return self.model(torch.tensor([ids]), output_attentions=True, use_cache=False)

    def evict(self, ids: list[int]) -> None:
        """Keep `BUDGET` of the tokens `ids` that are alive."""
        attentions, end = self.forward(ids).attentions, len(ids)
        for layer, weights in enumerate(attentions):
            for head in range(self.heads):
                of_group = weights[0, head * self.group : (head + 1) * self.group]
                alive = [t for t in self.alive[layer][head] if t < end]
                if self.method == "snapkv":
                    recent = alive[-32:]
                    summed = of_group[:, -32:].sum((0, 1))
                    score = {
                        t: max(
                            float(summed[n]) for n in alive[max(0, i - 3) : i + 4] if n < end - 32
                        )
                        for i, t in enumerate(alive[:-32])
                    }
                else:
                    recent = alive[-(BUDGET // 2) :]
                    total = of_group.sum((0, 1))
                    score = {t: float(total[t]) for t in alive[: -(BUDGET // 2)]}
                best = sorted(score, key=lambda t: (-score[t], t))[: BUDGET - len(recent)]
                kept = sorted([*best, *recent])
                count = self.visible.shape[-1]
                self.alive[layer][head] = [*kept, *range(end, count)]
                gone = torch.ones(count, dtype=torch.bool)
                gone[self.alive[layer][head]] = False
                self.visible[layer, head, end:, gone] = False


@pytest.mark.parametrize("method", METHODS)
def test_kept_sets_and_logits_are_those_of_the_paper(tokens, method) -> None:
    prompt = tokens[:PROMPT]
    built = evicting(method, prefill_chunk_size=37)
    built.add_request(
        "r", prompt, SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, logprobs=1)
    )
    ids: list[int] = []
    logprobs: list[float] = []
    held: list[torch.Tensor] = []
    while built.has_unfinished():
        for output in built.step():
            ids += output.new_token_ids
            logprobs += [each.logprob for each in output.logprobs or ()]
        for request in built.scheduler.running:
            if len(ids) == 2:  # the compaction came before the step of this token
                table = torch.tensor(request.block_ids)
                held = [
                    layer.keys.read(table, torch.float32).flatten(0, 1)[:BUDGET]
                    for layer in built.runner.cache.layers
                ]
    reference = PaperReference(method, PROMPT + OUTPUT)
    points = [PROMPT]
    if method == "h2o":
        points += range(PROMPT + BLOCK, PROMPT + OUTPUT - 1, BLOCK)
    for point in points:
        reference.evict([*prompt, *ids][:point])
        if point == PROMPT:
            _check_kept(engine(), prompt, held, reference.alive)
    expected = reference.forward([*prompt, *ids]).logits[0, PROMPT - 1 : -1].log_softmax(-1)
    assert expected.argmax(-1).tolist() == ids
    of_ids = expected.gather(1, torch.tensor(ids)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(logprobs), of_ids, atol=1e-4)
    whole = ids_of(outputs(engine(), [prompt], GREEDY))["r0", 0]
    assert whole != ids, "a budget of less than half changes something"


def _check_kept(full: Engine, prompt: list[int], held: list[torch.Tensor], alive: Any) -> None:
    """Each head's slots hold the keys that the full cache has at the positions that are alive."""
    full.add_request("r", prompt, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    full.step()
    (request,) = full.scheduler.running
    table = torch.tensor(request.block_ids)
    for layer, keys in zip(full.runner.cache.layers, held, strict=True):
        whole = layer.keys.read(table, torch.float32).flatten(0, 1)
        for head in range(whole.shape[1]):
            positions = alive[layer.index][head][:BUDGET]
            assert max(positions) < PROMPT
            assert torch.allclose(keys[:, head], whole[positions, head], atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_a_budget_of_the_whole_length_changes_nothing(tokens, method) -> None:
    prompts = [tokens[:PROMPT], tokens[100:140], tokens[30:31]]
    whole = outputs(engine(), prompts, GREEDY)
    built = evicting(method, kv_budget=PROMPT + OUTPUT)
    assert outputs(built, prompts, GREEDY) == whole
    assert built.stats.num_evicted_tokens == 0


@pytest.mark.sweep(1)
@pytest.mark.parametrize("method", METHODS)
def test_tokens_do_not_depend_on_the_schedule(tokens, method) -> None:
    prompts = [tokens[:PROMPT], tokens[90:270], tokens[20:60], tokens[:PROMPT]]
    alone = {}
    for number, prompt in enumerate(prompts):
        (alone[f"r{number}", 0],) = ids_of(outputs(evicting(method), [prompt], GREEDY)).values()
    for options in (
        {},
        {"prefill_chunk_size": 23, "enforce_eager": True},
        {"async_scheduling": True, "enable_prefix_caching": False},
    ):
        built = evicting(method, **options)
        assert ids_of(outputs(built, prompts, GREEDY)) == alone, options
        assert built.stats.kv_blocks_used == 0


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("method", "length", "num_blocks"), [("snapkv", 100, 22), ("h2o", 60, 25)])
def test_a_preempted_sequence_is_compacted_again_where_it_was(
    tokens, method, length, num_blocks
) -> None:
    prompts = [tokens[begin : begin + length] for begin in (0, 90, 200)]
    alone = ids_of(outputs(evicting(method), prompts, GREEDY))
    built = evicting(method, num_blocks=num_blocks, max_num_seqs=3)
    assert ids_of(outputs(built, prompts, GREEDY)) == alone
    assert built.stats.num_preemptions > 0 and built.stats.num_evicted_tokens > 0


@pytest.mark.sweep(1)
@pytest.mark.parametrize("method", METHODS)
def test_forks_go_on_from_what_was_kept(tokens, method) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=OUTPUT, ignore_eos=True)
    forked = ids_of(outputs(evicting(method), [tokens[:PROMPT]], params))
    assert len({tuple(ids) for ids in forked.values()}) == 3
    for index in range(3):
        one = SamplingParams(seed=5 + index, max_tokens=OUTPUT, ignore_eos=True)
        alone = ids_of(outputs(evicting(method), [tokens[:PROMPT]], one))
        assert alone["r0", 0] == forked["r0", index]


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_eight_bit_caches_keep_each_heads_scales(tokens, dtype) -> None:
    rule = KvEviction("h2o", BUDGET, BLOCK)
    built = evicting("h2o", kv_cache_dtype=dtype)
    built.add_request("r", tokens[:PROMPT], GREEDY)
    built.step()
    (request,) = built.scheduler.running
    layers = built.runner.cache.layers
    evictor = built.runner.evictor
    assert evictor is not None
    (scores,) = evictor.scores.values()
    plan = built.scheduler.schedule()
    (compaction,) = plan.compactions
    before = [
        layer.values.read(torch.tensor(compaction.source), torch.float32).flatten(0, 1)
        for layer in layers
    ]
    kept = [kept_slots(rule, sums[:, :PROMPT]) for sums in scores.sums]
    with torch.inference_mode():
        evictor.compact(plan.compactions)
    for layer, values, slots in zip(layers, before, kept, strict=True):
        after = layer.values.read(torch.tensor(request.block_ids), torch.float32).flatten(0, 1)
        for head in range(len(slots)):
            assert torch.equal(after[:BUDGET, head], values[slots[head], head])


def test_memory_freed_is_what_the_budget_says(tokens) -> None:
    for method, most in (("snapkv", BUDGET + OUTPUT - 1), ("h2o", BUDGET + BLOCK)):
        built = evicting(method, max_num_batched_tokens=400)
        built.add_request("r", tokens[:PROMPT], GREEDY)
        used = []
        while built.has_unfinished():
            built.step()
            used.append(built.stats.kv_blocks_used)
        assert used[0] == BUDGET // BLOCK, "blocks are free as soon as the prompt is computed"
        assert max(used[1:]) == -(-most // BLOCK)
        assert built.stats.num_kept_tokens >= BUDGET
        assert built.stats.num_evicted_tokens >= PROMPT - BUDGET


def test_decode_steps_are_replayed_under_snapkv(tokens) -> None:
    built = evicting("snapkv")
    built.add_request("r", tokens[:PROMPT], GREEDY)
    built.step()
    replayed = built.runner.execute(built.scheduler.schedule()).replayed
    assert replayed == built.runner.decoder.is_capturable


@pytest.mark.parametrize(
    ("config", "overrides", "line"),
    [
        (
            "MistralConfig",
            {"sliding_window": 5},
            "KV eviction and sliding windows do not go together",
        ),
        ("DeepseekV2Config", {**LATENT}, "KV eviction and latent attention do not go together"),
        ("ArceeConfig", {}, "a model that runs through transformers do not go together"),
    ],
)
def test_models_that_it_does_not_go_with_are_refused(tmp_path, config, overrides, line) -> None:
    save_model(tmp_path / "model", config, overrides)
    with pytest.raises(BadInput, match=line) as refused:
        engine(tmp_path / "model", kv_budget=64)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--kv-budget", "16"], "kv_budget = 16 is below a block of 32 tokens"),
        (["--kv-budget", "0"], "kv_budget = 0: need 1 or more"),
        (["--kv-budget", "32"], "snapkv keeps its observation window"),
        (["--kv-eviction", "h2o"], "needs a budget of tokens: give kv_budget too"),
        (["--kv-budget", "64", "--kv-eviction", "h3o"], "choose snapkv or h2o"),
        (["--kv-budget", "64", "--swap-space", "1MiB"], "a swap space and KV eviction do not go"),
    ],
)
def test_a_command_refuses_it_in_one_line(capsys, words, line) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve-local", "--model", "stories260K", "--device", "cpu", "--port", "0", *words])
    printed = capsys.readouterr().err.strip()
    assert ended.value.code == 2 and line in " ".join(printed.split())


def test_the_api_has_it() -> None:
    llm = LLM(MODELS / "stories260K", kv_budget=64, kv_eviction="h2o", block_size=8)
    (result,) = llm.generate(
        [[1, *range(300, 400)]], SamplingParams(max_tokens=20, ignore_eos=True)
    )
    assert len(result.token_ids) == 20 and llm.engine.stats.num_evicted_tokens > 30


def test_the_page_says_what_was_kept(tokens) -> None:
    built, metrics = evicting("snapkv"), ServerMetrics()
    metrics.begin(built)
    built.add_request("r", tokens[:PROMPT], GREEDY)
    metrics.note_step(built.step())
    state = snapshot(built, metrics)
    (sequence,) = state["running"]
    assert (sequence["computed_tokens"], sequence["evicted_tokens"]) == (PROMPT, PROMPT - BUDGET)
    assert state["counters"]["kept_tokens"] == metrics.stats.num_kept_tokens == BUDGET
    assert state["engine"]["kv_eviction"] == f"snapkv {BUDGET}"
