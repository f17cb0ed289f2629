"""Adapters over HTTP: each is a model of its own name."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from live_server import RunningServer, running
from llmopt.cli.main import main
from llmopt.engine import LLM, SamplingParams
from llmopt.engine.config import EngineConfig
from llmopt.engine.engine import Engine
from llmopt.recipes import MODELS
from lora_world import write_adapter
from transformers import AutoModelForCausalLM

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
