"""Pictures through every API, on a model whose image processor is a fake: the way of the parts and their limits."""

from __future__ import annotations

import asyncio
import base64
import resource
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import anthropic
import openai
import pytest
from llmopt.base.errors import BadInput
from llmopt.engine.base.image_input import MediaLimits
from llmopt.engine.multimodal.processor import PreparedPrompt
from llmopt.engine.multimodal.remote import RemoteMedia
from llmopt.engine.server.endpoints.capabilities import NUM_FETCHES, PromptImages
from llmopt.engine.server.protocol.chat_protocol import IMAGE_NOTE
from llmopt.engine.server.protocol.server_options import ServerOptions
from PIL.Image import Image

from ...support.live_server import RunningServer, make_engine, running
from ...support.pictures import SVG, data_url, encoded, picture, png_claiming

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{{ '\\n' }}{% endfor %}"
)
"""Reads lists of parts alone, as LLaVA's and Idefics' templates do."""
ROWS = 8
"""Each picture takes as many tokens as it has rows."""
URL = data_url(encoded(picture(12, ROWS)))
IMAGE = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}
SHORT = {"max_tokens": 1, "temperature": 0}


class RowsOfPictures:
    """In the place of `ImageSupport`: a token for each row of a picture, and no embeddings."""

    reason = ""

    def __init__(self, tokenizer: Any) -> None:
        self.processor = self
        self.max_tokens: int | None = None
        self.prompts: list[tuple[str, list[Image]]] = []
        self._tokenizer = tokenizer

    def required(self) -> RowsOfPictures:
        return self

    def prepare(
        self,
        prompt: str,
        images: Sequence[Image],
        *,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
    ) -> PreparedPrompt:
        self.max_tokens = max_tokens
        if prompt.count("<image>") != len(images):
            raise BadInput(f"{prompt.count('<image>')} placeholders for {len(images)} images")
        self.prompts.append((prompt, list(images)))
        pieces = prompt.split("<image>")
        ids = self._tokenizer(pieces[0], add_special_tokens=add_special_tokens).input_ids
        for image, piece in zip(images, pieces[1:], strict=True):
            ids += [3] * image.height
            ids += self._tokenizer(piece, add_special_tokens=False).input_ids
        return PreparedPrompt(ids, ())


@pytest.fixture(scope="module")
def seeing() -> Iterator[RunningServer]:
    engine = make_engine("stories260K")
    engine.images = RowsOfPictures(engine.tokenizer)  # type: ignore[assignment]
    limits = MediaLimits(max_images=3, max_image_pixels=10_000)
    with running(engine, ServerOptions(media=limits), chat_template=TEMPLATE) as it:
        yield it


@pytest.fixture
def prompts(seeing: RunningServer) -> list[tuple[str, list[Image]]]:
    made: Any = seeing.engine.images
    made.prompts.clear()
    return made.prompts


def _post(server: RunningServer, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    with server.http() as http:
        answer = http.post(path, json=body)
        return answer.status_code, answer.json()


def _ask(server: RunningServer, *parts: Any) -> tuple[int, dict[str, Any]]:
    content = [*parts, {"type": "text", "text": "What is it?"}]
    body = {"messages": [{"role": "user", "content": content}], **SHORT}
    return _post(server, "/v1/chat/completions", body)


def test_the_openai_client_sends_pictures(
    seeing: RunningServer, prompts: list[tuple[str, list[Image]]]
) -> None:
    client = seeing.openai()
    messages: Any = [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": [IMAGE, {"type": "text", "text": "What"}, IMAGE]},
        {"role": "assistant", "content": "A fox."},
        {"role": "user", "content": "Why?"},
    ]
    answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
    ((text, images),) = prompts
    made: Any = seeing.engine.images
    assert made.max_tokens == seeing.engine.max_model_len
    assert text == "system: Look.\nuser: <image>What<image>\nassistant: A fox.\nuser: Why?\n"
    assert [image.tobytes() for image in images] == [picture(12, ROWS).tobytes()] * 2
    num_tokens = len(seeing.engine.images.processor.prepare(text, images).token_ids)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == num_tokens - 1 > 2 * ROWS  # templates write <s> themselves


def test_openai_responses_take_input_images(
    seeing: RunningServer, prompts: list[tuple[str, list[Image]]]
) -> None:
    image = {"type": "input_image", "image_url": URL, "detail": "auto"}
    turn = {"role": "user", "content": [{"type": "input_text", "text": "Look: "}, image]}
    client = seeing.openai()
    first = client.responses.create(model="tiny", input=[turn], max_output_tokens=1)  # type: ignore[list-item]
    assert first.usage is not None and first.usage.input_tokens > ROWS
    items: Any = [turn, {"role": "assistant", "content": first.output_text}]
    items.append({"role": "user", "content": "Again?"})
    client.responses.create(model="tiny", input=items, max_output_tokens=1)
    assert prompts[0][0] == "user: Look: <image>\n"
    assert prompts[1][0].startswith("user: Look: <image>\nassistant:")
    assert prompts[1][0].endswith("user: Again?\n")


def test_the_anthropic_client_sends_pictures(
    seeing: RunningServer, prompts: list[tuple[str, list[Image]]]
) -> None:
    kind, _, data = URL.removeprefix("data:").partition(";base64,")
    image = {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}
    content = [image, {"type": "text", "text": "What is it?"}]
    client = anthropic.Anthropic(base_url=seeing.url, api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": content}]
    answer = client.messages.create(model="tiny", max_tokens=1, messages=messages)
    counted = client.messages.count_tokens(model="tiny", messages=messages)
    assert prompts[0][0] == "user: <image>What is it?\n"
    taken = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    assert counted.input_tokens == taken > ROWS


def test_a_picture_in_a_tools_result_is_the_users(
    seeing: RunningServer, prompts: list[tuple[str, list[Image]]]
) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]}
    result = [{"type": "text", "text": "seen"}, {"type": "image", "source": source}]
    turns = [
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "a", "name": "see", "input": {}}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "a", "content": result}],
        },
    ]
    status, body = _post(seeing, "/v1/messages", {"messages": turns, "max_tokens": 1})
    assert status == 200, body
    assert prompts[0][0] == "assistant: \ntool: seen\nuser: <image>\n"
    call = {"type": "function_call", "call_id": "a", "name": "see", "arguments": "{}"}
    output = [{"type": "input_text", "text": "seen"}, {"type": "input_image", "image_url": URL}]
    given = {"type": "function_call_output", "call_id": "a", "output": output}
    status, body = _post(seeing, "/v1/responses", {"input": [call, given], "max_output_tokens": 1})
    assert status == 200, body
    assert prompts[1][0] == prompts[0][0]


def test_ollama_takes_pictures_before_the_text(
    seeing: RunningServer, prompts: list[tuple[str, list[Image]]]
) -> None:
    data, options = base64.b64encode(encoded(picture(), "JPEG")).decode(), {"num_predict": 1}
    chat = {"role": "user", "content": "What?", "images": [data]}
    body = {"model": "tiny", "stream": False, "options": options}
    for path, asked in (
        ("chat", {"messages": [chat]}),
        ("generate", {"prompt": "What?", "images": [data]}),
    ):
        status, answer = _post(seeing, f"/api/{path}", {**body, **asked})
        assert status == 200, answer
        assert answer["prompt_eval_count"] > ROWS
    assert [text for text, _ in prompts] == ["user: <image>What?\n"] * 2
    assert "vision" in _post(seeing, "/api/show", {"model": "tiny"})[1]["capabilities"]
    refused = {**body, "prompt": "What?", "images": [data], "raw": True}
    assert _post(seeing, "/api/generate", refused)[0] == 400


def test_tokenize_counts_the_tokens_of_pictures(seeing: RunningServer) -> None:
    message = {"role": "user", "content": [IMAGE]}
    status, body = _post(seeing, "/tokenize", {"messages": [message]})
    assert status == 200 and body["tokens"].count(3) >= ROWS


def _url(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


WHOLE = encoded(picture(60, 60))
HOSTILE = {
    "truncated": (_url(data_url(WHOLE[: len(WHOLE) // 2])), "truncated"),
    "bomb": (_url(data_url(png_claiming(50_000, 50_000))), "max-image-pixels"),
    "svg": (_url(data_url(SVG, "image/svg+xml")), "SVG"),
    "loopback": (_url("http://127.0.0.1/a.png"), "allowed-media-domains"),
    "metadata": (_url("http://169.254.169.254/latest"), "allowed-media-domains"),
    "file": (_url("file:///etc/passwd"), "data: URL"),
    "path": (_url("/etc/passwd"), "data: URL"),
    "base64": (_url("data:image/png;base64,!!!"), "base64"),
    "none": ({"type": "image_url"}, "image_url"),
    "number": (_url(7), "image_url"),
    "video": ({"type": "video_url", "video_url": {"url": URL}}, "video_url"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_media_get_a_400_of_one_line(seeing: RunningServer, name: str) -> None:
    part, reason = HOSTILE[name]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    status, body = _ask(seeing, part)
    assert status == 400 and reason in body["error"]["message"]
    assert "\n" not in body["error"]["message"]
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 64 << 10  # KiB
    assert _ask(seeing, IMAGE)[0] == 200  # it goes on


def test_pictures_are_counted(seeing: RunningServer) -> None:
    status, body = _ask(seeing, *[IMAGE] * 4)
    assert status == 400 and "4 images in a prompt: at most 3" in body["error"]["message"]


def test_a_placeholder_in_the_text_takes_no_picture(seeing: RunningServer) -> None:
    status, body = _ask(seeing, IMAGE, {"type": "text", "text": "<image>"})
    assert status == 400 and "2 placeholders for 1 images" in body["error"]["message"]


def test_a_text_model_says_that_it_takes_none(server: RunningServer) -> None:
    status, body = _ask(server, IMAGE)
    assert status == 400 and "images are not taken" in body["error"]["message"]
    assert body["error"]["code"] == "unsupported_model"
    assert str(server.engine.folder) not in body["error"]["message"]
    client = server.openai()
    with pytest.raises(openai.BadRequestError, match="a model of text alone"):
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": [IMAGE]}],  # type: ignore[list-item]
        )


def test_a_text_model_is_told_of_pictures_in_responses(server: RunningServer) -> None:
    """An agent sends the pictures of a conversation with every turn: its session goes on."""
    image = {"type": "input_image", "image_url": URL}
    turns: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "Look: "}, image]},
        {"type": "function_call", "call_id": "1", "name": "see", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [image]},
    ]
    fields: Any = {"model": "tiny", "max_output_tokens": 1}
    client = server.openai()
    found = client.responses.create(input=turns, **fields)
    assert found.usage is not None
    texts = ["Look: \n" + IMAGE_NOTE, "", "", IMAGE_NOTE]
    roles = ["user", "assistant", "tool", "user"]
    said: Any = [{"role": r, "content": text} for r, text in zip(roles, texts, strict=True)]
    told = client.chat.completions.create(messages=said, model="tiny", max_tokens=1)
    assert told.usage is not None and told.usage.prompt_tokens == found.usage.input_tokens


def test_slow_hosts_do_not_hold_pictures_that_were_sent(
    seeing: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: Any = seeing.engine.images
    host_answers, asked = threading.Event(), threading.Semaphore(0)

    def wait(*_: object) -> bytes:
        asked.release()
        assert host_answers.wait(120)
        return encoded(picture())

    async def visit() -> None:
        images = PromptImages(made, MediaLimits(max_images=NUM_FETCHES), "")
        slow = ["https://pictures.test/a.png"] * NUM_FETCHES
        waiting = asyncio.ensure_future(images.prepare("<image>" * NUM_FETCHES, slow))
        try:
            for _ in slow:
                await asyncio.to_thread(asked.acquire)
            sent = await asyncio.wait_for(images.prepare("<image>", [URL]), 120)
            assert sent.token_ids.count(3) >= ROWS
        finally:
            host_answers.set()
            await asyncio.wait([waiting])
            images.close()

    monkeypatch.setattr(RemoteMedia, "fetch", wait)
    asyncio.run(visit())
