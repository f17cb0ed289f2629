"""Image-text pairs: rows of a `.jsonl` or `.json` file with `text` or `messages`, and paths of images.

LLaVA's rows, `{"image": "a.jpg", "conversations": […]}`, are such rows too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...recipes import DATA
from ..base.errors import BadInput, first_line
from .sources import Document, document_of, plain_text

if TYPE_CHECKING:
    from PIL.Image import Image

PICTURES = DATA / "pictures" / "pairs.jsonl"
MARK = "<image>"  # where an image goes in a text; LLaVA's word for it


@dataclass(frozen=True, slots=True)
class Pair:
    """One row with images.

    Attributes:
        document: its text or conversation, with `<image>` for each image that is placed in it.
        images: paths; those that the text does not place come before it.
        where: file and line, for messages.
    """

    document: Document
    images: tuple[Path, ...]
    where: str

    def opened(self) -> list[Image]:
        """The images in RGB.

        Raises:
            BadInput: one is missing, or no picture that Pillow reads.
        """
        from PIL import Image

        pictures = []
        for path in self.images:
            try:
                with Image.open(path) as picture:
                    pictures.append(picture.convert("RGB"))
            except FileNotFoundError as error:
                raise BadInput(f"{self.where}: there is no image {path}") from error
            except Exception as error:  # Pillow's decoders raise whatever they meet
                raise BadInput(f"{self.where}: {path} is no image: {first_line(error)}") from error
        return pictures

    def messages(self) -> list[dict[str, Any]]:
        """A conversation whose turns hold parts of type `image` and `text`, as chat templates take them."""
        turns = self.document
        if isinstance(turns, str):
            turns = [{"role": "user", "content": turns}]
        left = len(self.images) - plain_text(self.document).count(MARK)
        messages: list[dict[str, Any]] = []
        for turn in turns:
            here = left if turn["role"] == "user" else 0
            left -= here
            pieces = turn["content"].split(MARK)
            parts: list[dict[str, str]] = [{"type": "image"}] * here
            for number, piece in enumerate(pieces):
                parts += [{"type": "image"}] * (number > 0)
                parts += [{"type": "text", "text": piece}] if piece else []
            messages.append({"role": turn["role"], "content": parts})
        return messages


def read_pairs(source: str | Path) -> tuple[list[Pair], list[Document]] | None:
    """The rows with images, and the texts of the others; None where no row has images.

    Raises:
        BadInput: a row that cannot be read.
    """
    path = Path(source).expanduser()
    if path.suffix not in (".jsonl", ".json") or not path.is_file():
        return None
    rows = list(_rows(path))
    if not any(_images(row) for _, row in rows):
        return None
    pairs: list[Pair] = []
    texts: list[Document] = []
    for where, row in rows:
        images = _images(row)
        document = document_of(_without_parts(row, where), where)
        if not images:
            texts += [document] if document else []
            continue
        if not isinstance(images, list) or not all(isinstance(name, str) for name in images):
            raise BadInput(f"{where}: 'images' holds no list of paths")
        pairs.append(Pair(document, tuple(_path(path, name, where) for name in images), where))
        if plain_text(document).count(MARK) > len(images):
            raise BadInput(f"{where} places more images with {MARK} than its {len(images)}")
    return pairs, texts


def _images(row: Any) -> Any:
    """What a row says of its images: `images`, or LLaVA's `image`, one path."""
    if not isinstance(row, dict):
        return None
    single = row.get("image")
    return row.get("images") or ([single] if isinstance(single, str) and single else single)


def _rows(path: Path) -> list[tuple[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            rows = json.loads(text)
            if not isinstance(rows, list):
                raise BadInput(f"{path} holds no array of texts or conversations")
            return [(f"{path} row {number}", row) for number, row in enumerate(rows, start=1)]
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise BadInput(f"calibration file {path} cannot be read: {error}") from error
    numbered = []
    for number, line in enumerate(text.splitlines(), start=1):
        where = f"{path.name} line {number}"
        try:
            numbered += [(where, json.loads(line))] if line.strip() else []
        except json.JSONDecodeError as error:
            raise BadInput(f"{where} is not valid JSON: {error}") from error
    return numbered


def _path(file: Path, name: str, where: str) -> Path:
    """A path of a row, relative to its file."""
    if "://" in name or name.startswith("data:"):
        raise BadInput(f"{where}: {name[:60]!r} is no path: save the picture beside the file")
    try:
        return file.parent / Path(name).expanduser()
    except RuntimeError as error:
        raise BadInput(f"{where}: {name!r} names the home of nobody here") from error


def _without_parts(row: Any, where: str) -> Any:
    """The row with contents that are lists of parts, OpenAI's form, as text with marks."""
    if not isinstance(row, dict) or not isinstance(row.get("messages"), list):
        return row
    turns = []
    for turn in row["messages"]:
        content = turn.get("content") if isinstance(turn, dict) else None
        if isinstance(content, list):
            turn = {**turn, "content": "".join(_part(part, where) for part in content)}
        turns.append(turn)
    return {**row, "messages": turns}


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return part["text"]
    if kind == "image":
        return MARK
    raise BadInput(
        f"{where} has a part that is neither {{'type': 'text', 'text': …}} nor {{'type': 'image'}}"
    )
