"""Pictures to a served image-text model: the tokens that the engine gives offline, for every client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.core.llm import LLM

from ...support.image_models import IMAGE_FAMILIES, picture, save_image_model
from ...support.live_server import RunningServer, running
from ...support.pictures import data_url, encoded
from ...support.releases import skip_without_torchvision

FAMILY = IMAGE_FAMILIES["smolvlm"]
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}"
    "<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %} {% endfor %}assistant:"
)
NUM_TOKENS = 8
URL = data_url(encoded(picture(1)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    skip_without_torchvision("smolvlm")
    path = tmp_path_factory.mktemp("served-images")
    save_image_model(path, FAMILY)
    return path


@pytest.fixture(scope="module")
def expected(folder: Any) -> tuple[str, int]:
    """The text and the number of prompt tokens of the engine offline."""
    llm = LLM(str(folder), dtype="float32", num_threads=1)
    text = "user: <image>What is it? assistant:"
    token_ids = llm.engine.tokenizer(text, add_special_tokens=False).input_ids
    prompt: Any = {"prompt_token_ids": token_ids, "images": [picture(1)]}
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    (result,) = llm.generate([prompt], params)
    return result.completions[0].text, len(result.prompt_token_ids)


@pytest.fixture(scope="module")
def served(folder: Any) -> Iterator[RunningServer]:
    engine = Engine(EngineConfig(model=str(folder), dtype="float32", num_threads=1))
    with running(engine, chat_template=TEMPLATE) as it:
        yield it


def test_openai(served: RunningServer, expected: tuple[str, int]) -> None:
    image = {"type": "image_url", "image_url": {"url": URL}}
    content: Any = [image, {"type": "text", "text": "What is it?"}]
    for _ in range(2):  # the second from the prefix cache
        answer = served.openai().chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": content}],
            max_tokens=NUM_TOKENS,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        assert answer.usage is not None
        assert (answer.choices[0].message.content, answer.usage.prompt_tokens) == expected


def test_anthropic(served: RunningServer, expected: tuple[str, int]) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]}
    content: Any = [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]
    client = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)
    answer = client.messages.create(
        model="tiny",
        max_tokens=NUM_TOKENS,
        messages=[{"role": "user", "content": content}],
        extra_body={"temperature": 0, "ignore_eos": True},
    )
    taken = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    text = "".join(block.text for block in answer.content if block.type == "text")
    assert expected[0].startswith(text) and text and taken == expected[1]


def test_other_pictures_and_texts_beside_them(
    served: RunningServer, expected: tuple[str, int]
) -> None:
    client = served.openai()
    texts = set()
    for seed in (2, 3):
        image = {"type": "image_url", "image_url": {"url": data_url(encoded(picture(seed)))}}
        content: Any = [image, {"type": "text", "text": "What is it?"}]
        answer = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": content}],
            max_tokens=NUM_TOKENS,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        texts.add(answer.choices[0].message.content)
    assert len({*texts, expected[0]}) == 3
    plain = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Who is it?"}], max_tokens=2
    )
    assert plain.usage is not None and plain.usage.completion_tokens >= 1
    served.wait_until_idle()
