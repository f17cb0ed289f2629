"""The wheel, built and installed without a network, and used outside the checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools import structure

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that neither leftovers in the checkout nor this test change the result."""
    copy = tmp_path_factory.mktemp("source") / "llmopt"
    skipped = shutil.ignore_patterns(".*", "build", "dist", "runs", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=skipped)
    out = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    run = subprocess.run([*command, "-w", str(out), str(copy)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def elsewhere(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a new environment with the wheel, and with this one's third-party packages.

    A path in a .pth file is searched, but the .pth files that lie there are not read: so the editable
    install of this environment does not show through.
    """
    folder = tmp_path_factory.mktemp("elsewhere") / "env"
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    packages = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})["purelib"]
    unseen = "import importlib.util as u; assert u.find_spec('llmopt') is None"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps"]
    run = subprocess.run(
        [*install, "--no-index", "--no-compile", str(wheel)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    installed = Path(packages) / "llmopt"
    hidden = installed.rename(installed.with_name("hidden"))
    (Path(packages) / "third_party.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    subprocess.run([python, "-c", unseen], cwd=folder, check=True)
    hidden.rename(installed)
    return folder / "bin"


def run_llmopt(bin_folder: Path, where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    run = subprocess.run(
        [bin_folder / "llmopt", *arguments], cwd=where, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return run


def payload(shard: Path) -> int:
    """Bytes of the tensors in a safetensors file: all but the header and its length."""
    with shard.open("rb") as file:
        return shard.stat().st_size - 8 - int.from_bytes(file.read(8), "little")


def test_wheel_holds_nothing_outside_its_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {
        "llmopt",
        next(name for name in names if ".dist-info/" in name).split("/")[0],
    }


def test_wheel_holds_every_file_of_the_packages(wheel: Path) -> None:
    """Code, C sources, page, templates, device and model lists, bundled models: as tracked, no more."""
    floors = [*structure.FLOORS, structure.DATA, "package"]
    command = ["git", "ls-files", "-z", *floors]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("not a git checkout")
    tracked = {name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()}
    built = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("llmopt/")}
    assert built == {f"llmopt/{name.removeprefix('package/')}" for name in tracked}


def test_wheel_is_typed(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    packages = {
        name.split("/")[1] for name in names if name.startswith("llmopt/") and name.count("/") > 1
    }
    assert {"llmopt/py.typed", *(f"llmopt/{one}/py.typed" for one in packages)} <= names


def test_help_runs_from_the_wheel(elsewhere: Path, tmp_path: Path) -> None:
    assert "kv-plan" in run_llmopt(elsewhere, tmp_path, "--help").stdout
    assert not list(tmp_path.iterdir())


def test_the_package_is_run_and_has_a_version(elsewhere: Path, tmp_path: Path) -> None:
    """`python -m llmopt`, `llmopt.__version__` and the public names, none of which loads torch by itself."""
    version = run_llmopt(elsewhere, tmp_path, "--version").stdout
    command = [elsewhere / "python", "-m", "llmopt", "--version"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stdout == version
    code = (
        "import sys, llmopt; from llmopt.planner import PlanRequest, plan; from llmopt import bench, quant; "
        "assert plan(PlanRequest('llama-70b')).devices and 'torch' not in sys.modules; "
        "print('llmopt', llmopt.__version__)"
    )
    command = [elsewhere / "python", "-c", code]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stdout == version


def test_kv_plan_runs_from_the_wheel(elsewhere: Path, tmp_path: Path) -> None:
    run = run_llmopt(
        elsewhere, tmp_path, "kv-plan", "--model", "llama-70b", "--ctx", "128k", "--json"
    )
    assert json.loads(run.stdout)["kv_bytes_total"] == 40 * 2**30
    assert not list(tmp_path.iterdir())


@pytest.mark.whole
def test_quantize_runs_from_the_wheel(elsewhere: Path, tmp_path: Path) -> None:
    options = ["--num-samples", "2", "--seq-len", "32", "--json"]
    run = run_llmopt(elsewhere, tmp_path, "quantize", "--method", "awq", *options)
    assert json.loads(run.stdout)
    (made,) = tmp_path.iterdir()
    plan = run_llmopt(elsewhere, tmp_path, "kv-plan", "--model", made.name, "--json")
    assert json.loads(plan.stdout)["weight_bytes"] == sum(map(payload, made.glob("*.safetensors")))


@pytest.mark.whole
def test_bench_runs_from_the_wheel(elsewhere: Path, tmp_path: Path) -> None:
    options = "--num-prompts 2 --output-len 4 --num-runs 1 --max-concurrency 2 --quality-tokens 64"
    run = run_llmopt(
        elsewhere, tmp_path, "bench", "--dataset", "sharegpt", *options.split(), "--json"
    )
    assert json.loads(run.stdout)["completed"] == 2
    assert len(list(tmp_path.glob("runs/*/report.html"))) == 1


@pytest.mark.whole
def test_serve_local_runs_from_the_wheel(elsewhere: Path, tmp_path: Path) -> None:
    assert "--port" in run_llmopt(elsewhere, tmp_path, "serve-local", "--help").stdout


@pytest.mark.whole
def test_doctor_tries_a_gpu_from_the_wheel(elsewhere: Path, tmp_path: Path) -> None:
    """Run its first process, which says in one line that there is no card; no record is written."""
    words = "doctor --gpu -o gpu.json"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    refused = subprocess.run(
        [elsewhere / "llmopt", *words.split()],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert refused.returncode == 2 and "sees no CUDA device" in refused.stderr
    assert not (tmp_path / "gpu.json").exists()


def ci_scripts(job: str) -> tuple[dict[str, str], list[str]]:
    """(environment, scripts) of a workflow file as its runner has them, one shell for each script."""
    whole: Any = yaml.safe_load((ROOT / "docs" / "ci" / f"serving-{job}.yml").read_text())
    if job == "gitlab":
        part = whole["serving-regression"]
        return part["variables"], ["\n".join([*part["before_script"], *part["script"]])]
    part = whole["jobs"]["regression"]
    return part["env"], [step["run"] for step in part["steps"] if "run" in step]


def outside(wheel: Path) -> dict[str, str]:
    """The environment of a job's shell: third-party packages of this one as in `elsewhere`, no network."""
    inherited = {name: word for name, word in os.environ.items() if not name.startswith("PYTHON")}
    return {
        **inherited,
        "PYTHONPATH": sysconfig.get_paths()["purelib"],
        "PIP_NO_DEPS": "1",
        "PIP_NO_INDEX": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "INSTALL": str(wheel),
        "PYTHON": sys.executable,
    }


def gate_scripts(job: str, given: dict[str, str]) -> list[tuple[dict[str, str], str]]:
    """(environment, script) of each step of action.yml, or of the GitLab job, with these inputs."""
    if job == "gitlab":
        whole: Any = yaml.safe_load((ROOT / "docs" / "ci" / "gate-gitlab.yml").read_text())
        part = whole["llmopt-gate"]
        names = {name.replace("-", "_").upper(): word for name, word in given.items()}
        lines = "\n".join([*part["before_script"], *part["script"]])
        return [({**part["variables"], **names}, lines)]
    action: Any = yaml.safe_load((ROOT / "action.yml").read_text())
    words = {name: one.get("default", "") for name, one in action["inputs"].items()} | given
    steps = []
    for step in action["runs"]["steps"]:
        named = {
            key: re.fullmatch(r"\$\{\{ inputs\.(\S+) \}\}", value)
            for key, value in step["env"].items()
        }
        steps.append(({key: words[found[1]] for key, found in named.items() if found}, step["run"]))
        assert all(named.values())
    return steps


@pytest.mark.whole
@pytest.mark.timeout(300)
@pytest.mark.parametrize("job", ["github", "gitlab"])
def test_the_gate_judges_files_of_other_tools_outside_this_repository(
    wheel: Path, tmp_path: Path, job: str
) -> None:
    """The action's steps and the GitLab job: two files of llama-bench, the second 1.3 times as slow."""
    shutil.copytree(
        ROOT / "tests" / "bench" / "record" / "results" / "llama-bench", tmp_path / "results"
    )
    given = {"base": "results/base.json", "new": "results/new.jsonl"}
    given |= {"install": str(wheel), "python": sys.executable, "gate": "output_throughput>=-5%"}
    page, said = tmp_path / "page.md", tmp_path / "outputs"
    runner = {
        "RUNNER_TEMP": str(tmp_path),
        "GITHUB_STEP_SUMMARY": str(page),
        "GITHUB_OUTPUT": str(said),
    }
    run = None
    for environment, script in gate_scripts(job, given):
        run = subprocess.run(
            ["bash", "-eo", "pipefail", "-c", script],
            cwd=tmp_path,
            env={**outside(wheel), **runner, **environment},
            capture_output=True,
            text=True,
        )
    assert run is not None and run.returncode == 1, run and run.stderr
    summary = (page if job == "github" else tmp_path / "llmopt-gate.md").read_text()
    assert summary.startswith("### Regression: results/new against results/base") and "●" in summary
    assert (tmp_path / "llmopt-gate.xml").is_file()
    if job == "github":
        assert said.read_text() == "verdict=regression\n"


@pytest.mark.whole
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("job", "is_worse"), [("github", False), ("gitlab", True)])
def test_ci_files_need_the_wheel_and_nothing_of_this_repository(
    wheel: Path, elsewhere: Path, tmp_path: Path, job: str, is_worse: bool
) -> None:
    """The steps of both files, with llmopt's server in place of vLLM: a candidate of 2 bits is a regression."""
    candidate = "stories3M"
    if is_worse:
        words = "quantize --method rtn --bits 2 --no-errors --output 2bit"
        run_llmopt(elsewhere, tmp_path, *words.split())
        candidate = str(tmp_path / "2bit")
    environment, scripts = ci_scripts(job)
    changes = {"LLMOPT": wheel, "TODAY": wheel, "NEXT": wheel, "SERVE": "llmopt", "ARGS": ""}
    changes |= {"PROGRAM": "python", "MODEL": "stories3M", "CANDIDATE": candidate}
    assert set(environment) == set(changes)
    few = {"num_prompts": 8, "num_runs": 1, "output_len": 4, "quality_tokens": 512}
    few |= {"check_client": "false", "max_redone_passes": 0, "report": "false"}
    words = " ".join(f"--set bench.{name}={value}" for name, value in few.items())
    scripts[-1] = scripts[-1].replace("run ci-regression", f"run ci-regression {words}")
    where = tmp_path / "project"
    where.mkdir()
    inputs = {name: str(value) for name, value in changes.items()}
    shell = {**outside(wheel), **inputs, "GITHUB_STEP_SUMMARY": str(tmp_path / "page.md")}
    run = None
    for script in scripts:
        run = subprocess.run(
            ["bash", "-eo", "pipefail", "-c", script],
            cwd=where,
            env=shell,
            capture_output=True,
            text=True,
        )
    assert run is not None and run.returncode == is_worse, run and run.stderr
    result = json.loads((where / "regression" / "result.json").read_text())
    verdict = result["variants"]["candidate"]["comparison"]
    found = {check["key"]: check["outcome"] for check in verdict["checks"]}
    expected = "regression" if is_worse else "pass"
    assert found["error_rate"] == "pass" and found["perplexity"] == found["kl"] == expected
    assert (where / "regression" / "candidate" / "verdict.xml").is_file()
    assert (tmp_path / "page.md").is_file() == (job == "github")
    for name in ("original", "candidate"):
        of_run = json.loads((where / "regression" / name / "result.json").read_text())["llmopt"]
        folder = {"original": "today", "candidate": "next"}[name]
        assert of_run["server"]["started"]["command"][0].endswith(f"stacks/{folder}/bin/python")


def test_earlier_import_paths_lead_to_the_present_ones() -> None:
    """Programs outside import these; docs/architecture.md names where they lie now."""
    present = {
        "llmopt.quant.base.errors": ("llmopt.base.errors", "BadInput"),
        "llmopt.quant.load_processor": ("llmopt.quant.source.load_processor", "load_tokenizer"),
        "llmopt.quant.models": ("llmopt.quant.source.models", "resolve_model"),
    }
    for earlier, (module, name) in present.items():
        assert getattr(import_module(earlier), name) is getattr(import_module(module), name)
