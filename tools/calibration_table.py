"""Measure what more calibration text is worth on a CPU, and how right the estimates of a run are.

    python tools/calibration_table.py build/real/SmolLM2-135M-Instruct \\
        --output docs/measured/cpu/calibration.json --docs docs/measured/calibration.md

Quantizes the model (`tools/real_model.py` prints its folder) once for each amount of text, the command's
default among them, and round-to-nearest without any. A row has what was predicted before the run beside what
the run took, and KL from the original on the bundled evaluation text. Each run is a process of its own, for
memory that an earlier one left would hide what the next one needs. CPU seconds are those of all threads:
beside other work they stay, where the clock's do not. Rows of other amounts stay, if the JSON file is of the
same tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from llmopt.quant.methods.options import MethodOptions
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.request import QuantizeRequest

sys.path.insert(0, str(Path(__file__).parents[1]))
from tools.document_part import write_part

MIB = 2**20
NO_TEXT = "none"
AMOUNTS = (NO_TEXT, "16x512", "64x512", "256x512")


@dataclass(frozen=True, slots=True)
class Row:
    """One amount of text: `64x512` are 64 samples of 512 tokens.

    Attributes:
        cpu_seconds: of all threads.
        predicted_bytes, written_bytes: of the weight files.
        predicted_memory, held_memory: bytes beyond the start of the process.
    """

    text: str
    threads: int
    predicted_seconds: float
    seconds: float
    cpu_seconds: float
    predicted_bytes: int
    written_bytes: int
    predicted_memory: int
    held_memory: int
    perplexity: float
    kl_nats: float
    top1_agreement: float


def request_of(model: Path, output: Path, method: str, text: str) -> QuantizeRequest:
    """The request of an amount, with what the command takes by default."""
    if text == NO_TEXT:
        return QuantizeRequest(model, output, method="rtn", symmetric=False, errors=False)
    samples, length = map(int, text.split("x"))
    options = MethodOptions(asymmetric=None)
    asked = QuantizeRequest(model, output, method=method, rotations=None, options=options)
    return replace(asked, num_samples=samples, seq_len=length)


def measured(asked: QuantizeRequest) -> dict[str, Any]:
    """Quantize, and tell what was predicted and what it took: the fields of a row."""
    began, used = time.perf_counter(), time.process_time()
    result = quantize(asked)
    return {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - used,
        "threads": torch.get_num_threads(),
        "predicted_seconds": result.preflight.seconds,
        "predicted_bytes": next(iter(result.preflight.file_bytes.values())),
        "written_bytes": result.manifest["summary"]["checkpoint_bytes"],
        "predicted_memory": result.preflight.memory.bytes,
        "held_memory": result.peak_bytes,
    }


def markdown(rows: Sequence[Row]) -> str:
    """The table for the documentation."""
    lines = [
        "| samples × tokens | minutes predicted, by the clock | CPU minutes / threads | "
        "MiB predicted, held | bytes predicted, written | perplexity | KL, nats | same top token |",
        "|---|---|---:|---|---|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row.text.replace('x', ' × ')} | {row.predicted_seconds / 60:.1f}, {row.seconds / 60:.1f} | "
            f"{row.cpu_seconds / 60 / row.threads:.1f} | {row.predicted_memory / MIB:.0f}, "
            f"{row.held_memory / MIB:.0f} | {row.predicted_bytes:,}, {row.written_bytes:,} | "
            f"{row.perplexity:.3f} | {row.kl_nats:.4f} | {row.top1_agreement:.1%} |"
        )
    return "\n".join(lines)


def main() -> None:
    # Not in the processes that quantize: what the command does not load would count as there before.
    from llmopt.bench.quality.passage import read_passage
    from llmopt.bench.quality.scoring import score_passage
    from llmopt.bench.quality.summary import summarize
    from llmopt.engine.config.config import EngineConfig
    from llmopt.engine.core.engine import Engine

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--method", default="awq")
    parser.add_argument("--text", default=",".join(AMOUNTS), help="amounts, with commas")
    parser.add_argument("--num-tokens", type=int, default=4096, help="tokens that are scored")
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--docs", type=Path, help="Markdown file with the marks for the table")
    given = parser.parse_args()
    engine = Engine(EngineConfig(given.model, dtype="float32", device="cpu"))
    passage = read_passage(engine.tokenizer, max_model_len=2048, num_tokens=given.num_tokens)
    record = {"model": given.model.name, "method": given.method, "token_sha256": passage.sha256}
    rows: dict[str, Row] = {}
    if given.output and given.output.exists():
        before = json.loads(given.output.read_text(encoding="utf-8"))
        if all(before[key] == value for key, value in record.items()):
            rows = {row["text"]: Row(**row) for row in before["rows"]}
    for text in given.text.split(","):
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent) / "quantized"
            asked = request_of(given.model, folder, given.method, text)
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
                taken = fresh.submit(measured, asked).result()
            quantized = Engine(EngineConfig(folder, dtype="float32", device="cpu"))
            scores = summarize(
                passage,
                score_passage(passage, quantized.prompt_pass, engine.prompt_pass)[0],
                reference=given.model.name,
            )
        assert scores.kl_nats is not None and scores.top1_agreement is not None
        rows[text] = Row(
            text=text,
            **taken,
            perplexity=scores.perplexity,
            kl_nats=scores.kl_nats,
            top1_agreement=scores.top1_agreement,
        )
        print(rows[text], flush=True)
        ordered = [rows[text] for text in AMOUNTS if text in rows]
        ordered += [row for text, row in rows.items() if text not in AMOUNTS]
        if given.output:
            whole = record | {"torch": torch.__version__, "rows": [asdict(row) for row in ordered]}
            given.output.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        if given.docs:
            write_part(given.docs, "calibration_table.py", markdown(ordered))
    print(markdown([*rows.values()]))


if __name__ == "__main__":
    main()
