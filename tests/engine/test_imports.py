"""Imports of a text model's first request: not the modules of vision towers, compilers and trainers."""

from __future__ import annotations

import json
import subprocess
import sys

FIRST_REQUEST = """
import json, sys
from llmopt.engine import LLM, SamplingParams
llm = LLM("stories3M", device="cpu", max_model_len=64, num_threads=1)
llm.generate(["Once"], SamplingParams(temperature=0.0, max_tokens=2))
print(json.dumps(sorted(sys.modules)))
"""
PACKAGES = "cuda llmopt numpy safetensors tokenizers torch torchgen tqdm typing_extensions"
"""The top-level packages of a text model's start; transformers, httpx and Pillow took half a second of it.
CUDA builds of torch 2.14 and newer import `cuda`."""
HEAVY = (
    "sympy",
    "torch._dynamo.symbolic_convert",
    "torch.distributed.tensor._ops",
    "transformers.generation.utils",
    "transformers.integrations.flash_attention",
    "transformers.modeling_utils",
    "llmopt.engine.model.adapter.packed",
)
"""Each took from half a second to five under `python -X importtime`."""


def test_the_first_request_of_a_text_model_imports_what_it_needs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FIRST_REQUEST], capture_output=True, text=True, check=True
    )
    modules = set(json.loads(done.stdout.splitlines()[-1]))
    assert "llmopt.engine.model.decoder.decoder" in modules
    assert not modules.intersection(HEAVY)
    own = {*sys.stdlib_module_names, "sitecustomize"}  # a site's own module runs at every start
    packages = {name.partition(".")[0] for name in modules} - own
    assert {name for name in packages if not name.startswith(("_", "cython"))} <= {
        *PACKAGES.split()
    }
