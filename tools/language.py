"""The language of the source: what a newcomer stumbles over, counted, by the rules of CONTRIBUTING.md.

    python tools/language.py [--top 10] [--floor engine]

Checked are the product's folders, not its tests:

- variables and parameters called `one`, `each`, `place`, `found`, `words`, `held`, `said`, `asked` or `told`;
- descriptions of attributes, fields and constants that open with a preposition or a pronoun;
- docstrings that open with a word that leaves their subject out;
- sentences of docstrings and comments of more than 40 words.

Exits with 1 where any is found. tests/test_language.py asserts the same from the same functions.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.structure import RIDDLE, ROOT, Module, read_modules

VAGUE = frozenset(["one", "each", "place", "found", "words", "held", "said", "asked", "told"])
OPENING = re.compile(
    r"(?:of|in|by|for|with|from|to|at|on|as|into|over|under|between|after|before|without|"
    r"those|that|these|its|it|they|them|their|what|which|whose|where|whether|how)\b",
    re.IGNORECASE,
)
"""First words that lean on the name before them."""
MACHINE_WORDS = re.compile(r"(?:engine\.kernels|engine\.sampling|quant\.kinds)\.")
"""Modules in which `words` are the 32-bit words that codes and masks are packed in."""
MOST_WORDS = 40
_FIELD = re.compile(r"^(\s+)(`?[\w, `]+`?): (?=\S)", re.MULTILINE)
_SECTIONS = re.compile(r"^\s*(Attributes|Args|Raises|Returns|Yields):\s*$", re.MULTILINE)
_CODE = re.compile(r"`[^`]*`|\[[^\]]*\]|https?://\S+")

Finding = tuple[Module, int, str]


def bindings(module: Module) -> Iterator[Finding]:
    """Variables and parameters with a name of `VAGUE`."""
    vague = VAGUE - {"words"} if MACHINE_WORDS.match(module.name) else VAGUE
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in vague:
            yield module, node.lineno, node.id
        elif isinstance(node, ast.arg) and node.arg in vague:
            yield module, node.lineno, node.arg


def docstrings(module: Module) -> Iterator[tuple[int, str, bool]]:
    """Line, text and kind of every docstring; the kind is True for the text after a field or a constant."""
    for node in ast.walk(module.tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for number, statement in enumerate(body):
            if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
                continue
            if isinstance(text := statement.value.value, str):
                is_field = number > 0 and isinstance(body[number - 1], ast.Assign | ast.AnnAssign)
                yield statement.lineno, text, is_field


def leaning_descriptions(module: Module) -> Iterator[Finding]:
    """Descriptions of attributes, arguments, fields and constants that open with a word of `OPENING`."""
    for line, text, is_field in docstrings(module):
        if is_field:
            if OPENING.match(text.strip()):
                yield module, line, text.strip()[:60]
            continue
        for section in _SECTIONS.finditer(text):
            if section[1] not in ("Attributes", "Args"):
                continue
            body = text[section.end() :]
            following = _SECTIONS.search(body)
            for entry in _FIELD.finditer(body[: following.start()] if following else body):
                description = body[entry.end() :].lstrip()
                if OPENING.match(description):
                    offset = text[: section.end() + entry.start(2)].count("\n")
                    yield module, line + offset, f"{entry[2]}: {description[:50]}".splitlines()[0]


def openings(module: Module) -> Iterator[Finding]:
    """Docstrings that open with a word of `RIDDLE`."""
    for line, text, _ in docstrings(module):
        if RIDDLE.match(text.lstrip()):
            yield module, line, text.lstrip()[:60].splitlines()[0]


def comments(module: Module) -> Iterator[tuple[int, str]]:
    """First line and text of every comment; comments on consecutive lines are one."""
    source = module.path.read_text(encoding="utf-8")
    start, last, parts = 0, -1, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        own_line = token.line.lstrip().startswith("#")
        if parts and not (own_line and line == last + 1):
            yield start, " ".join(parts)
            parts = []
        if not parts:
            start = line
        parts.append(token.string.lstrip("#: "))
        last = line if own_line else -1
    if parts:
        yield start, " ".join(parts)


def long_sentences(module: Module) -> Iterator[Finding]:
    """Sentences of more than `MOST_WORDS` words; lists, tables and indented examples end one."""
    texts = [(line, text) for line, text, _ in docstrings(module)]
    for line, text in [*texts, *comments(module)]:
        plain = _CODE.sub("x", text)
        for sentence in re.split(r"(?<=[.!?:;])\s+|\n\s*\n|\n\s*[-*|]\s|\n\s+[\w`, ]+: ", plain):
            if len(sentence.split()) > MOST_WORDS:
                yield module, line, " ".join(sentence.split())[:70]


def comment_share(modules: Iterable[Module]) -> float:
    """Lines with a comment, as a share of all lines."""
    lines = commented = 0
    for module in modules:
        source = module.path.read_text(encoding="utf-8")
        lines += module.num_lines
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        commented += sum(token.type == tokenize.COMMENT for token in tokens)
    return commented / max(lines, 1)


CHECKS: dict[str, Callable[[Module], Iterator[Finding]]] = {
    "variables with a vague name": bindings,
    "descriptions that open with a preposition or pronoun": leaning_descriptions,
    "docstrings without a subject": openings,
    f"sentences over {MOST_WORDS} words": long_sentences,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--top", type=int, default=10, help="rows of each list")
    parser.add_argument("--floor", default="", help="only modules whose dotted name begins so")
    arguments = parser.parse_args()
    modules = [m for name, m in read_modules().items() if name.startswith(arguments.floor)]
    failed = False
    for title, check in CHECKS.items():
        findings = [finding for module in modules for finding in check(module)]
        failed |= bool(findings)
        print(f"{title}: {len(findings)}")
        for module, line, text in findings[: arguments.top]:
            print(f"  {module.path.relative_to(ROOT)}:{line}: {text}")
        if check is bindings:
            print(f"  by name: {dict(Counter(text for _, _, text in findings).most_common())}")
    print(f"lines with a comment: {comment_share(modules):.1%}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
