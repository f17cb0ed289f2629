"""An option is defined once: every way to say it has the same names, defaults and values."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
import typer.main
from llmopt.base.errors import BadInput
from llmopt.base.option import Option, options_of, word_name
from llmopt.bench.options.options import BenchOptions
from llmopt.bench.session import run_sessions
from llmopt.bench.studies.recipe import Recipe
from llmopt.cli import bench, main, serve_local
from llmopt.cli.options.command import shown_name
from llmopt.cli.options.shared import FolderOptions
from llmopt.engine.config.compatibility import FEATURES
from llmopt.engine.config.config import EngineConfig, SpeculationConfig
from llmopt.engine.core import llm
from llmopt.engine.deploy.engine_commands import VLLM

ROOT = Path(__file__).parents[2]
VLLM_OPTIONS = (ROOT / f"tests/engine/deploy/vllm-{VLLM.version}-options.txt").read_text().split()
NOT_OPTIONS = {"model": "every command takes it as its argument"}
OURS_ALONE = {
    "--device": "vLLM is built for one kind of device",
    "--swap-space": "vLLM recomputes what it preempts",
    "--window": "streams without end",
    "--attention-sinks": "streams without end",
    "--kv-budget": "vLLM evicts no tokens",
    "--kv-eviction": "vLLM evicts no tokens",
    "--encoder-cache-memory": "vLLM's encoder cache has a step's tokens",
    "--num-threads": "vLLM reads OMP_NUM_THREADS",
    "--cpu-activations": "a kernel of ours",
    "--prompt-lookup-min": "a key of vLLM's --speculative-config",
    "--prompt-lookup-max": "a key of vLLM's --speculative-config",
    "--speculative-acceptance": "a key of vLLM's --speculative-config",
    "--speculative-tree-width": "vLLM's heads propose chains",
}
SAID: Mapping[str, tuple[list[str], Any]] = {
    "dtype": (["--dtype", "float32"], "float32"),
    "trust_remote_code": (["--trust-remote-code"], True),
    "device": (["--device", "cpu"], "cpu"),
    "kv_cache_dtype": (["--kv-cache-dtype", "int8"], "int8"),
    "block_size": (["--block-size", "4"], 4),
    "kv_cache_memory_bytes": (["--kv-cache-memory-bytes", "4GiB"], 4 << 30),
    "num_blocks": (["--num-blocks", "64"], 64),
    "gpu_memory_utilization": (["--gpu-memory-utilization", "0.5"], 0.5),
    "swap_space_bytes": (["--swap-space", "1MiB"], 1 << 20),
    "max_model_len": (["--max-model-len", "128"], 128),
    "max_num_seqs": (["--max-num-seqs", "3"], 3),
    "max_num_batched_tokens": (["--max-num-batched-tokens", "99"], 99),
    "prefill_chunk_size": (["--prefill-chunk-size", "5"], 5),
    "async_scheduling": (["--async-scheduling"], True),
    "enforce_eager": (["--enforce-eager"], True),
    "scheduling_policy": (["--scheduling-policy", "priority"], "priority"),
    "enable_prefix_caching": (["--no-enable-prefix-caching"], False),
    "window": (["--window", "64"], 64),
    "attention_sinks": (["--window", "64", "--attention-sinks", "4"], 4),
    "kv_budget": (["--kv-budget", "64"], 64),
    "kv_eviction": (["--kv-budget", "64", "--kv-eviction", "h2o"], "h2o"),
    "language_model_only": (["--language-model-only"], True),
    "encoder_cache_bytes": (["--encoder-cache-memory", "1MiB"], 1 << 20),
    "seed": (["--seed", "7"], 7),
    "num_threads": (["--num-threads", "1"], 1),
    "cpu_activations": (["--cpu-activations", "8"], 8),
    "tensor_parallel_size": (["--tensor-parallel-size", "2"], 2),
    "loras": (["--lora", "poet=folder"], {"poet": Path("folder")}),
    "max_loras": (["--max-loras", "3"], 3),
    "speculation": (
        ["--speculative", "ngram", "--num-speculative-tokens", "3", "--prompt-lookup-min", "1"],
        SpeculationConfig("ngram", num_tokens=3, ngram_min=1),
    ),
}
HIDDEN = [
    ("--kv-cache-memory", "4GiB", "kv_cache_memory_bytes", 4 << 30),
    ("--kv-cache-memory", "4096", "kv_cache_memory_bytes", 4096),
    ("--num-gpu-blocks-override", "64", "num_blocks", 64),
    ("--long-prefill-token-threshold", "5", "prefill_chunk_size", 5),
    ("--overlapped-loop", None, "async_scheduling", True),
    ("--serial-loop", None, "async_scheduling", False),
    ("--no-prefix-caching", None, "enable_prefix_caching", False),
    ("--lora-modules", "a=b", "loras", {"a": Path("b")}),
]
WRITES = {
    *("batch", "quantize", "convert", "merge", "bench", "freeze", "compare"),
    *("kv-plan", "deploy", "report", "run", "best", "doctor", "record"),
}
Captured = Callable[..., EngineConfig]


class Stopped(Exception):
    """A command has come as far as its options; `config` is what it made of them."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config


@pytest.fixture(scope="module")
def commands() -> Mapping[str, Any]:
    return typer.main.get_command(main.application()).commands  # type: ignore[attr-defined]


@pytest.fixture
def configs(commands, monkeypatch) -> Captured:
    """The engine config that `serve-local` or `bench` makes of an argument list."""

    def serve(config: EngineConfig, *_: Any) -> None:
        raise Stopped(config)

    def measure(options: BenchOptions, *_: Any) -> None:
        raise Stopped(options.engine)

    monkeypatch.setattr(serve_local, "_serve", serve)
    for command in (serve_local, bench):  # the adapters named here are no folders
        monkeypatch.setattr(command, "check_models", lambda _: None)
    monkeypatch.setattr(run_sessions, "run_judged", measure)

    def config_of(command: str, *words: str) -> EngineConfig:
        with pytest.raises(Stopped) as stopped:
            commands[command].main(list(words), command, standalone_mode=False)
        return stopped.value.config

    return config_of


def all_options(config: type = EngineConfig) -> dict[str, Option]:
    """{word on the command line: option} of a config and of the configs in it."""
    found: dict[str, Option] = {}
    for name, one in options_of(config).items():
        found |= all_options(one.config) if one.config else {word_name(name, one): one}
    return found


def test_every_field_is_an_option_or_says_why_not() -> None:
    names = {one.name for one in fields(EngineConfig)}
    assert names == set(options_of(EngineConfig)) | set(NOT_OPTIONS) == set(SAID) | {"model"}
    assert {one.name for one in fields(SpeculationConfig)} == set(options_of(SpeculationConfig))


@pytest.mark.parametrize("field", SAID)
def test_a_field_is_reached_by_every_way_under_its_name(configs, monkeypatch, field) -> None:
    words, value = SAID[field]
    for command in ("serve-local", "bench"):
        assert getattr(configs(command, *words), field) == value
    monkeypatch.setattr(llm, "Engine", lambda config: config)
    needed = {"attention_sinks": {"window": 64}, "kv_eviction": {"kv_budget": 64}}
    beside = needed.get(field, {})
    made: Any = llm.LLM("stories3M", **beside, **{field: value}).engine
    assert made == EngineConfig("stories3M", **beside, **{field: value})
    assert getattr(BenchOptions(**beside, **{field: value}).engine, field) == value
    if field != "num_threads":  # a recipe has this for all of its steps
        steps = {"name": "r", "capacity": {}, "bench": {**beside, field: value}}
        assert getattr(Recipe.model_validate(steps).bench.engine, field) == value


def test_defaults_are_those_of_the_config(configs) -> None:
    usual = EngineConfig()
    assert configs("serve-local") == EngineConfig("stories3M")
    assert configs("bench") == BenchOptions().engine == usual


def test_what_bench_takes_beside_has_one_default(commands) -> None:
    """None on the command line: not given, and the option's own default holds."""
    known = BenchOptions.model_fields
    of_the_command = {
        "sweep_concurrency",
        "sweep_rate",
        "slo",
        "slo_by",
        "slo_share",
        "model_option",
    }
    of_the_command |= {"sanity", "baseline", "against", "gate", "junit", "benchmark_json"}
    of_the_command |= {"mlflow_uri", "mlflow_experiment"}
    of_the_command |= {"output", "result_dir", "csv", "as_json", "help", "help_all"}
    for parameter in commands["bench"].params:
        name = shown_name(parameter.name)
        if name in all_options() or name in of_the_command:
            continue
        validated = BenchOptions.model_validate(
            {name: parameter.default} if parameter.default is not None else {}
        )
        assert getattr(validated, name) == known[name].get_default(call_default_factory=True)


@pytest.mark.parametrize(("flag", "word", "field", "value"), HIDDEN)
def test_hidden_spellings_mean_the_same(configs, flag, word, field, value) -> None:
    words = [flag] if word is None else [flag, word]
    for command in ("serve-local", "bench"):
        assert getattr(configs(command, *words), field) == value


def test_hidden_spellings_are_on_no_help_screen(commands, capsys) -> None:
    for command in commands.values():
        with command.make_context(command.name, [], resilient_parsing=True) as context:
            shown = command.get_help(context) + capsys.readouterr().out
        assert "--help" in shown
        for parameter in command.params:
            if shown_name(parameter.name) != parameter.name:
                for flag in (*parameter.opts, *parameter.secondary_opts):
                    assert f"{flag} " not in shown
    assert {flag for flag, *_ in HIDDEN} <= {
        flag.strip()
        for one in all_options().values()
        for spelling in one.hidden_flags
        for flag in spelling.split("/")
    }


def test_one_option_by_two_spellings_is_refused(commands) -> None:
    words = ["--kv-cache-memory", "4GiB", "--kv-cache-memory-bytes", "1GiB"]
    for command in ("serve-local", "bench"):
        with pytest.raises(BadInput, match="--kv-cache-memory-bytes was given by two spellings"):
            commands[command].main(words, command, standalone_mode=False)
    with pytest.raises(BadInput, match="overlapped_loop is another name of async_scheduling"):
        llm.LLM(async_scheduling=True, overlapped_loop=False)


def test_former_names_are_still_keywords_and_keys(monkeypatch) -> None:
    monkeypatch.setattr(llm, "Engine", lambda config: config)
    config: Any = llm.LLM(overlapped_loop=True, lora=["a=b"], kv_cache_memory_bytes="4GiB").engine
    assert config.async_scheduling and config.loras == {"a": Path("b")}
    assert config.kv_cache_memory_bytes == 4 << 30
    bench = {"overlapped_loop": True, "lora": {"a": "b"}, "kv_cache_memory_bytes": "4GiB"}
    recipe = Recipe.model_validate({"name": "r", "capacity": {}, "bench": bench})
    assert recipe.bench.engine == config
    journal = recipe.model_dump(mode="json", exclude_unset=True)
    assert Recipe.model_validate(journal) == recipe


@pytest.mark.parametrize("word", all_options())
def test_vllm_spells_an_option_so_or_has_none(word) -> None:
    flag = "--" + word.replace("_", "-")
    spelled = {flag, *all_options()[word].hidden_flags}
    assert bool(spelled & set(VLLM_OPTIONS)) != (flag in OURS_ALONE), spelled


def test_the_feature_table_names_options_of_the_command_line(commands) -> None:
    known = {o for p in commands["serve-local"].params for o in (*p.opts, *p.secondary_opts)}
    for feature in FEATURES.values():
        for word in feature.source.replace("`", " ").split():
            assert not word.startswith("--") or word in known, feature


def test_output_names_what_a_command_writes(commands) -> None:
    for name, command in commands.items():
        flags = {
            flag for one in command.params if not one.name.endswith("__hidden") for flag in one.opts
        }
        assert {"--output", "-o"} <= flags if name in WRITES else not {"--output", "-o"} & flags
        assert "--out" not in flags


def test_a_run_folder_is_named_or_made(commands, tmp_path) -> None:
    named = FolderOptions(tmp_path / "mine", tmp_path)
    named.check()
    assert named.folder("x") == tmp_path / "mine"
    # Another run took the folder while this one measured.
    assert named.folder("x") == tmp_path / "mine-2"
    names = {FolderOptions(None, tmp_path).folder("x").name for _ in range(3)}
    assert len(names) == 3 and all("-x" in name for name in names)
    there = ["--output", str(tmp_path)]
    for command, words in (("bench", there), ("run", ["quickstart", *there])):
        with pytest.raises(BadInput, match="exists: name another folder"):
            commands[command].main(words, command, standalone_mode=False)
    words = ["--resume", str(tmp_path), "-o", str(tmp_path / "new")]
    with pytest.raises(BadInput, match="omit it with --resume"):
        commands["run"].main(words, "run", standalone_mode=False)


@pytest.mark.parametrize("path", sorted((ROOT / "cli").rglob("*.py")), ids=lambda path: path.stem)
def test_no_function_is_longer_than_a_screen(path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 60, f"{path.name}: {node.name}"


def test_a_required_field_is_an_optional_word() -> None:
    assert fields(SpeculationConfig)[0].default is MISSING
    assert SpeculationConfig.asked() is None
    assert SpeculationConfig.asked(draft_model="x") == SpeculationConfig("draft", "x")
