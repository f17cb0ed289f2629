"""The language of the source: tools/language.py finds nothing but the names listed here."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools import language
from tools.structure import Module, read_modules

MODULES = list(read_modules().values())
# Fields of results and options of commands, which other modules and people name.
KEPT = {
    "bench.best.search": {"asked"},
    "bench.record.comparable": {"said"},
    "cli.best": {"asked"},
    "cli.kv_plan": {"words"},
    "cli.quantize": {"asked"},
    "engine.deploy.deployment": {"words"},
    "engine.deploy.engine_commands": {"words"},
    "engine.server.requests.request_record": {"held"},
    "quant.stream.final_submodules": {"place"},
}


@pytest.mark.parametrize("title", language.CHECKS)
def test_the_source_reads_well(title: str) -> None:
    findings = [
        f"{module.name}:{line}: {text}"
        for module in MODULES
        for _, line, text in language.CHECKS[title](module)
        if text not in KEPT.get(module.name, ())
    ]
    assert not findings


def test_kept_names_are_still_there() -> None:
    names = {m.name: {text for _, _, text in language.bindings(m)} for m in MODULES}
    assert {name: words for name, words in names.items() if words} == KEPT


def test_each_check_finds_its_kind(tmp_path: Path) -> None:
    long = " ".join(["word"] * (language.MOST_WORDS + 1))
    source = f'"""{long}."""\nlimit = 1\n"""of the step"""\nfor one in ():\n    pass\n'
    source += 'def f():\n    """What it does."""\n    return 1\n'
    (path := tmp_path / "module.py").write_text(source)
    module = Module("engine.module", path)
    assert (
        ast.parse(source)
        and [len(list(check(module))) for check in language.CHECKS.values()] == [1] * 4
    )
