"""What a choice of method does on a real model: KL with and without rotations, GPTAQ, and awq's yardsticks.

    python tools/choices.py --model DIR --calibration c4.jsonl --text wiki.test.raw \\
        --output docs/measured/cpu/choices.json --docs docs/rotations.md

Each row quantizes the same checkpoint in this process, dequantizes what was written, and scores it beside the
plain model as tools/quality_table.py does; `float` rows quantize nothing: a rotated checkpoint as
it is stored. Rows are kept in the JSON file, and the same command goes on where it was stopped. What the
plain model says is kept below build/.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from llmopt.bench.quality.passage import ProtocolOptions, read_passage
from llmopt.quant.base.atomic_io import write_atomically
from llmopt.quant.methods.options import MethodOptions
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.request import QuantizeRequest
from llmopt.quant.smoothing.rotate import rotated

sys.path.insert(0, str(Path(__file__).parents[1]))
from tools.quality.dequantized import dequantize_checkpoint, write_plain
from tools.quality.marks import write_between
from tools.quality.scoring import Scorer

GROUP_SIZE = 64
BOTH = ("R1", "R2")
FLOAT = "float"
REFERENCES = Path(__file__).resolve().parents[1] / "build" / "references"
"""The plain model's hidden states: a hundred megabytes, no record, and made again where they lack."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A method, a grid, and what is chosen beside them.

    Attributes:
        method: `float`: nothing is quantized.
        options: of `MethodOptions`.
    """

    method: str
    bits: int | None = None
    symmetric: bool = True
    rotations: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def grid(self) -> str:
        if self.bits is None:
            return "as stored"
        return f"int{self.bits} {'sym' if self.symmetric else 'asym'}"

    @property
    def chosen(self) -> str:
        words = [f"{key}={value}" for key, value in self.options.items()]
        return " ".join([*self.rotations, *words]) or "defaults"

    @property
    def name(self) -> str:
        """Unique; what `--only` is matched with."""
        return f"{self.method} {self.grid} {self.chosen}"


def choices() -> Iterator[Choice]:
    """Every row, in the order of the table."""
    yield Choice(FLOAT, rotations=BOTH)
    for bits in (4, 3):
        for rotations in ((), BOTH):
            yield Choice("rtn", bits, rotations=rotations, options={"ranges": "minmax"})
        for method in ("rtn", "gptq"):
            yield Choice(method, bits)
            yield from (Choice(method, bits, rotations=names) for names in (("R1",), ("R2",), BOTH))
        yield Choice("gptq", bits, options={"asymmetric": True})
        yield from (Choice("gptq", bits, False, rotations) for rotations in ((), BOTH))
        yield Choice("gptq", bits, False, ("R2",), {"asymmetric": True})
        yield Choice("awq", bits, False)
        yield Choice("awq", bits, False, options={"asymmetric": True})
        yield Choice("awq", bits, False, ("R2",), {"asymmetric": True})


def measure(choice: Choice, given: argparse.Namespace, scorer: Scorer) -> dict[str, Any]:
    """The row of a choice."""
    with tempfile.TemporaryDirectory(dir=given.scratch) as parent:
        output, plain = Path(parent) / "quantized", Path(parent) / "plain"
        began, busy = time.perf_counter(), time.process_time()
        if choice.method == FLOAT:
            turned = rotated(Checkpoint(given.model), choice.rotations, given.seed)
            write_plain(plain, given.model, dict(turned.tensors()), turned.config)
        else:
            quantize(request_of(choice, given, output))
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - busy
        if choice.method != FLOAT:
            dequantize_checkpoint(output, plain, given.model)
        scores = scorer.score(plain)
    return {
        "name": choice.name,
        "method": choice.method,
        "grid": choice.grid,
        "chosen": choice.chosen,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "perplexity": scores.perplexity,
        "reference_perplexity": scores.reference_perplexity,
        "kl_nats": scores.kl_nats,
        "kl_interval": scores.intervals["kl_nats"],
        "top1_agreement": scores.top1_agreement,
    }


def request_of(choice: Choice, given: argparse.Namespace, output: Path) -> QuantizeRequest:
    return QuantizeRequest(
        given.model,
        output,
        method=choice.method,
        bits=choice.bits,
        group_size=GROUP_SIZE,
        symmetric=choice.symmetric,
        format="compressed-tensors",  # holds every width
        rotations=choice.rotations,
        options=MethodOptions(**choice.options),
        calibration=str(given.calibration),
        num_samples=given.num_samples,
        seq_len=given.seq_len,
        held_out=0,
        seed=given.seed,
    )


def shown(row: Mapping[str, Any]) -> str:
    low, high = row["kl_interval"]
    return (
        f"{row['name']:<44} ppl {row['perplexity']:9.3f}  KL {row['kl_nats']:.4g} "
        f"({low:.3g} to {high:.3g})  top-1 {row['top1_agreement']:.1%}  {row['seconds']:.0f} s"
    )


def markdown(record: Mapping[str, Any]) -> str:
    """The table of a record."""
    lines = [
        f"Calibration {record['calibration']}; {record['num_tokens']} tokens of {record['text']}, groups of "
        f"{GROUP_SIZE}.",
        "",
        "| method | grid | chosen | perplexity | KL, nats (95 %) |",
        "|---|---|---|---:|---:|",
    ]
    for row in record["rows"]:
        low, high = row["kl_interval"]
        lines.append(
            f"| {row['method']} | {row['grid']} | {row['chosen']} | {row['perplexity']:.3f} | "
            f"{row['kl_nats']:.3g} ({low:.3g} to {high:.3g}) |"
        )
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a plain checkpoint")
    parser.add_argument("--calibration", type=Path, required=True, help=".jsonl or .txt")
    parser.add_argument("--text", type=Path, required=True, help="evaluation text")
    parser.add_argument("--only", default="", help="regular expression searched in the rows' names")
    parser.add_argument("--num-samples", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--num-tokens", type=int, default=4096, help="of the text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--scratch", type=Path, help="folder for what is scored")
    parser.add_argument("--output", type=Path, required=True, help="JSON file, which gains rows")
    parser.add_argument("--docs", type=Path, help="Markdown file with the marks for the table")
    return parser.parse_args()


def main() -> int:
    given = parse()
    torch.set_num_threads(given.threads)
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.model, trust_remote_code=False)
    passage = read_passage(
        tokenizer,
        max_model_len=8192,
        num_tokens=given.num_tokens,
        path=given.text,
        options=ProtocolOptions("gptq", 2048),
    )
    record: dict[str, Any] = {
        "model": given.model.name,
        "text": given.text.name,
        "num_tokens": passage.num_scored,
        "token_sha256": passage.sha256,
        "calibration": f"{given.num_samples} x {given.seq_len} tokens of {given.calibration.name}",
        "torch": torch.__version__,
    }
    rows: dict[str, dict[str, Any]] = {}
    if given.output.exists():
        rows = {row["name"]: row for row in json.loads(given.output.read_text())["rows"]}
    scorer = Scorer(given.model, passage, REFERENCES)
    for choice in choices():
        if not re.search(given.only, choice.name) or choice.name in rows:
            continue
        rows[choice.name] = measure(choice, given, scorer)
        print(shown(rows[choice.name]), flush=True)
        record["rows"] = [rows[each.name] for each in choices() if each.name in rows]
        write_atomically(given.output, f"{json.dumps(record, indent=1)}\n".encode())
    if given.docs:
        write_between(given.docs, "choices", markdown(json.loads(given.output.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
