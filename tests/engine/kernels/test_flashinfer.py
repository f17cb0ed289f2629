"""FlashInfer behind the kernels' table, on a stand-in that follows its documented signatures and semantics."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from llmopt.engine import LLM, SamplingParams
from llmopt.engine.execution import decode_graphs
from llmopt.engine.kernels.attention import dispatch, flashinfer_plans, library_attention
from llmopt.engine.kernels.attention.batch import AttentionRule
from llmopt.engine.kernels.attention.flashinfer_plans import Shape
from llmopt.engine.kernels.attention.paged_attention import attend_sdpa
from llmopt.engine.kernels.attention.paged_tensor import E4M3_ALONE, CacheDtype, PagedTensor
from llmopt.engine.kernels.common.devices import VARIABLE, Backend
from llmopt.engine.kernels.common.dispatch import Candidate, Operation

from ...support import flashinfer_stand_in
from ...support.attention_reference import attend_reference
from ...support.attention_world import World
from ...support.flashinfer_stand_in import Log, Replayed, stand_in
from ...support.model_families import FAMILIES, save_model
from ...support.pretended_cuda.card import Card
from ...support.pretended_cuda.runtime import pretended_cuda
from ...support.pretended_cuda.world import GREEDY, SAMPLED, serve
from ...support.triton_world import DEVICE

PROMPTS = [[1] + [5 + (7 * i + 3 * j) % 60 for i in range(3 + 2 * j)] for j in range(5)]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    """FlashInfer is the stand-in, which writes to the log."""
    log = Log()
    library = Backend(stand_in(log))
    for module in (library_attention, flashinfer_plans):
        monkeypatch.setattr(module, "package", lambda name: library)
    flashinfer_plans.workspace_on.cache_clear()
    yield log
    flashinfer_plans.workspace_on.cache_clear()


def left(*_: Any) -> torch.Tensor:
    raise AssertionError("left to the other kernel")


never: Any = left


RULES = [
    AttentionRule(0.3),
    AttentionRule(0.2, window=6),
    AttentionRule(0.3, window=9, softcap=2.0),
]


@pytest.mark.parametrize("rule", RULES, ids=["full", "window", "softcap"])
def test_mixed_batches(rule: AttentionRule, log: Log) -> None:
    """Decodes and chunks in any order: one plan and one call a layer for the whole batch."""
    random = Random(0)
    for kv_heads in (1, 2, 4):
        news = [random.choice((1, 1, 2, 7)) for _ in range(random.randint(1, 5))]
        lengths = [new + random.randint(0, 30) for new in news]
        world = World(lengths, news, kv_heads=kv_heads)
        _, batch = world.batch()
        attend = library_attention.attend_flashinfer(never)
        layers = [attend(world.queries, world.keys, world.values, batch, rule) for _ in range(2)]
        expected = attend_reference(world.queries, world.keys, world.values, batch, rule)
        torch.testing.assert_close(layers, [expected] * 2, atol=1e-5, rtol=1e-5)
        kind = "prefill" if batch.spans else "decode"
        assert (log.plans, log.runs) == ([kind], [kind] * 2)
        log.plans.clear()
        log.runs.clear()


@pytest.mark.parametrize("news", [[1, 1, 1], [1, 7, 2]], ids=["decode", "mixed"])
@pytest.mark.parametrize("rule", RULES, ids=["full", "window", "softcap"])
@pytest.mark.parametrize("stored", [torch.float8_e5m2, torch.float8_e4m3fn], ids=["e5m2", "e4m3"])
def test_a_cache_without_scales_is_read_as_it_is(
    news: list[int],
    rule: AttentionRule,
    stored: torch.dtype,
    log: Log,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight bits without scales: the layout of both, so ours and theirs agree on the very same blocks."""
    monkeypatch.setenv(VARIABLE, "interpret" if DEVICE == "cpu" else "auto")
    world = World([21, 9, 33], news, kv_heads=2)
    keys, values = (PagedTensor(each.codes.to(stored)) for each in (world.keys, world.values))
    _, batch = world.batch()
    given = world.queries, keys, values, batch, rule
    theirs = library_attention.attend_flashinfer(never)(*given)
    assert log.runs == ["prefill" if batch.spans else "decode"]
    torch.testing.assert_close(theirs, attend_reference(*given), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(theirs, dispatch._attend_triton(*given), atol=2e-5, rtol=1e-4)
    exact = attend_reference(world.queries, world.keys, world.values, batch, rule)
    assert (theirs - exact).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize(
    "stored", [torch.float8_e5m2, E4M3_ALONE, torch.float8_e4m3fn, torch.bfloat16]
)
def test_who_reads_which_cache(
    stored: CacheDtype, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    for refuses in ("refuses_flash_attention", "refuses_flashinfer", "refuses_rows"):
        monkeypatch.setattr(dispatch, refuses, lambda *_: None)
    query = dispatch.AttentionKernelQuery("cuda", torch.bfloat16, 128, 128, stored=stored)
    flash, flashinfer = (
        dispatch._refuses_flash(query),
        dispatch._refuses_library(dispatch.refuses_flashinfer, query),
    )
    assert (flash is None) is (stored is torch.bfloat16)
    assert (flashinfer is None) is (stored is not torch.float8_e4m3fn)


def test_the_workspace_has_room_for_a_captured_step(log: Log) -> None:
    """Of 64 heads at 256 sequences, more than the workspace has; the graph before keeps what it reads."""
    shape = Shape(64, 64, 128, 128, 16, torch.float32, torch.float32, 1.0, None, None)
    workspace = flashinfer_plans.Workspace(torch.device("cpu"))
    least = workspace.partial
    wrappers = []
    for sequences in (1, 256):
        counts = [1] * sequences
        pages = flashinfer_plans.pages_of(counts, counts, torch.arange(256), range(sequences), 16)
        wrappers.append(workspace.captured(shape, sequences, 256))
        wrappers[-1].plan(pages, None)
    assert workspace.partial is not least and wrappers[0]._partial is least
    assert wrappers[1]._partial is workspace.partial


@pytest.mark.parametrize(("most", "runs"), [(3, ["latent"]), (2, [])])
def test_a_plan_holds_so_many_tiles_of_latents(
    most: int, runs: list[str], log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk and two decodes are a tile each; a batch of more than a plan holds is left to our kernel."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(library_attention, "MOST_LATENT_TILES", most)
    world = World([9, 4, 17], [1, 3, 1], heads=8, kv_heads=1, dims=(24, 16), in_keys=True)
    attend = library_attention.attend_flashinfer(attend_sdpa)
    attend(world.queries, world.keys, world.values, world.batch()[1], AttentionRule(0.3))
    assert log.runs == runs


@pytest.mark.parametrize("heads", [8, 20])
def test_latents(heads: int, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """Multi-head latent attention: values are the keys' first elements, of one KV head. FlashInfer's plan
    refuses heads that do not fill its tiles, such as the 20 of GLM-4.7-Flash."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    dims = {"heads": heads, "kv_heads": 1, "dims": (24, 16), "in_keys": True}
    world = World([9, 4, 17], [1, 3, 1], **dims)
    _, batch = world.batch()
    rule = AttentionRule(0.3)
    attend = library_attention.attend_flashinfer(attend_sdpa)
    got = attend(world.queries, world.keys, world.values, batch, rule)
    expected = attend_reference(world.queries, world.keys, world.values, batch, rule)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert log.runs == (["latent"] if heads == 8 else [])


def test_what_flashinfer_lacks_is_left_to_our_kernel() -> None:
    world = World([9, 4], [1, 3])
    _, batch = world.batch()
    otherwise: Any = lambda *_: world.queries  # noqa: E731
    attend = library_attention.attend_flashinfer(otherwise)
    plain = AttentionRule(1.0)
    for rule in (
        AttentionRule(1.0, sinks=torch.zeros(8)),
        AttentionRule(1.0, chunk=4),
        AttentionRule(1.0, window=4, num_sink_tokens=2),
    ):
        assert attend(world.queries, world.keys, world.values, batch, rule) is world.queries
    stored = PagedTensor.zeros(12, 8, 4, 32, torch.device("cpu"), torch.float8_e4m3fn)
    assert attend(world.queries, stored, stored, batch, plain) is world.queries
    # Values that are narrower than keys, but not a part of them.
    narrow = world.values.first_elements(16)
    assert attend(world.queries, world.keys, narrow, batch, plain) is world.queries


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        (("cuda", torch.float32, 128, 128), "it takes bfloat16 and float16"),
        (("cuda", torch.bfloat16, 96, 96), "it takes heads of 64, 128, 256"),
        (("cuda", torch.bfloat16, 192, 128), "it takes heads of 64, 128, 256"),
        (("cuda", torch.bfloat16, 128, 128), "flashinfer is not installed"),
        (("cuda", torch.bfloat16, 576, 512), "flashinfer is not installed"),
        (("cpu", torch.bfloat16, 128, 128), "it is a CUDA library"),
    ],
)
def test_it_says_why_it_does_not_serve(
    query: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    missing = Backend(reason="flashinfer is not installed")
    monkeypatch.setattr(library_attention, "package", lambda name: missing)
    refused = library_attention.refuses_flashinfer(*query)
    assert refused is not None and refused.startswith(reason)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    old = library_attention.refuses_flashinfer("cuda", torch.bfloat16, 128, 128)
    assert old is not None and "compute capability 7.5" in old


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("llama-3.1", {"decode", "prefill"}),
        ("gemma-2", {"decode", "prefill"}),
        ("deepseek-v3", {"latent"}),
    ],
)
@pytest.mark.parametrize("mode", ["captured", "eager", "async"])
def test_greedy_tokens(
    family: str,
    kinds: set[str],
    mode: str,
    log: Log,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Through the engine: plans precede each replay, and none is made in a capture."""
    save_model(tmp_path, *FAMILIES[family])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    options: dict[str, Any] = {"dtype": "float32", "block_size": 4, "max_model_len": 64}
    options |= {"max_num_seqs": 4, "device": "cpu"}

    def tokens() -> list[list[int]]:
        built = LLM(tmp_path, **options)
        return [list(result.token_ids) for result in built.generate(PROMPTS, params)]

    expected = tokens()
    monkeypatch.setattr(
        "llmopt.engine.core.build.capture_on", lambda _: lambda call: Replayed(call, log)
    )
    attend = library_attention.attend_flashinfer(attend_sdpa)
    monkeypatch.setattr(dispatch, "_attend_flashinfer", attend)
    candidates = [Candidate("flashinfer", lambda query: None, attend)]
    monkeypatch.setattr(dispatch, "PAGED_ATTENTION", Operation("paged attention", candidates))
    monkeypatch.setattr(decode_graphs, "CPU_SIZES", (1, 2, 4))
    options |= {"enforce_eager": mode == "eager", "async_scheduling": mode == "async"}
    assert tokens() == expected
    assert set(log.runs) == kinds


@pytest.mark.parametrize("stored", ["auto", "fp8_e5m2", "fp8_e4m3"])
@pytest.mark.parametrize("eager", [False, True], ids=["captured", "eager"])
def test_it_serves_without_a_fault(
    eager: bool, stored: str, log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the pretended card no plan waits for the device, copies pageable memory or is captured."""
    monkeypatch.setattr(library_attention, "HEAD_DIMS", (8, 16, 32, 64))
    save_model(tmp_path, *FAMILIES["gemma-2"])
    log.computes = False
    options: dict[str, Any] = {"num_blocks": 24, "block_size": 16, "enforce_eager": eager}
    options["kv_cache_dtype"] = stored
    served = serve(Card(), tmp_path, (SAMPLED, GREEDY), async_scheduling=True, **options)
    assert served.faults == []
    assert served.num_tokens == {"0": 5, "1": 5} and bool(served.graphs) is not eager
    # Captured steps of several tokens stay with our kernel.
    assert set(log.runs) == ({"decode", "prefill"} if eager else {"decode"})


def test_without_nvcc_it_is_dropped_with_a_line_and_another_serves(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It compiles at its first use, which is its trial."""

    def compile_kernels(*_: Any, **__: Any) -> None:
        raise RuntimeError("Could not find nvcc and default cuda_home='/usr/local/cuda' is absent")

    for wrapper in (flashinfer_stand_in.BatchDecode, flashinfer_stand_in.BatchPrefill):
        monkeypatch.setattr(wrapper, "plan", compile_kernels)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    query = dispatch.AttentionKernelQuery("cuda", torch.bfloat16, 64, 64)
    with pretended_cuda(Card()):
        chosen = [dispatch.PAGED_ATTENTION.select(query).name for _ in range(2)]
    assert "flashinfer" not in chosen and not log.runs
    (line,) = [each.getMessage() for each in caplog.records if "nvcc" in each.getMessage()]
    assert "flashinfer is dropped: it failed: RuntimeError: Could not find nvcc" in line


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def test_the_stand_in_has_the_library_s_parameters() -> None:
    """What the stand-in takes, FlashInfer takes, at the same places."""
    library = pytest.importorskip("flashinfer")
    pairs = {
        flashinfer_stand_in.BatchDecode: library.BatchDecodeWithPagedKVCacheWrapper,
        flashinfer_stand_in.BatchPrefill: library.BatchPrefillWithPagedKVCacheWrapper,
        flashinfer_stand_in.BatchMLA: library.BatchMLAPagedAttentionWrapper,
        flashinfer_stand_in.MLAPlanMetadata: library.mla.MLAPlanMetadata,
    }
    for ours, theirs in pairs.items():
        for name in ("__init__", "plan", "run", "reset_workspace_buffer", "csr"):
            if not hasattr(ours, name) or not hasattr(theirs, name):
                continue
            given, taken = parameters(getattr(ours, name)), parameters(getattr(theirs, name))
            if "kwargs" in taken:  # the decode wrapper hands them on
                taken = parameters(theirs._plan_impl)
            positional = [k for k, p in given.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
            assert set(given) <= set(taken), (theirs, name)
            assert positional == list(taken)[: len(positional)], (theirs, name)
