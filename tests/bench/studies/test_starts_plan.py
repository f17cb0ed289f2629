"""What a comparison by starts is made of: builds, options, CPUs, warm passes; and what is refused."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.bench.gate.gate_options import LimitOptions
from llmopt.bench.record.result import RunData
from llmopt.bench.studies.start import affinity, cpus_of_pair, idlest, parse_cpus
from llmopt.bench.studies.starts_plan import (
    Budget,
    Build,
    StartsPlan,
    check_options,
    parse_builds,
    value_of,
)
from llmopt.bench.studies.starts_series import num_cold, warm
from llmopt.cli.main import main

URLS = ("base=http://a:1", "new=http://b:2")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["base=x"], "was given 1 times"),
        (["base", "new=x"], "write NAME=SPEC"),
        (["ba se=x", "new=x"], "write NAME=SPEC"),
        (["a=x", "a=y"], "two names"),
        (["a=http://x", "b=y"], "one build is a URL"),
    ],
)
def test_malformed_builds_are_refused(given: list[str], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        parse_builds(given)


@pytest.mark.parametrize(
    ("spec", "options", "said"),
    [
        ("no/such/folder", (), "no virtual environment, no program and no URL"),
        ("python 'unclosed", (), "No closing quotation"),
        (sys.prefix, ("--output=x",), "--output does not go behind"),
        (sys.prefix, ("--serve", "nothing"), "none of vllm"),
    ],
)
def test_builds_that_cannot_start_are_refused(
    spec: str, options: tuple[str, ...], said: str
) -> None:
    with pytest.raises(BadInput, match=said):
        check_options([Build("base", spec)], options)


def test_an_environment_without_the_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    with pytest.raises(BadInput, match="no bin/llmopt in it"):
        Build("base", str(tmp_path)).command(())
    with pytest.raises(BadInput, match="no bin/vllm in it"):
        Build("base", str(tmp_path)).command(("--serve", "vllm"))


def test_the_command_lines_of_a_start(tmp_path: Path) -> None:
    for name in ("llmopt", "vllm", "python"):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).touch()
    environment = Build("base", str(tmp_path))
    assert environment.command(("M",)) == [str(tmp_path / "bin/llmopt"), "bench", "M"]
    served = environment.command(("M", "--serve", "vllm"))
    assert served[:4] == [sys.executable, "-m", "llmopt.cli.main", "bench"]
    assert served[4:] == ["M", "--serve", "vllm", "--serve-program", str(tmp_path / "bin/vllm")]
    assert environment.command(("--serve=llmopt",))[-1] == str(tmp_path / "bin/python")
    command = Build("new", f"{sys.executable} -X dev")
    assert command.command(("M",)) == [sys.executable, "-X", "dev", "bench", "M"]
    served = command.command(("--serve", "vllm", "--serve-args", "--max-num-seqs 4"))
    assert served[-3:] == [
        "--serve-program",
        sys.executable,
        "--serve-args=--max-num-seqs 4 -X dev",
    ]
    assert Build("new", "http://a:1").command(("M",))[3:] == [
        "bench",
        "M",
        "--base-url",
        "http://a:1",
    ]


def test_the_last_value_of_an_option_counts() -> None:
    words = ["--a", "1", "--b=2", "--a=3", "--c"]
    assert [value_of(words, name) for name in ("--a", "--b", "--c", "--d")] == [
        "3",
        "2",
        None,
        None,
    ]


def test_quality_is_scored_by_the_first_start_alone(tmp_path: Path) -> None:
    builds = Build("base", sys.prefix), Build("new", sys.prefix)
    cases: tuple[tuple[tuple[str, ...], dict[str, Any], bool], ...] = (
        ((), {}, False),
        (("--reference", "stories3M"), {}, True),
        ((), {"gate": "kl<=0.01"}, True),
        ((), {"min_top1": "95%"}, True),
        ((), {"gate": "duration<=+10%"}, False),
    )
    for options, limits, scores in cases:
        plan = StartsPlan(*builds, options, LimitOptions(**limits))
        assert plan.scores_quality() is scores
        for number in (1, 2):
            words = plan.command(builds[0], number, tmp_path, is_current=True)
            assert ("--no-quality" in words) is not (scores and number == 1)
            assert ("--no-report" in words) is (number == 2)


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    plan = StartsPlan(
        *parse_builds(URLS),
        ("M",),
        LimitOptions(gate="duration<=+1%"),
        Budget(10, 2.5),
        "0",
        False,
        4,
    )
    plan.write(tmp_path)
    assert StartsPlan.read(tmp_path) == plan
    (tmp_path / "starts.json").write_text("{}")
    with pytest.raises(BadInput, match="is damaged"):
        StartsPlan.read(tmp_path)
    with pytest.raises(BadInput, match="holds no comparison by starts"):
        StartsPlan.read(tmp_path / "elsewhere")
    with pytest.raises(BadInput, match="--max-starts is 1"):
        Budget(max_starts=1)
    with pytest.raises(BadInput, match="--max-minutes is 0"):
        Budget(max_minutes=0)


def test_cpus_are_pinned_for_an_engine_that_leaves_some_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    monkeypatch.setattr("llmopt.bench.studies.start.LOOK_SECONDS", 0.0)
    assert parse_cpus(f"{allowed[0]}") == {allowed[0]}
    for text in ("x", "", "0-", f"{allowed[-1] + 1}"):
        with pytest.raises(BadInput, match="--pin-cpus"):
            parse_cpus(text)
    threads = ("--num-threads", "1")
    assert cpus_of_pair("none", threads, has_server=False) is None
    assert cpus_of_pair("auto", threads, has_server=True) is None
    assert cpus_of_pair("auto", (), has_server=False) is None
    assert cpus_of_pair("auto", ("--num-threads", "999"), has_server=False) is None
    with affinity(frozenset(allowed[:1])):
        assert os.sched_getaffinity(0) == {allowed[0]}
    assert sorted(os.sched_getaffinity(0)) == allowed


def test_the_idlest_cpus_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(*idle: int) -> None:
        rows = [f"cpu{n} 1 0 1 {ticks} 0 0 0 0 0 0" for n, ticks in enumerate(idle)]
        (tmp_path / "stat").write_text("\n".join(["cpu 9 9 9 9", *rows, "intr 1"]))

    look(100, 100, 100)
    monkeypatch.setattr("time.sleep", lambda _: look(100, 120, 105))
    assert idlest({0, 1, 2}, 1, tmp_path) == {1}
    look(100, 100, 100)
    assert idlest({0, 1, 2}, 2, tmp_path) == {1, 2}
    assert idlest({0, 7}, 1, tmp_path) is None
    assert idlest({0}, 1, tmp_path / "none") is None


@pytest.mark.parametrize(
    ("times", "cold"),
    [
        ([1.0, 1.0, 1.0, 1.0], 0),
        ([1.5, 1.0, 1.01, 1.0], 1),
        ([2.0, 1.5, 1.0, 1.0], 2),
        ([4.0, 3.0, 2.0, 1.0], 2),
        ([1.0], 0),
    ],
)
def test_leading_passes_are_discarded_until_two_agree(times: list[float], cold: int) -> None:
    passes: list[dict[str, Any]] = [{"duration": 9.0, "cpu_seconds": one} for one in times]
    assert num_cold(passes) == cold
    assert num_cold([{"duration": one} for one in times]) == cold


def test_a_warm_start_has_the_requests_of_its_warm_passes() -> None:
    runs = [{"duration": one} for one in (2.0, 1.0, 1.0, 1.0)]
    table = {"run": [0, 0, 1, 2, 3], "ttft_ms": [9, 9, 1, 1, 1]}
    start = warm(RunData({"llmopt": {"runs": runs}}, table))
    assert start.result["llmopt"] == {"runs": runs[1:], "num_cold_passes": 1}
    assert start.requests == {"run": [0, 1, 2], "ttft_ms": [1, 1, 1]}
    assert table["run"] == [0, 0, 1, 2, 3], "what was read stays as it is"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-starts", "4"], "--max-starts needs --run"),
        (["--run", "base=x", "--run", "new=y"], "no virtual environment"),
        (["--resume", "nowhere"], "holds no comparison by starts"),
        (["--resume", "nowhere", "--run", "base=x"], "--resume goes on as it began"),
        (["--run", "base=http://a", "--run", "new=http://b", "--gate", "x"], "cannot read 'x'"),
        (["--run", "base=http://a", "--run", "new=http://b", "--pin-cpus", "x"], "--pin-cpus 'x'"),
    ],
)
def test_a_wrong_command_line_leaves_nothing(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["compare", *words])
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert said in err and err.startswith("error: ") and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.whole
def test_two_real_starts_of_this_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = f"{sys.executable} -m llmopt.cli.main"
    words = ["--run", f"base={spec}", "--run", f"new={spec}", "--max-starts", "2", "--json"]
    options = [
        "stories260K",
        "--num-prompts",
        "8",
        "--output-len",
        "4",
        "--num-runs",
        "3",
        "--no-report",
    ]
    with pytest.raises(SystemExit) as ended:
        main(["compare", *words, "-o", str(tmp_path / "runs"), "--", *options])
    assert ended.value.code == 3, "a pair of starts tells nothing"
    record = json.loads(capsys.readouterr().out)
    assert record["num_pairs"] == 1
    (start,) = record["starts"]["new"]
    assert start["cpu_seconds"] > 0 and start["duration"] > 0
