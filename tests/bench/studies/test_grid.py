"""Grids: parameter files, cells, resumption, failures, the table and the Pareto front."""

from __future__ import annotations

import contextlib
import json
import pickle
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
from llmopt.bench.load.started_server import preset
from llmopt.bench.studies.grid_cells import num_gpus, pareto_front, parse_axes
from llmopt.bench.studies.grid_plan import plan_grid, read_combinations, server_words
from llmopt.cli.main import main
from llmopt.quant.base.errors import BadInput

FAKE = Path(__file__).parents[2] / "support" / "fake_server.py"
COMMAND = f"{sys.executable} {FAKE} --port {{port}}"
FAST = ["--num-prompts", "4", "--num-runs", "1", "--output-len", "4", "--no-check-client"]


def written(path: Path, value: Any) -> Path:
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def bench(*words: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--serve", COMMAND, *FAST, *map(str, words)])
    code = ended.value.code
    assert isinstance(code, int)
    return code


def test_parameter_files_are_vllms(tmp_path: Path) -> None:
    listed = read_combinations(written(tmp_path / "a", [{"max_num_seqs": 4}, {"x": True}]), "--f")
    assert [(c.name, dict(c.params)) for c in listed] == [
        ("max_num_seqs=4", {"max_num_seqs": 4}),
        ("x=true", {"x": True}),
    ]
    named = read_combinations(written(tmp_path / "b", "small: {a: 1}\nlarge: {a: 2}\n"), "--f")
    assert [c.name for c in named] == ["small", "large"]
    assert dict(named[1].params) == {"a": 2}
    given = written(tmp_path / "c", [{"_benchmark_name": "mine", "a": 1}])
    assert read_combinations(given, "--f")[0].name == "mine"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("3", "list of mappings"),
        ("[]", "list of mappings"),
        ("[1]", "entry 1 is no mapping"),
        ("a: 1", "a: write a mapping"),
        ("[{a: 1}, {a: 1}]", "two entries are 'a=1'"),
        ("[{a: }]", "a has no value"),
        ("{a: [", "neither YAML nor JSON"),
    ],
)
def test_what_is_no_parameter_file_says_why(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(BadInput, match=words) as refused:
        read_combinations(written(tmp_path / "p.yaml", text), "--serve-params")
    assert "p.yaml" in str(refused.value) and "\n" not in str(refused.value)
    with pytest.raises(BadInput, match="No such file"):
        read_combinations(tmp_path / "none", "--serve-params")


def test_server_words_are_vllms() -> None:
    params = {"max_num_seqs": 8, "x": True, "y": False, "c.z": True, "j": {"a": 1}, "l": [1, 2]}
    assert shlex.join(server_words(params)) == (
        """--max-num-seqs 8 --x --no-y --c.z=true --j '{"a": 1}' --l 1 --l 2"""
    )


def test_a_command_line_is_a_server() -> None:
    made = preset("srv --m {model} --n {name} -p {port} --j '{\"a\": {}}'")
    words = made.arguments("/m/x", "x", 81)
    assert made.program == "srv" and words == [
        *("--m", "/m/x", "--n", "x", "-p", "81"),
        *("--j", '{"a": {}}'),
    ]
    assert not made.has_no_name and preset("srv {port}").has_no_name


def test_cells_are_checked_before_anything_starts(tmp_path: Path) -> None:
    given = {"serve": COMMAND}
    serve = written(tmp_path / "s", [{"max_num_seqs": 1}, {"max_num_seqs": 2}])
    good = written(tmp_path / "b", [{"max-concurrency": 1}, {"max-concurrency": 2}])
    plan = plan_grid(given, serve, good)
    assert [len(row) for row in plan.rows()] == [2, 2]
    assert plan.cells[1].options.max_concurrency == 2 and plan.cells[1].options.num_runs == 3
    assert plan.cells[3].options.serve_args == "--max-num-seqs 2"
    linked = plan_grid(given, serve, good, "max_num_seqs=max_concurrency")
    assert [cell.options.max_concurrency for cell in linked.cells] == [1, 2]
    for bad, words in (
        ([{"max_concurrency": 0}], "max_concurrency"),
        ([{"nonsense": 1}], "unknown key 'nonsense'"),
        ([{"serve_args": "x"}], "set by the grid"),
    ):
        with pytest.raises(BadInput, match=words):
            plan_grid(given, serve, written(tmp_path / "bad", bad))
    with pytest.raises(BadInput, match="needs --serve"):
        plan_grid({}, serve, None)
    with pytest.raises(BadInput, match="no cell"):
        plan_grid(given, serve, good, "max_num_seqs=num_prompts")


def test_the_front_is_what_no_cell_beats() -> None:
    rows: list[dict[str, Any]] = [
        {"cell": "a", "tokens_per_user": 10.0, "median_ttft_ms": 5.0},
        {"cell": "b", "tokens_per_user": 20.0, "median_ttft_ms": 9.0},
        {"cell": "c", "tokens_per_user": 9.0, "median_ttft_ms": 6.0},
        {"cell": "failed", "tokens_per_user": None, "median_ttft_ms": None},
    ]
    assert pareto_front(rows, ("tokens_per_user", "median_ttft_ms")) == ["a", "b"]
    assert num_gpus({"tensor-parallel-size": 4, "data_parallel_size": 2}) == 8
    assert parse_axes("users,failed") == ("users", "failed")
    with pytest.raises(BadInput, match="two of"):
        parse_axes("users,speed")


def test_a_grid_records_failures_and_goes_on(tmp_path: Path, capsys: Any) -> None:
    serve = written(
        tmp_path / "serve.yaml",
        "slow: {max_num_seqs: 4}\nbroken: {crash: true}\nrefusing: {refuse: true}\nfast: {}\n",
    )
    load = written(tmp_path / "load.json", [{"max_concurrency": 1}, {"max_concurrency": 4}])
    out = tmp_path / "grid"
    # On a busy machine disturbed passes are measured again, which changes nothing that is asserted.
    words = ["--serve-params", serve, "--bench-params", load, "--output", out]
    words += ["--max-redone-passes", "0"]
    assert bench(*words) == 1
    record = json.loads((out / "grid.json").read_text())
    by_key = {row["cell"]: row for row in record["cells"]}
    assert [row["status"] for row in record["cells"]] == [
        *("done", "done", "failed", "failed", "failed", "failed", "done", "done")
    ]
    assert "no such device" in by_key["002-broken--max_concurrency=1"]["error"]
    assert "refused" in by_key["005-refusing--max_concurrency=4"]["error"]
    fast = by_key["006-fast--max_concurrency=1"]
    assert fast["tokens_per_user"] == pytest.approx(fast["output_throughput"])
    done = {row["cell"] for row in record["cells"] if row["status"] == "done"}
    assert record["pareto_front"] and set(record["pareto_front"]) <= done
    page = (out / "report.html").read_text()
    assert "no such device" in page and "<svg" in page and (out / "pareto.svg").is_file()
    table = pq.read_table(out / "grid.parquet").to_pydict()
    assert table["serve.max_num_seqs"] == [4, 4, *[None] * 6]
    assert table["bench.max_concurrency"] == [1, 4] * 4
    run = json.loads((out / "cells" / fast["cell"] / "result.json").read_text())
    assert run["llmopt"]["server_metrics"]["counters"]["generation_tokens"] == 16
    # The same line again measures only what failed, and other parameters are refused.
    kept = (out / "cells" / fast["cell"] / "result.json").stat().st_mtime_ns
    capsys.readouterr()
    assert bench(*words, "--json") == 1
    assert (out / "cells" / fast["cell"] / "result.json").stat().st_mtime_ns == kept
    assert json.loads(capsys.readouterr().out)["cells"][6]["status"] == "done"
    assert bench(*words, "--num-prompts", "5") == 2
    assert "other parameters (--num-prompts)" in capsys.readouterr().err


def test_a_server_that_dies_costs_one_cell(tmp_path: Path) -> None:
    # Five requests a cell with the warm-up: the server dies in the second, and is started again.
    load = written(tmp_path / "load.json", {"a": {}, "b": {"seed": 1}, "c": {"seed": 2}})
    out = tmp_path / "grid"
    code = bench(
        *("--serve-args", "--die-after 7 --no-metrics", "--bench-params", load, "--output", out),
        *("--max-concurrency", "1", "--request-timeout", "5", "--no-quality"),
        # On a busy machine a disturbed pass is measured again, and its requests count too.
        *("--max-redone-passes", "0"),
    )
    cells = json.loads((out / "grid.json").read_text())["cells"]
    assert code == 1 and [row["status"] for row in cells] == ["done", "failed", "done"]
    assert "the server ended during the cell" in cells[1]["error"]
    assert [run["failed"] for run in results(out)] == [0, 0]


class Ray:
    """Ray as far as jobs use it: a task is done at once, in this process, from its pickled words."""

    class exceptions:
        class RayError(Exception):
            pass

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def is_initialized(self) -> bool:
        return True

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": 2.0}}]

    def remote(self, **asked: Any) -> Any:
        self.asked.append(asked)
        return lambda call: SimpleNamespace(
            remote=lambda *words: (len(self.asked), call(*pickle.loads(pickle.dumps(words))))
        )

    def wait(self, left: list[Any], num_returns: int) -> Any:
        return left[:num_returns], left[num_returns:]

    def get(self, done: Any) -> Any:
        return done[1]


@pytest.mark.whole
def test_each_server_of_a_grid_is_a_task_of_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setitem(sys.modules, "ray", ray := Ray())
    serve = written(tmp_path / "serve.yaml", "broken: {crash: true}\nfast: {}\n")
    load = written(tmp_path / "load.json", [{"max_concurrency": 1}, {"max_concurrency": 2}])
    words = ["--serve-params", serve, "--bench-params", load, "--output", tmp_path / "grid"]
    words += ["--max-redone-passes", "0", "--on", "ray"]
    assert bench(*words) == 1
    record = json.loads((tmp_path / "grid" / "grid.json").read_text())
    assert [row["status"] for row in record["cells"]] == ["failed", "failed", "done", "done"]
    assert [asked["num_cpus"] for asked in ray.asked] == [2, 2]
    assert bench(*words) == 1 and len(ray.asked) == 3  # again only what failed
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        words = ["--base-url", "http://x", "--bench-params", load, "--output", tmp_path / "url"]
        main(["bench", *map(str, words), "--on", "ray"])
    assert ended.value.code == 2 and "disturb each other" in capsys.readouterr().err


def results(out: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(out.glob("cells/*/result.json"))]


def servers(words: str) -> list[Path]:
    """Processes of the stand-in with these words on their command line."""
    running = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_text()
            if str(FAKE) in line and words in line and "bench" not in line.split("\0"):
                running.append(path.parent)
    return running


@pytest.mark.whole
def test_a_killed_grid_continues(tmp_path: Path) -> None:
    load = written(tmp_path / "load.json", {"a": {}, "b": {"seed": 1}})
    out = tmp_path / "grid"
    serve = written(tmp_path / "serve.json", [{"_benchmark_name": "s", "max_num_seqs": 21}])
    words = ["--serve-params", str(serve), "--bench-params", str(load), "--output", str(out)]
    command = [sys.executable, "-m", "llmopt.cli.main", "bench", "--serve", COMMAND, *FAST, *words]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True) as process:
        first = out / "cells" / "000-s--a" / "result.json"
        deadline = time.monotonic() + 240
        while not first.is_file():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    # The server dies with it, or it would still hold the GPU.
    while servers("--max-num-seqs\0" + "21"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    before = first.stat().st_mtime_ns
    assert bench(*words) == 0
    assert first.stat().st_mtime_ns == before and len(results(out)) == 2


def test_a_dry_run_prints_the_commands(tmp_path: Path, capsys: Any) -> None:
    serve = written(tmp_path / "serve.json", [{"max_num_seqs": 4}])
    load = written(tmp_path / "load.json", [{"max_concurrency": 2}])
    words = ["--serve-params", serve, "--bench-params", load, "--output", tmp_path / "no"]
    assert bench(*words, "--dry-run") == 0
    server, client = capsys.readouterr().out.splitlines()
    assert server == f"{sys.executable} {FAKE} --port 8000 --max-num-seqs 4"
    assert client.startswith("    llmopt bench --base-url http://127.0.0.1:8000 ")
    assert "--max-concurrency 2" in client and "--num-prompts 4" in client
    assert not (tmp_path / "no").exists()
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--dry-run"])
    assert ended.value.code == 2 and "needs a grid" in capsys.readouterr().err
