"""The first day with llmopt, from the wheel: every step, and twenty mistakes.

`python tools/first_user.py MODELS OUT --walk` builds the wheel and installs it into an environment of its own
with the third-party packages of this one. It then quantizes in five ways, verifies, serves, benches, compares
and reports, asks `best`, runs the CI job, and the Python lines of the README. It prints wall and processor
time of every step, each in a process of its own. It ends with 1 where a step fails, or a mistake is not
refused with one line in a second of processor time, on a quiet machine.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHORT = "--num-prompts 8 --num-runs 2 --output-len 8 --no-quality"
CALIBRATED = "--num-samples 4 --seq-len 128"
# MODEL is the checkpoint, OUT the folder of the walk.
STEPS = (
    "",
    "--help",
    "doctor",
    "quantize MODEL --method awq --bits 4 --dry-run",
    "kv-plan MODEL --gpu l40s",
    "kv-plan MODEL --gpu cpu",
    "best MODEL --max-kl 0.05 --loads-in llama.cpp --dry-run",
    "quantize MODEL --method rtn --no-errors -o OUT/rtn",
    "quantize MODEL --method fp8 --no-errors -o OUT/fp8",
    "quantize MODEL --method Q4_K_M --no-errors -o OUT/q4km.gguf",
    f"quantize MODEL --method gptq --group-size 64 {CALIBRATED} -o OUT/gptq",
    f"quantize MODEL --method smoothquant {CALIBRATED} -o OUT/w8a8",
    "verify OUT/rtn",
    "verify OUT/fp8",
    "verify OUT/q4km.gguf",
    "verify OUT/gptq",
    "verify OUT/w8a8",
    "check OUT/gptq --engine vllm",
    "serve-local OUT/q4km.gguf",
    f"bench MODEL {SHORT} -o OUT/a",
    f"bench OUT/rtn {SHORT} -o OUT/b",
    "compare OUT/a OUT/b",
    "report OUT/a OUT/b -o OUT/report.html",
    "best stories3M --max-kl 0.1 --gpu cpu --finalists 2 --num-samples 2 --seq-len 32 --quality-tokens 128 "
    "--no-quality-full -o OUT/best",
    "run ci-regression --model stories3M --set bench.num_prompts=8 --set bench.output_len=8 "
    "--set bench.num_runs=2 --set bench.quality_tokens=256 -o OUT/ci",
    "python README",
)
MISTAKES = (
    "quantize MODEL --method quantise",
    "quantize MODEL --method Q4_KM",
    "quantize MODEL --group-size 100 --dry-run",
    "quantize MODEL --output /dev/null/x --dry-run",
    "quantize MODEL --bits 17",
    "quantize no/such/model",
    "quantize MODEL --format ggfu",
    "verify no/such/checkpoint",
    "convert no/such/checkpoint --format gguf",
    "bench MODEL --dataset sharegp",
    "bench MODEL --dataset OUT/report.html",
    "bench MODEL --gate p99<=10",
    "bench --base-url 127.0.0.1:9",
    "compare no/such/a no/such/b",
    "report no/such/run",
    "run quickstart --set bench.num_promts=5",
    "best MODEL --loads-in vlm",
    "best MODEL --gpu l400s",
    "kv-plan lama-70b",
    "kv-plan llama-70b --gpu l400s",
)
MOST_SECONDS = 1.0
VERDICTS = "compare", "run", "best", "check"
STARTED_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Timed:
    """A finished command with its wall and processor seconds."""

    line: str
    code: int
    error: str
    wall_seconds: float
    cpu_seconds: float

    @classmethod
    def run(cls, line: str, command: Sequence[str | Path], folder: Path) -> Timed:
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        if "serve-local" in command:
            code, error = served(command, folder)
        else:
            done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
            code, error = done.returncode, done.stderr.strip()
        wall = time.perf_counter() - began
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return cls(line, code, error, wall, cpu)

    def __str__(self) -> str:
        return f"{self.line[:76]:<76} {self.code:>4} {self.wall_seconds:>7.2f} {self.cpu_seconds:>7.2f}"

    @property
    def problem(self) -> str | None:
        """The reason that a mistake was not refused as it should be: one line, at once."""
        if self.code != 2 or not self.error.startswith("error: ") or "\n" in self.error:
            return f"{self.line}: exit code {self.code}, {self.error[-200:]!r}"
        if self.cpu_seconds > MOST_SECONDS:
            return f"{self.line}: refused after {self.cpu_seconds:.1f} s of processor time"
        return None


def served(command: Sequence[str | Path], folder: Path) -> tuple[int, str]:
    """Start the server, wait until it is ready, ask it once, and stop it; its exit code and a fault."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + STARTED_SECONDS
    log = folder / "server.log"
    with (
        log.open("w") as output,
        subprocess.Popen(
            [*command, "--port", str(port)], cwd=folder, stdout=output, stderr=output
        ) as server,
    ):
        try:
            while True:
                try:
                    urllib.request.urlopen(f"{url}/health", timeout=5).close()
                    break
                except (urllib.error.URLError, OSError):
                    if server.poll() is not None or time.monotonic() > until:
                        return 1, log.read_text()[-300:]
                    time.sleep(0.5)
            body = b'{"model": "first-day", "prompt": "Once", "max_tokens": 8}'
            header = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{url}/v1/completions", body, header)
            urllib.request.urlopen(request, timeout=120).close()
        finally:
            server.terminate()
    return server.returncode, log.read_text()[-300:]


def installed(folder: Path) -> Iterator[Timed]:
    """Build the wheel of this checkout and install it into `folder/env`, with this environment's packages."""
    source, environment = folder / "source", folder / "env"
    skipped = shutil.ignore_patterns(".*", "build", "dist", "runs", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=skipped)
    pip = [sys.executable, "-m", "pip"]
    offline = ["--no-deps", "--no-index"]
    wheel = [*pip, "wheel", *offline, "--no-build-isolation", "-w", folder, source]
    yield Timed.run("pip wheel .", wheel, folder)
    venv.create(environment, with_pip=False)
    (built,) = folder.glob("*.whl")
    target = ["--python", environment / "bin" / "python"]
    yield Timed.run(
        f"pip install {built.name}", [*pip, *target, "install", *offline, built], folder
    )
    scheme = {"base": str(environment), "platbase": str(environment)}
    packages = Path(sysconfig.get_paths(vars=scheme)["purelib"])
    (packages / "third_party.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")


def command_of(line: str, model: Path | str, folder: Path) -> list[str | Path]:
    """The command line of a step in the installed environment."""
    programs = folder / "env" / "bin"
    if line == "python README":
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        (code,) = re.findall(r"^```python\n(.+?)^```", readme, re.DOTALL | re.MULTILINE)
        return [programs / "python", "-c", code]
    words = [
        str(model) if word == "MODEL" else word.replace("OUT/", f"{folder}/")
        for word in line.split()
    ]
    if words[:1] == ["serve-local"]:
        words += ["--served-model-name", "first-day"]
    return [programs / "llmopt", *words]


def walk(model: Path | str, folder: Path) -> list[str]:
    """Print the time of every step and mistake; returns the problems."""
    os.environ.pop("PYTHONPATH", None)
    problems = []
    print(f"{'step':<76} exit  wall s   CPU s")
    for step in installed(folder):
        print(step, flush=True)
        if step.code:
            return [f"{step.line}: {step.error[-300:]}"]
    for line in (*STEPS, *MISTAKES):
        done = Timed.run(line or "llmopt", command_of(line, model, folder), folder)
        print(done, flush=True)
        if line in MISTAKES:
            problems += [done.problem] if done.problem else []
        elif done.code not in ((0, 1, 3) if line.startswith(VERDICTS) else (0,)):
            problems.append(f"{done.line}: exit code {done.code}, {done.error[-300:]}")
    return problems
