"""Texts of any size: what is refused before it is tokenized, and what waits for what."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.engine.server.endpoints.capabilities import SizedPool
from llmopt.engine.server.endpoints.tokenization import (
    BREAK,
    CHUNK_CHARACTERS,
    SpecialTexts,
    Tokenization,
    num_characters,
)
from llmopt.engine.server.protocol.chat_protocol import ChatMessage, Tool
from llmopt.quant.source.load_processor import load_tokenizer
from llmopt.recipes import MODELS

LONG = "A word and another. " * 10_000


def make(max_model_len: int | None = 4096) -> Tokenization:
    return Tokenization(load_tokenizer(MODELS / "stories3M"), max_model_len=max_model_len)


def message(**fields: Any) -> ChatMessage:
    return ChatMessage.model_validate({"role": "user", "content": "hi", **fields})


def tool(**parameters: Any) -> Tool:
    function = {"name": "f", "parameters": parameters}
    return Tool.model_validate({"type": "function", "function": function})


@pytest.mark.parametrize(
    "conversation",
    [
        ([message(content="<|" * 100_000)], []),
        ([message(), message(role="assistant", reasoning_content="x" * 200_000)], []),
        ([message()], [tool(description="x" * 200_000)]),
        ([message()], [tool(enum=list(range(200_000)))]),
    ],
)
def test_a_conversation_is_refused_before_its_text_is_looked_at(
    conversation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = make(1000)
    monkeypatch.setattr(text, "_render_chat", lambda *_, **__: pytest.fail("it was rendered"))
    with pytest.raises(BadInput, match="exceed the context length"):
        asyncio.run(text.encode_chat(*conversation))
    text.close()


def test_a_text_of_too_many_tokens_is_not_tokenized_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    text, encoded = make(20_000), []
    real = text._for_long.backend_tokenizer

    class Backend:
        def encode_batch(self, texts: list[str]) -> Any:
            encoded.extend(texts)
            return real.encode_batch(texts)

        def no_truncation(self) -> None:
            real.no_truncation()

    monkeypatch.setattr(text._for_long, "backend_tokenizer", Backend())
    monkeypatch.setattr(text, "_longest_token", 1 << 30)
    with pytest.raises(BadInput, match="prompt tokens exceed the context length of 20000"):
        asyncio.run(text.encode([LONG * 2]))
    assert 1 <= len(encoded) <= 3 and max(map(len, encoded)) <= CHUNK_CHARACTERS
    text.close()


def test_a_text_that_is_truncated_is_cut_first(monkeypatch: pytest.MonkeyPatch) -> None:
    text, whole = make(), make(None)
    lengths: list[int] = []
    checked = text._bounded

    def bounded(tokenizer: Any, value: str, max_tokens: int | None) -> str:
        lengths.append(len(shown := checked(tokenizer, value, max_tokens)))
        return shown

    monkeypatch.setattr(text, "_bounded", bounded)
    monkeypatch.setattr(text, "_longest_token", 1 << 30)
    cut = asyncio.run(text.encode([LONG], max_tokens=100))
    assert cut == [asyncio.run(whole.encode([LONG]))[0][:100]]
    assert lengths == [CHUNK_CHARACTERS]
    for tokenization in (text, whole):
        tokenization.close()


def test_special_texts_are_broken_however_they_overlap() -> None:
    tokenizer = load_tokenizer(MODELS / "stories3M").whole
    tokenizer.add_special_tokens({"additional_special_tokens": ["====", "<|a|>", BREAK * 2]})
    guard = SpecialTexts(tokenizer)
    for text in ("=" * 11, "<|a|>" * 3, "<|<|a|>a|>"):
        broken = guard.broken(text)
        assert broken.replace(BREAK, "") == text
        assert not any(special in broken for special in ("====", "<|a|>"))


def test_characters_of_values() -> None:
    assert num_characters({"ab": ["c", 1, None, {"d": "ef"}]}) == 8
    assert num_characters(tool(enum=["abc"]).function) == num_characters(
        ["f", None, None, {"enum": ["abc"]}]
    )


def test_short_work_does_not_wait_and_the_smallest_is_next() -> None:
    pool, may_end, done = SizedPool("test", 10), threading.Event(), list[int]()

    def large(size: int) -> int:
        may_end.wait(60)
        done.append(size)
        return size

    async def main() -> None:
        waiting = []
        for size in (50, 40, 30, 20):
            waiting.append(asyncio.ensure_future(pool.run(size, lambda size=size: large(size))))
            await asyncio.sleep(0)
        assert await pool.run(10, lambda: "short") == "short"
        waiting[2].cancel()
        await asyncio.wait({waiting[2]})
        may_end.set()
        assert [await task for task in (waiting[0], waiting[3], waiting[1])] == [50, 20, 40]

    asyncio.run(main())
    pool.close()
    assert done == [50, 20, 40]


def test_work_that_fails_or_is_left_makes_room() -> None:
    pool, may_end = SizedPool("test", 0), threading.Event()

    def failing() -> None:
        raise BadInput("no")

    async def main() -> None:
        with pytest.raises(BadInput):
            await pool.run(1, failing)
        first = asyncio.ensure_future(pool.run(1, lambda: may_end.wait(60)))
        second = asyncio.ensure_future(pool.run(1, lambda: 2))
        await asyncio.sleep(0)
        first.cancel()
        may_end.set()
        assert await second == 2

    asyncio.run(main())
    pool.close()
