"""llama.cpp's quantize through its Python binding. The task is of tools/quality_table.py."""

# The package lives in an environment of its own.
# pyright: reportMissingImports=false
from __future__ import annotations

import ctypes
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llama_cpp as lib

# The type that a mix is named after, for one without a constant of its own name.
FLOAT32 = 0


def imatrix(entries: dict[str, list[float]]) -> Any:
    """The C array of llama_model_imatrix_data; an entry without name ends it."""
    array = (lib.llama_model_imatrix_data * (len(entries) + 1))()
    for slot, (name, values) in zip(array, entries.items(), strict=False):
        slot.name = name.encode()
        slot.data = (ctypes.c_float * len(values))(*values)
        slot.size = len(values)
    return array


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    began = time.perf_counter()
    params = lib.llama_model_quantize_default_params()
    params.nthread = task["threads"]
    params.ftype = getattr(lib, "LLAMA_FTYPE_MOSTLY_" + task["gguf_type"])
    # The embeddings are not compared.
    params.token_embedding_type = params.output_tensor_type = FLOAT32
    kept = None
    if task["imatrix"]:
        kept = imatrix(json.loads(Path(task["imatrix_file"]).read_text()))
        params.imatrix = ctypes.cast(kept, ctypes.POINTER(lib.llama_model_imatrix_data))
    lib.llama_backend_init()
    code = lib.llama_model_quantize(
        task["float_gguf"].encode(), task["output"].encode(), ctypes.byref(params)
    )
    if code:
        raise RuntimeError(f"llama_model_quantize ended with {code}")
    answer = {
        "seconds": time.perf_counter() - began,
        "version": f"llama-cpp-python {version('llama-cpp-python')}",
        "wrote": "gguf",
    }
    Path(sys.argv[2]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
