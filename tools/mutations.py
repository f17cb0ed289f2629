"""Judge the tests: seeded mistakes in the product, and whether the tests that run their lines find them.

    python -m tools.suite_coverage record    # which test runs which line: the whole suite, once
    python -m tools.mutations               # 60 mutations, for `make test` and for the whole suite

A mutation flips a comparison, is off by one, negates a condition, drops a statement or swaps a constant, each
kind as often; the floors have as many as their share of lines. It is judged in a clone of the last commit by
the tests that ran its line in that record, those of `make test` first. A test that fails without the mutation
as well finds nothing.
"""

from __future__ import annotations

import argparse
import ast
import json
import platform
import random
import re
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.structure import FLOORS, ROOT, Module, read_modules
from tools.suite_coverage import FOLDER, TestedLines, commit, run_nodes, run_pytest

KINDS = ("comparison", "off by one", "condition", "statement", "constant")
FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
CHUNKS = (60, 600, 10**6)
"""Tests of the first, second, ... run: most mutations fall to the first."""
LONGEST = 3600
"""Seconds; a loop in C code heeds no timeout of a test."""
BROKEN = re.compile(r"^(?:FAILED|ERROR) (\S+::.*?|\S+\.py)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Mutation:
    """Source bytes of a file to be replaced; `lines` are those whose execution runs them."""

    path: str
    kind: str
    lines: tuple[int, int]
    start: int
    end: int
    text: str

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]


def changes(node: ast.AST) -> Iterator[tuple[str, ast.expr | ast.stmt, ast.AST]]:
    """Mistakes to make at a node: kind, what is replaced, and by what."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in FLIPPED:
            flipped = FLIPPED[type(operator)]()
            yield "comparison", node, ast.Compare(node.left, [flipped], node.comparators)
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield "condition", test, ast.UnaryOp(ast.Not(), test)
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Assign(targets=[ast.Attribute()]):
            yield "statement", node, ast.Pass()
        case ast.Constant(value=bool(value)):
            yield "constant", node, ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield "off by one", node, ast.Constant(value + 1)
        case ast.Constant(value=float(value)):
            yield "constant", node, ast.Constant(value * 2 or 1.0)


def mutations(module: Module) -> Iterator[Mutation]:
    source = module.path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    path = str(module.path.relative_to(ROOT))
    for statement, node in run_nodes(module.tree):
        for kind, old, new in changes(node):
            text = ast.unparse(ast.fix_missing_locations(new))
            start = starts[old.lineno - 1] + old.col_offset
            end = starts[(old.end_lineno or 0) - 1] + (old.end_col_offset or 0)
            text = text if kind == "statement" else f"({text})"
            yield Mutation(path, kind, (statement, old.lineno), start, end, text)


def chosen(count: int, seed: int) -> list[Mutation]:
    """Mutations of each kind in turn, floor by floor."""
    floors: dict[str, list[Module]] = defaultdict(list)
    for name, module in read_modules().items():
        floors[name.partition(".")[0]].append(module)
    lines = {floor: sum(m.num_lines for m in floors[floor]) for floor in FLOORS}
    shares = {floor: count * lines[floor] / sum(lines.values()) for floor in FLOORS}
    quotas = {floor: int(share) for floor, share in shares.items()}
    by_rest = sorted(FLOORS, key=lambda floor: quotas[floor] - shares[floor])
    for floor in by_rest[: count - sum(quotas.values())]:
        quotas[floor] += 1
    found, draw = [], random.Random(seed)
    for floor in FLOORS:
        sites = [site for module in floors[floor] for site in mutations(module)]
        for number in range(quotas[floor]):
            kind = KINDS[number % len(KINDS)]
            found.append(draw.choice([site for site in sites if site.kind == kind]))
    return found


class Clone:
    """The last commit in a folder of its own, where mistakes are made."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.folder, self.workers = folder, workers
        subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), str(folder)], check=True)
        self.links = folder / "build/links"
        subprocess.run(["make", "-s", "-C", str(folder), str(self.links / "llmopt")], check=True)
        self.broken: set[str] = set()

    def first_failure(self, tests: Iterable[str]) -> str | None:
        """The test that fails first, or the way in which pytest ended."""
        names = self.folder / "build/tests.txt"
        names.write_text("\n".join(sorted(tests)), encoding="utf-8")
        workers = ["-n", str(self.workers), "--dist", "loadfile"] if self.workers > 1 else []
        options = ["-x", "-rfE", "--tb=no", "-o", "timeout=120", *workers, f"@{names}"]
        try:
            done = run_pytest(self.folder, *options, PYTHONPATH=str(self.links), timeout=LONGEST)
        except subprocess.TimeoutExpired:
            return "no end"
        failures = BROKEN.findall(done.stdout)
        return failures[0] if failures else f"exit {done.returncode}" * bool(done.returncode)

    def finder(self, mutation: Mutation, tests: set[str]) -> str | None:
        """The test that finds the mutation."""
        path = self.folder / mutation.path
        source = path.read_bytes()
        left = random.Random(0).sample(sorted(tests), len(tests))
        for size in CHUNKS:
            while chunk := set(left[:size]) - self.broken:
                path.write_bytes(mutation.apply(source))
                failure = self.first_failure(chunk)
                path.write_bytes(source)
                if not failure:
                    break
                if "::" not in failure or not self.first_failure([failure]):
                    return failure
                self.broken.add(failure)
            left = left[size:]
        return None


def judge(record: TestedLines, mutation: Mutation, clone: Clone) -> dict[str, Any]:
    start, tests = time.monotonic(), record.tests(mutation.path, mutation.lines)
    by_tier = clone.finder(mutation, tests & record.tier)
    by_whole = by_tier or clone.finder(mutation, tests - record.tier)
    source = (ROOT / mutation.path).read_bytes()
    return {
        **asdict(mutation),
        "was": source[mutation.start : mutation.end].decode(),
        "tests": len(tests), "tests_of_tier": len(tests & record.tier),
        "found_by_tier": by_tier, "found_by_whole": by_whole, "seconds": round(time.monotonic() - start),
    }  # fmt: skip


def print_row(number: int, row: dict[str, Any]) -> None:
    found = row["found_by_tier"] or "NOT FOUND"
    if row["found_by_whole"] and not row["found_by_tier"]:
        found = f"by the whole suite alone: {row['found_by_whole']}"
    change = " ".join(f"{row['was']} -> {row['text']}".split())[:60]
    tests = f"{row['tests_of_tier']} of {row['tests']} tests"
    print(f"{number:>3} {row['path']}:{row['lines'][1]}  {change}  {tests}: {found}", flush=True)


def judge_suite(count: int, seed: int, only: list[int], workers: int, out: Path) -> None:
    """Judge the mutations, each printed and in a JSON file as soon as it is judged."""
    record, rows = TestedLines(), []
    about = {
        "command": "python -m tools.mutations", "count": count, "seed": seed, "date": time.strftime("%F"),
        "commit": commit(), "recorded_at": (FOLDER / "commit").read_text(), "machine": platform.machine(),
        "mutations": rows,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        clone = Clone(Path(folder) / "llmopt", workers)
        for number, mutation in enumerate(chosen(count, seed), start=1):
            if not only or number in only:
                rows.append({"number": number, **judge(record, mutation, clone)})
                print_row(number, rows[-1])
                about["fail_without_mutation"] = sorted(clone.broken)
                out.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    tier, whole = (sum(bool(row[f"found_by_{who}"]) for row in rows) for who in ("tier", "whole"))
    print(f"of {len(rows)} mutations make test finds {tier}, the whole suite {whole}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Judge the tests by seeded mistakes.")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=43)
    parser.add_argument("--only", type=int, nargs="*", default=[], help="numbers of mutations")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=FOLDER / "mutations.json")
    given = parser.parse_args()
    judge_suite(given.count, given.seed, given.only, given.workers, given.out)


if __name__ == "__main__":
    main()
