"""`llmopt doctor`: the machine's facts, what is wrong, and the kernel table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.bench.machine import kernel_table, roofline
from llmopt.bench.machine import overview as machine_overview
from llmopt.bench.machine.kernel_table import SCHEMES, table
from llmopt.bench.machine.overview import EXTRAS, overview, problems
from llmopt.cli.main import main, run_guarded
from llmopt.engine.kernels.common.dispatch import Candidate
from llmopt.engine.kernels.common.verdicts import Quartiles, Verdict, VerdictTable
from llmopt.engine.kernels.elementwise.dispatch import GATE
from llmopt.engine.kernels.elementwise.reference import torch_silu_gate

from tools.structure import ROOT

from ..support.native_paths import needs_compiler, needs_x86
from .test_shell import told


def call(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as stop:
        main(["doctor", *arguments])
    return stop.value.code


def test_a_screen_without_torch_that_compiles_one_kernel(tmp_path: Path) -> None:
    out = told("doctor", COLUMNS="100", XDG_CACHE_HOME=str(tmp_path))
    lines = out.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 100
    rows = {line[:15].strip() for line in lines}
    facts = {"versions", "processor", "threads", "C kernels", "C compiler", "memory", "NVIDIA GPUs"}
    assert facts <= rows and "--all" in out
    assert len(list(tmp_path.rglob("*.so"))) <= 1
    assert "No such file" not in out


def test_a_checkout_that_is_not_installed_is_held_against_its_project_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def requires(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    def version_of(name: str) -> str | None:
        return None if name == "pydantic" else library_version(name)

    library_version = machine_overview.library_version
    monkeypatch.setattr(machine_overview, "requires", requires)
    monkeypatch.setattr(machine_overview, "library_version", version_of)
    missing = overview()["missing"]
    assert [(entry["package"].partition(">")[0], entry["extra"]) for entry in missing] == [
        ("pydantic", None)
    ]


def test_a_package_that_is_not_there_is_named_in_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def without(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    assert run_guarded(partial(without, "pydantic.fields"), debug=False) == 2
    assert capsys.readouterr().err == ("error: pydantic is not installed: pip install pydantic\n")
    with pytest.raises(ModuleNotFoundError):
        run_guarded(partial(without, "llmopt.bench.gone"), debug=False)


@needs_x86
def test_the_profile_shows_in_what_torch_says_of_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "llmopt", "doctor", "--json"],
        capture_output=True,
        check=True,
        env=os.environ | {"LLMOPT_CPU": "generic"},
    )
    found = json.loads(done.stdout)
    assert (found["cpu"]["profile"], found["cpu"]["default_dtype"]) == ("generic", "float32")
    assert (found["cpu"]["capability"], found["cpu"]["features"]) == ("DEFAULT", [])
    assert found["native"]["path"] is None


def test_what_is_wrong_comes_with_a_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LLMOPT_NATIVE", raising=False)
    monkeypatch.setenv("CC", "no-such-compiler")
    assert call() == 0
    out = " ".join(capsys.readouterr().out.split())
    if torch.backends.cpu.get_cpu_capability() != "DEFAULT":
        assert (
            "no C kernels: there is no C compiler (no-such-compiler); install gcc or clang" in out
        )
    monkeypatch.setenv("LLMOPT_NATIVE", "off")
    facts = overview()
    assert [each.remedy for each in problems(facts | {"missing": []})] == ["unset LLMOPT_NATIVE"]
    facts["native"] |= {"reason": None, "is_kept": False}
    facts["versions"]["torch"] = "2.13.0+cpu"
    facts["nvidia"] |= {"gpus": [{"name": "card", "memory_bytes": 1}], "reason": None}
    facts["missing"] = [
        {"package": "torch>=2.11", "extra": None, "installed": "2.9"},
        {"package": "gguf>=0.18", "extra": "gguf", "installed": None},
    ]
    assert [each.remedy for each in problems(facts)] == [
        "pip install 'torch>=2.11'",
        "let XDG_CACHE_HOME name a folder of yours",
        "install a CUDA build of torch",
    ]


def test_each_extra_says_what_it_serves() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(EXTRAS) == set(project["optional-dependencies"]) - {"all", "dev", "docs"}


def test_a_package_of_an_extra_that_others_name_is_listed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = ['no-such>=2; extra == "images"', 'llmopt[images]; extra == "serve"']
    monkeypatch.setattr(
        "llmopt.bench.machine.overview.requires", lambda name: [*lines, "no-core>=1"]
    )
    missing = {each["package"]: each["extra"] for each in overview()["missing"]}
    assert missing == {"no-such>=2": "images", "no-core>=1": None}


def test_json_holds_the_kernel_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--json") == 0
    found = json.loads(capsys.readouterr().out)
    parts = {"versions", "cpu", "native", "memory", "cuda", "mps", "kernels", "verdicts", "health"}
    assert parts <= set(found)
    assert {"path", "reason", "bfloat16_products", "threads", "cache"} <= set(found["native"])
    assert {"capability", "features"} <= set(found["cpu"])
    assert found["versions"]["torch"] == version("torch")
    assert 1 <= found["cpu"]["usable_cores"] <= found["cpu"]["cores"]
    threads = found["cpu"]["threads"]
    assert 1 <= threads["chosen"] <= threads["physical_cores"] <= threads["hardware_threads"]
    assert threads["reason"] or set(threads["step_seconds"]) >= {str(threads["chosen"])}
    assert 0 < found["memory"]["available_bytes"] <= found["memory"]["total_bytes"]
    assert len(found["cuda"]) == torch.cuda.device_count()
    choices = table(torch.device("cpu"), torch.bfloat16)
    section = found["kernels"][0]
    assert (section["device"], section["dtype"]) == ("cpu", "bfloat16")
    assert [row["chosen"] for row in section["operations"]] == [c.chosen for c in choices]


def test_table_names_each_operation_and_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--all") == 0
    out = " ".join(capsys.readouterr().out.split())
    for choice in table(torch.device("cpu"), torch.float32):
        assert choice.operation in out
        assert str(choice.chosen) in out
    assert "Kernels on cpu in float32" in out
    assert "physical cores" in out


def test_it_says_which_node_and_how_many_threads_were_chosen() -> None:
    from llmopt.cli.output.doctor_tables import threads_line

    threads = {"physical_cores": 16, "hardware_threads": 32, "nodes": 2, "node": 1, "quota": None}
    measured = {**threads, "chosen": 6, "step_seconds": {8: 0.003, 6: 0.002}, "reason": None}
    assert threads_line(measured) == (
        "6 on node 1 of 16 physical cores (32 hardware threads, 2 NUMA nodes); a made-up step on 8: 3.0 ms, "
        "6: 2.0 ms; --tensor-parallel-size 2 takes every node"
    )
    alone = {"physical_cores": 4, "hardware_threads": 8, "nodes": 1, "node": None, "quota": 2}
    told = {**alone, "chosen": 2, "step_seconds": {}, "reason": "OMP_NUM_THREADS"}
    assert threads_line(told) == (
        "2 of 4 physical cores (8 hardware threads, quota 2); OMP_NUM_THREADS"
    )


def test_verdicts_are_shown_and_renewed_where_kernels_are_tried(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine tries its own")
    assert call("--json") == 0
    assert json.loads(capsys.readouterr().out)["verdicts"] is None
    assert call("--renew") == 2
    assert "no kernels are tried here: that needs a CUDA device" in capsys.readouterr().err
    once = Quartiles(1e-5, 1e-5, 1.5e-5)
    tried = VerdictTable(tmp_path / "card.json", lambda call: once)
    tried.crossover("int4", lambda: 16)
    slower = Verdict(1e-3, (Quartiles(2e-5, 2e-5, 2.1e-5),), "torch takes 50 % of its time")
    tried.verdicts["norm: rows of 8"] = {"triton": slower, "torch": Verdict(seconds=(once,))}
    monkeypatch.setattr(kernel_table, "current_verdicts", lambda: tried)
    monkeypatch.setattr(kernel_table, "measure", lambda *_: None)
    assert call("--all") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Kernels tried on this GPU" in out and "torch takes 50 %" in out
    assert "20.0 to 21.0" in out and "10.0 to 15.0" in out
    assert call("--json") == 0
    told = json.loads(capsys.readouterr().out)["verdicts"]
    assert told["crossovers"] == {"int4": 16}
    assert [each["dropped"] for each in told["kernels"]] == [slower.dropped, None]
    assert call("--renew", "--json") == 0
    assert json.loads(capsys.readouterr().out)["verdicts"]["kernels"] == []
    assert not tried.path.exists()


@needs_compiler
def test_a_self_test_of_every_kernel_that_serves(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--self-test", "--json") == 0
    health = json.loads(capsys.readouterr().out)["health"]
    device = health["devices"][0]
    assert health["passed"] and device["device"] == "cpu"
    assert device["roofs"]["copy_bytes_per_second"] > 0
    assert device["roofs"]["bfloat16_flops"] > 0
    for dtype in (torch.bfloat16, torch.float32):
        served = {(choice.operation, choice.chosen) for choice in table(torch.device("cpu"), dtype)}
        tested = {
            (t["operation"], t["kernel"]) for t in device["tests"] if str(dtype) in t["situation"]
        }
        references = {"torch", "torch-sdpa", "tiled-dequant", "torch-rows", "loop"}
        assert {one for one in served if one[1] not in references} <= tested


@pytest.mark.whole
@needs_compiler
def test_a_self_test_on_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--self-test") == 0
    assert "against their references" in capsys.readouterr().out


def test_a_kernel_that_is_wrong_fails_the_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def near() -> Any:
        return lambda gate, up: torch_silu_gate(gate, up) * 1.05

    def broken(*_: Any) -> Any:
        raise RuntimeError("no such register\nand more")

    wrong = Candidate("near", lambda _: None, near)
    failing = Candidate("broken", lambda _: None, broken)
    monkeypatch.setattr(GATE, "candidates", (wrong, failing, *GATE.candidates))
    monkeypatch.setattr(kernel_table, "SCHEMES", SCHEMES[:1])
    monkeypatch.setattr(roofline, "device_roofs", lambda _: {})
    assert call("--self-test", "--json") == 1
    health = json.loads(capsys.readouterr().out)["health"]
    found = {t["kernel"]: t for t in health["devices"][0]["tests"] if t["operation"] == GATE.name}
    assert not health["passed"]
    assert found["near"]["error"] == pytest.approx(0.05, rel=0.1) and not found["near"]["passed"]
    assert (found["broken"]["error"], found["broken"]["passed"]) == (None, False)
    assert found["broken"]["reason"] == "RuntimeError: no such register"
    assert found.get("native", {"passed": True})["passed"]


def test_without_a_gpu_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there it is made unasked")
    assert call("--json") == 0
    assert json.loads(capsys.readouterr().out)["health"] is None
