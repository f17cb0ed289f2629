"""Custom prompts, with images or without, from a JSON-lines file."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path

from ...quant.base.errors import BadInput
from .image_bucket import data_url
from .random_mm import IMAGE_NOTE
from .workload import Tokenizer, Workload, numbered

DEFAULT_OUTPUT_LEN = 256
KINDS = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".webp": "image/webp",
    ".gif": "image/gif",
    ".bmp": "image/bmp",
}


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
    """Requests from a JSON-lines file of `{"prompt": …}` with an optional `"output_len"` and
    `"image_files"`.

    The output length is the line's, else `output_len`, else 256. It is cut to the model's context; a prompt
    that does not fit is left out; both are counted in the notes.

    Raises:
        BadInput: no such file, an invalid line (with its number), or no prompt left.
    """
    default = output_len if output_len is not None else DEFAULT_OUTPUT_LEN
    prompts = read_prompts(path)
    if shuffle:
        random.Random(seed).shuffle(prompts)
    pairs: list[tuple[list[int], int]] = []
    images: list[tuple[str, ...]] = []
    too_long = cut = 0
    for line in prompts:
        if len(pairs) == num_prompts:
            break
        ids = list(tokenizer.encode(line.prompt))
        max_output_len = max_model_len - len(ids)
        if max_output_len < 1:
            too_long += 1
            continue
        length = line.output_len or default
        cut += length > max_output_len
        pairs.append((ids, min(length, max_output_len)))
        images.append(tuple(_sent(name, path) for name in line.images))
    if not pairs:
        raise BadInput(f"dataset {path}: every prompt is longer than the context, {max_model_len}")
    notes = []
    if too_long:
        notes.append(f"{too_long} prompts left out: longer than the context of {max_model_len}")
    if cut:
        notes.append(f"{cut} output lengths cut to the context of {max_model_len}")
    if len(pairs) < num_prompts and oversample:
        missing = num_prompts - len(pairs)
        notes.append(f"{missing} of {num_prompts} prompts are repeats: the file has too few")
        repeats = random.Random(seed).choices(range(len(pairs)), k=missing)
        pairs += [pairs[index] for index in repeats]
        images += [images[index] for index in repeats]
    items = numbered(pairs)
    if any(images):
        notes.append(IMAGE_NOTE)
        items = tuple(replace(item, images=of) for item, of in zip(items, images, strict=True))
    return Workload("custom", f"prompts of {path.name}", items, tuple(notes))


def _sent(name: str, path: Path) -> str:
    """An image as it is sent: a URL as it is, a file as a data URL."""
    if name.partition(":")[0] in ("data", "http", "https"):
        return name
    file = path.parent / Path(name).expanduser()
    if file.suffix.lower() not in KINDS:
        raise BadInput(f"dataset {path}: the image {name} is none of {', '.join(KINDS)}")
    try:
        return data_url(file.read_bytes(), KINDS[file.suffix.lower()])
    except OSError as error:
        raise BadInput(f"dataset {path}: the image {name}: {error.strerror or error}") from error


def read_prompts(path: Path) -> list[CustomPrompt]:
    """Every line that is not blank."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, IsADirectoryError) as error:
        raise BadInput(f"dataset {path} is not a file") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"dataset {path} is not UTF-8 text: {error.reason}") from error
    prompts: list[CustomPrompt] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"dataset {path}, line {number}"
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise BadInput(f"{where}: not JSON ({error.msg}); each line is one object") from error
        if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
            raise BadInput(f'{where}: wants an object with a text "prompt"')
        length = entry.get("output_len")
        if length is not None and (type(length) is not int or length < 1):
            raise BadInput(f'{where}: "output_len" is {length!r}, not a positive whole number')
        images = entry.get("image_files") or []
        if not isinstance(images, list) or not all(isinstance(name, str) for name in images):
            raise BadInput(f'{where}: "image_files" is not a list of paths and URLs')
        prompts.append(CustomPrompt(entry["prompt"], length, tuple(images)))
    if not prompts:
        raise BadInput(f'dataset {path} is empty: each line is one object with a "prompt"')
    return prompts
