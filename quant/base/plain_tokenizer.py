"""A tokenizer that its tokenizer.json, or a GGUF file, decides alone: by `tokenizers`, without transformers.

Importing transformers takes half a second of every start; it answers chat templates, batches and saving, over
the same backend, when asked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_UNUSED = 10**30
"""Length limit of transformers' tokenizer, which warns beyond it: callers check lengths."""


class PlainTokenizer:
    """Text to ids and back, as `PreTrainedTokenizerFast`; `special` texts by name, `whole` makes theirs.
    With `renders_bos` a rendered chat begins with BOS, whatever the template has."""

    clean_up_tokenization_spaces = False

    def __init__(
        self,
        backend: Any,
        special: Mapping[str, str],
        chat_template: str | dict[str, str] | None,
        whole: Callable[[], Any],
        *,
        renders_bos: bool = False,
    ) -> None:
        self.backend_tokenizer, self._special = backend, dict(special)
        self._chat_template = chat_template
        self._make_whole, self._whole = whole, None
        self.renders_bos = renders_bos

    @property
    def whole(self) -> Any:
        if self._whole is None:
            self._whole = quiet(self._make_whole())
            self._whole.chat_template = self._chat_template
        return self._whole

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        return self._chat_template

    @chat_template.setter
    def chat_template(self, template: str | dict[str, str] | None) -> None:
        self._chat_template = template
        if self._whole is not None:
            self._whole.chat_template = template

    def encode(self, text: str, add_special_tokens: bool = True, **options: Any) -> list[int]:
        options.pop("verbose", None)
        if options or not isinstance(text, str):
            return self.whole.encode(text, add_special_tokens=add_special_tokens, **options)
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(
        self, token_ids: Sequence[int], skip_special_tokens: bool = False, **options: Any
    ) -> str:
        if options or not isinstance(token_ids, list):
            return self.whole.decode(token_ids, skip_special_tokens=skip_special_tokens, **options)
        return self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab()

    @property
    def eos_token_id(self) -> int | None:
        return self._id("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._id("bos_token")

    def _id(self, name: str) -> int | None:
        text = self._special.get(name)
        return None if text is None else self.backend_tokenizer.token_to_id(text)

    def apply_chat_template(self, *arguments: Any, **options: Any) -> Any:
        rendered = self.whole.apply_chat_template(*arguments, **options)
        if not (self.renders_bos and self._chat_template and isinstance(rendered, str)):
            return rendered
        bos = self._special["bos_token"]
        return rendered if rendered.startswith(bos) else bos + rendered

    def save_pretrained(self, folder: Path | str) -> None:
        """Write the tokenizer, with BOS in a template that leaves it to the tokenizer."""
        template = self._chat_template
        if isinstance(template, dict):
            self.whole.chat_template = {
                name: self._with_bos(text) for name, text in template.items()
            }
        elif template:
            self.whole.chat_template = self._with_bos(template)
        self.whole.save_pretrained(folder)
        self.whole.chat_template = template

    def _with_bos(self, template: str) -> str:
        is_there = "bos_token" in template or self._special.get("bos_token", "") in template
        return f"{{{{ bos_token }}}}{template}" if self.renders_bos and not is_there else template

    def __call__(self, *texts: Any, **options: Any) -> Any:
        return self.whole(*texts, **options)

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and pickling look for methods before there is a backend
            raise AttributeError(name)
        return getattr(self.whole, name)


def quiet(tokenizer: Any) -> Any:
    """A transformers tokenizer that neither warns of lengths nor changes what it decodes."""
    tokenizer.model_max_length = _UNUSED
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


def processor_template(folder: Path) -> Any:
    """The chat template of a folder, for a tokenizer that has none: a processor's (Mistral Small 3.1), or the
    one next to a GGUF file."""
    if (file := folder / "chat_template.jinja").is_file():
        return file.read_text(encoding="utf-8")
    for name in ("chat_template.json", "processor_config.json", "tokenizer_config.json"):
        file = folder / name
        content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        template = content.get("chat_template")
        if isinstance(template, list):
            template = {named["name"]: named["template"] for named in template}
        if template:
            return template
    return None


_IGNORED = """
tokenizer_class model_max_length clean_up_tokenization_spaces legacy name_or_path backend is_local
local_files_only chat_template padding_side model_input_names use_default_system_prompt
add_bos_token add_eos_token
"""
"""Keys of tokenizer_config.json without effect: tokenizer.json decides, whatever `add_bos_token` says."""


def plain_tokenizer(
    folder: Path, declared: Mapping[str, Any], whole: Callable[[], Any]
) -> PlainTokenizer | None:
    """The tokenizer of a folder, or None where its tokenizer_config.json adds to its tokenizer.json."""
    from tokenizers import Tokenizer

    ignored = {*_IGNORED.split(), "added_tokens_decoder"}
    named = {key for key in declared if key.endswith("_token")} - ignored
    if {*declared} - named - ignored:
        return None
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    added = backend.get_added_tokens_decoder()
    for index, listed in declared.get("added_tokens_decoder", {}).items():
        token = added.get(int(index))
        if token is None or any(getattr(token, key) != value for key, value in listed.items()):
            return None
    tokens = {key: declared[key] for key in named}
    texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in tokens.items()}
    special = {key: text for key, text in texts.items() if text is not None}
    if {*special.values()} - {token.content for token in added.values()}:
        return None
    if backend.truncation or backend.padding:
        return None
    file = folder / "chat_template.jinja"
    template = declared.get("chat_template")
    if file.is_file():
        template = file.read_text(encoding="utf-8")
    if not isinstance(template, str | None) or (folder / "additional_chat_templates").is_dir():
        return None
    return PlainTokenizer(backend, special, template, whole)
