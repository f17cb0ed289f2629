"""docs/python.md: its snippets run, one after another in an empty folder, as a reader would run them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from .support.cli_process import ForkedProcess

PAGE = Path(__file__).resolve().parent.parent / "docs" / "python.md"


def run_code(code: str) -> None:
    """The process of a reader, with torch imported already."""
    exec(code, {"__name__": "__main__"})


def test_the_snippets_run(tmp_path: Path) -> None:
    snippets = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(snippets) == len(re.findall(r"^## ", PAGE.read_text(), re.MULTILINE))
    code = "\n".join(snippets)
    with ForkedProcess(run_code, code, cwd=tmp_path) as process:
        out, err = process.communicate(300)
    assert process.returncode == 0, err
    for said in ("quantizing 5 5 layers", "H100", "gptp", "choose one of auto, autoround"):
        assert said in out
    assert {path.name for path in tmp_path.iterdir()} == {"small", "runs"}


def test_the_public_names_load_when_they_are_used() -> None:
    code = (
        "import sys, llmopt, llmopt.engine, llmopt.quant, llmopt.bench, llmopt.planner\n"
        "assert 'torch' not in sys.modules and 'pydantic' not in sys.modules\n"
        "for module in (llmopt.engine, llmopt.quant, llmopt.bench, llmopt.planner):\n"
        "    assert all(getattr(module, name) for name in module.__all__)\n"
        "try:\n"
        "    llmopt.quant.no_such_name\n"
        "except AttributeError as error:\n"
        "    print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "module 'llmopt.quant' has no attribute 'no_such_name'\n"
