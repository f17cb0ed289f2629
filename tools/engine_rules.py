"""Read what engines name in their own sources, for `llmopt check`: quantization methods and architectures.

    pip download --no-deps -d WHEELS/vllm-0.33.0 vllm==0.33.0
    python tools/engine_rules.py vllm WHEELS/vllm-0.33.0/*.whl WHEELS/vllm-0.32.0/*.whl ...
    python tools/engine_rules.py sglang WHEELS/sglang-0.5.23/*.whl ...

The wheels are read without being imported, the newest first. Each name is written to
`quant/check/rules/engines.json`, with what single versions lack; the other fields of an engine stay.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

RULES = Path(__file__).resolve().parent.parent / "quant" / "check" / "rules" / "engines.json"
_VLLM_METHODS = "vllm/model_executor/layers/quantization/__init__.py"
_VLLM_MODELS = "vllm/model_executor/models/registry.py"
_SGLANG_METHODS = "sglang/srt/layers/quantization/__init__.py"
_SGLANG_MODELS = "sglang/srt/models/"
# Dictionaries of vLLM's registry that name what it does not run.
_NOT_RUN = ("_PREVIOUSLY_SUPPORTED_MODELS", "_OOT_SUPPORTED_MODELS")


def assigned(text: str) -> Iterator[tuple[str, ast.expr]]:
    """Names and values of the assignments of a module."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            yield node.target.id, node.value


def texts(node: ast.AST) -> Iterator[str]:
    """String constants below a node."""
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def keys(node: ast.expr) -> Iterator[str]:
    """Keys of a dictionary display."""
    if isinstance(node, ast.Dict):
        for key in node.keys:
            if key is not None:
                yield from texts(key)


def of_vllm(wheel: zipfile.ZipFile) -> tuple[set[str], set[str]]:
    """Methods and architectures of a wheel of vLLM."""
    values = dict(assigned(wheel.read(_VLLM_METHODS).decode()))
    models = assigned(wheel.read(_VLLM_MODELS).decode())
    found = (
        key
        for name, value in models
        if name.endswith("_MODELS") and name not in _NOT_RUN
        for key in keys(value)
    )
    methods = {*texts(values["QuantizationMethods"])}
    return methods | ({"auto-round"} if "inc" in methods else set()), {
        *found
    }  # `inc` takes it over


def of_sglang(wheel: zipfile.ZipFile) -> tuple[set[str], set[str]]:
    """Methods and architectures of a wheel of SGLang."""
    values = dict(assigned(wheel.read(_SGLANG_METHODS).decode()))
    methods = {
        *keys(values["BASE_QUANTIZATION_METHODS"]),
        "mxfp4",
        "gptq",
    }  # `gptq_marlin` takes it over
    architectures: set[str] = set()
    for path in wheel.namelist():
        if path.startswith(_SGLANG_MODELS) and path.endswith(".py"):
            for name, value in assigned(wheel.read(path).decode()):
                if name == "EntryClass":
                    architectures |= {n.id for n in ast.walk(value) if isinstance(n, ast.Name)}
    return methods, architectures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("engine", choices=("vllm", "sglang"))
    parser.add_argument("wheels", nargs="+", type=Path, help="of the versions, the newest first")
    options = parser.parse_args()
    read = {"vllm": of_vllm, "sglang": of_sglang}[options.engine]
    names = {}
    for path in options.wheels:
        with zipfile.ZipFile(path) as wheel:
            names[path.name.split("-")[1]] = read(wheel)
    rules = json.loads(RULES.read_text(encoding="utf-8"))
    entry = rules[options.engine]
    entry["versions"] = list(names)
    for number, field in enumerate(("methods", "architectures")):
        entry[field] = sorted(set[str]().union(*(found[number] for found in names.values())))
    every = {*entry["methods"], *entry["architectures"]}
    entry["lacking"] = {
        version: sorted(every - methods - architectures)
        for version, (methods, architectures) in names.items()
    }
    RULES.write_text(json.dumps(rules, indent=1) + "\n", encoding="utf-8")
    print(
        f"{options.engine}: {len(entry['methods'])} methods, {len(entry['architectures'])} models"
    )


if __name__ == "__main__":
    sys.exit(main())
