"""KV caches narrower than the arithmetic: stored values, attention over them, and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.base.processor import VARIABLE
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.cache.kv_cache import KvCache, stored_dtype
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core import build
from llmopt.engine.core.engine import Engine
from llmopt.engine.execution.prompt_pass import plan_steps
from llmopt.engine.kernels.attention import batch as pa
from llmopt.engine.kernels.attention.paged_attention import attend_sdpa
from llmopt.engine.kernels.attention.paged_tensor import PagedTensor, quantize
from llmopt.engine.model.layers.spec import KvLayout
from llmopt.engine.scheduling.step_plan import BlockCopies
from llmopt.recipes import DATA, MODELS

from ...engine.kernels.test_kernels import RULES, attention_case
from ...support.attention_reference import attend_reference
from ...support.model_families import ADAPTED, FAMILIES, save_model
from ...support.native_paths import native_paths

MODEL = MODELS / "stories3M"
NARROW = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = Engine(EngineConfig("stories260K", num_threads=1)).tokenizer
    stories = [s for s in (DATA / "evaluation.txt").read_text().split("\n\n") if s.strip()]
    lengths = [5 + (41 * i) % 120 for i in range(10)]
    return [tokenizer(s).input_ids[:n] for s, n in zip(stories, lengths, strict=False)]


def engine(kv: str, **options: Any) -> Engine:
    given = {"dtype": "float32", "num_threads": 1, "kv_cache_dtype": kv, **options}
    return Engine(EngineConfig(given.pop("model", MODEL), **given))


def run(built: Engine, prompts: list[list[int]], n: int = 1) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=24, n=n, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        built.add_request(str(index), prompt, params)
    tokens: dict[tuple[int, int], list[int]] = {}
    while built.has_unfinished():
        for output in built.step():
            tokens.setdefault((int(output.request_id), output.index), []).extend(
                output.new_token_ids
            )
        built.scheduler.check_integrity()
    assert built.stats.kv_blocks_used == 0
    return [tokens[key] for key in sorted(tokens)]


@pytest.mark.parametrize("dtype", NARROW.values(), ids=NARROW)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_what_is_read_back_is_within_half_a_step(dtype, given):
    g = torch.Generator().manual_seed(0)
    size = torch.tensor([1e-30, 1e-3, 1.0, 300.0, 1e5])[:, None, None]
    x = (torch.randn(5, 3, 64, generator=g) * size).to(given)
    paged = PagedTensor.zeros(4, 2, 3, 64, CPU, dtype)
    slots = torch.tensor([2, 7, 3, 4, 6])
    paged.write(x, slots)
    back = paged.read(torch.arange(4), torch.float32).flatten(0, 1)
    error, largest = (back[slots] - x.float()).abs(), x.float().abs().amax(-1, keepdim=True)
    if dtype is torch.int8:
        bound = largest / 254
    else:
        bound = torch.maximum(x.float().abs() / 16, largest / 458752)
    assert (error <= bound * 1.001).all()
    assert (error.amax(-1) > 0).all()
    assert (back[[0, 1, 5]] == 0).all(), "slots that nobody wrote"


def test_a_vector_of_zeros_and_one_that_is_not_finite():
    x = torch.stack([torch.zeros(8), torch.full((8,), float("nan"))])
    for dtype in NARROW.values():
        codes, scales = quantize(x, dtype)
        back = codes.float() * scales[:, None]
        assert (back[0] == 0).all()
        assert back[1].isnan().all(), "a broken vector is not made to look sound"


def test_the_code_of_a_token_does_not_depend_on_its_neighbours():
    x = torch.randn(6, 2, 16, generator=torch.Generator().manual_seed(1))
    for dtype in NARROW.values():
        together, scales = quantize(x, dtype)
        for i in range(6):
            alone, scale = quantize(x[i : i + 1], dtype)
            assert torch.equal(alone[0].view(torch.uint8), together[i].view(torch.uint8))
            assert torch.equal(scale[0], scales[i])


@pytest.mark.parametrize("dtype", NARROW.values(), ids=NARROW)
@pytest.mark.parametrize("rule", [None, *RULES])
def test_attention_over_codes_is_attention_over_what_they_mean(dtype, rule):
    queries, keys, values, batch = attention_case(
        8, 4, 32, 4, [1, 7, 20, 9, 13, 5], [1, 7, 1, 4, 1, 2]
    )
    given = pa.AttentionRule(0.3, **RULES.get(rule, {}))
    packed_keys = PagedTensor(*quantize(keys.codes, dtype))
    packed_values = PagedTensor(*quantize(values.codes, dtype))
    everything = torch.arange(len(keys.codes))
    meant_keys = PagedTensor(packed_keys.read(everything, torch.float32))
    meant_values = PagedTensor(packed_values.read(everything, torch.float32))
    got = attend_sdpa(queries, packed_keys, packed_values, batch, given)
    wanted = attend_reference(queries, meant_keys, meant_values, batch, given)
    torch.testing.assert_close(got, wanted)
    exact = attend_reference(queries, keys, values, batch, given)
    # Quantization errors average out over many keys; the bound is a few steps of one value.
    worst = {torch.int8: 0.05, torch.float8_e4m3fn: 0.4}[dtype]
    assert 0 < (got - exact).abs().max() < worst


@pytest.mark.sweep(1)
@pytest.mark.parametrize("kv", [*NARROW, "bfloat16"])
def test_greedy_tokens_depend_on_nothing_but_the_prompt(prompts, kv):
    expected = run(engine(kv, enable_prefix_caching=False, max_num_seqs=1), prompts)
    for options in (
        {"max_num_seqs": 5},
        {"prefill_chunk_size": 7, "block_size": 8},
        {"block_size": 1, "max_num_batched_tokens": 48, "max_num_seqs": 8},
    ):
        built = engine(kv, **options)
        assert run(built, prompts) == expected
        assert run(built, prompts) == expected, "the second time with whatever is cached"
        assert built.stats.prefix_cache_hits > 200
    few = engine(kv, block_size=4, num_blocks=60, max_num_seqs=16)
    assert run(few, prompts) == expected
    assert few.stats.num_preemptions > 1, "the pool was meant to be too small"


@pytest.mark.parametrize("kv", NARROW)
def test_a_fork_copies_codes_and_scales(prompts, kv):
    prompt = prompts[2][:50]
    alone = run(engine(kv), [prompt])[0]
    assert run(engine(kv, block_size=16), [prompt], n=3) == [alone] * 3


HERE = native_paths()


@pytest.mark.sweep(1)
@pytest.mark.parametrize("path", ["off", *(name for name in HERE if name != "avx512vnni")])
def test_a_cache_wider_than_the_arithmetic_changes_nothing(prompts, monkeypatch, path):
    monkeypatch.setenv(VARIABLE, path)
    options = {"dtype": "bfloat16"}
    expected = run(engine("auto", **options), prompts[:6])
    assert run(engine("float32", **options), prompts[:6]) == expected
    assert run(engine("bfloat16", **options), prompts[:6]) == expected


def test_bfloat16_gemm_without_widening_changes_little(prompts):
    """There weights of values become bfloat16, as in torch's attention; beside a wider cache they do not."""

    def scored(kv: str) -> torch.Tensor:
        built = engine(kv, dtype="bfloat16")
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        for index, prompt in enumerate(prompts[:6]):
            built.add_request(str(index), prompt, params)
        found = []
        while built.has_unfinished():
            found += [out.prompt_logprobs for out in built.step() if out.prompt_logprobs]
        return torch.tensor([one.logprob for scores in found for one in scores if one])

    wide, own = scored("float32"), scored("auto")
    assert len(own) > 200
    # 0.013 where matrix tiles (AMX) sum the products.
    assert (wide - own).abs().mean() < 0.02
    assert (wide - own).abs().max() < 0.2


@pytest.mark.sweep(8)
@pytest.mark.parametrize("kv", [*NARROW, "bfloat16"])
@pytest.mark.parametrize(
    "family", ["deepseek-v3", "gemma-2", "gpt-oss", "gpt-2", "arcee", "bloom-alibi"]
)
def test_every_kind_of_attention_runs_over_codes(tmp_path, family, kv):
    """Latents too: their values are the first elements of their keys, under the keys' scale."""
    folder = tmp_path / family
    save_model(folder, *{**FAMILIES, **ADAPTED}[family][:2])
    tokens = [(7 * i) % 90 + 1 for i in range(40)]
    options = {
        "model": folder,
        "max_num_batched_tokens": 9,
        "max_num_seqs": 4,
        "block_size": 4,
        "max_model_len": 256,
    }
    exact = engine("auto", **options).prompt_logits(tokens)
    narrow = engine(kv, **options).prompt_logits(tokens)
    limit = {"bfloat16": 0.05, "int8": 0.15, "fp8": 0.4}[kv]
    assert 0 < (narrow - exact).norm() / exact.norm() < limit


@pytest.mark.parametrize(
    ("kv", "token_bytes"),
    [("auto", 2560), ("float32", 5120), ("int8", 1440), ("fp8", 1440)],
)
def test_memory_counts_every_byte(kv, token_bytes):
    built = engine(kv, dtype="bfloat16", block_size=16, num_blocks=10)
    assert built.memory.kv_bytes_per_token == token_bytes
    assert built.memory.kv_cache_bytes == built.stats.kv_bytes == 11 * 16 * token_bytes
    assert built.stats.kv_dtype == ("bfloat16" if kv == "auto" else kv)
    assert built.stats.kv_tokens_total == 160
    held = [part for layer in built.runner.cache.layers for part in layer.parts]
    assert sum(part.untyped_storage().nbytes() for part in held) == 11 * 16 * token_bytes
    given = engine(kv, dtype="bfloat16", block_size=16, kv_cache_memory_bytes=10**6)
    assert given.stats.kv_blocks_total == 10**6 // (16 * token_bytes)


@pytest.mark.parametrize(
    ("options", "device", "stored"),
    [
        ({}, "cpu", torch.bfloat16),
        ({"dtype": "float32"}, "cpu", torch.float32),
        ({"kv_cache_dtype": "float32"}, "cpu", torch.float32),
        ({"dtype": "float32", "kv_cache_dtype": "bfloat16"}, "cpu", torch.bfloat16),
        ({"kv_cache_dtype": "int8"}, "cpu", torch.int8),
        ({}, "mps", torch.float32),
    ],
)
def test_a_cpu_that_computes_in_float32_stores_16_bits_unless_told(options, device, stored):
    config = EngineConfig(MODEL, **options)
    assert stored_dtype(config, torch.device(device), torch.float32) is stored


def test_a_plain_start_on_a_cpu_without_bfloat16_takes_half_of_float32(monkeypatch):
    monkeypatch.setattr(build, "choose_dtype", lambda name, device: torch.float32)
    built = engine("auto", dtype="auto", block_size=16, num_blocks=10)
    assert (built.dtype, built.stats.kv_dtype) == (torch.float32, "bfloat16")
    assert built.memory.kv_bytes_per_token == 2560


def test_slots_that_hold_nothing_are_counted():
    built = engine("auto", block_size=16, num_blocks=10, max_num_batched_tokens=16)
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    built.add_request("a", list(range(3, 23)), params)
    built.step()
    stats = built.stats
    assert (stats.kv_slots_used, stats.kv_slots_unfilled) == (32, 16)
    built.step()
    built.step()
    assert (built.stats.kv_slots_used, built.stats.kv_slots_unfilled) == (32, 11)
    while built.has_unfinished():
        built.step()
    assert (built.stats.kv_slots_used, built.stats.kv_slots_unfilled) == (0, 0)


def test_a_latent_has_one_scale():
    layout = KvLayout(1, 24, 16, values_in_keys=True)
    cache = KvCache([layout], 3, 4, CPU, torch.int8)
    assert cache.num_bytes == 3 * 4 * (24 + 4)
    x = torch.randn(4, 1, 24, generator=torch.Generator().manual_seed(0))
    cache.layers[0].keys.write(x, torch.tensor([4, 5, 6, 7]))
    both = cache.layers[0]
    keys = both.keys.read(torch.tensor([1]), torch.float32)
    assert torch.equal(both.values.read(torch.tensor([1]), torch.float32), keys[..., :16])
    cache.copy(BlockCopies(within=((1, 2),)))
    assert torch.equal(both.keys.read(torch.tensor([2]), torch.float32), keys)


def test_an_unknown_type_is_refused():
    with pytest.raises(BadInput, match=r"kv_cache_dtype 'int4': choose auto, bfloat16"):
        EngineConfig(MODEL, kv_cache_dtype="int4")


@pytest.mark.parametrize("name", ["fp8_e5m2", "fp8_e4m3"])
def test_a_cache_without_scales_is_for_gpus(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMOPT_TRITON", "off")
    with pytest.raises(BadInput, match=rf"kv_cache_dtype {name} is for GPUs: .*; take fp8 or"):
        Engine(EngineConfig(MODEL, kv_cache_dtype=name, device="cpu"))


def test_a_cache_beyond_the_free_memory_is_refused():
    with pytest.raises(
        BadInput, match=r"a KV cache of 1,048,576.*: .* is free; lower kv_cache_mem"
    ):
        engine("auto", kv_cache_memory_bytes=2**50)


@pytest.mark.parametrize("kv", ["bfloat16", "int8"])
def test_a_pass_over_an_unrounded_cache_is_that_of_a_float32_cache(kv: str) -> None:
    options: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "max_model_len": 128}
    tokens = [1, *range(20, 70)]
    rounded = Engine(EngineConfig("stories260K", kv_cache_dtype=kv, **options))
    exact = Engine(EngineConfig("stories260K", kv_cache_dtype="float32", **options))
    assert exact.unrounded_prompt_pass(64) is None, "its own cache rounds nothing"
    free = rounded.scheduler.pool.num_free
    prompts = rounded.unrounded_prompt_pass(64)
    assert prompts is not None
    with prompts:
        prompts.check_fits(len(tokens))
        steps = plan_steps([len(tokens)], [prompts])
        hidden = torch.cat([prompts.hidden(step, [tokens]) for step in steps])
    assert torch.equal(prompts.logits(hidden), exact.prompt_logits(tokens))
    assert not torch.equal(rounded.prompt_logits(tokens), exact.prompt_logits(tokens))
    assert rounded.scheduler.pool.num_free == free
    with pytest.raises(BadInput, match="of memory is free"):
        rounded.unrounded_prompt_pass(2**50)
