"""The engine's host code on a pretended GPU: every family and every mode, without a fault that a GPU would show."""

from __future__ import annotations

import asyncio
import gc
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from llmopt.base.errors import BadInput
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.config.config import SpeculationConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.execution.step_loop import StepRecorder
from llmopt.engine.execution.token_graphs import TOKEN_SIZES
from llmopt.engine.model.adapter.adapter import TransformersModel
from llmopt.engine.server.protocol.server_options import ServerOptions
from llmopt.engine.server.requests.loop import EngineLoop
from llmopt.quant.base.scheme import Activations
from llmopt.quant.families.spec_parts import NotCovered
from llmopt.quant.kinds.codebook.scheme import CodebookScheme
from llmopt.quant.kinds.fp8.scheme import FloatScheme
from llmopt.quant.kinds.integer.scheme import IntScheme
from llmopt.quant.kinds.lookup.scheme import LookupScheme
from llmopt.quant.kinds.trellis.scheme import TrellisScheme

from ...support.heads_world import write_eagle, write_eagle3, write_medusa
from ...support.lora_world import write_adapter
from ...support.model_families import ADAPTED, FAMILIES, save_model
from ...support.pretended_cuda.card import Card
from ...support.pretended_cuda.world import GREEDY, SAMPLED, engine_on, serve
from ...support.quantized_world import random_model, write_checkpoint

MOST_LAUNCHES = {
    "llama-3.1": 53, "qwen3": 53, "gemma-2": 169, "gemma-3n": 466, "gpt-oss": 131, "qwen3-moe": 79,
    "llama-4": 178, "deepseek-v3": 158, "gpt-2": 68, "falcon-40b": 88, "phi-4-longrope-partial": 53,
    "glm-4-moe": 106, "olmo-2": 70, "hunyuan-moe": 179, "gemma-4-moe": 183, "ministral-3": 107,
    "lfm-2-moe": 58, "granite-4": 85, "qwen3.5-moe": 87,
    "nemotron-h-moe": 67,
}  # fmt: skip
"""Kernels of a captured decode step, of three layers and more; what makes them fewer lowers these."""
RECURRENT = ("lfm-2-moe", "granite-4", "qwen3.5-moe", "nemotron-h-moe")
"""Families of whose steps those of one token a sequence are captured: a recurrence runs over several."""
EVERY = tuple(FAMILIES) if os.environ.get("LLMOPT_EVERY_FAMILY") else tuple(MOST_LAUNCHES)
GRAPHS = 2 + len(TOKEN_SIZES)
"""Decode steps of one and two sequences, and steps of several tokens."""
FEW: dict[str, Any] = {"num_blocks": 24, "block_size": 16}
"""A cache that is given: nothing is profiled."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_model(folder, *FAMILIES["llama-3.1"])
    return folder


@pytest.mark.sweep(5)
@pytest.mark.parametrize("family", EVERY)
def test_every_family_serves_without_a_fault(family: str, tmp_path: Path) -> None:
    save_model(tmp_path, *FAMILIES[family])
    served = serve(Card(), tmp_path, **FEW)
    assert served.faults == []
    assert served.num_tokens == {"0": 5, "1": 5}
    if family in MOST_LAUNCHES:
        assert served.graphs == (2 if family in RECURRENT else GRAPHS)
        assert sum(served.captured.values()) <= MOST_LAUNCHES[family], served.captured


@pytest.fixture
def adapted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A model that runs through transformers; its check of logits passes, since no kernel computes any."""
    monkeypatch.setattr(TransformersModel, "_agrees", lambda *_: True)
    save_model(tmp_path / "model", *ADAPTED["arcee"][:2])
    return tmp_path / "model"


def test_models_of_transformers_are_captured(adapted: Path) -> None:
    served = serve(Card(), adapted, **FEW)
    assert served.faults == [] and served.graphs == 2
    assert served.num_tokens == {"0": 5, "1": 5}
    eager = serve(Card(), adapted, **FEW, enforce_eager=True)
    replayed = served.card.launches("step").total()
    assert served.captured.total() <= 156 and replayed < eager.card.launches("step").total()


@pytest.mark.whole
@pytest.mark.parametrize("family", ["qwen3-next", "qwen3.5", "lfm-2"])
def test_hybrids_of_transformers_are_captured(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where their modules run, not the decoder that has these families too; a step is one replay."""

    def refuse(_: dict[str, Any]) -> None:
        raise NotCovered("it is to run through transformers")

    monkeypatch.setattr(TransformersModel, "_agrees", lambda *_: True)
    monkeypatch.setattr("llmopt.engine.model.adapter.open.model_spec", refuse)
    config, overrides = FAMILIES[family]
    # Transformers' grouped experts ask a GPU for what the pretended card's CPU lacks (integers' `histc`).
    dense = {"mlp_only_layers": [0, 1, 2]} if "mlp_only_layers" in overrides else {}
    save_model(tmp_path, config, overrides | dense)
    served = serve(Card(), tmp_path, **FEW)
    assert served.faults == [] and served.graphs == 2
    assert served.num_tokens == {"0": 5, "1": 5}
    assert sum(entry.kind == "replay" for entry in served.card.log if entry.phase == "step")


@pytest.mark.whole
def test_adapters_of_models_of_transformers_are_captured(adapted: Path, tmp_path: Path) -> None:
    lora = write_adapter(
        tmp_path / "lora", transformers.AutoModelForCausalLM.from_pretrained(adapted)
    )
    served = serve(Card(), adapted, adapters=("lora", None), loras={"lora": lora}, **FEW)
    assert served.faults == [] and served.graphs == 4
    assert served.num_tokens == {"0": 5, "1": 5}


@pytest.mark.whole
def test_a_module_that_waits_for_the_device_leaves_its_model_eager(
    adapted: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers.models.arcee.modeling_arcee import ArceeMLP

    forward = ArceeMLP.forward

    def waiting(self: ArceeMLP, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x if float(x.sum()) else -x)

    monkeypatch.setattr(ArceeMLP, "forward", waiting)
    served = serve(Card(), adapted, **FEW)
    assert served.graphs == 0 and served.num_tokens == {"0": 5, "1": 5}
    assert "decode steps run without graphs, as capturing them failed: " in caplog.text


MODES: dict[str, tuple[dict[str, Any], tuple[SamplingParams, ...]]] = {
    "async": ({"async_scheduling": True}, (SAMPLED, GREEDY)),
    "eager": ({"enforce_eager": True}, (SAMPLED, GREEDY)),
    "chunked prefill": ({"prefill_chunk_size": 4}, (SAMPLED, GREEDY)),
    "int8 cache": ({"kv_cache_dtype": "int8"}, (SAMPLED, GREEDY)),
    "fp8 cache": ({"kv_cache_dtype": "fp8"}, (SAMPLED, GREEDY)),
    "fp8 cache without scales": ({"kv_cache_dtype": "fp8_e4m3"}, (SAMPLED, GREEDY)),
    "e5m2 cache": ({"kv_cache_dtype": "fp8_e5m2"}, (SAMPLED, GREEDY)),
    "draft tokens of an n-gram": (
        {"speculation": SpeculationConfig("ngram", ngram_min=1)}, (GREEDY, SAMPLED),
    ),
    "rejection of an n-gram": (
        {"speculation": SpeculationConfig("ngram", ngram_min=1, acceptance="rejection")}, (GREEDY, SAMPLED),
    ),
    "draft model": ({"speculation": SpeculationConfig("draft", "llama")}, (GREEDY, SAMPLED)),
    "forks": ({"max_num_seqs": 4}, (SamplingParams(temperature=0.8, n=3, max_tokens=5, ignore_eos=True),)),
    "swap": (
        {"num_blocks": 9, "block_size": 4, "swap_space_bytes": 2**22},
        (SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),) * 2,
    ),
    "penalties": (
        {},
        (SamplingParams(repetition_penalty=1.2, presence_penalty=0.4, max_tokens=5, ignore_eos=True),) * 2,
    ),
    "logprobs": ({}, (SamplingParams(logprobs=3, max_tokens=5, ignore_eos=True), GREEDY)),
    "prompt logprobs": ({}, (SamplingParams(prompt_logprobs=2, max_tokens=5, ignore_eos=True), GREEDY)),
}  # fmt: skip


class EvenTokens:
    """A mask of the even tokens, packed or boolean."""

    def __init__(self, *, packed: bool) -> None:
        self._mask = torch.full((2,), 0x55555555, dtype=torch.int32)
        if not packed:
            self._mask = torch.arange(64) % 2 == 0

    def allowed(self, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
        return self._mask


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "boolean"])
def test_rows_with_logits_processors_are_sampled_without_a_fault(packed: bool, llama: Path) -> None:
    """They go row by row: masks, bias, penalties and noise of each reach the device by themselves."""
    row = replace(
        SAMPLED, logits_processors=(lambda tokens, scores: scores * 2,), logit_bias={4: 1.0},
        token_mask=EvenTokens(packed=packed), repetition_penalty=1.1, presence_penalty=0.3,
        min_tokens=3, stop_token_ids=(6,),
    )  # fmt: skip
    served = serve(Card(), llama, (row, replace(row, temperature=0.0), GREEDY), **FEW)
    assert served.faults == []
    assert served.num_tokens == {"0": 5, "1": 5, "2": 5}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_serves_without_a_fault(mode: str, llama: Path) -> None:
    options, params = MODES[mode]
    options = dict(FEW) | options
    if mode == "draft model":
        options["speculation"] = SpeculationConfig("draft", llama)
    served = serve(Card(), llama, params, **options)
    assert served.faults == []
    assert all(count >= 5 for count in served.num_tokens.values())


def test_adapters_are_replayed_without_a_fault(tmp_path: Path) -> None:
    """Graphs with adapters beside those without; a mix, and one that is loaded while another is served."""
    base = save_model(tmp_path / "base", *FAMILIES["llama-3.1"])
    first, later = (write_adapter(tmp_path / f"{i}", base, seed=i) for i in range(2))
    card, params = Card(), SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    options = {"loras": {"first": first}, "max_loras": 2, "max_num_seqs": 3, **FEW}
    with engine_on(card, tmp_path / "base", **options) as engine:
        assert card.captures == 2 * (GRAPHS + 1)
        engine.recorder = StepRecorder(engine.scheduler)
        with card.during("step"):
            for lora in ("first", None, "later"):
                if lora == "later":
                    engine.load_lora(lora, later)
                engine.add_request(str(lora), [1, 2, 3], params, lora=lora)
                engine.step()
            while engine.has_unfinished():
                engine.step()
        assert all(step.replayed for step in engine.recorder.steps)
    loading = ("engine/model/layers/lora.py", "engine/execution/lora_manager.py")
    assert [fault for fault in card.faults() if not any(way in fault for way in loading)] == []


HEADS: dict[str, Callable[[Path, int, int], Path]] = {
    "medusa": write_medusa,
    "eagle": lambda folder, *sizes: write_eagle(folder, *sizes, heads=4, kv_heads=2),
    "eagle-3": lambda folder, hidden, vocab: write_eagle3(
        folder, 64, vocab, read=hidden, aux_hidden_state_layers=[0, 1, 2]
    ),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("tree_width", [1, 2], ids=["chain", "tree"])
@pytest.mark.parametrize("heads", HEADS)
def test_draft_heads_serve_without_a_fault(
    heads: str, tree_width: int, llama: Path, tmp_path: Path
) -> None:
    sizes = json.loads((llama / "config.json").read_text())
    folder = HEADS[heads](tmp_path, sizes["hidden_size"], sizes["vocab_size"])
    method = heads.partition("-")[0]
    speculation = SpeculationConfig(method, folder, num_tokens=4, tree_width=tree_width)
    served = serve(Card(), llama, (GREEDY, SAMPLED), speculation=speculation, **FEW)
    assert served.faults == []
    assert all(count >= 5 for count in served.num_tokens.values())


WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
QUANTIZED: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "int4": ("compressed-tensors", IntScheme(4, 128, True), WIDE),
    "fp8": ("compressed-tensors", FloatScheme("channel", Activations("fp8")), WIDE),
    "nf4": ("bitsandbytes", CodebookScheme("nf4"), WIDE),
    "trellis": ("exl3", TrellisScheme(3), WIDE | {"num_key_value_heads": 8}),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_models_serve_without_a_fault(name: str, tmp_path: Path) -> None:
    format_name, scheme, shape = QUANTIZED[name]
    write_checkpoint(tmp_path, random_model(**shape), format_name, scheme)
    served = serve(Card(), tmp_path, **FEW)
    assert served.faults == [] and served.graphs == GRAPHS
    used = {"_code_gemm", "_transform"} if name == "trellis" else {"_gemm"}
    assert used <= set(served.captured)


def test_a_quantized_head_is_served_packed_behind_the_captured_step(tmp_path: Path) -> None:
    format_name, scheme, shape = QUANTIZED["int4"]
    write_checkpoint(tmp_path, random_model(**shape), format_name, scheme, head=True)
    card = Card()
    with engine_on(card, tmp_path, **FEW) as engine:
        engine.add_request("0", [1, 2, 3], GREEDY)
        engine.step()
        with card.during("decode"):
            engine.step()
    launched = card.launches("decode")
    assert launched["_gemm"] == 1 and card.faults(phases=("decode",)) == []
    assert not [name for name in launched if name in ("aten.mm", "aten.addmm", "aten.linear")]


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("format_name", "scheme", "shape"),
    [
        ("squeezellm", LookupScheme(4, 0.01), {}),
        (
            "bitsandbytes",
            CodebookScheme("nf4"),
            {"hidden_size": 72, "num_attention_heads": 6, "num_key_value_heads": 2},
        ),
    ],
)
def test_what_cannot_be_captured_is_served_eagerly_and_told(
    format_name: str,
    scheme: Any,
    shape: dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Sparse outliers and shapes that no kernel packs: torch's fallbacks wait for the device."""
    write_checkpoint(tmp_path, random_model(**shape), format_name, scheme)
    served = serve(Card(), tmp_path, **FEW)
    assert served.num_tokens == {"0": 5, "1": 5}
    if served.graphs == 0:
        (line,) = [
            record.getMessage() for record in caplog.records if "graphs" in record.getMessage()
        ]
        assert line.startswith("decode steps run without graphs, as capturing them failed: ")
        assert "\n" not in line


def test_a_second_card_is_the_current_one_of_the_thread_that_serves(llama: Path) -> None:
    card = Card(count=2)
    served = serve(card, llama, device="cuda:1", **FEW)
    assert served.faults == [] and served.num_tokens == {"0": 5, "1": 5}
    assert card.held[0] == 0


def test_the_servers_thread_has_the_device_of_its_engine(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new thread begins with cuda:0; the server's steps run on one of its own."""
    card = Card(count=2)
    # Torch's dispatch modes are a thread's own, so that this one has no pretended operations.
    monkeypatch.setattr("llmopt.engine.server.requests.loop._warm_up", lambda engine: None)

    async def device_of_thread(engine: Engine) -> int:
        loop = EngineLoop(engine, ServerOptions())
        loop.start()
        try:
            await loop.is_warm.wait()
            assert loop.unavailable is None
            return await loop.run(lambda _: card.current)
        finally:
            loop.stop()

    with engine_on(card, llama, device="cuda:1", **FEW) as engine:
        assert asyncio.run(device_of_thread(engine)) == 1


def test_a_card_that_is_not_there_is_named(llama: Path) -> None:
    with pytest.raises(BadInput, match=r"'cuda:1': there are 1 CUDA devices, cuda:0 to cuda:0"):
        serve(Card(), llama, device="cuda:1")


def test_an_fp8_cache_is_refused_where_the_card_has_no_fp8(llama: Path) -> None:
    a100 = Card(name="NVIDIA A100", capability=(8, 0), shared_bytes=163 << 10)
    with pytest.raises(BadInput, match=r"kv_cache_dtype fp8: a GPU .* 8\.0 has no FP8; take int8"):
        serve(a100, llama, kv_cache_dtype="fp8")
    assert serve(a100, llama, kv_cache_dtype="int8", **FEW).faults == []


def test_the_memory_profile_covers_what_serving_takes(llama: Path) -> None:
    """Weights, graphs, split-KV buffers and prompt logprobs: nothing exceeds the share that may be used."""
    card = Card(memory_bytes=48 << 20)
    params = SamplingParams(prompt_logprobs=2, max_tokens=4, ignore_eos=True)
    options: dict[str, Any] = {
        "max_num_seqs": 8,
        "max_model_len": 256,
        "max_num_batched_tokens": 512,
    }
    with engine_on(card, llama, **options, gpu_memory_utilization=0.5) as engine:
        for index in range(8):
            engine.add_request(str(index), [1 + index] * 200, params)
        card.peak[0] = card.held[0]
        while engine.has_unfinished():
            engine.step()
    assert card.peak[0] <= 0.5 * card.memory_bytes


def test_captured_steps_hold_no_logits(tmp_path: Path) -> None:
    """Whatever the sizes, after steps of all of them: of the vocabulary the card holds weights, and the logits
    of the row that was sampled last."""
    held = []
    for vocab in (512, 4096):
        folder, card = tmp_path / str(vocab), Card()
        format_name, scheme, shape = QUANTIZED["int4"]
        write_checkpoint(folder, random_model(vocab_size=vocab, **shape), format_name, scheme)
        with engine_on(card, folder, max_num_seqs=4, **FEW) as engine:
            for index in range(4):
                engine.add_request(str(index), [1 + index], SAMPLED if index % 2 else GREEDY)
                engine.step()
            while engine.has_unfinished():
                engine.step()
            gc.collect()
            held.append(card.held[0])
    embedding_and_head = 2 * WIDE["hidden_size"] * torch.bfloat16.itemsize
    logits = torch.float32.itemsize
    assert held[1] - held[0] <= (embedding_and_head + logits) * (4096 - 512)


def test_kernels_that_compute_nonsense_are_dropped_and_torch_serves(
    llama: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The pretended card runs no Triton kernel: against its reference, each is wrong."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    card = Card()
    served = serve(card, llama, trials=True, **FEW)
    assert served.num_tokens == {"0": 5, "1": 5}
    assert card.launches("step")["triton"] == 0
    dropped = [record.getMessage() for record in caplog.records if "dropped" in record.getMessage()]
    assert {line.partition(" for ")[0] for line in dropped} >= {
        "norm", "paged attention", "rotation and cache write", "silu gate", "sampling",
    }  # fmt: skip
    caplog.clear()
    assert serve(Card(), llama, trials=True, **FEW).num_tokens == served.num_tokens
    assert not [record for record in caplog.records if "dropped" in record.getMessage()]
