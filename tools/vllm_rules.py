"""Hold our table of vLLM's kernels against vLLM itself.

    python tools/vllm_rules.py --python ENVIRONMENT/bin/python      # an environment that has vLLM

Asks the installed vLLM, through `tests/owners/rules_vllm.py`, which kernel takes each matrix of a grid of
widths, groups, zero points, shapes and ranks, experts among them, which KV-cache schemes it reads, and what
its own parser makes of our ModelOpt configs and of those of 4-bit floats in compressed-tensors; ends with 1
where `quant/check/loaders.py` says otherwise. Part of `make owners`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from llmopt.quant.base.scheme import Activations
from llmopt.quant.formats.compressed_tensors import CompressedTensorsFormat
from llmopt.quant.formats.modelopt import ALGORITHMS, ModelOptFormat, hf_quant_config
from llmopt.quant.formats.registry import FORMATS
from llmopt.quant.kinds.base.kind import RankMatrix, storage_of
from llmopt.quant.kinds.fp4.scheme import Fp4Scheme
from llmopt.quant.kinds.integer.scheme import IntScheme

SCRIPT = Path(__file__).resolve().parent.parent / "tests" / "owners" / "rules_vllm.py"
MODULES = {
    "model.layers.0.self_attn.q_proj": False,
    "model.layers.0.self_attn.o_proj": False,
    "model.layers.0.mlp.experts.0.up_proj": True,
    "model.layers.0.mlp.experts.0.down_proj": True,
}
FORMATS_ASKED = {"compressed-tensors": (2, 3, 4, 5, 6, 8), "gptq": (4, 8)}
GROUPS = (-1, 16, 32, 64, 128, 256)
SHAPES = ((256, 256), (576, 1536), (1536, 576), (100, 384))
RANKS = (1, 2)


def matrices() -> Iterator[tuple[dict[str, Any], str | None]]:
    """Questions about matrices, each with our answer."""
    for name, bits in ((name, bits) for name, widths in FORMATS_ASKED.items() for bits in widths):
        for group, symmetric, (out, inner), ranks, (module, experts) in product(
            GROUPS, (True, False), SHAPES, RANKS, MODULES.items()
        ):
            split = inner if module.endswith(("o_proj", "down_proj")) else out
            if (group > 0 and inner % group) or split % ranks or (name == "gptq" and not symmetric):
                continue  # refused before a loader sees it
            scheme = IntScheme(bits, group, symmetric)
            matrix = RankMatrix.of(module, [out], inner, ranks)
            question = {
                "format": name,
                "bits": bits,
                "group_size": group,
                "symmetric": symmetric,
                "shape": [out, inner],
                "rank_shape": [matrix.out_features, matrix.in_features],
                "experts": experts,
                "down": matrix.row_parallel,
            }
            loads, text = storage_of(scheme).rules.vllm_kernel(scheme, matrix, name)
            kernel = text.split(maxsplit=1)[0].rstrip(",") if loads else None
            if experts and kernel != "Marlin":
                kernel = None  # only Marlin's rule is a function that can be asked
            yield question, kernel


def caches() -> Iterator[tuple[dict[str, Any], str | None]]:
    """KV-cache schemes: the one that is written, and one of int8."""
    writer: Any = FORMATS["compressed-tensors"]
    scheme = writer.full_config({"m": IntScheme(4, 128, True)}, [], "fp8")["kv_cache_scheme"]
    yield {"kv_cache_scheme": scheme}, "accepted"
    yield {"kv_cache_scheme": scheme | {"strategy": "attn_head"}}, "accepted"
    yield {"kv_cache_scheme": scheme | {"type": "int"}}, None


_FP4_INPUTS = {
    "nvfp4": Activations("nvfp4", "group16", dynamic=False),
    "mxfp4": Activations("mxfp4", "group32"),
}


def fp4_configs() -> Iterator[tuple[dict[str, Any], str | None]]:
    """Configs of compressed-tensors: the kind of weights, and whether the inputs are of that kind too."""
    for kind, inputs in _FP4_INPUTS.items():
        for scheme, said in ((Fp4Scheme(kind), kind), (Fp4Scheme(kind, inputs), f"{kind} True")):  # pyright: ignore[reportArgumentType]
            yield {"compressed_tensors": CompressedTensorsFormat().config({"m": scheme}, [])}, said


def modelopt_configs() -> Iterator[tuple[dict[str, Any], str | None]]:
    """ModelOpt's configs of every algorithm, alone and mixed, in `config.json` and `hf_quant_config.json`."""
    linear, plain = "model.layers.0.mlp.down_proj", "lm_head"
    writer = ModelOptFormat()
    mixed = {linear: ALGORITHMS["NVFP4"], "model.layers.0.self_attn.o_proj": ALGORITHMS["FP8"]}
    cases = [({linear: scheme}, algorithm) for algorithm, scheme in ALGORITHMS.items()]
    for schemes, algorithm in [*cases, (mixed, "NVFP4")]:
        kind = "ModelOptNvFp4Config" if "NVFP4" in algorithm else "ModelOptFp8Config"
        kind = kind if len(schemes) == 1 else "ModelOptMixedPrecisionConfig"
        for cache, said in ((None, "None"), ("fp8", "FP8")):
            config = writer.full_config(schemes, [plain], cache)
            for given in (config, hf_quant_config(config)):
                question = {"modelopt": given, "linear": linear, "plain": plain}
                yield question, f"{kind} {algorithm} KV {said}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--python", type=Path, required=True, help="of an environment with vLLM")
    return check(parser.parse_args().python)


def check(python: Path) -> int:
    """Ask vLLM, print what differs; the number of differences, at most 1."""
    asked = [*matrices(), *caches(), *fp4_configs(), *modelopt_configs()]
    with tempfile.TemporaryDirectory() as folder:
        questions, answers = Path(folder) / "questions.json", Path(folder) / "answers.json"
        questions.write_text(json.dumps([question for question, _ in asked]))
        command = [str(python), str(SCRIPT), str(questions), str(answers)]
        run = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
        if not answers.exists():
            print(f"vLLM's rules could not be asked: {run.stderr.strip()[-400:]}")
            return 1
        theirs = json.loads(answers.read_text())
    differing = [
        (question, ours, answer)
        for (question, ours), answer in zip(asked, theirs, strict=True)
        if ours != answer
    ]
    for question, ours, answer in differing:
        print(f"we say {ours}, vLLM says {answer}: {json.dumps(question)}")
    print(f"{len(asked)} rules of vLLM asked, {len(differing)} differ from ours")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
