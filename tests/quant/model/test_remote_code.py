"""Code that a checkpoint brings: named explicitly at every call, and run only where it is trusted."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.quant.convert.verify import verify
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.request import QuantizeRequest

from ...support.quant_support import STORIES
from ...test_architecture import ROOT

FOLDERS = ("base", "quant", "engine", "bench", "cli", "tools")
CALLS = ("from_pretrained", "from_config")
REMOTE = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}


def auto_calls(path: Path) -> list[ast.Call]:
    """Calls such as `AutoModelForCausalLM.from_pretrained(...)` in a file."""
    return [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in CALLS
        and ast.unparse(node.func.value).rpartition(".")[2].startswith("Auto")
    ]


def test_every_call_says_whether_code_is_trusted() -> None:
    calls = [
        (path, call)
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for call in auto_calls(path)
    ]
    assert len(calls) > 10
    silent = [
        f"{path.name}:{call.lineno}"
        for path, call in calls
        # `None`: a mapping of arguments, which has it.
        if not {"trust_remote_code", None} & {keyword.arg for keyword in call.keywords}
    ]
    assert silent == []


def copy_of_stories(folder: Path, **changes: Any) -> Path:
    """stories3M under another config, with code that leaves a mark where it is run."""
    folder.mkdir()
    for path in STORIES.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "config.json").unlink()
    config = json.loads((STORIES / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    mark = folder / "ran"
    (folder / "code.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Config: pass\n")
    return folder


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "of_someone", "auto_map": REMOTE}, "--trust-remote-code"),
        ({"model_type": "of_tomorrow"}, r"not known to the installed transformers \d"),
    ],
)
def test_an_unknown_type_is_one_line_and_runs_nothing(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    model = copy_of_stories(tmp_path / "model", **changes)
    with pytest.raises(BadInput, match=words) as caught:
        quantize(QuantizeRequest(model, tmp_path / "out", method="rtn", errors=False))
    assert "\n" not in str(caught.value)
    assert not (model / "ran").exists() and not (tmp_path / "out").exists()


def test_trusted_code_is_run(tmp_path: Path) -> None:
    model = copy_of_stories(tmp_path / "model", model_type="of_someone", auto_map=REMOTE)
    request = QuantizeRequest(model, tmp_path / "out", method="rtn", errors=False)
    trusting = QuantizeRequest(**{**vars_of(request), "trust_remote_code": True})
    with pytest.raises(BadInput, match="its code gives no config"):
        quantize(trusting)
    assert (model / "ran").exists()


def vars_of(request: QuantizeRequest) -> dict[str, Any]:
    return {name: getattr(request, name) for name in request.__dataclass_fields__}


def test_verify_says_what_it_could_not_check(tmp_path: Path) -> None:
    """A type that transformers does not know is verified by its files alone, and the report says so."""
    output = tmp_path / "out"
    quantize(QuantizeRequest(STORIES, output, method="rtn", errors=False))
    config = json.loads((output / "config.json").read_text())
    (output / "llmopt_quantization.json").unlink()
    (output / "config.json").write_text(json.dumps(config | {"model_type": "of_tomorrow"}))
    report = verify(output)
    assert report.ok
    (unchecked,) = report.unchecked
    assert "'of_tomorrow' is not known" in unchecked
