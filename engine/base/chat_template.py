"""Chat templates: the text of a conversation, by the model's own template or by a plain one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...base.errors import BadInput

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}\n"
    "{% endfor %}Assistant:"
)
"""Chat template for models without one: a line a message, `User: Hello`, then `Assistant:`."""

Message = Mapping[str, Any]


def render_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    options: Mapping[str, Any] | None = None,
    *,
    template: str | None = None,
) -> str:
    """Render a conversation by `template` or the model's, with a generation prompt; BadInput: it refuses."""
    if template is None and not tokenizer.chat_template:
        template = PLAIN_TEMPLATE
    fixed = {"chat_template": template, "tokenize": False}
    try:
        return tokenizer.apply_chat_template(
            [*messages], **{"add_generation_prompt": True, **(options or {}), **fixed}
        )
    except Exception as error:
        # A template may raise anything; its input is only the caller's messages.
        raise BadInput(f"messages: the model's chat template refuses them: {error}") from error


def renders_text(tokenizer: Any) -> bool:
    """True if the chat template takes the content of a message as a text, not as a list of parts alone."""
    probe = "probe"
    try:
        turns = [{"role": "user", "content": probe}]
        return probe in tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # a template may raise anything
        return False


def images_of(message: Message) -> list[Any]:
    """URLs, paths or pictures among a message's parts. BadInput: no message, or another kind of part."""
    if not isinstance(message, Mapping) or "role" not in message:
        raise BadInput(f"messages: {message!r} has no role: give role and content")
    content = message.get("content")
    if content is not None and not isinstance(content, str | list):
        raise BadInput(f"messages: content {content!r}: give a text, or a list of parts")
    if not isinstance(content, list):
        return []
    return [source for part in content if (source := _image(part)) is not None]


def _image(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return None
    named = part.get(kind) if kind in ("image", "image_url") else None
    if isinstance(named, Mapping):
        named = named.get("url")
    if named is None:
        raise BadInput(
            f"messages: a part of type {kind!r}: give text, image (a picture, a path or a data URL) or "
            "image_url"
        )
    return named


def for_template(message: Message, *, as_parts: bool) -> dict[str, Any]:
    """The message as templates read it: its content one text, or a list in which an image is only a place."""
    content = message.get("content") or ""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    if as_parts:
        shown = [part if part["type"] == "text" else {"type": "image"} for part in parts]
    else:
        shown = "\n".join(part["text"] for part in parts)
    # Few templates know OpenAI's newer name for the role.
    role = "system" if message["role"] == "developer" else message["role"]
    return {**message, "role": role, "content": shown}
