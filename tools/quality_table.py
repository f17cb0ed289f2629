"""Quality of every quantization method at every width: perplexity, KL and top-1 agreement.

    python tools/quality_table.py --output docs/measured/cpu/quality-table.json \\
        --docs docs/measured/quality.md

The bundled stories3M by default. Perplexity, KL from the original and top-1 agreement are taken on the
bundled evaluation text, with inputs and arithmetic in float32, so that a difference is the weights'
(and where a scheme quantizes activations, theirs). The methods that share a grid are given the same one:
asymmetric, with one group size. Ends with 1 if a method's KL does not fall as its bits grow. Rows of
methods that are not asked for stay, if the JSON file is of the same tokens.

    python tools/quality_table.py real --help

is the table of a real model beside other packages, and `mixes` that of mixed precision.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from llmopt.base.errors import BadInput
from llmopt.bench.quality.passage import EVALUATION_TEXT, read_passage
from llmopt.bench.quality.scoring import score_passage
from llmopt.bench.quality.summary import FORMULAS, summarize
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.quant.formats.registry import module_scheme, quantized_modules, read_quantized
from llmopt.quant.methods.options import MethodOptions, SchemeOptions
from llmopt.quant.methods.registry import METHODS
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.request import QuantizeRequest
from llmopt.quant.source.models import resolve_model

sys.path.insert(0, str(Path(__file__).parents[1]))
from tools.document_part import write_part
from tools.quality.cells import ITERS

WIDTHS = (2, 3, 4, 8)
SHARED_GRID = ("rtn", "hqq", "awq", "gptq", "autoround")
VARIANTS: dict[str, Sequence[dict[str, Any]]] = {
    "int8": ({}, {"outlier_threshold": 6.0}),
    "fp8": ({"granularity": "tensor"}, {"granularity": "channel"}, {"granularity": "block"}),
    "nf4": ({}, {"double_quant": True}),
}
RUNS: dict[str, dict[str, Any]] = {
    "autoround": {"options": MethodOptions(iters=ITERS)},
    **{
        name: {"options": MethodOptions(asymmetric=None, finetune_steps=100)}
        for name in ("trellis", "quip")
    },
}
"""What a method's requests say beside its scheme."""
SAME = ("model", "token_sha256", "calibration_samples")
"""What rows of an earlier run must share to stand beside new ones."""


@dataclass(frozen=True, slots=True)
class Case:
    """One method, scheme and width."""

    method: str
    bits: int
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Row:
    """Scores of a quantized model."""

    method: str
    scheme: str
    bits: int
    bits_per_weight: float
    perplexity: float
    kl_nats: float
    top1_agreement: float
    seconds: float


def cases(methods: Sequence[str], group_size: int) -> Iterator[Case]:
    """Every method at every width that it has."""
    for method in methods:
        grid = {"group_size": group_size, "symmetric": False} if method in SHARED_GRID else {}
        for bits in WIDTHS:
            for variant in VARIANTS.get(method, ({},)):
                try:
                    METHODS[method].scheme(SchemeOptions(bits=bits, **grid, **variant))
                except BadInput:
                    continue  # a width that the method does not have
                # Only compressed-tensors holds every width of the shared grid.
                format_name = {"format": "compressed-tensors"} if grid else {}
                yield Case(method, bits, {**grid, **variant, **format_name, **RUNS.get(method, {})})


def measure(case: Case, model: Path, num_samples: int, quality: Any) -> Row:
    """Quantize into a temporary folder, and score the checkpoint.

    Args:
        quality: from the folder of a checkpoint to its scores.
    """
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "quantized"
        request = QuantizeRequest(
            model,
            folder,
            method=case.method,
            bits=case.bits,
            num_samples=num_samples,
            **case.options,
        )
        began = time.perf_counter()
        quantize(request)
        seconds = time.perf_counter() - began
        checkpoint = Checkpoint(folder)
        modules = sorted(quantized_modules(checkpoint))
        weights = bits = 0.0
        for module in modules:
            tensor = read_quantized(checkpoint, module)
            count = tensor.out_features * tensor.in_features
            weights += count
            bits += count * tensor.scheme.bits_per_weight(tensor.out_features, tensor.in_features)
        label = module_scheme(checkpoint, modules[0]).label
        scores = quality(folder)
    return Row(
        case.method,
        label,
        case.bits,
        bits / weights,
        scores.perplexity,
        scores.kl_nats,
        scores.top1_agreement,
        seconds,
    )


def kept_rows(record: dict[str, Any], path: Path, methods: Sequence[str]) -> list[Row]:
    """Rows of an earlier run, of other methods; none where that was of anything else.

    Args:
        record: what the file will say beside its rows.
    """
    if not path.exists():
        return []
    before = json.loads(path.read_text(encoding="utf-8"))
    perplexities = (one["original_perplexity"] for one in (before, record))
    same = all(before[key] == record[key] for key in SAME) and math.isclose(
        *perplexities, rel_tol=1e-5
    )
    rows = [Row(**row) for row in before["rows"]] if same else []
    return [row for row in rows if row.method not in methods]


def rising(rows: Sequence[Row]) -> list[str]:
    """Methods whose KL does not fall with more bits, as messages."""
    found = []
    for method in dict.fromkeys(row.method for row in rows):
        own = sorted((row for row in rows if row.method == method), key=lambda row: row.bits)
        for fewer in own:
            for more in own:
                if more.bits > fewer.bits and more.kl_nats >= fewer.kl_nats:
                    found.append(
                        f"{method}: KL {more.kl_nats:.3g} at {more.bits} bits, "
                        f"{fewer.kl_nats:.3g} at {fewer.bits}"
                    )
    return found


def markdown(original: float, rows: Sequence[Row]) -> str:
    """The table for the documentation."""
    lines = [
        "| method | grid | bits per weight | perplexity | KL from the original, nats | same top token |",
        "|---|---|---:|---:|---:|---:|",
        f"| the original | bfloat16 | 16 | {original:.3f} | 0 | 100 % |",
    ]
    lines += [
        f"| `{row.method}` | {row.scheme} | {row.bits_per_weight:.2f} | {row.perplexity:.3f} | "
        f"{row.kl_nats:.2g} | {100 * row.top1_agreement:.1f} % |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> int:
    if sys.argv[1:2] in (["real"], ["mixes"]):
        from tools.quality import mixes, real

        return (real if sys.argv[1] == "real" else mixes).main(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", help="folder; the bundled stories3M by default")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--num-samples", type=int, default=64, help="calibration samples")
    parser.add_argument("--num-tokens", type=int, default=8192, help="tokens that are scored")
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--docs", type=Path, help="Markdown file with the marks for the table")
    given = parser.parse_args()
    model = resolve_model(given.model)
    engine = Engine(EngineConfig(model, dtype="float32", device="cpu"))
    passage = read_passage(
        engine.tokenizer,
        max_model_len=Checkpoint(model).config["max_position_embeddings"],
        num_tokens=given.num_tokens,
    )
    original = summarize(passage, score_passage(passage, engine.prompt_pass)[0])

    def quality(folder: Path) -> Any:
        quantized = Engine(EngineConfig(folder, dtype="float32", device="cpu"))
        return summarize(
            passage,
            score_passage(passage, quantized.prompt_pass, engine.prompt_pass)[0],
            reference=model.name,
        )

    rows = []
    methods = given.methods.split(",")
    for case in cases(methods, given.group_size):
        row = measure(case, model, given.num_samples, quality)
        rows.append(row)
        print(
            f"{row.method:12} {row.scheme:34} {row.bits_per_weight:6.2f} bpw  "
            f"ppl {row.perplexity:8.3f}  KL {row.kl_nats:9.2e}  top-1 {row.top1_agreement:6.1%}  "
            f"{row.seconds:5.1f} s",
            flush=True,
        )
    record: dict[str, Any] = {
        "model": model.name,
        "evaluation": EVALUATION_TEXT.name,
        "protocol": passage.description,
        "token_sha256": passage.sha256,
        "num_tokens": passage.num_scored,
        "formulas": FORMULAS,
        "calibration_samples": given.num_samples,
        "torch": torch.__version__,
        "original_perplexity": original.perplexity,
    }
    if given.output:
        rows += kept_rows(record, given.output, methods)
        rows.sort(key=lambda row: list(METHODS).index(row.method))
    wrong = rising(rows)
    if given.output:
        record["rows"] = [asdict(row) for row in rows]
        record["kl_falls_as_bits_grow"] = not wrong
        given.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if given.docs:
        write_part(given.docs, "quality_table.py", markdown(original.perplexity, rows))
    print("\n".join(wrong) or "KL falls as bits grow, for every method")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
