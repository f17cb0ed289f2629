"""The plan of the house, held against the source: who imports whom, what stays free of torch, how large a
file may grow, what is packaged."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = ("quant", "engine", "bench", "cli")  # each may import those before it
DATA = "recipes"  # bundled data: anyone may import it
TORCH_FREE = (
    "engine.scheduling",
    "engine.base.sampling_params",
    "engine.base.units",
    "engine.text.detokenizer",
    "engine.planner",
    "cli",
)
MAX_LINES = 500


def source_files() -> list[Path]:
    return sorted(p for folder in (*FLOORS, DATA) for p in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in source_files()}


def statements(tree: ast.AST, inside_functions: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements that run, so not those under TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield from statements(other, inside_functions)
        elif inside_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from statements(node, inside_functions)


@cache
def imports(module: str, inside_functions: bool) -> frozenset[str]:
    """Modules that a module imports: ours by their place in the tree, others by their top name."""
    path = MODULES[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    found: set[str] = set()
    for node in statements(ast.parse(path.read_text(encoding="utf-8")), inside_functions):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif node.level == 0:
            found.add((node.module or "").split(".")[0])
        else:
            base = package[: len(package) - node.level + 1]
            target = ".".join([*base, *(node.module.split(".") if node.module else [])])
            for alias in node.names:
                inner = f"{target}.{alias.name}" if target else alias.name
                found.add(inner if inner in MODULES else target)
    return frozenset(found)


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_one_way(module: str) -> None:
    floor = module.split(".")[0]
    for imported in imports(module, inside_functions=True):
        top = imported.split(".")[0]
        assert top != "llmopt", (
            f"{module} imports {imported} by its installed name: use a relative one"
        )
        if imported in MODULES and top != floor and top != DATA:
            assert floor != DATA, f"{module} is data, but imports {imported}"
            assert FLOORS.index(top) < FLOORS.index(floor), f"{module} imports {imported}, above it"


def test_no_cycles() -> None:
    state: dict[str, str] = {}

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert state.get(module) != "open", f"import cycle: {' -> '.join((*trail, module))}"
        if module in state:
            return
        state[module] = "open"
        for imported in imports(module, inside_functions=not module.endswith("main")):
            # A package's own __init__ hands out names of its modules on demand; that is no dependence.
            if imported in MODULES and MODULES[imported].name != "__init__.py":
                visit(imported, (*trail, module))
        state[module] = "done"

    for module, path in MODULES.items():
        if path.name != "__init__.py":
            visit(module, ())


@pytest.mark.parametrize(
    "module", [m for m in MODULES if any(m == f or m.startswith(f + ".") for f in TORCH_FREE)]
)
def test_policy_planner_and_command_line_load_no_torch(module: str) -> None:
    """What importing the module imports, through any number of our own modules."""
    pending, seen = [(module, module)], set()
    while pending:
        current, trail = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        for imported in imports(current, inside_functions=False):
            assert imported not in ("torch", "transformers"), f"{trail} imports {imported}"
            if imported in MODULES:
                pending.append((imported, f"{trail} -> {imported}"))
    if not module.startswith("cli"):
        assert "torch" not in imports(module, inside_functions=True)


def test_no_file_is_too_long() -> None:
    files = [*source_files(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
    long = {
        str(path.relative_to(ROOT)): count
        for path in files
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert not long


def test_every_folder_with_code_is_packaged() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    in_tree = {module_name(path) for path in source_files() if path.name == "__init__.py"}
    folders = {".".join(path.relative_to(ROOT).parts[:-1]) for path in source_files()}
    assert folders == in_tree, "a folder with code has no __init__.py"
    assert set(tool["packages"]) == {f"llmopt.{name}" for name in in_tree}
    assert tool["package-dir"] == {f"llmopt.{name}": name for name in (*FLOORS, DATA)}


def test_package_data_lists_every_data_file() -> None:
    """A file that is not code reaches an installed llmopt only through a pattern of pyproject.toml."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = tool["package-data"]
    for path in tracked_files():
        if path.parts[0] not in (*FLOORS, DATA) or path.suffix == ".py":
            continue
        if path.parts[:2] == ("bench", "results"):
            continue  # recorded measurements: evidence, which no command reads
        packaged = any(
            (ROOT / path) in set((ROOT / package_folder(package)).glob(pattern))
            for package, globs in patterns.items()
            for pattern in globs
        )
        assert packaged, f"{path} would be missing from the wheel"


def package_folder(package: str) -> str:
    return package.removeprefix("llmopt.").replace(".", "/")


def tracked_files() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listing.returncode:
        pytest.skip("not a git checkout")
    paths = [Path(name) for name in listing.stdout.split("\0") if name]
    return [path for path in paths if (ROOT / path).is_file()]


def test_no_machine_paths() -> None:
    """A tracked text names no folder of the machine that it was written on."""
    homes = re.compile(r"(?<![\w.:/])/(?:work|root|home|Users|workspace)/[\w.]")
    for path in tracked_files():
        content = (ROOT / path).read_bytes()
        if b"\0" in content[:8192]:
            continue
        text = content.decode("utf-8", errors="replace")
        found = homes.search(text)
        assert found is None, (
            f"{path}: {text[found.start() : found.start() + 40]!r}" if found else ""
        )
        assert path == Path("LICENSE") or str(ROOT) not in text, f"{path} names {ROOT}"


NO_TORCH = """
import sys
from llmopt.cli.main import main
try:
    main({arguments!r})
except SystemExit as stop:
    assert not stop.code, stop.code
heavy = [name for name in ("torch", "transformers", "numpy", "pandas", "matplotlib") if name in sys.modules]
assert not heavy, heavy
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["kv-plan", "--model", "llama-70b", "--ctx", "128k"],
        ["kv-plan", "--model", "llama-70b", "--ctx", "128k", "--json"],
        ["quantize", "--help"],
        ["bench", "--help"],
        ["serve-local", "--help"],
    ],
    ids=" ".join,
)
def test_quick_commands_load_no_torch(arguments: list[str]) -> None:
    script = NO_TORCH.format(arguments=arguments)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
