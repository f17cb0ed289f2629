"""Cross-check quantized image-text checkpoints in transformers and vLLM for CPU, on prompts with images.

    python tools/vision_owners.py --environments DIR [--families qwen2_5_vl,idefics3]

Makes a tiny random checkpoint of each family, quantizes its language layers, and then the vision tower and
the projector too, and lets both packages, in `DIR/transformers` and `DIR/vllm` (`tools/owners.py --install`
makes them; vLLM needs torchvision for its processors), compute the token behind two prompts with images. The
table gives the difference of its log-probabilities from those of the dequantized weights in transformers'
float32 model. Vision tensors that were to stay are compared byte for byte. Ends with 1 where a difference is
beyond its limit, tensors changed, or a package refuses.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from llmopt.quant.convert.convert import dequantized_model
from llmopt.quant.load_processor import load_processor, load_tokenizer
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.request import QuantizeRequest
from PIL import Image
from safetensors.torch import save_file

from tests.support.vision_checkpoints import FAMILIES as WRAPPED
from tests.support.vision_checkpoints import save_pictures, save_wrapped
from tools.owners import ask

FAMILIES = ("qwen2_5_vl", "idefics3")
TOP = 5
LIMIT = 0.1  # vLLM computes in bfloat16, and its processor resizes by torchvision
CASES: dict[str, dict[str, Any]] = {
    "language layers, awq int4 g64": {"method": "awq", "format": "compressed-tensors"},
    "with tower, gptq int4 g64": {
        "method": "gptq", "format": "compressed-tensors", "vision": True,
    },
    "with tower, fp8 channel": {"method": "fp8", "group_size": None, "vision": True},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text with placeholders, its pictures, and what the processor makes of them."""

    text: str
    pictures: tuple[Path, ...]
    inputs: dict[str, torch.Tensor]


def prompts_of(folder: Path, name: str) -> list[Prompt]:
    placeholder, pictures = WRAPPED[name].placeholder, save_pictures(folder)
    tokenizer = load_tokenizer(folder)
    processor = load_processor(folder, tokenizer, trust_remote_code=False)
    prompts = []
    for text, chosen in (
        (f"{placeholder} a small dog", pictures[:1]),
        (f"once {placeholder} and {placeholder} then", pictures[1:3]),
    ):
        opened = [Image.open(path).convert("RGB") for path in chosen]
        made = processor(text=[text], images=opened, return_tensors="pt")
        inputs = {k: v.contiguous() for k, v in made.items() if isinstance(v, torch.Tensor)}
        prompts.append(Prompt(text, chosen, inputs))
    return prompts


@torch.no_grad()
def expected(folder: Path, prompts: list[Prompt]) -> list[torch.Tensor]:
    """Log-probabilities of the next token by the dequantized weights, in float32."""
    model = dequantized_model(folder)
    return [model(**prompt.inputs).logits[0, -1].log_softmax(-1) for prompt in prompts]


def changed_tensors(source: Path, folder: Path) -> list[str]:
    """Names of vision tensors that are not the source's, byte for byte."""
    before, after = Checkpoint(source), Checkpoint(folder)
    vision = [
        name for name in before.names if "visual" in name or "vision" in name or "connector" in name
    ]
    assert vision
    return [
        name
        for name in vision
        if name not in after
        or before.tensor(name).dtype != after.tensor(name).dtype
        or not torch.equal(before.tensor(name), after.tensor(name))
    ]


def difference(wanted: list[torch.Tensor], answer: dict[str, Any]) -> float:
    """Mean difference of the log-probabilities of the likeliest tokens."""
    off = [
        abs(float(row[int(token)]) - value)
        for row, rows in zip(wanted, answer["logprobs"], strict=True)
        for token, value in rows[0].items()
    ]
    return sum(off) / len(off)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--environments", type=Path, required=True)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--owners", default="transformers,vllm")
    parser.add_argument("--output", type=Path, help="JSON file")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as parent:
        for name in given.families.split(","):
            rows += rows_of(name, Path(parent) / name, given)
    if given.output:
        given.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    failed = [row for row in rows if row["failed"]]
    print(f"{len(failed)} failed" if failed else "all load, within their limits")
    return 1 if failed else 0


def rows_of(name: str, folder: Path, given: argparse.Namespace) -> list[dict[str, Any]]:
    """The checks of one family."""
    source = folder / "source"
    save_wrapped(source, name).to(torch.bfloat16).save_pretrained(source)
    prompts = prompts_of(source, name)
    paths = []
    for number, prompt in enumerate(prompts):
        paths.append(str(folder / f"inputs-{number}.safetensors"))
        save_file(prompt.inputs, paths[-1])
    rows, tasks, wanted = [], [], {}
    for case, fields in CASES.items():
        output = folder / case.replace(" ", "-").replace(",", "")
        request: dict[str, Any] = {"group_size": 64, "num_samples": 4, "seq_len": 512} | fields
        quantize(QuantizeRequest(source, output, **request))
        wanted[case] = expected(output, prompts)
        if not fields.get("vision"):
            changed = changed_tensors(source, output)
            text = "vision tensors byte-equal" if not changed else f"changed: {changed[0]}"
            rows.append(shown(name, case, "files", text, failed=bool(changed)))
        tasks.append(
            {
                "folder": str(output), "inputs": paths, "top": TOP, "max_tokens": 1,
                "texts": [prompt.text for prompt in prompts],
                "images": [[str(path) for path in prompt.pictures] for prompt in prompts],
            }
        )  # fmt: skip
    for owner in given.owners.split(","):
        python = given.environments / owner / "bin" / "python"
        dtype = "float32" if owner == "transformers" else "bfloat16"
        answers = ask(python, f"{owner}_images", [task | {"dtype": dtype} for task in tasks])
        for case, answer in zip(CASES, answers, strict=True):
            if "error" in answer:
                rows.append(shown(name, case, owner, f"refused: {answer['error']}", failed=True))
                continue
            off = difference(wanted[case], answer)
            text = f"|Δ logprob| mean {off:.1e} (limit {LIMIT:g})  {answer['loader']}"
            rows.append(shown(name, case, owner, text, failed=not off <= LIMIT))
    return rows


def shown(family: str, case: str, owner: str, text: str, *, failed: bool) -> dict[str, Any]:
    print(f"{family:16} {case:30} {owner:13} {text}", flush=True)
    return {"family": family, "case": case, "owner": owner, "result": text, "failed": failed}


if __name__ == "__main__":
    sys.exit(main())
