"""Adapters over HTTP: each is a model of its own name."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from llmopt.cli.main import main
from llmopt.engine import LLM, SamplingParams
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.recipes import MODELS
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from ...support.live_server import RunningServer, running, slow_steps
from ...support.lora_world import write_adapter

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def adapted(tmp_path_factory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("adapters")
    base = AutoModelForCausalLM.from_pretrained(MODELS / "stories260K")
    loras = {
        name: write_adapter(root / name, base, seed=seed)
        for seed, name in enumerate(["one", "two"])
    }
    config = EngineConfig("stories260K", dtype="float32", num_threads=1, loras=loras)
    with running(Engine(config)) as it:
        yield it


def test_the_model_name_chooses_the_adapter(adapted: RunningServer) -> None:
    client = adapted.openai()
    texts = {}
    for name in ("tiny", "one", "two"):
        answer = client.completions.create(model=name, prompt=PROMPT, temperature=0, max_tokens=20)
        assert answer.model == name
        texts[name] = answer.choices[0].text
    assert len(set(texts.values())) == 3
    llm = LLM("stories260K", dtype="float32", loras=adapted.engine.config.loras)
    params = SamplingParams(temperature=0, max_tokens=20)
    offline = llm.generate([PROMPT] * 3, params, lora=[None, "one", "two"])
    assert [result.text for result in offline] == list(texts.values())
    chat = client.chat.completions.create(
        model="two", messages=[{"role": "user", "content": PROMPT}], temperature=0, max_tokens=4
    )
    assert chat.model == "two"


def test_three_adapters_at_once_give_the_numbers_of_peft(tmp_path: Path) -> None:
    """Every completion has the log-probabilities of transformers with PEFT's merged weights."""
    base = AutoModelForCausalLM.from_pretrained(MODELS / "stories3M", dtype=torch.float32).eval()
    loras = {
        name: write_adapter(tmp_path / name, base, seed=seed, rank=rank, alpha=2.0 * rank)
        for seed, (name, rank) in enumerate({"red": 4, "green": 8, "blue": 2}.items())
    }
    names = ["tiny", *loras]
    answers: dict[str, Any] = {}
    config = EngineConfig("stories3M", dtype="float32", num_threads=1, loras=loras)
    with running(Engine(config)) as server:

        def ask(name: str) -> None:
            answers[name] = server.openai().completions.create(
                model=name, prompt=PROMPT, temperature=0, max_tokens=24, logprobs=5, echo=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip

        threads = [threading.Thread(target=ask, args=(name,)) for name in names]
        with slow_steps(server):
            for thread in threads:
                thread.start()
            server.wait_for(lambda engine: engine.stats.num_running == 4)
            for thread in threads:
                thread.join()
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "stories3M")
    prompt = tokenizer(PROMPT).input_ids
    texts = set()
    for name in names:
        model: Any = copy.deepcopy(base)
        if name in loras:
            model = PeftModel.from_pretrained(model, str(loras[name])).merge_and_unload()
        with torch.no_grad():
            expected = model.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=24, eos_token_id=None,
                pad_token_id=0,
            )  # fmt: skip
            wanted = model(expected).logits[0].log_softmax(-1)
        choice = answers[name].choices[0]
        texts.add(choice.text)
        assert choice.text == tokenizer.decode(expected[0], skip_special_tokens=True)
        own = torch.tensor(choice.logprobs.token_logprobs[1:])
        chosen = wanted[:-1].gather(1, expected[0, 1:, None])[:, 0]
        torch.testing.assert_close(own, chosen, atol=1e-4, rtol=1e-4)
        for top, row in zip(choice.logprobs.top_logprobs[1:], wanted[:-1], strict=True):
            best = torch.tensor(sorted(top.values(), reverse=True)[:5])
            torch.testing.assert_close(best[0], row.max(), atol=1e-4, rtol=1e-4)
    assert len(texts) == 4


def test_adapters_are_listed_below_their_model(adapted: RunningServer) -> None:
    client = adapted.openai()
    cards = {card.id: card.model_dump() for card in client.models.list()}
    assert list(cards) == ["tiny", "one", "two"]
    assert [card["parent"] for card in cards.values()] == [None, "tiny", "tiny"]
    assert client.models.retrieve("two").model_dump()["root"] == "two"
    with pytest.raises(openai.NotFoundError, match="'tiny', 'one', 'two'"):
        client.completions.create(model="three", prompt=PROMPT)


def test_the_command_line_refuses_a_name_that_is_taken(tmp_path, capsys) -> None:
    words = ["serve-local", "stories260K", "--port", "0", "--lora", f"stories260K={tmp_path}"]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "the model itself is served by that name" in capsys.readouterr().err
