"""Quantization time and layer error of llmopt, llm-compressor and GPTQModel on the same work.

    python tools/quantizer_speed.py --environments DIR --shapes 0.13B --output quantizer-speed.json

Makes random Llama checkpoints, then has each quantizer, in a process and an environment of its own
(`DIR/NAME/bin/python`; this package runs in the present one), make W4 g128 of it with gptq and awq, from
the same calibration tokens and with the same number of threads, interleaved. The time is from reading the
checkpoint to the written result, without imports. A layer's error is measured here for all of them, from
what they wrote: `|Y - Y'|² / |Y - X|²` over the outputs of a decoder layer whose inputs X are the float
model's on held-out tokens; scales folded into norms or adjacent linears do not change it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from llmopt.quant.calibration.calibration import load_calibration
from llmopt.quant.convert.read import quantized_modules, read_quantized
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.model.models import resolve_model

SCRIPTS = Path(__file__).resolve().parent / "quantizers"
# llm-compressor measures a whole layer at once; GPTQModel goes through it linear by linear, as llmopt does
# unless told otherwise.
WHOLE_LAYERS = "llmopt:whole-layers"
QUANTIZERS = ("llmopt", WHOLE_LAYERS, "llmcompressor", "gptqmodel")
METHODS = ("gptq", "awq")
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "heads": 8},
    "0.13B": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "heads": 12},
    "1.1B": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "heads": 32,
        "kv_heads": 4,
    },
}
ENVIRONMENT = {
    "GPTQMODEL_CPU_WORKERS": "2",  # without it, it does not start on two cores
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}
HELD_OUT = 2


def make_model(shape: str, folder: Path) -> None:
    """A random Llama in bfloat16, with the bundled tokenizer, whose ids are the first of the vocabulary."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(SHAPES[shape])
    heads = sizes.pop("heads")
    config = transformers.LlamaConfig(
        vocab_size=32000,
        num_attention_heads=heads,
        num_key_value_heads=sizes.pop("kv_heads", heads),
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        dtype="bfloat16",
        **sizes,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    bundled = resolve_model("stories3M")
    for path in bundled.glob("*token*"):
        shutil.copy(path, folder)


def run(python: Path, name: str, task: dict[str, Any]) -> dict[str, Any]:
    """Time and version that a quantizer gives, or the last line of its output."""
    with tempfile.TemporaryDirectory() as folder:
        given, answered = Path(folder) / "task.json", Path(folder) / "answer.json"
        given.write_text(json.dumps(task))
        script = SCRIPTS / f"with_{name.partition(':')[0]}.py"
        command = [str(python), str(script), str(given), str(answered)]
        environment = os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": str(task["threads"])}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
        if answered.exists():
            return json.loads(answered.read_text())
    lines = [line for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"]
    return {"error": lines[-1][:300]}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--environments", type=Path, required=True)
    parser.add_argument("--shapes", default="0.13B", help=", ".join(SHAPES))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--quantizers", default=",".join(QUANTIZERS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--num-samples", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--output", type=Path, help="JSON file")
    given = parser.parse_args()
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        resolve_model("stories3M"), trust_remote_code=False
    )
    calibration = load_calibration(
        None,
        tokenizer,
        num_samples=given.num_samples,
        seq_len=given.seq_len,
        seed=0,
        held_out=HELD_OUT,
    )
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as parent:
        for shape in given.shapes.split(","):
            source = Path(parent) / shape
            make_model(shape, source)
            task = {
                "model": str(source),
                "tokens": calibration.token_ids.tolist(),
                "threads": given.threads,
            }
            for method in given.methods.split(","):
                names = given.quantizers.split(",")
                if method != "gptq":
                    names = [name for name in names if name != WHOLE_LAYERS]
                rows += [
                    {"shape": shape, "method": method} | row
                    for row in compare(given, names, source, task | {"method": method}, calibration)
                ]
    if given.output:
        record = {
            "rows": rows,
            "threads": given.threads,
            "calibration": list(calibration.token_ids.shape),
            "torch": torch.__version__,
        }
        given.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def compare(
    given: argparse.Namespace,
    names: Sequence[str],
    source: Path,
    task: dict[str, Any],
    calibration: Any,
) -> list[dict[str, Any]]:
    """One row for each quantizer: its times in interleaved rounds, and the errors of its last checkpoint."""
    times: dict[str, list[float]] = {name: [] for name in names}
    rows: dict[str, dict[str, Any]] = {name: {"quantizer": name} for name in names}
    held_out = torch.as_tensor(calibration.held_out)
    for _ in range(given.rounds):
        for name in names:
            output = source.parent / f"{source.name}-{task['method']}-{name}"
            shutil.rmtree(output, ignore_errors=True)
            own = Path(sys.executable)
            python = given.environments / name / "bin" / "python"
            python = own if name.startswith("llmopt") else python
            task |= {"output": str(output), "sequential": name != WHOLE_LAYERS}
            answer = run(python, name, task)
            if "error" in answer:
                rows[name] |= answer
                continue
            times[name].append(answer["seconds"])
            rows[name] |= {"version": answer["version"]}
            errors = layer_errors(source, output, held_out)
            rows[name] |= {"mean_error": statistics.mean(errors), "layer_errors": errors}
    for name in names:
        if times[name]:
            rows[name] |= {"seconds": statistics.median(times[name]), "runs": times[name]}
        print(source.name, task["method"], json.dumps(rows[name]), flush=True)
    return list(rows.values())


if __name__ == "__main__":
    main()
