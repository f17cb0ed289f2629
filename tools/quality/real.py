"""Table of the real model: each cell quantized by its package, dequantized, scored by one program, recorded.

    python tools/quality_table.py real --models build/real --environments build/quantizers --install \\
        --calibration c4.jsonl --text wiki.test.raw --output docs/measured/cpu/quality-real.json

The reference is SmolLM2-135M-Instruct made continuous (tools/continuous_model.py); GGUF mixes are of its
768-wide twin. With `--plain FOLDER` it is another model of the Llama shape, as it is, for all cells, such as
the bundled one. Rows gain one by one in the JSON file, and the same command goes on where it was stopped.
Ends with 3 where there is no row.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from llmopt.base.atomic_io import write_atomically
from llmopt.base.errors import BadInput
from llmopt.base.processor import cpu_model
from llmopt.bench.quality.passage import Passage, ProtocolOptions, read_passage
from llmopt.bench.quality.summary import FORMULAS
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.request import QuantizeRequest
from llmopt.quant.stream.calibration import Calibration, load_calibration

from tools.continuous_model import make
from tools.document_part import write_part
from tools.environments import install
from tools.quality.cells import GROUP_SIZE, ITERS, Cell, cells
from tools.quality.dequantized import StoredSize, dequantize_checkpoint, quantized_folder
from tools.quality.environments import PACKAGES, interpreter, run
from tools.quality.gguf_file import dequantize_gguf, second_moments, write_float_gguf
from tools.quality.scoring import Scorer, key_of
from tools.real_model import fetch_gguf


@dataclass(slots=True)
class Session:
    """Models, calibration tokens and scorers of a run; what is slow is made when it is first needed."""

    given: argparse.Namespace
    continuous: Path
    twin: Path
    calibration: Calibration
    searched: Calibration
    """The same, with as many held-out samples, which searches measure errors on."""
    passage: Passage
    _scorers: dict[Path, Scorer] = field(default_factory=dict, init=False)

    def plain(self, cell: Cell) -> Path:
        """The plain model that a cell quantizes."""
        return self.twin if cell.on_twin else self.continuous

    def scorer(self, plain: Path) -> Scorer:
        if plain not in self._scorers:
            kept = self.given.models / "references"
            self._scorers = {plain: Scorer(plain, self.passage, kept)}  # one at a time in memory
        return self._scorers[plain]

    def task(self, cell: Cell, output: Path) -> dict[str, Any]:
        """What a cell's worker is given."""
        task = {
            "model": str(self.plain(cell).resolve()),
            "tokens": self.calibration.token_ids[: cell.options.get("samples")].tolist(),
            "calibration": str(self.given.calibration.resolve()),
            "seed": self.given.seed,
            "threads": self.given.threads,
            "output": str(output),
            "method": cell.method,
            "bits": cell.bits,
            "group_size": GROUP_SIZE,
            "sequential": True,
            **cell.options,
        }
        if "target_bytes" in cell.options:  # what a search measured serves the next one
            task["held_out"] = len(self.searched.held_out)
            key = f"{key_of(self.plain(cell))}-{self.searched.sha256[:16]}"
            task["stats"] = str((self.given.models / f"statistics-{key}").resolve())
        if cell.package == "llamacpp":
            task |= {"float_gguf": str(self._float_gguf()), "output": f"{output}.gguf"}
            if cell.options["imatrix"]:
                task["imatrix_file"] = str(self._imatrix())
        return task

    def _float_gguf(self) -> Path:
        path = self.given.models / f"{key_of(self.twin)}-f32.gguf"
        if not path.exists():
            part = path.with_suffix(".partial")
            write_float_gguf(self.twin, self._original_gguf(), part)
            part.replace(path)
        return path.resolve()

    def _original_gguf(self) -> Path:
        """A file whose tokenizer and shape llama.cpp takes for the model."""
        if not self.given.plain:
            return fetch_gguf(self.given.models)
        folder = self.given.models / f"{key_of(self.twin)}-Q8_0"
        if not folder.exists():
            quantize(
                QuantizeRequest(self.twin, folder, method="rtn", gguf_type="Q8_0", format="gguf")
            )
        return next(folder.glob("*.gguf"))

    def _imatrix(self) -> Path:
        path = (
            self.given.models / f"imatrix-{key_of(self.twin)}-{self.calibration.sha256[:16]}.json"
        )
        if not path.exists():
            moments = second_moments(self.twin, self.calibration.token_ids)
            write_atomically(path, json.dumps(moments).encode())
        return path.resolve()


def measure(cell: Cell, session: Session, python: Path) -> dict[str, Any]:
    """The row of a cell: its scores, or the error that its package ended with."""
    row: dict[str, Any] = {
        "name": cell.name,
        "package": cell.package,
        "method": cell.method,
        "grid": cell.grid,
        "bits": cell.bits,
        "options": dict(cell.options),
    }
    plain = session.plain(cell)
    with tempfile.TemporaryDirectory(dir=session.given.scratch) as parent:
        output, folder = Path(parent) / "quantized", Path(parent) / "plain"
        answer = run(python, cell.package, session.task(cell, output))
        if "error" in answer:
            return row | answer
        # Ours reads the text itself.
        given = session.searched if "target_bytes" in cell.options else session.calibration
        reads_all = "samples" not in cell.options
        if reads_all and answer.get("calibration_sha256", given.sha256) != given.sha256:
            return row | {"error": "it calibrated on other tokens than the packages were given"}
        try:
            if answer.get("wrote") == "plain":
                folder, stored = output, StoredSize(linear_weights(plain), answer["stored_bytes"])
            elif cell.is_gguf:
                source = next(iter([*output.parent.glob("*.gguf"), *output.glob("*.gguf")]))
                stored = dequantize_gguf(source, folder, plain, tables="tables" in cell.options)
            else:
                stored = dequantize_checkpoint(quantized_folder(output), folder, plain)
        except (BadInput, KeyError, StopIteration) as error:
            return row | {"error": f"what it wrote cannot be read here: {error}"}
        scores = session.scorer(plain).score(folder)
    return row | {
        "version": answer["version"],
        **{key: answer[key] for key in ("seconds", "cpu_seconds", "peak_bytes")},
        "bits_per_weight": stored.bits_per_weight,
        "file_bytes": stored.file_bytes,
        "perplexity": scores.perplexity,
        "reference_perplexity": scores.reference_perplexity,
        "kl_nats": scores.kl_nats,
        "kl_interval": scores.intervals["kl_nats"],
        "p99_kl_nats": scores.p99_kl_nats,
        "top1_agreement": scores.top1_agreement,
    }


def linear_weights(plain: Path) -> int:
    """Weights of the decoder layers' linears."""
    from llmopt.quant.model.checkpoint import Checkpoint

    checkpoint = Checkpoint(plain)
    names = (name for name in checkpoint.names if "_proj.weight" in name)
    return sum(checkpoint.tensor(name).numel() for name in names)


def prepare(given: argparse.Namespace) -> Session:
    """The models, the calibration tokens (once, for all packages) and the passage."""
    import transformers

    continuous, twin = (given.plain, given.plain) if given.plain else make(given.models, 0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(continuous, trust_remote_code=False)
    calibration, searched = (
        load_calibration(
            str(given.calibration),
            tokenizer,
            num_samples=given.num_samples,
            seq_len=given.seq_len,
            seed=given.seed,
            held_out=held_out,
        )
        for held_out in (0, given.num_samples)
    )
    passage = read_passage(
        tokenizer,
        max_model_len=8192,
        num_tokens=given.num_tokens,
        path=given.text,
        options=ProtocolOptions("gptq", given.window),
    )
    return Session(given, continuous, twin, calibration, searched, passage)


def record_of(session: Session, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The JSON file's content."""
    return {
        "model": session.continuous.name,
        "evaluation": session.given.text.name,
        "protocol": session.passage.description,
        "token_sha256": session.passage.sha256,
        "num_tokens": session.passage.num_scored,
        "calibration": {
            "source": session.calibration.source,
            "shape": list(session.calibration.token_ids.shape),
            "sha256": session.calibration.sha256,
        },
        "group_size": GROUP_SIZE,
        "formulas": FORMULAS,
        "torch": torch.__version__,
        "processor": cpu_model(),
        "original_perplexity": next(
            (row["reference_perplexity"] for row in rows if "reference_perplexity" in row), None
        ),
        "rows": rows,
    }


def kept_rows(path: Path, session: Session) -> list[dict[str, Any]]:
    """Rows of an earlier run.

    Raises:
        BadInput: they are of other tokens.
    """
    if not path.exists():
        return []
    record = json.loads(path.read_text(encoding="utf-8"))
    same = (
        record["model"] == session.continuous.name
        and record["token_sha256"] == session.passage.sha256
        and record["calibration"]["sha256"] == session.calibration.sha256
    )
    if not same:
        raise BadInput(
            f"{path} is of another model, or of other calibration or evaluation tokens: name another --output"
        )
    return record["rows"]


def fill(session: Session, wanted: Iterable[Cell] | None = None) -> list[dict[str, Any]]:
    """Measure the cells that `--only` matches and that have no row, and write the file after each."""
    given = session.given
    rows = {row["name"]: row for row in kept_rows(given.output, session)}
    for cell in cells() if wanted is None else wanted:
        if given.only and not re.search(given.only, cell.name):
            continue
        if not given.again and "kl_nats" in rows.get(cell.name, {}):
            continue
        python = interpreter(given.environments, cell.package)
        if python is None:
            print(f"{cell.name}: its package is not installed", flush=True)
            continue
        row = measure(cell, session, python)
        print(shown(row), flush=True)
        # Read again: another process may have added rows of other cells.
        rows = {row["name"]: row for row in kept_rows(given.output, session)} | {cell.name: row}
        text = json.dumps(record_of(session, list(rows.values())), indent=1)
        write_atomically(given.output, f"{text}\n".encode())
    return list(rows.values())


def shown(row: dict[str, Any]) -> str:
    """A row for the terminal."""
    if "error" in row:
        return f"{row['name']:<40} {row['error']}"
    low, high = row["kl_interval"]
    return (
        f"{row['name']:<40} {row['bits_per_weight']:6.3f} bpw  ppl {row['perplexity']:9.3f}  "
        f"KL {row['kl_nats']:.4g} ({low:.3g} to {high:.3g})  top-1 {row['top1_agreement']:.1%}  "
        f"{row['seconds']:.0f} s"
    )


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="quality_table.py real",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", type=Path, required=True, help="folder of tools/real_model.py")
    parser.add_argument("--plain", type=Path, help="another model, of the Llama shape")
    parser.add_argument("--environments", type=Path, help="folder with an environment a package")
    parser.add_argument("--install", action="store_true", help="make the environments first")
    parser.add_argument("--only", help="regular expression searched in the cells' names")
    parser.add_argument("--again", action="store_true", help="measure cells that have a row, too")
    parser.add_argument("--list", action="store_true", help="print the cells' names, and end")
    parser.add_argument("--calibration", type=Path, required=True, help="C4 as .jsonl")
    parser.add_argument("--text", type=Path, required=True, help="WikiText-2's wiki.test.raw")
    parser.add_argument("--num-samples", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--num-tokens", type=int, default=4096, help="of the text")
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--iters", type=int, default=ITERS, help="of auto-round's mixes")
    parser.add_argument("--scratch", type=Path, help="folder for checkpoints that are scored")
    parser.add_argument("--output", type=Path, required=True, help="JSON file, which gains rows")
    parser.add_argument("--docs", type=Path, help="Markdown file with the lines for the table")
    parser.add_argument("--part", help="which of its parts: quality_table.py real")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    if "--list" in words:
        print("\n".join(cell.name for cell in cells()))
        return 0
    given = parse(words)
    torch.set_num_threads(given.threads)
    if given.install:
        for name, packages in PACKAGES.items():
            install(given.environments / name, packages)
    session = prepare(given)
    rows = fill(session)
    if given.docs:
        part = given.part or "quality_table.py real"
        write_part(given.docs, part, markdown(record_of(session, rows)))
    return 0 if rows else 3


def label(row: Mapping[str, Any]) -> str:
    """Package and method, and what sets a row apart within its grid."""
    options = row["options"]
    words = [row["package"], row["method"]]
    if "symmetric" in options:
        words.append("sym" if options["symmetric"] else "asym")
    if options.get("imatrix"):
        words.append("imatrix")
    words += options.get("rotations", ())
    if options.get("asymmetric"):
        words.append("GPTAQ")
    if "target_bpw" in options:
        words.append(f"{options['target_bpw']:g} bits")
    if "finetune_steps" in options:
        words.append("tuned")
    if "samples" in options:
        words.append(f"{options['samples']} samples")
    if "solver" in options:
        words.append(options["solver"])
    return " ".join(words)


def markdown(record: Mapping[str, Any]) -> str:
    """The table for the documentation."""
    rows = sorted(
        (row for row in record["rows"] if "kl_nats" in row),
        key=lambda row: (-row["bits"], row["grid"], row["kl_nats"]),
    )
    shape = " x ".join(str(size) for size in record["calibration"]["shape"])
    lines = [
        f"Calibration {shape} tokens of {record['calibration']['source']}; {record['num_tokens']:,} tokens "
        f"of {record['evaluation']}, {record['protocol']}; the plain model's perplexity is "
        f"{record['original_perplexity']:.3f}.",
        "",
        "| grid | package, method | bits per weight | perplexity | KL, nats (95 %) | same top token |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        low, high = row["kl_interval"]
        lines.append(
            f"| {row['grid']} | {label(row)} | {row['bits_per_weight']:.2f} | {row['perplexity']:.3f} | "
            f"{row['kl_nats']:.3g} ({low:.3g} to {high:.3g}) | {100 * row['top1_agreement']:.1f} % |"
        )
    for row in record["rows"]:
        if "error" in row:
            lines += ["", f"Not run: {row['grid']} by {label(row)}: {row['error']}"]
    return "\n".join(lines)
