"""Installs without optional packages: the core's commands work, and the others say in one line what to install."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import llmopt
import pytest
from llmopt.bench.page.page import NO_PICTURES

from tools.lowest import BOUND
from tools.structure import ROOT, read_modules

MODULES = {"pillow": "PIL", "prometheus-client": "prometheus_client", "pyyaml": "yaml"}
"""Modules whose distribution has another name."""


def needs(package: str) -> set[str]:
    """Modules of the direct dependencies of an installed package."""
    lines = [line for line in metadata.requires(package) or () if "extra ==" not in line]
    return {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in lines}


BROUGHT = needs("huggingface_hub")
if "httpx" in BROUGHT:  # before release 2
    BROUGHT |= needs("httpx")
HIDE = """
import contextlib, io, json, sys

HIDDEN = set()

class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        hidden = name.partition(".")[0] in HIDDEN
        return None if hidden else self.finder.find_spec(name, path, target)
    def find_distributions(self, *context):
        found = self.finder.find_distributions(*context)
        return (item for item in found if item.name.lower().replace("-", "_") not in HIDDEN)
    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Without(f) if hasattr(f, "find_distributions") else f for f in sys.meta_path]
from llmopt.cli.main import main

answers = []
for hidden, words in json.loads(sys.argv[1]):
    HIDDEN = {*hidden, *(["pillow"] if "PIL" in hidden else [])}
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(words.split())
        except SystemExit as stop:
            code = stop.code or 0
    answers.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(answers))
"""
"""A script that runs commands in turn, each without some modules: they are found by no finder."""


def requirements(extra: str | None) -> set[str]:
    """Modules of the direct dependencies of the core, or of an extra and of those that it names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    group = project["dependencies"] if extra is None else project["optional-dependencies"][extra]
    modules: set[str] = set()
    for requirement in group:
        if nested := re.fullmatch(r"llmopt\[([\w,]+)\]", requirement):
            modules.update(*(requirements(name) for name in nested[1].split(",")))
        elif match := BOUND.match(requirement):
            modules.add(MODULES.get(match[1], match[1].replace("-", "_")))
    return modules - BROUGHT if extra else modules


OPTIONAL = requirements("all")
WITH_THEM = {"starlette", "requests", "pandas"}
"""Packages that the optional ones bring, and one that nothing in the product needs."""


def answers(folder: Path, *commands: tuple[set[str], str]) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each command in a fresh interpreter, run without its modules."""
    given = json.dumps([(sorted(hidden), words) for hidden, words in commands])
    run = subprocess.run(
        [sys.executable, "-c", HIDE, given], cwd=folder, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    found: list[tuple[int, str, str]] = json.loads(run.stdout)
    return found


def test_the_core_works_without_any_optional_package(tmp_path: Path) -> None:
    assert {"fastapi", "gguf", "matplotlib", "prometheus_client", "PIL"} <= OPTIONAL
    bench = (
        "bench --model stories260K --dataset sharegpt --num-prompts 2 --num-runs 1 --output-len 4"
    )
    bench += " --quality-tokens 32"
    words = [
        "kv-plan --model llama-70b --ctx 128k",
        "doctor",
        "quantize --model stories260K --method rtn --group-size -1 --no-errors --output small",
        "verify small",
        "convert small --format hf --output plain",
        f"{bench} --output base",
        f"{bench} --output new",
        "compare base new --output verdict.html",
        "report base new --output joined.html",
    ]
    found = answers(tmp_path, *((OPTIONAL | WITH_THEM, line) for line in words))
    codes = {line.split()[0]: code for line, (code, _, _) in zip(words, found, strict=True)}
    assert codes.pop("compare") in (0, 3) and not any(codes.values()), found
    assert found[5][2].count(NO_PICTURES) == 1
    assert (tmp_path / "base" / "requests.parquet").is_file()
    for page in ("base/report.html", "verdict.html", "joined.html"):
        text = (tmp_path / page).read_text()
        assert "pip install &#39;llmopt[plots]&#39;" in text and "<svg" not in text
    assert not list(tmp_path.rglob("*.svg"))


def test_a_command_without_its_package_ends_before_any_work(tmp_path: Path) -> None:
    """With one line that names the package and the extra, and exit code 2."""
    (tmp_path / "batch.jsonl").touch()
    cases = [({module}, "serve-local", "serve") for module in sorted(requirements("serve"))]
    cases += [({"fastapi"}, "batch batch.jsonl", "serve")]
    cases += [
        ({"gguf"}, words, "gguf")
        for words in (
            "quantize --format gguf",
            "quantize --method Q4_K_M",
            "convert any --format gguf",
            "best --dry-run",
        )
    ]
    cases += [
        ({"PIL"}, "bench --dataset random-mm --num-prompts 2", "images"),
        ({"mlflow"}, "bench --mlflow-uri x", "mlflow"),
        ({"lm_eval"}, "bench --tasks hellaswag", "eval"),
        ({"datasets"}, "quantize --method gptq --calibration owner/name", "hub"),
    ]
    # What one command imported, the next would find: only the server's packages are hidden one by one.
    also = {True: set[str](), False: OPTIONAL}
    found = answers(tmp_path, *((h | also[extra == "serve"], words) for h, words, extra in cases))
    for (hidden, words, extra), (code, out, err) in zip(cases, found, strict=True):
        lines = [line for line in err.splitlines() if line.startswith("error: ")]
        assert (code, out, len(lines)) == (2, "", 1), (words, hidden, err)
        (module,) = hidden
        (name,) = [key for key, value in {module: module, **MODULES}.items() if value == module][
            -1:
        ]
        assert name.replace("-", "_") in lines[0].replace("-", "_"), (words, lines)
        assert lines[0].endswith(f"pip install 'llmopt[{extra}]'"), (words, lines)
    assert [path.name for path in tmp_path.iterdir()] == ["batch.jsonl"]


def optional_imports(tree: ast.Module) -> set[str]:
    """Optional packages that a module imports when it is imported itself."""
    found: set[str] = set()
    pending: list[Any] = [*tree.body]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module.partition(".")[0])
        elif isinstance(node, ast.ClassDef | ast.Try):
            pending += node.body
    return found & (OPTIONAL | WITH_THEM)


def test_optional_packages_are_imported_where_they_are_needed() -> None:
    """At the top of a module only in the server, and where grammars and images are read."""
    places = {
        module.path.relative_to(ROOT).as_posix()
        for module in read_modules().values()
        if optional_imports(ast.parse(module.path.read_text(encoding="utf-8")))
    }
    readers = {"grammar.py", "schema_limits.py", "structural_tag.py", "media.py", "remote.py"}
    assert {
        place
        for place in places
        if not place.startswith("engine/server/") and Path(place).name not in readers
    } == set()


@pytest.mark.parametrize("extra", ["all", "dev"])
def test_an_extra_that_names_others_names_known_ones(extra: str) -> None:
    assert requirements("serve") | requirements("plots") | {"gguf"} <= requirements(extra)
    assert not requirements(None) & OPTIONAL


def test_the_version_is_a_constant_that_needs_no_installed_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert llmopt.__version__ == project["version"]
    asked = [
        path
        for path, module in read_modules().items()
        if re.search(r"version\(.llmopt.\)|metadata.*llmopt", _text(module))
    ]
    assert asked == []


def _text(module: Any) -> str:
    return module.path.read_text(encoding="utf-8")
