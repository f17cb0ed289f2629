"""Architecture rules, held against the source: import directions, torch-free modules, file sizes, and
packages."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import structure
from tools.structure import DATA, FLOORS, ROOT

TORCH_FREE = (
    "bench.gate",
    "bench.report",
    "engine.scheduling",
    "engine.base.sampling_params",
    "engine.base.units",
    "engine.scheduling.outputs",
    "engine.planner",
    "engine.planner.catalog",
    "engine.probe.facts",
    "cli",
)
MOST_FOLDERS = 68  # with the root of quant, which holds two earlier import paths
MODULES = structure.read_modules()


@functools.cache
def imports(module: str, *, in_functions: bool = True) -> frozenset[str]:
    """What a module imports when it runs."""
    return structure.imports(MODULES[module], MODULES, in_functions=in_functions, for_types=False)


def source_files() -> list[Path]:
    return [module.path for module in MODULES.values()]


def test_imports_run_one_way() -> None:
    wrong = []
    for module in MODULES:
        floor = module.split(".")[0]
        for imported in imports(module):
            top = imported.split(".")[0]
            if top == "llmopt":
                wrong.append(f"{module} imports {imported} by its installed name")
            if imported not in MODULES or top in (floor, DATA):
                continue
            if floor == DATA or FLOORS.index(top) > FLOORS.index(floor):
                wrong.append(f"{module} imports {imported}, above it")
    assert not wrong


def test_folders_of_a_floor_import_one_way() -> None:
    """Imports for types alone count too."""
    assert not structure.cycles(structure.folder_graph(MODULES))


def test_modules_import_one_way() -> None:
    assert not structure.cycles(structure.module_graph(MODULES))


def test_an_import_cycle_is_found() -> None:
    graph = {"a": frozenset("b"), "b": frozenset("c"), "c": frozenset("a"), "d": frozenset("a")}
    assert structure.cycles(graph) == [["a", "b", "c"]]


def ways(module: str, *targets: str) -> list[str]:
    """Ways from the module to one of the targets when it is imported, through our own modules."""
    found: list[str] = []
    pending, seen = [(module, module)], set()
    while pending:
        current, trail = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        for imported in imports(current, in_functions=False):
            if imported in targets:
                found.append(f"{trail} -> {imported}")
            elif imported in MODULES:
                pending.append((imported, f"{trail} -> {imported}"))
    return found


def test_policy_planner_and_command_line_load_no_torch() -> None:
    """When they are imported; the policy and the planner not in a function either."""
    free = [m for m in MODULES if any(m == f or m.startswith(f + ".") for f in TORCH_FREE)]
    assert [trail for module in free for trail in ways(module, "torch", "transformers")] == []
    assert [m for m in free if not m.startswith("cli") and "torch" in imports(m)] == []


def test_a_server_imports_transformers_models_only_where_it_runs_them() -> None:
    """They take 190 MiB and seconds; the native decoder needs none."""
    assert (
        ways("engine.server.app", "engine.model.adapter.linears", "engine.model.adapter.packed")
        == []
    )


def test_no_file_is_too_long() -> None:
    files = [*source_files(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
    long = {
        str(path.relative_to(ROOT)): count
        for path in files
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > structure.MAX_LINES
    }
    assert not long


def test_every_folder_with_code_is_a_package() -> None:
    """setup.py discovers packages: tests/packaging/test_wheel.py holds the wheel against the tree."""
    packages = {path.parent for path in source_files() if path.name == "__init__.py"}
    assert {path.parent for path in source_files()} == packages


def test_folders_stay_few() -> None:
    assert len(structure.modules_in(MODULES)) <= MOST_FOLDERS


def test_a_scheme_answers_for_itself() -> None:
    """Outside of its folder a quantization kind is asked, not named."""
    checks = structure.scheme_checks(
        m for n, m in MODULES.items() if not n.startswith("quant.kinds")
    )
    assert sum(checks.values()) <= 15, checks


def test_few_modules_read_a_model_type() -> None:
    """A family's file in `quant/families` says the rest."""
    readers = structure.naming(MODULES.values(), "model_type")
    assert len(readers) <= 12, readers


def test_docstrings_name_their_subject() -> None:
    assert list(structure.riddles(MODULES.values())) == []


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


QUANTIZE = """
import sys
from llmopt.cli.main import main
try:
    main(["quantize", "--model", "stories3M", "--output", sys.argv[1], "--method", "awq",
          "--num-samples", "4", "--seq-len", "64"])
except SystemExit as stop:
    assert not stop.code, stop.code
print(*(name.removeprefix("llmopt.quant.") for name in sys.modules if name.startswith("llmopt.quant.")))
"""


def test_quantize_imports_no_other_kind(tmp_path: Path) -> None:
    """Neither another quantization kind, nor a format of one, nor anything of GGUF."""
    command = [sys.executable, "-c", QUANTIZE, str(tmp_path / "awq")]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    imported = run.stdout.splitlines()[-1].split()
    assert {name.split(".")[1] for name in imported if name.startswith("kinds.")} == {
        *("base", "integer", "registry")
    }
    assert {name for name in imported if name.startswith("formats.")} == {"formats.registry"}
    assert "gguf" not in {name.split(".")[0] for name in imported}
