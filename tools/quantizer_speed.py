"""Quantization time and layer error of llmopt, llm-compressor, GPTQModel and auto-round on the same work.

    python tools/quantizer_speed.py --environments DIR --shapes 0.13B --output quantizer-speed.json

Makes random Llama checkpoints (or takes the folder of a real one), then has each quantizer, in a process and
an environment of its own (`DIR/NAME/bin/python`; this package runs in the present one), make W4 of it with
gptq, awq and autoround, in groups of 128 or the largest usual size that divides the width, from the same
calibration tokens and with the same number of threads, interleaved. The time is from reading the checkpoint
to the written result, without imports: by the clock, and of the processors, which counts where other work
shares the machine (`--clock cpu_seconds --threads 1`). Ratios are of the runs of one round; their median is
judged. A layer's error is measured here for all of them, from what they wrote: `|Y - Y'|² / |Y - X|²` over
the outputs of a decoder layer whose inputs X are the float model's on held-out tokens; scales folded into
norms or adjacent linears do not change it. Ends with 0 where every goal is met, 1 where one is missed, 3
where a package gave no result.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from llmopt.quant.convert.read import quantized_modules, read_quantized
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.stream.calibration import load_calibration
from llmopt.quant.stream.sources import STORIES

sys.path.insert(0, str(Path(__file__).parents[1]))
from tools.quality.dequantized import quantized_folder
from tools.quality.environments import install, interpreter, run
from tools.quality.goals import Goal, exit_code
from tools.quality.speed_models import SHAPES, first_layers, make_model

# llm-compressor measures a whole layer at once; GPTQModel goes through it linear by linear, as llmopt does
# unless told otherwise, which is shown beside it.
WHOLE_LAYERS = "llmopt:whole-layers"
QUANTIZERS: dict[str, tuple[str, ...]] = {
    "gptq": ("llmopt", WHOLE_LAYERS, "llmcompressor", "gptqmodel"),
    "awq": ("llmopt", "llmcompressor", "gptqmodel"),
    "autoround": ("llmopt", "autoround"),
}
GOALS = {"gptq": 2.0, "awq": 2.0, "autoround": 1.5}
"""Their time over ours, at an error of ours that is no larger."""
CLOCKS = ("seconds", "cpu_seconds")
GROUP_SIZES = (128, 64, 32)
HELD_OUT = 2


@torch.no_grad()
def layer_errors(source: Path, folder: Path, tokens: torch.Tensor) -> list[float]:
    """The error of each decoder layer, on `tokens [samples, length]`."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, trust_remote_code=False
    )
    seen: list[tuple[Any, Any, torch.Tensor]] = []

    def keep(_: Any, args: Any, kwargs: Any, output: Any) -> None:
        seen.append((args, kwargs, output[0] if isinstance(output, tuple) else output))

    handles = [layer.register_forward_hook(keep, with_kwargs=True) for layer in model.model.layers]
    model.model(tokens, use_cache=False)
    for handle in handles:
        handle.remove()
    checkpoint = Checkpoint(folder)
    quantized = quantized_modules(checkpoint)
    errors = []
    for index, (layer, (args, kwargs, outputs)) in enumerate(
        zip(model.model.layers, seen, strict=True)
    ):
        prefix = f"model.layers.{index}."
        own = layer.state_dict()
        changed = {
            name.removeprefix(prefix): checkpoint.tensor(name).float()
            for name in checkpoint.names
            if name.startswith(prefix) and name.removeprefix(prefix) in own
        }
        for module in quantized:
            if module.startswith(prefix):
                weight = read_quantized(checkpoint, module).dequantize()
                changed[f"{module.removeprefix(prefix)}.weight"] = weight
        layer.load_state_dict(changed)
        inputs = args[0] if args else kwargs["hidden_states"]
        again = layer(*args, **kwargs)
        again = again[0] if isinstance(again, tuple) else again
        errors.append(float((again - outputs).square().sum() / (outputs - inputs).square().sum()))
    return errors


def compare(
    given: argparse.Namespace,
    names: Sequence[str],
    source: Path,
    task: dict[str, Any],
    held_out: torch.Tensor,
) -> list[dict[str, Any]]:
    """One row for each quantizer: its times in interleaved rounds, and the errors of its first checkpoint."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    rows: dict[str, dict[str, Any]] = {name: {"quantizer": name} for name in names}
    for _ in range(given.rounds):
        for name in names:
            package = name.partition(":")[0]
            python = interpreter(given.environments, package)
            if python is None:
                rows[name] |= {"error": "not installed"}
                continue
            with tempfile.TemporaryDirectory() as parent:
                output = Path(parent) / "quantized"
                task |= {"output": str(output), "sequential": name != WHOLE_LAYERS}
                answer = run(python, package, task)
                if answer.get("calibration_sha256", task["sha256"]) != task["sha256"]:
                    answer = {"error": "it was calibrated on other tokens"}
                if "error" in answer:
                    rows[name] |= answer
                    continue
                runs[name].append({clock: float(answer[clock]) for clock in CLOCKS})
                if "mean_error" not in rows[name]:
                    errors = layer_errors(source, quantized_folder(output), held_out)
                    rows[name] |= {"mean_error": statistics.mean(errors), "layer_errors": errors}
            rows[name] |= {"version": answer["version"], "runs": runs[name]}
            print(source.name, task["method"], name, json.dumps(runs[name][-1]), flush=True)
    for name in names:
        print(source.name, task["method"], json.dumps(rows[name]), flush=True)
    return list(rows.values())


def goals(rows: Sequence[dict[str, Any]], clock: str) -> list[Goal]:
    """Our default's time beside each package's on the same work."""
    lines = []
    for theirs in (row for row in rows if not row["quantizer"].startswith("llmopt")):
        name = "llmopt"
        key = (theirs["shape"], theirs["method"], name)
        ours = next(r for r in rows if (r["shape"], r["method"], r["quantizer"]) == key)
        text = f"{theirs['shape']} {theirs['method']}: {theirs['quantizer']} / {name}"
        if "runs" not in ours or "runs" not in theirs:
            lines.append(Goal(text, None))
            continue
        least = GOALS[theirs["method"]]
        median, low, high = ratios(theirs["runs"], ours["runs"], clock)
        errors = f"error {ours['mean_error']:.4f} beside {theirs['mean_error']:.4f}"
        met = median >= least and ours["mean_error"] <= theirs["mean_error"]
        said = f"{median:.2f} times ({low:.2f} to {high:.2f}), {least:g} asked"
        lines.append(Goal(f"{text} {said}, {errors}", met))
    return lines


def ratios(
    theirs: Sequence[dict[str, float]], ours: Sequence[dict[str, float]], clock: str
) -> tuple[float, float, float]:
    """Their time over ours, round by round: median, least and largest."""
    values = [one[clock] / other[clock] for one, other in zip(theirs, ours, strict=False)]
    return statistics.median(values), min(values), max(values)


def measure_shape(
    given: argparse.Namespace, source: Path, methods: Sequence[str]
) -> list[dict[str, Any]]:
    """The rows of one checkpoint."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    text = Path(given.calibration or STORIES)
    calibration, apart = (
        load_calibration(
            text,
            tokenizer,
            num_samples=given.num_samples,
            seq_len=given.seq_len,
            seed=0,
            held_out=held_out,
        )
        for held_out in (0, HELD_OUT)
    )
    assert torch.equal(calibration.token_ids, apart.token_ids), "the text is too short"
    width = json.loads((source / "config.json").read_text(encoding="utf-8"))["hidden_size"]
    rows: list[dict[str, Any]] = []
    for method in methods:
        task = {
            "model": str(source.resolve()),
            "tokens": calibration.token_ids.tolist(),
            "sha256": calibration.sha256,
            "calibration": str(text.resolve()),
            "threads": given.threads,
            "method": method,
            "bits": 4,
            "group_size": next(size for size in GROUP_SIZES if width % size == 0),
            "symmetric": method != "awq",
            "iters": given.iters,
        }
        asked = given.quantizers.split(",") if given.quantizers else QUANTIZERS[method]
        names = [name for name in QUANTIZERS[method] if name in asked]
        held_out = torch.as_tensor(apart.held_out)
        rows += [
            {"shape": source.name, "method": method} | row
            for row in compare(given, names, source, task, held_out)
        ]
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--environments", type=Path, required=True)
    parser.add_argument("--install", action="store_true", help="make the environments first")
    parser.add_argument(
        "--shapes", default="0.13B", help=f"{', '.join(SHAPES)}, or the folder of a checkpoint"
    )
    parser.add_argument("--methods", default="gptq,awq")
    parser.add_argument("--quantizers", help="names, separated by commas; default: all of a method")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, help="take the first so many of each checkpoint")
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default=CLOCKS[0],
        help="what goals are judged by; cpu_seconds where other work shares the machine",
    )
    parser.add_argument("--calibration", help="a .txt or .jsonl file; the bundled text by default")
    parser.add_argument("--num-samples", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--iters", type=int, default=200, help="of autoround")
    parser.add_argument("--output", type=Path, help="JSON file")
    return parser.parse_args()


def main() -> int:
    given = parse()
    methods = given.methods.split(",")
    if given.install:
        packages = {name.partition(":")[0] for method in methods for name in QUANTIZERS[method]}
        install(given.environments, sorted(packages - {"llmopt"}))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as parent:
        for shape in given.shapes.split(","):
            source = Path(parent) / Path(shape).name
            if shape in SHAPES:
                make_model(shape, source, given.layers)
            elif given.layers:
                first_layers(Path(shape), source, given.layers)
            else:
                source = Path(shape)
            rows += measure_shape(given, source, methods)
    reached = goals(rows, given.clock)
    if given.output:
        record = {
            "rows": rows,
            "threads": given.threads,
            "layers": given.layers,
            "iters": given.iters,
            "clock": given.clock,
            "calibration": [given.num_samples, given.seq_len],
            "torch": torch.__version__,
            "goals": [{"text": goal.text, "met": goal.met} for goal in reached],
        }
        given.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print("\n".join(goal.line for goal in reached))
    return exit_code(reached)


if __name__ == "__main__":
    sys.exit(main())
