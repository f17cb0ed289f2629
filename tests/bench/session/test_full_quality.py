"""`bench --quality-full` and the bundled tasks through the command: flips, KL by domain, without lm-eval."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from llmopt.base.errors import BadInput
from llmopt.bench.quality import domains
from llmopt.bench.quality.passage import DOMAINS
from llmopt.bench.quality.scoring import score_passage
from llmopt.bench.session.tasks import encode_pair
from llmopt.cli.bench import bench
from llmopt.cli.main import run_guarded
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.recipes import MODELS
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = MODELS / "stories3M"
NUM_ITEMS = 12


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little text and few items."""
    monkeypatch.setattr(domains, "TOKENS_PER_DOMAIN", 120)
    whole = domains.bundled_task
    monkeypatch.setattr(
        domains,
        "bundled_task",
        lambda name: replace(whole(name), items=whole(name).items[:NUM_ITEMS]),
    )


def llmopt(runs: Path, *words: str) -> int:
    """The exit code of `llmopt bench` on the bundled model."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(bench)
    common = ["stories3M", "--num-prompts", "2", "--output-len", "2", "--num-runs", "1"]
    common += ["--num-threads", "1", "--quality-tokens", "200", "--result-dir", str(runs)]
    return run_guarded(lambda: app([*common, *words], standalone_mode=False), debug=False)


@pytest.mark.usefixtures("few")
def test_a_model_beside_itself_changes_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # not importable
    tasks = ("--tasks", "cloze_stories", "--tasks-limit", str(NUM_ITEMS))
    assert llmopt(tmp_path, "--reference", "stories3M", "--quality-full", *tasks) == 0
    (folder,) = tmp_path.iterdir()
    ours = json.loads((folder / "result.json").read_text())["llmopt"]
    report = (folder / "report.md").read_text()
    quality = ours["quality"]
    flips = quality["flips"]
    assert flips["num_items"] == NUM_ITEMS and flips["count"] == 0
    assert flips["intervals"]["share"] == [0, 0]
    assert set(quality["domains"]) == set(DOMAINS)
    assert all(part["kl_nats"] == 0 for part in quality["domains"].values())
    assert quality["sure"]["kl_nats"] == 0 and quality["sure"]["num_tokens"] > 10
    assert "| Answers that change | 0.00 % | 0.00 % to 0.00 % | 12 items |" in report
    assert "| KL of code | 0.00000 |" in report
    (row,) = ours["tasks"]["metrics"]
    assert ours["tasks"]["error"] is None and ours["tasks"]["lm_eval_version"] is None
    # The task asks what the flips ask: one accuracy.
    assert row["task"] == "cloze_stories" and row["value"] == flips["reference_accuracy"] > 0.4


@pytest.mark.usefixtures("few")
@torch.inference_mode()
def test_answers_are_those_of_transformers() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    full = domains.FullPassage.of(
        tokenizer,
        lambda *pair: encode_pair(tokenizer, *pair),
        512,
        stories_only=True,
        share=False,
    )
    (task,) = full.tasks
    windows = iter(full.passage.windows[len(full.domains) :])
    right = 0
    for item in task.items:
        sums = []
        for choice in item.choices:
            window = next(windows)
            whole = tokenizer(f"{item.context} {choice}")["input_ids"]
            assert list(window.token_ids) == whole
            logprobs = model(torch.tensor([whole])).logits[0].log_softmax(-1)
            sums.append(
                sum(
                    float(logprobs[at - 1, whole[at]])
                    for at in range(window.first_scored, len(whole))
                )
            )
        right += sums.index(max(sums)) == item.answer
    assert next(windows, None) is None
    assert right > NUM_ITEMS * 0.4


@pytest.mark.usefixtures("few")
def test_options_that_share_a_window_score_as_in_their_own() -> None:
    """First tokens in place of some of the words: options of one token share, the others do not."""
    engine = Engine(EngineConfig(FOLDER, dtype="float32", device="cpu"))

    def pair(context: str, option: str) -> tuple[list[int], list[int]]:
        before, targets = encode_pair(engine.tokenizer, context, option)
        return before, targets if len(option) % 4 == 0 else targets[:1]

    found = []
    for share in (True, False):
        full = domains.FullPassage.of(engine.tokenizer, pair, 512, stories_only=True, share=share)
        assert any(window.alternatives for window in full.passage.windows) == share
        series, speed = score_passage(full.passage, engine.prompt_pass)
        # The blocks of a context are computed once, however many windows it has.
        assert speed.num_computed < 0.8 * full.passage.num_tokens
        assert len(series.needed("nll")) == full.passage.num_scored
        found.append(np.concatenate(full.log_likelihoods(series.needed("nll"))))
    np.testing.assert_allclose(*found, atol=2e-4)


def test_what_has_no_reference_or_template_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, said in (
        (["--quality-full"], "give --reference"),
        (["--tasks", "cloze_stories", "--num-fewshot", "2"], "is for lm-eval's tasks"),
    ):
        assert llmopt(tmp_path, *words) == 2
        assert said in " ".join(capsys.readouterr().err.split())


def test_a_cache_that_does_not_fit_costs_its_own_number_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise BadInput("a KV cache of 9 GiB: 1 GiB of memory is free")

    monkeypatch.setattr(Engine, "unrounded_prompt_pass", refuse)
    assert llmopt(tmp_path, "--reference", "stories3M", "--no-report") == 0
    (path,) = tmp_path.glob("*/result.json")
    quality = json.loads(path.read_text())["llmopt"]["quality"]
    assert quality["kl_nats"] == 0 and quality["kv_cache"] is None
    assert "no KL of rounding the KV cache: a KV cache of 9 GiB" in caplog.text
