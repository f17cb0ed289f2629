"""Grids of recipes: a variant for each combination of values, errors at their lines, a run that goes on."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from llmopt.base.errors import BadInput
from llmopt.bench.studies.recipe import Recipe, server_words, steps_of
from llmopt.bench.studies.recipe_files import Stages, read_recipe
from llmopt.cli.main import main

GRID = """name: loads
num_threads: 1
bench: {num_prompts: 4, output_len: 4, num_runs: 1, quality: false, check_client: false}
variants:
  - {name: more, bench: {output_len: 8}}
grid:
  bench:
    max_concurrency: [1, 2]
    stop_token_ids: [[5, 6], []]
compare: {gate: false}
"""
SERVED = """name: served
serve_local: {max_model_len: 128}
grid:
  model: [stories260K, models/Mine-Q4]
  serve_local: {max_num_seqs: [8, 16]}
  bench: {max_concurrency: [1, 8, 32]}
"""


def recipe(tmp_path: Path, text: str, *changes: str) -> Recipe:
    (tmp_path / "mine.yaml").write_text(text)
    return read_recipe(str(tmp_path / "mine.yaml"), changes=changes)


def test_every_combination_is_a_variant(tmp_path: Path) -> None:
    found = recipe(tmp_path, SERVED).variants
    assert len(found) == len({variant.name for variant in found}) == 2 * 2 * 3
    first, last = found[0], found[-1]
    assert first.name == "model-stories260K_max_num_seqs-8_max_concurrency-1"
    assert last.name == "model-models_Mine-Q4_max_num_seqs-16_max_concurrency-32"
    assert last.model == "models/Mine-Q4" and last.bench.max_concurrency == 32
    assert last.serve_local is not None and last.serve_local.max_num_seqs == 16
    assert [v.bench.max_concurrency for v in found[:4]] == [1, 8, 32, 1]


def test_a_value_may_be_a_list_and_written_variants_stay(tmp_path: Path) -> None:
    found = recipe(tmp_path, GRID.replace("stop_token_ids: [[5, 6], []]", "goodput: [[ttft:90]]"))
    assert [v.name for v in found.variants] == [
        "more",
        "max_concurrency-1_goodput-_ttft_90_",
        "max_concurrency-2_goodput-_ttft_90_",
    ]
    assert "more, max_concurrency-1" in steps_of(found)[0]


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("[1, 8, 32]", "8", 6, "grid.bench.max_concurrency: Input should be a valid list"),
        ("[1, 8, 32]", "[]", 6, "grid.bench.max_concurrency: List should have at least 1 item"),
        ("[1, 8, 32]", "[1, zero]", 6, "bench.max_concurrency: Input should be a valid integer"),
        ("max_concurrency:", "max_concurency:", 6, "unknown key 'variants.0.bench.max_concurency'"),
        ("[8, 16]", "[0]", 5, "max_num_seqs"),
        ("[8, 16]", "[8, 8]", 3, "two variants have the same name"),
        ("  bench: {", "  benches: {", 6, "unknown key 'grid.benches'"),
        ("  model: [stories260K, models/Mine-Q4]", "  model: stories260K", 4, "grid.model"),
        ("grid:\n", "grid: 5\nx:\n", 3, "grid"),
    ],
)
def test_an_error_names_its_line(old: str, new: str, line: int, said: str, tmp_path: Path) -> None:
    assert old in SERVED
    with pytest.raises(BadInput) as caught:
        recipe(tmp_path, SERVED.replace(old, new, 1))
    assert f"mine.yaml, line {line}:" in str(caught.value) and said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_change_sets_values_of_a_grid(tmp_path: Path) -> None:
    found = recipe(tmp_path, SERVED, "grid.bench.max_concurrency=[4]", "grid.model=null")
    assert [v.name for v in found.variants] == [
        "max_num_seqs-8_max_concurrency-4",
        "max_num_seqs-16_max_concurrency-4",
    ]
    with pytest.raises(BadInput, match=r"--set grid.bench.max_concurrency=4: grid.bench.max_con"):
        recipe(tmp_path, SERVED, "grid.bench.max_concurrency=4")


def test_a_grid_is_measured_and_its_journal_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = GRID.replace("    stop_token_ids: [[5, 6], []]\n", "")
    Path("mine.yaml").write_text(f"model: stories260K\n{text}")
    with pytest.raises(SystemExit) as stop:
        main(["run", "mine.yaml", "--output", "out"])
    assert stop.value.code == 0
    names = ["original", "more", "max_concurrency-1", "max_concurrency-2"]
    results = {name: json.loads(Path("out", name, "result.json").read_text()) for name in names}
    assert [results[name]["max_concurrency"] for name in names[2:]] == [1, 2]
    page = Path("out", "report.md").read_text()
    assert all(name in page for name in names)
    again = Stages.resume(Path("out")).recipe
    assert [variant.name for variant in again.variants] == names[1:]


def test_the_schema_has_a_grid() -> None:
    assert {"model", "bench", "quantize", "serve_local"} == {
        *Recipe.model_json_schema()["$defs"]["Grid"]["properties"]
    }


def test_server_words_are_vllms() -> None:
    params = {"max_num_seqs": 8, "x": True, "y": False, "l": [1, 2]}
    assert shlex.join(server_words(params)) == "--max-num-seqs 8 --x --no-y --l 1 --l 2"
