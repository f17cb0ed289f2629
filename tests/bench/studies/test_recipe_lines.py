"""Recipes: the bundled ones are whole, a dry run does nothing, an error names its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
import yaml
from llmopt.base.errors import BadInput
from llmopt.bench.studies.recipe import steps_of
from llmopt.bench.studies.recipe_files import line_of, read_recipe
from llmopt.cli.main import run_guarded
from llmopt.cli.run import run
from llmopt.recipes import ROOT

GOOD = """# a comment
name: mine
bench:
  num_prompts: 8
variants:
  - name: one
    quantize:
      method: rtn
  - name: two
    quantize: {method: rtn, bits: 8}
compare:
  threshold: 5%
"""


def llmopt(*words: str | Path) -> int:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(run)
    return run_guarded(lambda: app(list(map(str, words)), standalone_mode=False), debug=False)


@pytest.mark.parametrize("path", sorted(ROOT.glob("*.yaml")), ids=lambda path: path.stem)
def test_bundled_recipes_are_valid(path: Path) -> None:
    recipe = read_recipe(path.stem)
    assert recipe.name == path.stem and steps_of(recipe)[-1].startswith("write report.html")


def test_a_dry_run_lists_the_steps_and_does_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text(GOOD)
    root = tmp_path / "runs"
    assert llmopt(tmp_path / "mine.yaml", "--dry-run", "--result-dir", root, "--json") == 0
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert [step.split()[0] for step in steps] == [
        "quantize", "verify", "quantize", "verify", "bench", "compare", "compare", "write",
    ]  # fmt: skip
    assert "rtn, 8 bits" in steps[2] and "8 prompts" in steps[4] and not root.exists()
    assert llmopt("ci-regression", "--dry-run", "--json") == 0
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert steps[0] == "serve original (stories3M) by llmopt"
    assert llmopt("ci-regression", "--model", tmp_path / "gone", "--dry-run") == 2
    assert "gone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("num_prompts: 8", "num_prompt: 8", 4, "unknown key 'bench.num_prompt'"),
        ("num_prompts: 8", "num_prompts: 0", 4, "bench.num_prompts"),
        ("      method: rtn", "      methode: rtn", 8, "methode"),
        ("bits: 8}", "bits: eight}", 10, "variants.1.quantize.bits"),
        ("name: two", "name: original", 9, "is taken"),
        ("name: two", "name: one", 5, "two variants have the same name"),
        ("threshold: 5%", "threshold: x", 11, "no share"),
        ("name: mine\n", "", 1, "name: Field required"),
        ("  num_prompts: 8", "  num_prompts: [8", 5, "not YAML"),
    ],
)
def test_an_error_names_its_line(old: str, new: str, line: int, said: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(BadInput) as caught:
        read_recipe(str(path))
    assert f"bad.yaml, line {line}:" in str(caught.value) and said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["name: 2024-13-45", f"name: {'[' * 5000}", b"\xff\xfe"], ids=["date", "depth", "bytes"]
)
def test_hostile_yaml_is_bad_input(text: str | bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(BadInput, match=r"bad\.yaml: not YAML"):
        read_recipe(str(path))
    path.write_text(GOOD)
    with pytest.raises(BadInput, match=r"--set bench\.num_prompts=\[2024-13-45\]"):
        read_recipe(str(path), changes=["bench.num_prompts=[2024-13-45]"])


def test_lines_of_values_and_of_what_is_missing() -> None:
    root = yaml.compose("a:\n  b:\n  - x\n  - y\nc: 1\n", Loader=yaml.SafeLoader)
    found = [line_of(root, path) for path in (["c"], ["a", "b", 1], ["a", "z"], ["a", "b", 7], [])]
    assert found == [5, 4, 1, 2, 1]
