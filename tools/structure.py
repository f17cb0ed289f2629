"""The structure of the source: modules, folders and lines, import cycles, and how often one idea is asked for
in many places.

    python tools/structure.py [--top 10]

Exits with 1 where folders or modules import each other in a circle, or a docstring opens with a word that
says nothing. tests/test_architecture.py asserts the same from the same functions. How many files a prompt
enters is told by tools/path_trace.py, which runs one.
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLOORS = ("base", "quant", "engine", "bench", "cli")
"""Each may import those before it."""
DATA = "recipes"
"""Bundled data: anyone may import it."""
MAX_LINES = 500
KINDS = "quant.kinds"
"""Where a quantization kind may be named."""
RIDDLE = re.compile(r"(?:What|Of|See|As|Its|None)\b")
"""First words of a docstring that leaves its subject out."""

Graph = Mapping[str, frozenset[str]]


@dataclass(frozen=True)
class Module:
    """A source file, by its dotted name from the root of the tree."""

    name: str
    path: Path

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"))

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @property
    def folder(self) -> str:
        """The package that it lies in; a package's own `__init__` lies in the package."""
        return self.name if self.is_package else self.name.rpartition(".")[0]

    @property
    def num_lines(self) -> int:
        return len(self.path.read_text(encoding="utf-8").splitlines())


def read_modules(root: Path = ROOT) -> dict[str, Module]:
    """All modules of the package, by name."""
    modules = {}
    for folder in (*FLOORS, DATA):
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            modules[name] = Module(name, path)
    return modules


def import_statements(
    tree: ast.AST, *, in_functions: bool = True, for_types: bool = True
) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements; `for_types`: also those under TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not for_types and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        elif in_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from import_statements(node, in_functions=in_functions, for_types=for_types)


def imports(
    module: Module,
    modules: Mapping[str, Module],
    *,
    in_functions: bool = True,
    for_types: bool = True,
) -> frozenset[str]:
    """What a module imports: ours by their names in the tree, others by their top name."""
    package = module.folder.split(".")
    found: set[str] = set()
    for node in import_statements(module.tree, in_functions=in_functions, for_types=for_types):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif node.level == 0:
            found.add((node.module or "").split(".")[0])
        else:
            base = package[: len(package) - node.level + 1]
            target = ".".join([*base, *(node.module.split(".") if node.module else [])])
            for alias in node.names:
                inner = f"{target}.{alias.name}" if target else alias.name
                found.add(inner if inner in modules else target)
    return frozenset(found)


def module_graph(modules: Mapping[str, Module]) -> Graph:
    """Which module imports which, types included. A package's `__init__` hands out names of its modules on
    demand, and `cli.main` loads commands by name: those are no dependences."""
    sources = {name: module for name, module in modules.items() if not module.is_package}
    return {
        name: imports(module, modules) & sources.keys() - {name} for name, module in sources.items()
    }


def folder_graph(modules: Mapping[str, Module]) -> Graph:
    """Which folder's modules import which folder's, within a floor."""
    graph: dict[str, set[str]] = defaultdict(set)
    for name, imported in module_graph(modules).items():
        here = modules[name].folder
        graph[here] |= {
            there
            for other in imported
            if (there := modules[other].folder) != here
            and there.split(".")[0] == here.split(".")[0]
        }
    return {name: frozenset(folders) for name, folders in graph.items()}


def cycles(graph: Graph) -> list[list[str]]:
    """The strongly connected components of more than one node (Tarjan, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    for node in graph:
        if node not in index:
            visit(node)
    return found


def modules_in(modules: Mapping[str, Module]) -> Counter[str]:
    """How many modules each folder holds, not counting its `__init__`."""
    return Counter(module.folder for module in modules.values() if not module.is_package)


def functions(modules: Iterable[Module]) -> Iterator[tuple[int, str]]:
    """Every function with its number of lines, from its `def` to its end."""
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield (node.end_lineno or 0) - node.lineno + 1, f"{module.name}.{node.name}"


def docstring_lines(module: Module) -> int:
    """Lines of a module's docstrings and of the texts after its fields and constants."""
    return sum(
        (node.end_lineno or 0) - node.lineno + 1
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def called_once(modules: Iterable[Module]) -> tuple[int, int]:
    """Private functions and methods that their module names once, and all private ones."""
    once = total = 0
    for module in modules:
        names = Counter(re.findall(r"\w+", module.path.read_text(encoding="utf-8")))
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and re.match(
                r"_[a-z]", node.name
            ):
                total += 1
                once += names[node.name] == 2  # its definition and one use
    return once, total


def counts_of(modules: Sequence[Module]) -> dict[str, str]:
    """The size of the source and of its documents, by what is counted."""
    lines = sum(module.num_lines for module in modules)
    classes = sum(isinstance(n, ast.ClassDef) for m in modules for n in ast.walk(m.tree))
    sizes = [size for size, _ in functions(modules)]
    once, private = called_once(modules)
    options = sum(
        len(re.findall(r"\boption\(", m.path.read_text(encoding="utf-8"))) for m in modules
    )
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    words = {page: len(page.read_text(encoding="utf-8").split()) for page in pages if page.exists()}
    measured = sum(count for page, count in words.items() if "measured" in page.parts)
    return {
        "lines": f"{lines}",
        "files": f"{len(modules)}",
        "classes": f"{classes}",
        "functions": f"{len(sizes)}, median {statistics.median(sizes):.0f} lines",
        "private functions with one use": f"{once} of {private}",
        "lines of docstrings": f"{sum(map(docstring_lines, modules)) / lines:.1%}",
        "definitions of options": f"{options}",
        "words of documents": f"{sum(words.values()) - measured}, measured tables {measured}",
    }


def riddles(modules: Iterable[Module]) -> Iterator[str]:
    """Docstrings, and texts behind a constant or field, that open with a word of `RIDDLE`, by their place."""
    for module in modules:
        for node in ast.walk(module.tree):
            if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
                continue
            text = node.value.value
            if isinstance(text, str) and RIDDLE.match(text.lstrip()):
                yield f"{module.path.relative_to(ROOT)}:{node.lineno}: {text.lstrip()[:60]!r}"


def scheme_checks(modules: Iterable[Module]) -> Counter[str]:
    """Calls of `isinstance` with a class `…Scheme`, and `case …Scheme()`, by module."""
    counts: Counter[str] = Counter()
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                named: ast.AST = node.args[1]
            elif isinstance(node, ast.MatchClass):
                named = node.cls
            else:
                continue
            counts[module.name] += bool(re.search(r"'\w+Scheme'", ast.dump(named)))
    return +counts


def naming(modules: Iterable[Module], word: str) -> list[str]:
    """Modules whose code or strings have the word."""
    pattern = re.compile(rf"\b{word}\b")
    return [m.name for m in modules if pattern.search(m.path.read_text(encoding="utf-8"))]


def repeated_classes(modules: Iterable[Module]) -> dict[str, list[str]]:
    """Names of public classes that stand in more than one module."""
    places: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module.name)
    return {name: found for name, found in places.items() if len(found) > 1}


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--top", type=int, default=10, help="rows of each list")
    top = arguments.parse_args().top
    modules = read_modules()
    sources = [module for module in modules.values() if not module.is_package]
    graph = module_graph(modules)
    circles = [*cycles(folder_graph(modules)), *cycles(graph)]
    counts = modules_in(modules)
    lines: Counter[str] = Counter()
    for module in modules.values():
        lines[module.name.split(".")[0]] += module.num_lines
    print(f"{sum(counts.values())} modules in {len(counts)} folders, {sum(lines.values())} lines")
    print("  " + ", ".join(f"{floor} {count}" for floor, count in lines.items()))
    for title, count in counts_of(list(modules.values())).items():
        print(f"  {title}: {count}")
    for folder, count in sorted(counts.items()):
        print(f"  {count:4} {folder.replace('.', '/')}/")
    print(f"import cycles of folders and modules: {len(circles)}")
    for circle in circles:
        print(f"  {' <-> '.join(circle)}")
    checks = scheme_checks(m for m in sources if not m.name.startswith(KINDS))
    print(f"isinstance(…Scheme) outside of {KINDS.replace('.', '/')}/: {sum(checks.values())}")
    show("  by module", ((count, name) for name, count in checks.items()), top)
    print(f"modules that name model_type: {len(naming(sources, 'model_type'))}")
    repeated = repeated_classes(sources)
    show("class names in several modules", ((len(m), name) for name, m in repeated.items()), top)
    opaque = list(riddles(modules.values()))
    print(f"docstrings that open with What, Of, See, As, Its or None: {len(opaque)}")
    print("".join(f"  {place}\n" for place in opaque[:top]), end="")
    popular = Counter(other for imported in graph.values() for other in imported)
    show("most imported modules", ((count, name) for name, count in popular.items()), top)
    show("longest files", ((module.num_lines, name) for name, module in modules.items()), top)
    show("longest functions", functions(modules.values()), top)
    return 1 if circles or opaque else 0


def show(title: str, rows: Iterable[tuple[int, str]], top: int) -> None:
    print(title)
    for number, name in sorted(rows, reverse=True)[:top]:
        print(f"  {number:4} {name}")


if __name__ == "__main__":
    sys.exit(main())
