"""Recipes at the level of the command: options by the commands' names, --set, --model, --schema, nearest names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from llmopt.base.option import options_of, spellings
from llmopt.bench.options.definitions import BENCH_GROUPS
from llmopt.bench.record.tracking import TrackingOptions
from llmopt.bench.studies.recipe import Recipe, bench_of
from llmopt.bench.studies.recipe_files import read_recipe
from llmopt.cli import main as cli_main
from llmopt.cli.main import main
from llmopt.cli.options.command import shown_name
from llmopt.recipes import ROOT

TWO = """name: mine
bench:
  num_prompts: 8
variants:
  - name: one
    quantize: {method: rtn}
  - name: two
    bench: {num_runs: 2}
"""
SET_BY_THE_RECIPE = {
    "quantize": {"model", "model_option", "output", "dry_run", "time", "as_json", "nproc"},
    "serve_local": {
        *("model", "model_option", "host", "port", "as_json", "served_model_name"),
        *("print_command", "config"),
    },
}


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(TWO)
    return tmp_path / "mine.yaml"


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["run", *words])
    said = capsys.readouterr()
    return int(stop.value.code or 0), said.out, said.err


def steps(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    code, out, err = run(capsys, *words, "--dry-run", "--json")
    assert code == 0, err
    return json.loads(out)["steps"]


def test_set_and_model_change_what_is_run(recipe: Path, capsys) -> None:
    found = steps(
        capsys, "mine.yaml", "--model", "stories260K", "--set", "bench.num_prompts=200",
        "--set", "variants.one.quantize.bits=8", "--set", "variants.1.bench.serve=llmopt",
        "--set", "variants.two.bench.serve_args=--api-key KEY",
        "--set", "compare.gate=kl<=0.1", "--set", "num_threads=1",
    )  # fmt: skip
    assert found == [
        "quantize stories260K to checkpoints/one: rtn, 8 bits",
        "verify checkpoints/one",
        "serve two (stories260K) by llmopt --num-threads 1 --api-key ...",
        "bench original, one, two one after another: sharegpt, 200 prompts, 5 passes",
        "compare one with original, kl<=0.1",
        "compare two with original, kl<=0.1",
        "write report.html; the verdicts decide the exit code",
    ]
    assert "do not decide" in steps(capsys, "mine.yaml", "--set", "compare.gate=false")[-1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("bench.num_promts=2", "unknown key 'bench.num_promts': the nearest is num_prompts"),
        ("bench.num_prompts=many", "bench.num_prompts: Input should be a valid integer"),
        ("bench.num_prompts=0", "bench.num_prompts: Input should be greater than or equal to 1"),
        ("variants.oen.model=x", "no item 'oen': the nearest is one"),
        ("name.x=1", "'x' is below a plain value"),
        ("bench", "write PATH=VALUE"),
        ("compare.gate=kll<=1", "nothing is called 'kll'"),
    ],
)
def test_a_wrong_change_is_one_line_that_names_it(recipe: Path, capsys, change, said) -> None:
    code, _, err = run(capsys, "mine.yaml", "--set", "bench.seed=1", "--set", change)
    assert code == 2 and err.startswith(f"error: --set {change}") and said in err
    assert err.count("\n") == 1 and not (recipe.parent / "runs").exists()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("num_prompts: 8", "num_promts: 8", "line 3: unknown key 'bench.num_promts': the nearest is num_prompts"),
        ("name: mine", "nmae: mine\nname: mine", "line 1: unknown key 'nmae': the nearest is name"),
        ("{method: rtn}", "{metod: rtn}", "line 6: unknown key 'variants.0.quantize.metod': the nearest is method"),
        ("{num_runs: 2}", "{num_run: 2}", "line 8: unknown key 'variants.1.bench.num_run': the nearest is num_runs"),
        ("{num_runs: 2}", "{serve_args: x, num_fewshot: 1}", "--num-fewshot is for --tasks"),
        ("bench: {num_runs: 2}", "serve_local: {max_num_seq: 2}", "the nearest is max_num_seqs"),
        ("bench: {num_runs: 2}", "serve_local: {port: 1}", "'port' is set by the recipe"),
        ("bench: {num_runs: 2}", "serve_local: {engine: sglang, num_blocks: 5}", "nothing that means the same"),
        ("bench: {num_runs: 2}", "bench: {name: x}", "'name' is set by the recipe"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_one_line_that_says_where(recipe: Path, capsys, old, new, said) -> None:
    recipe.write_text(TWO.replace(old, new))
    code, _, err = run(capsys, "mine.yaml")
    assert code == 2 and err.startswith("error: mine.yaml, line ") and said in err
    assert err.count("\n") == 1


def test_what_has_no_use_with_resume(recipe: Path, capsys) -> None:
    for words in (("--model", "x"), ("--set", "bench.seed=1")):
        code, _, err = run(capsys, "--resume", ".", *words)
        assert code == 2 and "omit them with --resume" in err


def test_the_schema_knows_every_option_of_the_three_commands(recipe: Path, capsys) -> None:
    code, out, _ = run(capsys, "--schema")
    schema = json.loads(out)
    parts = {**schema["$defs"], "Recipe": schema}
    commands: Any = typer.main.get_command(cli_main.application()).commands  # type: ignore[attr-defined]
    for step, model, command in (
        ("quantize", "QuantizeStep", "quantize"),
        ("serve_local", "ServeStep", "serve-local"),
    ):
        names = {shown_name(one.name) for one in commands[command].params if "help" not in one.name}
        assert names - SET_BY_THE_RECIPE[step] <= set(parts[model]["properties"]), step
    assert {"csv", *options_of(TrackingOptions)} <= set(parts["BenchStep"]["properties"])
    for model in ("BenchStep", "BenchFields"):
        for group in BENCH_GROUPS:
            assert set(options_of(group)) - set(parts[model]["properties"]) == set()
        assert {"speculative", "draft_model", "lora"} <= set(parts[model]["properties"])
    bits = parts["QuantizeStep"]["properties"]["bits"]
    assert bits["description"].startswith("Bits per weight")
    assert {kind.get("type") for kind in bits["anyOf"]} == {"integer", "string", "null"}
    assert code == 0


def test_options_of_nested_configs_are_keys_beside_the_others() -> None:
    made = Recipe.model_validate(
        {
            "name": "r",
            "bench": {"speculative": "ngram", "num_speculative_tokens": 3, "kv_cache_memory": "1MiB"},
            "variants": [
                {"name": "a", "quantize": {"asymmetric_calibration": True, "damp": 0.1, "target_bpw": None}},
                {"name": "b", "serve_local": {"draft_model": "stories260K", "enforce_eager": True}},
            ],
        }
    )  # fmt: skip
    speculation = made.bench.engine.speculation
    assert speculation is not None and (speculation.method, speculation.num_tokens) == ("ngram", 3)
    assert made.bench.engine.kv_cache_memory_bytes == 1 << 20
    step, served = made.variants[0].quantize, made.variants[1].serve_local
    assert step is not None and served is not None
    assert (step.options.asymmetric, step.options.damp) == (True, 0.1)
    assert step.request(Path(), Path(), "").rotations is None
    for words in ("--speculative draft", "--draft-model stories260K", "--enforce-eager"):
        assert words in served.arguments
    journal = made.dump(exclude_unset=True)
    assert Recipe.model_validate(journal) == made


def test_a_quantization_without_options_is_that_of_the_command() -> None:
    (variant,) = Recipe.model_validate({"name": "r", "variants": [{"name": "a"}]}).variants
    assert variant.made is not None
    request = variant.made.request(Path(), Path(), "")
    assert (request.method, request.bits, request.rotations) == ("awq", None, None)
    assert request.options.asymmetric is None


def test_the_journal_is_strict_json_and_read_back() -> None:
    bench = {"request_rate": "inf", "burstiness": "inf"}
    recipe = Recipe.model_validate({"name": "r", "bench": bench, "variants": [{"name": "a"}]})
    text = json.dumps(recipe.dump(exclude_unset=True), allow_nan=False)
    assert Recipe.model_validate(json.loads(text)) == recipe


def test_a_dry_run_says_how_many_users_there_are(recipe: Path, capsys) -> None:
    (_, _, sweep, _) = steps(capsys, "capacity")
    assert "with 1, 2, 4 ... users until throughput gains little: " in sweep
    (_, _, sweep, _) = steps(capsys, "capacity", "--set", "capacity.sweep_concurrency=4,1")
    assert "with 1, 4 users: " in sweep


def test_keys_are_not_written() -> None:
    bench = {"base_url": "http://127.0.0.1:1", "api_key": "secret-a", "header": {"x": "secret-b"}}
    variant = {"name": "a", "serve_local": {"api_key": ["secret-c"]}}
    served = {"name": "b", "bench": {"api_key": "secret-d"}}
    recipe = Recipe.model_validate({"name": "r", "bench": bench, "variants": [variant, served]})
    for unset in (True, False):
        assert "secret" not in json.dumps(recipe.dump(exclude_unset=unset))


@pytest.mark.parametrize(
    ("top", "own", "expected"),
    [
        ({}, {}, {"serve": None, "base_url": None}),
        ({"bench": {"serve": "vllm"}}, {}, {"serve": "vllm"}),
        ({"bench": {"serve": "vllm"}}, {"bench": {"serve": None}}, {"serve": None}),
        (
            {"bench": {"serve": "vllm", "serve_program": "a"}},
            {"bench": {"serve_program": "b"}},
            {"serve": "vllm", "serve_program": Path("b")},
        ),
        (
            {"bench": {"serve": "vllm", "serve_args": "--x"}},
            {"bench": {"base_url": "http://127.0.0.1:1"}},
            {"serve": None, "serve_args": None, "base_url": "http://127.0.0.1:1", "model": None},
        ),
        (
            {"serve_local": {"max_num_seqs": 2}},
            {},
            {"serve": "llmopt", "serve_args": "--max-num-seqs 2"},
        ),
        (
            {"serve_local": {"max_num_seqs": 2}},
            {"serve_local": {"engine": "vllm", "max_num_seqs": 4, "enforce_eager": True}},
            {"serve": "vllm", "serve_args": "--max-num-seqs 4 --enforce-eager"},
        ),
        (
            {"bench": {"base_url": "http://127.0.0.1:1"}},
            {"quantize": {"method": "rtn"}},
            {"base_url": None, "serve": None},
        ),
        ({"num_threads": 2}, {"bench": {"num_threads": 1}}, {"num_threads": 1}),
    ],
)
def test_what_a_variant_takes_over(top: Any, own: Any, expected: Any) -> None:
    values = {"name": "r", **top, "variants": [{"name": "a", "model": "m", **own}]}
    if "base_url" in own.get("bench", {}):
        del values["variants"][0]["model"]
    recipe = Recipe.model_validate(values)
    found = bench_of(recipe, recipe.variants[0])
    assert {name: getattr(found, name) for name in expected} == expected


def test_every_spelling_of_an_option_is_a_key() -> None:
    for name, one in options_of(BENCH_GROUPS[0]).items():
        assert name in spellings(name, one)
    assert "sharegpt_output_len" in spellings(
        "output_len", options_of(BENCH_GROUPS[0])["output_len"]
    )
    recipe = read_recipe("quickstart", changes=("bench.sharegpt_output_len=3",))
    assert recipe.bench.output_len == 3


def test_the_page_of_run_shows_what_is_valid_and_what_is_bundled() -> None:
    docs = Path(__file__).parents[3] / "docs"
    page = (docs / "commands" / "run.md").read_text(encoding="utf-8")
    blocks = [part.partition("```")[0] for part in page.split("```yaml\n")[1:]]
    quickstart, variants, grid = (yaml.safe_load(block) for block in blocks)
    Recipe.model_validate(quickstart)
    assert len(Recipe.model_validate(grid).variants) == 6
    shown = Recipe.model_validate({"name": "shown", "model": "m", **variants})
    for variant in shown.variants:
        bench_of(shown, variant)
    assert str(read_recipe("ci-regression").compare.gate) in page.replace("`", "")
    assert all(f"| `{path.stem}` |" in page for path in ROOT.glob("*.yaml"))
    methods = [one.quantize for one in read_recipe("method-shootout").variants]
    assert len(methods) == 6 and "six methods in 4 bits" in page
    assert {step.words.partition(", ")[2] for step in methods if step is not None} == {"4 bits"}
