"""README and docs, held against the tree: links and anchors, paths, names of the code, options, a page per command."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import typer.main
from llmopt.cli import main

ROOT = Path(__file__).resolve().parent.parent
FLOORS = ("base", "bench", "cli", "engine", "quant")
FOLDERS = (*FLOORS, "docs", "recipes", "tests", "tools")
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
COMMAND_PAGES = ROOT / "docs" / "commands"
MAX_LINES = {"README.md": 199, "AGENTS.md": 120, "CONTRIBUTING.md": 90}
MAX_WORDS = 60_000
"""Words of README, CONTRIBUTING and docs/, without records and generated tables (docs/measured)."""
FIRST_LINES = (
    "llmopt quantize --method awq",
    "llmopt bench --dataset sharegpt",
    "llmopt kv-plan --model llama-70b --ctx 128k",
    "llmopt serve-local",
)

FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^ {4,}\S.*$", re.MULTILINE)
SPAN = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
PATH = re.compile(rf"(?<![\w./@-])(?:{'|'.join(FOLDERS)})/[\w.*/-]*\w")
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
GIT = re.compile(r"^ *git .*$", re.MULTILINE)  # whose options are not ours
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def code_of(text: str) -> list[str]:
    """Everything that a page sets as code: blocks, and spans outside of them."""
    fenced = FENCED.findall(text)
    text = FENCED.sub("", text)
    return [*fenced, *INDENTED.findall(text), *SPAN.findall(INDENTED.sub("", text))]


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors that GitHub gives a page's headings."""
    found: list[str] = []
    for heading in re.findall(r"^#+ +(.+)$", FENCED.sub("", text_of(page)), re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", words.strip().lower()).replace(" ", "-")
        count = sum(1 for one in found if re.fullmatch(rf"{re.escape(slug)}(-\d+)?", one))
        found.append(f"{slug}-{count}" if count else slug)
    return frozenset(found)


@every_page
def test_links_and_anchors_exist(page: Path) -> None:
    text = SPAN.sub("", FENCED.sub("", text_of(page)))
    broken = []
    for link in LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / unquote(name)).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


@every_page
def test_paths_exist(page: Path) -> None:
    paths = {path for code in code_of(text_of(page)) for path in PATH.findall(code)}
    assert not sorted(path for path in paths if not any(ROOT.glob(path)))


def test_tests_that_make_and_tools_choose_exist() -> None:
    """A list of tests goes stale where a test moves: pytest then fails in a target that runs seldom."""
    rule = "--eval=lists: ; @echo $(LOWEST_TESTS) $(ARM_TESTS)"
    listed = subprocess.run(
        ["make", "--silent", rule, "lists"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    profiles = text_of(ROOT / "tools" / "processor_profiles.py")
    chosen = {*listed.stdout.split(), *re.findall(r'"(tests/[^"]+)"', profiles)}
    assert len(chosen) > 40
    assert not sorted(path for path in chosen if not (ROOT / path).exists())


@every_page
def test_options_exist(page: Path) -> None:
    if page.name == "CHANGELOG.md":
        return  # names the old ones
    options = {
        option for code in code_of(text_of(page)) for option in OPTION.findall(GIT.sub("", code))
    }
    assert not sorted(options - options_of_commands() - options_of_tools())


def test_architecture_names_what_is_in_the_code() -> None:
    spans = SPAN.findall(FENCED.sub("", text_of(ROOT / "docs" / "architecture.md")))
    members, words = names_of_the_code()
    methods = {span for span in spans if re.fullmatch(r"[A-Z]\w+\.[a-z]\w+", span)}
    names = {span for span in spans if re.fullmatch(r"[A-Z]\w+|[a-z]+_\w+", span)}
    assert not sorted(methods - members)
    assert not sorted(names - words)


@cache
def names_of_the_code() -> tuple[frozenset[str], frozenset[str]]:
    """`Class.member` of every class, and every word of the sources."""
    members: set[str] = set()
    words: set[str] = set()
    for path in (path for floor in FLOORS for path in (ROOT / floor).rglob("*.py")):
        text = text_of(path)
        words |= set(re.findall(r"\w+", text))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                members |= {
                    f"{node.name}.{one.name}"
                    for one in node.body
                    if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
                }
    return frozenset(members), frozenset(words)


@cache
def commands() -> Mapping[str, Any]:
    """The commands of `llmopt` by name, as click has them."""
    return typer.main.get_command(main.application()).commands  # type: ignore[attr-defined]


@cache
def options_of_commands() -> frozenset[str]:
    """Of all commands, hidden ones included."""
    return frozenset(
        {"--help", "--debug"}
        | {
            name
            for command in commands().values()
            for part in (command, *getattr(command, "commands", {}).values())
            for parameter in part.params
            for name in (*parameter.opts, *parameter.secondary_opts)
        }
    )


@cache
def options_of_tools() -> frozenset[str]:
    """Options that the scripts of tools/ and of the tests' support take."""
    folders = (ROOT / "tools", ROOT / "tests" / "support")
    texts = (text_of(path) for folder in folders for path in folder.rglob("*.py"))
    return frozenset(name for text in texts for name in re.findall(r'"(--[a-z][\w-]*)"', text))


def test_the_site_lists_every_page() -> None:
    """`make docs` fails for a page that the navigation leaves out."""
    listed = re.findall(r": (\S+\.md)$", text_of(ROOT / "mkdocs.yml"), re.MULTILINE)
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(listed) == sorted(pages)


def test_every_command_has_a_page() -> None:
    pages = {page.stem for page in COMMAND_PAGES.glob("*.md")}
    assert pages == set(commands())
    linked = {link for link in LINK.findall(text_of(ROOT / "README.md")) if "commands/" in link}
    assert linked == {f"docs/commands/{name}.md" for name in pages}


def test_the_readme_begins_with_the_four_lines() -> None:
    lines = text_of(ROOT / "README.md").splitlines()
    shown = [line.strip() for line in lines if line.startswith("    llmopt ")]
    assert tuple(shown[: len(FIRST_LINES)]) == FIRST_LINES


@pytest.mark.parametrize(("name", "most"), MAX_LINES.items())
def test_the_first_pages_are_short(name: str, most: int) -> None:
    lines = len(text_of(ROOT / name).splitlines())
    assert lines <= most, f"{name} has {lines} lines, of {most}: shorten it"


def test_the_documents_are_short() -> None:
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    pages = [page for page in documents if "measured" not in page.relative_to(ROOT).parts]
    words = sum(len(text_of(page).split()) for page in pages)
    assert words <= MAX_WORDS, f"the documents have {words:,} words: shorten a page"
