"""Which test runs which line of the product, and what `make test` leaves out of the whole suite's lines.

    python -m tools.suite_coverage record [PATHS]    # the suite under coverage, into build/coverage
    python -m tools.suite_coverage                   # shares of the lines in functions, by floor

`tools/coverage_contexts.py` does the recording. Lines outside of functions run when anything imports their
module, so they say nothing about tests and are left out.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from tools.structure import FLOORS, ROOT, read_modules

FOLDER = ROOT / "build/coverage"
WHOLE, TIER = "", "not whole"
PHASE = re.compile(r" \((?:setup|call|teardown)\)$")


def run_pytest(
    folder: Path, *arguments: str, timeout: float | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", *arguments]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=timeout
    )


def collected(marks: str) -> set[str]:
    listing = run_pytest(ROOT, "--collect-only", "-m", marks).stdout.splitlines()
    return {line for line in listing if "::" in line}


def run_nodes(tree: ast.Module) -> Iterator[tuple[int, ast.AST]]:
    """Nodes that run within functions, each with the first line of its statement."""
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                yield from _within(statement, statement.lineno)
        else:
            nodes += ast.iter_child_nodes(node)


def _within(node: ast.AST, statement: int) -> Iterator[tuple[int, ast.AST]]:
    """Leave out signatures, annotations and f-strings, whose parts have no places in Python 3.11."""
    if isinstance(node, ast.JoinedStr | ast.arguments | ast.MatchValue):
        return
    statement = node.lineno if isinstance(node, ast.stmt) else statement
    yield statement, node
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    for name, value in ast.iter_fields(node):
        if name != "annotation" and (name == "body" or not is_function):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _within(child, statement)


class TestedLines:
    """The record, and the tests of today."""

    def __init__(self) -> None:
        import coverage

        self.data = coverage.CoverageData(str(FOLDER / "data"))
        self.data.read()
        self.whole, self.tier = collected(WHOLE), collected(TIER)
        self._lines: dict[str, dict[int, set[str]]] = {}

    def contexts(self, path: str) -> dict[int, set[str]]:
        """Node ids by line. One that is a file alone stands for what all tests of the file share."""
        if path not in self._lines:
            lines = self.data.contexts_by_lineno(str(ROOT / path))
            self._lines[path] = {
                line: {PHASE.sub("", name) for name in names} - {""}
                for line, names in lines.items()
            }
        return self._lines[path]

    def tests(self, path: str, lines: Iterable[int]) -> set[str]:
        """Tests that run one of the lines."""
        names = {name for line in lines for name in self.contexts(path).get(line, ())}
        return {test for test in self.whole if test in names or test.partition("::")[0] in names}


def commit() -> str:
    return subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()


def record(workers: int, paths: list[str]) -> None:
    """Run the suite under coverage."""
    import coverage

    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.glob("data*"):
        old.unlink()
    options = ["-p", "tools.coverage_contexts", "-m", WHOLE, "-o", "timeout=900"]
    done = run_pytest(ROOT, *options, "-n", str(workers), "--dist", "loadfile", *paths)
    print(done.stdout[-4000:], done.stderr[-4000:])
    whole = coverage.CoverageData(str(FOLDER / "data"))
    for part in sorted(FOLDER.glob("data.*")):
        data = coverage.CoverageData(str(part))
        data.read()
        whole.update(data)
        part.unlink()
    whole.write()
    (FOLDER / "commit").write_text(commit())


def print_shares() -> None:
    lines = TestedLines()
    tier = lines.tier | {test.partition("::")[0] for test in lines.tier}
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for name, module in read_modules().items():
        contexts = lines.contexts(str(module.path.relative_to(ROOT)))
        statements = {n.lineno for _, n in run_nodes(module.tree) if isinstance(n, ast.stmt)}
        for line in statements:
            tests = contexts.get(line, set())
            for total in (totals[name.partition(".")[0]], totals["all"]):
                total[0] += 1
                total[1] += bool(tests)
                total[2] += not tier.isdisjoint(tests)
    print(f"{'floor':<8}{'lines':>8}{'whole':>9}{'make test':>11}")
    for floor in (*FLOORS, "all"):
        count, by_whole, by_tier = totals[floor]
        print(f"{floor:<8}{count:>8}{by_whole / count:>9.1%}{by_tier / count:>11.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Which test runs which line of the product.")
    parser.add_argument("what", nargs="?", choices=("record", "shares"), default="shares")
    parser.add_argument("paths", nargs="*", help="record: tests to run, instead of all")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_intermixed_args()
    if given.what == "record":
        record(given.workers, given.paths)
    else:
        print_shares()


if __name__ == "__main__":
    main()
