"""Every protocol against a plain loop over transformers' model, as its owners write it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.bench.quality.passage import EVALUATION_TEXT, ProtocolOptions, read_passage
from llmopt.bench.quality.scoring import score_passage
from llmopt.bench.quality.summary import Quality, summarize
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.recipes import MODELS
from transformers import AutoModelForCausalLM, AutoTokenizer

TOKENS, WINDOW, STRIDE = 1200, 96, 40
TEXT = EVALUATION_TEXT.read_text(encoding="utf-8")
Loop = Callable[[Any, Any, Any], list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(the bundled model with noise on its weights, the bundled model)."""
    plain = MODELS / "stories3M"
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * parameter.std() * torch.randn_like(parameter)
    folder = tmp_path_factory.mktemp("noisy")
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(plain).save_pretrained(folder)
    return folder, plain


@pytest.fixture(scope="module")
def engines(folders: tuple[Path, Path]) -> list[Engine]:
    # Steps of 100 tokens: windows are cut by steps, and steps are shared by windows.
    options: dict[str, Any] = {"dtype": "float32", "max_num_batched_tokens": 100, "num_threads": 1}
    return [Engine(EngineConfig(folder, **options)) for folder in folders]


@pytest.fixture(scope="module")
def oracles(folders: tuple[Path, Path]) -> list[Any]:
    return [AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32).eval() for f in folders]


def rows() -> str:
    """The text as the rows of a data set of Hugging Face, joined as in the GPTQ code."""
    lines = [line + "\n" if line.strip() else "" for line in TEXT.rstrip("\n").split("\n")]
    return "\n\n".join(lines)


def documents(model: Any, reference: Any, tokenizer: Any) -> list[Any]:
    scored, left = [], TOKENS
    for document in TEXT.split("\n\n"):
        ids = tokenizer(document.strip(), return_tensors="pt").input_ids
        for begin in range(0, ids.shape[1], WINDOW):
            window = ids[:, begin : begin + min(WINDOW, left)]
            if window.shape[1] > 1:
                left -= window.shape[1]
                p, q = reference(window).logits, model(window).logits
                scored.append((q[0, :-1], p[0, :-1], window[0, 1:]))
        if left < 2:
            break
    return scored


def gptq(model: Any, reference: Any, tokenizer: Any) -> list[Any]:
    testenc = tokenizer(rows(), return_tensors="pt").input_ids[:, :TOKENS]
    scored = []
    for i in range(testenc.numel() // WINDOW):
        batch = testenc[:, i * WINDOW : (i + 1) * WINDOW]
        p, q = reference(batch).logits, model(batch).logits
        scored.append((q[0, :-1], p[0, :-1], batch[0, 1:]))
    return scored


def strided(model: Any, reference: Any, tokenizer: Any) -> list[Any]:
    ids = tokenizer(rows(), return_tensors="pt").input_ids[:, :TOKENS]
    seq_len, previous_end, scored = ids.shape[1], 0, []
    for begin in range(0, seq_len, STRIDE):
        end = min(begin + WINDOW, seq_len)
        target_len = end - previous_end
        inputs, targets = ids[:, begin:end], ids[:, begin:end].clone()
        targets[:, :-target_len] = -100
        kept = targets[0, 1:] != -100
        p, q = reference(inputs).logits, model(inputs).logits
        scored.append((q[0, :-1][kept], p[0, :-1][kept], targets[0, 1:][kept]))
        previous_end = end
        if end == seq_len:
            break
    return scored


def llama_cpp(model: Any, reference: Any, tokenizer: Any) -> list[Any]:
    tokens = tokenizer(TEXT.rstrip("\n"), return_tensors="pt").input_ids[0][:TOKENS].clone()
    first, scored = WINDOW // 2, []
    for i in range(len(tokens) // WINDOW):
        chunk = tokens[i * WINDOW : (i + 1) * WINDOW].clone()
        chunk[0] = tokenizer.bos_token_id
        p, q = reference(chunk[None]).logits, model(chunk[None]).logits
        n_token = WINDOW - 1 - first
        scored.append(
            (q[0, first : first + n_token], p[0, first : first + n_token], chunk[first + 1 :])
        )
    return scored


def by_engine(engines: list[Engine], options: ProtocolOptions) -> Quality:
    passage = read_passage(
        engines[0].tokenizer, max_model_len=512, num_tokens=TOKENS, options=options
    )
    return summarize(
        passage, score_passage(passage, *(engine.prompt_pass for engine in engines))[0]
    )


@pytest.mark.parametrize(
    ("options", "loop"),
    [
        (ProtocolOptions("documents", WINDOW), documents),
        (ProtocolOptions("gptq", WINDOW), gptq),
        (ProtocolOptions("strided", WINDOW, STRIDE), strided),
        (ProtocolOptions("llama.cpp", WINDOW), llama_cpp),
    ],
)
def test_scores_equal_a_transformers_loop(
    engines: list[Engine], oracles: list[Any], options: ProtocolOptions, loop: Loop
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "stories3M")
    with torch.inference_mode():
        scored = loop(oracles[0], oracles[1], tokenizer)
        q, p = (torch.cat([each[i] for each in scored]).double().log_softmax(-1) for i in (0, 1))
    targets = torch.cat([each[2] for each in scored])[:, None]
    ours = by_engine(engines, options)
    nll = -q.gather(1, targets)[:, 0]
    rank, reference_rank = ((d > d.gather(1, targets)).sum(1) for d in (q, p))
    kl = (p.exp() * (p - q)).sum(1)
    assert kl.mean() > 1e-3, "the models are too close for the comparison to mean anything"
    assert ours.num_tokens == len(targets)
    assert ours.perplexity == pytest.approx(math.exp(nll.mean()), rel=1e-3)
    reference = math.exp(-p.gather(1, targets).mean())
    assert ours.reference_perplexity == pytest.approx(reference, rel=1e-3)
    assert ours.kl_nats == pytest.approx(kl.mean().item(), rel=1e-3)
    p99 = kl.quantile(0.99, interpolation="higher").item()
    assert ours.p99_kl_nats == pytest.approx(p99, rel=0.02)
    agree = (q.argmax(1) == p.argmax(1)).double().mean().item()
    assert ours.top1_agreement == pytest.approx(agree, abs=2e-3)
    moved = (rank != reference_rank).double().mean().item()
    assert ours.rank_moved == pytest.approx(moved, abs=5e-3)
