"""Prompts from a JSON-lines file, with images or without, or from a data set on the Hugging Face hub.

The hub and the ShareGPT download use the network.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...base.atomic_io import expanded
from ...base.errors import BadInput, first_line
from ...base.extras import import_extra
from ...base.json_lines import json_objects
from .sharegpt import TURNS, first_pair, turns_of
from .synthetic import IMAGE_NOTE, data_url
from .workload import Tokenizer, Workload, numbered, oversampled

DEFAULT_OUTPUT_LEN = 256
KINDS = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".webp": "image/webp",
    ".gif": "image/gif",
    ".bmp": "image/bmp",
}
SHAREGPT_REPOSITORY = "anon8231489123/ShareGPT_Vicuna_unfiltered"
SHAREGPT_FILE = "ShareGPT_V3_unfiltered_cleaned_split.json"
LENGTHS = ("output_len", "output_tokens", "output_length", "output_tokens_count", "max_tokens")
LENGTHS += ("max_completion_tokens", "max_new_tokens", "max_output_tokens")
# A key that looks like a length of the answer and is none of these is misspelt.
LENGTH_LIKE = re.compile("(?=.*(out|max|gen|compl|resp|answer))(?=.*(len|tok))", re.IGNORECASE)
PROMPTS = ("prompt", "question", "instruction", "input", "query", "text")
CONTEXTS = ("input", "context")
ANSWERS = ("output", "response", "completion", "answer", "chosen")
SHUFFLE_BUFFER = 1000
TEMPLATE_NOTE = (
    "prompts are sent as they are, to a chat endpoint as a user's message: vllm bench serve writes them into "
    "the model's chat template first, unless it has --skip-chat-template"
)

Pair = tuple[list[int], int]
"""Token ids of a prompt, and its output length."""


@dataclass(frozen=True, slots=True)
class CustomPrompt:
    """A line of the file: its images are data URLs, paths from the file's folder, or http(s) URLs."""

    prompt: str
    output_len: int | None = None
    images: tuple[str, ...] = ()


def custom_workload(
    tokenizer: Tokenizer,
    path: Path,
    *,
    num_prompts: int,
    max_model_len: int,
    output_len: int | None = None,
    seed: int = 0,
    shuffle: bool = True,
    oversample: bool = True,
) -> Workload:
    """Requests from a JSON-lines file of `{"prompt": …}` with an optional `"output_len"` and `"image_files"`.

    The output length is `output_len`, else the line's, else 256, cut to the model's context; prompts that do
    not fit are left out. Notes count both, and keys that are not read. Raises BadInput: no such file, an
    invalid line (with its number), or no prompt left.
    """
    prompts, unread = read_prompts(path)
    if shuffle:
        random.Random(seed).shuffle(prompts)
    fitted = _Fitted(tokenizer, max_model_len)
    rows: list[tuple[Pair, tuple[str, ...]]] = []
    for line in prompts:
        if len(rows) == num_prompts:
            break
        length = output_len or line.output_len or DEFAULT_OUTPUT_LEN
        if (pair := fitted.pair(line.prompt, length)) is not None:
            rows.append((pair, tuple(_sent(name, path) for name in line.images)))
    if not rows:
        raise BadInput(f"dataset {path}: every prompt is longer than the context, {max_model_len}")
    notes = fitted.notes() + unread
    if oversample:
        rows = oversampled(rows, num_prompts, seed, notes)
    items = numbered([pair for pair, _ in rows])
    if any(images for _, images in rows):
        notes.append(IMAGE_NOTE)
        items = tuple(replace(item, images=of) for item, (_, of) in zip(items, rows, strict=True))
    elif getattr(tokenizer, "chat_template", None):
        notes.append(TEMPLATE_NOTE)
    return Workload("custom", f"prompts of {path.name}", items, tuple(notes))


class _Fitted:
    """Prompts that fit the context, with their output lengths cut to it; counts both."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int) -> None:
        self._tokenizer, self._max_model_len = tokenizer, max_model_len
        self.left_out = self._cut = 0

    def pair(self, prompt: str, output_len: int) -> Pair | None:
        """Token ids and output length; None where the prompt leaves no room for a token."""
        ids = list(self._tokenizer.encode(prompt))
        room = self._max_model_len - len(ids)
        if room < 1:
            self.left_out += 1
            return None
        self._cut += output_len > room
        return ids, max(1, min(output_len, room))

    def notes(self, without: int = 0) -> list[str]:
        """Notes on prompts that were left out and lengths that were cut; `without` rows had no text."""
        notes = (
            (self.left_out, f"prompts left out: longer than the context of {self._max_model_len}"),
            (without, "rows left out: no question with text at their start"),
            (self._cut, f"output lengths cut to the context of {self._max_model_len}"),
        )
        return [f"{count} {note}" for count, note in notes if count]


def _sent(name: str, path: Path) -> str:
    """An image as it is sent: a URL unchanged, a file as a data URL."""
    if name.partition(":")[0] in ("data", "http", "https"):
        return name
    file = path.parent / expanded(name)
    if file.suffix.lower() not in KINDS:
        raise BadInput(f"dataset {path}: the image {name} is none of {', '.join(KINDS)}")
    try:
        return data_url(file.read_bytes(), KINDS[file.suffix.lower()])
    except OSError as error:
        raise BadInput(f"dataset {path}: the image {name}: {error.strerror or error}") from error


def read_prompts(path: Path) -> tuple[list[CustomPrompt], list[str]]:
    """Every line that is not blank, and a note on keys that are not read."""
    prompts: list[CustomPrompt] = []
    unread: Counter[str] = Counter()
    for where, entry in json_objects(path, "dataset"):
        if not isinstance(entry.get("prompt"), str):
            raise BadInput(f'{where}: wants an object with a text "prompt"')
        length = _output_len(entry, where)
        unread.update(entry.keys() - {"prompt", "image_files", *LENGTHS})
        images = entry.get("image_files") or []
        if not isinstance(images, list) or not all(isinstance(name, str) for name in images):
            raise BadInput(f'{where}: "image_files" is not a list of paths and URLs')
        prompts.append(CustomPrompt(entry["prompt"], length, tuple(images)))
    if not prompts:
        raise BadInput(f'dataset {path} is empty: each line is one object with a "prompt"')
    keys = ", ".join(f"{key} ({count})" for key, count in sorted(unread.items()))
    return prompts, [f"keys of rows that are not read: {keys}"] if keys else []


def _output_len(entry: Mapping[str, Any], where: str) -> int | None:
    """The output length of a row under any of its `LENGTHS` names."""
    lengths = {key: entry[key] for key in LENGTHS if entry.get(key) is not None}
    for key, length in lengths.items():
        if type(length) is not int or length < 1:
            raise BadInput(f'{where}: "{key}" is {length!r}, not a positive whole number')
    if len({*lengths.values()}) > 1:
        raise BadInput(f"{where}: {' and '.join(lengths)} differ: leave one")
    for key in entry.keys() - {*LENGTHS}:
        if LENGTH_LIKE.match(key):
            raise BadInput(
                f'{where}: "{key}" is no known key; a length of the answer is "output_len"'
            )
    return next(iter(lengths.values()), None)


def download_sharegpt() -> Path:
    """ShareGPT's usual file (640 MB), from the hub or its cache. BadInput: the download failed."""
    from huggingface_hub import hf_hub_download

    try:
        path = hf_hub_download(SHAREGPT_REPOSITORY, SHAREGPT_FILE, repo_type="dataset")
    except Exception as error:  # any network or hub failure becomes a one-line message
        raise BadInput(
            f"cannot get {SHAREGPT_FILE} from the hub's {SHAREGPT_REPOSITORY}: "
            f"{first_line(error)}; give a local file with --dataset-path"
        ) from error
    return Path(path)


def hub_rows(
    name: str, *, subset: str | None, split: str, seed: int, shuffle: bool
) -> Iterator[Mapping[str, Any]]:
    """Stream a data set's rows, shuffled through a buffer of 1,000. BadInput: package or data missing."""
    datasets = import_extra("--dataset hf", "hub", "datasets")
    try:
        rows = datasets.load_dataset(name, name=subset, split=split, streaming=True)
        if shuffle:
            rows = rows.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)
        yield from rows
    except Exception as error:  # the library raises many exception types; report one line
        raise BadInput(
            f"data set {name!r} (subset {subset or 'default'}, split {split}) cannot be read: "
            f"{first_line(error)}"
        ) from error


def hub_workload(
    tokenizer: Tokenizer,
    rows: Iterable[Mapping[str, Any]],
    *,
    source: str,
    num_prompts: int,
    max_model_len: int,
    output_len: int | None = None,
) -> Workload:
    """The first `num_prompts` rows with a prompt that fits the context.

    The prompt is the first question of a conversation with the system messages before it, or a column of
    `PROMPTS`, with those of `CONTEXTS` after it. The output length is `output_len`, else that of the row's
    response (the answer to that question, or a column of `ANSWERS`), else 256; it is cut to the context.
    Raises BadInput: no such column, or no row that fits.
    """
    fitted = _Fitted(tokenizer, max_model_len)
    pairs: list[Pair] = []
    without = 0
    for row in rows:
        prompt, answer = prompt_and_answer(row, source) or ("", None)
        if not prompt:
            without += 1
            continue
        length = output_len
        if length is None:
            length = len(tokenizer.encode(answer)) if answer else DEFAULT_OUTPUT_LEN
        if (pair := fitted.pair(prompt, length)) is not None:
            pairs.append(pair)
        if len(pairs) == num_prompts:
            break
    if not pairs:
        raise BadInput(
            f"{source}: no row gives a prompt ({fitted.left_out} longer than the context of "
            f"{max_model_len}, {without} without text)"
        )
    notes = fitted.notes(without)
    if len(pairs) < num_prompts:
        notes.append(f"{len(pairs)} of {num_prompts} prompts: the data set has no more")
    return Workload("hf", source, numbered(pairs), tuple(notes))


def prompt_and_answer(row: Mapping[str, Any], source: str) -> tuple[str, str | None] | None:
    """(prompt, response or None) of a row, None if empty. BadInput: no column for a prompt."""
    if (turns := turns_of(row)) is not None:
        return first_pair(turns)

    def texts(names: Iterable[str]) -> list[str]:
        return [text for name in names if isinstance(text := row.get(name), str) and text]

    if (column := next((name for name in PROMPTS if name in row), None)) is not None:
        about = (name for name in CONTEXTS if name != column)
        prompt, answers = texts([column]), texts(ANSWERS)
        return ("\n\n".join(prompt + texts(about)), next(iter(answers), None)) if prompt else None
    raise BadInput(
        f"{source} has the columns {', '.join(row)}: none of "
        f"{', '.join((*TURNS, *PROMPTS))} is there to take prompts from"
    )
