"""Errors of a command line come before torch is imported, with the nearest of the known names."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from llmopt.base.errors import BadInput
from llmopt.base.option import offer
from llmopt.bench.load.address import PATHS
from llmopt.bench.options.values import BACKENDS, DATASETS
from llmopt.quant.formats.registry import FORMATS
from llmopt.quant.kinds.registry import format_names
from llmopt.quant.methods.options import SchemeOptions
from llmopt.quant.methods.registry import METHODS, Method
from llmopt.recipes import MODELS

LINES = {
    "quantize --method gptq --no-errors": "--no-errors: method gptq is calibrated",
    "quantize --method exl3": "exl3 is a format: --method trellis --format exl3",
    "quantize --method gguf": "gguf is a format: --format gguf",
    "quantize --method gpqt": "unknown method 'gpqt': the nearest is gptq",
    "quantize --format gguff": "unknown format 'gguff': the nearest is gguf",
    "quantize --format rtn": "rtn is a method: --method rtn",
    "quantize --format awq,awq": "a format is named twice",
    "quantize --device cdua": "--device cdua: choose cpu, cuda or cuda:N",
    "quantize --device cuda:01": "--device cuda:01: choose cpu, cuda or cuda:N",
    "quantize --kv-cache fp9": "--kv-cache fp9: choose fp8 or int8",
    "quantize --gguf-type Q4_K --format awq": "--gguf-type Q4_K_M belongs to --format gguf, not to awq",
    "quantize --method Q4_K_M --gguf-type Q8_0": "--method Q4_K_M and --gguf-type Q8_0: give one",
    "quantize --method q4_k_m --format gptq": "--gguf-type Q4_K_M belongs to --format gguf, not to gptq",
    "quantize --gguf-type Q4_X": "no GGUF type 'Q4_X'",
    "quantize --gguf-type Q4_KM": "no GGUF type 'Q4_KM': the nearest is Q4_K_M or Q5_K_M; choose one of Q4_0",
    "quantize --method Q4_KM": "no GGUF type 'Q4_KM': the nearest is Q4_K_M",
    "quantise": "No such command 'quantise'. Did you mean 'quantize'? see llmopt --help",
    "quantize --method rtn --alpha 0.2": "--alpha belongs to method smoothquant",
    "quantize --method hqq --solver gptq": "method hqq chooses its codes itself",
    "quantize --method rtn --target-bpw 4": "belong to --method auto and trellis",
    "quantize --bits 9": "--bits 9: method awq has 2, 3, 4, 5, 6, 8",
    "quantize --method quip --bits 0": "--bits 0: method quip has 2, 3, 4",
    "quantize --group-size 96": "group size 96 does not divide the model's hidden size of 256: choose",
    "quantize --output taken": "taken exists: remove it, or choose another folder with --output",
    "quantize --time": "--time refines the estimate of --dry-run: give both",
    "quantize --group-size 0": "--group-size 0: give a positive number, or -1",
    "quantize stories3": "no model 'stories3'",
    "quantize ~nosuchuser/x": "~nosuchuser/x names the home of nobody here",
    "quantize --calibration ~nosuchuser/x.txt": "~nosuchuser/x.txt names the home of nobody here",
    "bench --dataset ~nosuchuser/x": "~nosuchuser/x names the home of nobody here",
    "run ~nosuchuser/x": "~nosuchuser/x names the home of nobody here",
    "kv-plan ~nosuchuser/x": "~nosuchuser/x names the home of nobody here",
    "kv-plan llama-70b --gpu ,": "--gpu ',': name a GPU of llmopt kv-plan --list",
    "kv-plan llama-70b --gpu h101": "no GPU 'h101' in the table: near are H100 SXM",
    "kv-plan llama-70b --gpu rtx4900": "near are RTX 4090",
    "kv-plan nothere --gpu h101": "no GPU 'h101'",
    "kv-plan llama-70b --gpu h100,2xl40s": "--gpu h100, 2xl40s: give every GPU the same number",
    "kv-plan llama-70b --gpu 2xl40s --tp 4": "--tp x --pp x --attention-dp are 4 GPUs",
    "kv-plan llama-70b --kv-dtype fp9": "no KV dtype 'fp9': the nearest is fp8",
    "kv-plan llama-70b --weights Q4_KM": "no weight format 'Q4_KM'; close: Q4_K_M",
    "kv-plan lama-70b": "no model 'lama-70b' in the bundled table (close: llama-70b",
    "best nothere --gpu h101": "no GPU 'h101' in the table: near are H100 SXM",
    "best nothere --gpu all": "--gpu all: name one, or cpu",
    "deploy nothere --gpu h101": "no GPU 'h101' in the table: near are H100 SXM",
    "kv-plan llama-70b --gpu h100 --measured cpu.json": "cpu.json was measured on a CPU, and --gpu is H100",
    "bench --dataset sharegtp": "no dataset 'sharegtp': the nearest is sharegpt",
    "bench --dataset sharegp": "error: dataset: no dataset 'sharegp': the nearest is sharegpt",
    "check stories3M --engine vLM": "error: Invalid value for '--engine': 'vLM' is not one of 'vllm'",
    "check stories3M --loads-in vllm": "No such option: --loads-in: give --engine: see llmopt check",
    "bench --num-passes 3": "No such option: --num-passes: a pass is a run here: --num-runs",
    "best --method awq": "No such option: --method: it compares the methods itself",
    "quantize --max-kl 0.02": "No such option: --max-kl: llmopt best --max-kl searches for it",
    "best --size 100": "'100' bytes: a size has a unit, such as 100MB",
    "check nothere --engine vLLM": "no model 'nothere'",
    "bench --dataset broken.yaml": "dataset broken.yaml, line 1: not JSON",
    "bench --dataset nothere.jsonl": "no dataset 'nothere.jsonl': there is no such file here",
    "bench --dataset owner/name": "one of the hub is --dataset hf --dataset-path owner/name",
    "bench --base-url 127.0.0.1:1": "no server answers at http://127.0.0.1:1: Connection refused",
    "bench --base-url http://127.0.0.1:1": "no server answers at http://127.0.0.1:1: Connection refused",
    "bench --base-url ftp://host": "--base-url 'ftp://host': write http://HOST:PORT",
    "best --max-kl 10%": "--max-kl 10%: give nats a token, such as 0.05: a share is one of --min-top1",
    "best --loads-in vLMM": "--loads-in vlmm: the nearest is vllm",
    "compare a b --max-kl 10%": "--max-kl 10%: give nats a token",
    "bench --backend opena": "no --backend 'opena': the nearest is openai",
    "bench --device cdua": "device: choose auto, cpu, cuda, mps or cuda:N",
    "bench --request-rate -1": "request_rate",
    "bench nothere": "no model 'nothere'",
    "bench --against nothere": "no model 'nothere'",
    "bench --reference nothere": "no model 'nothere'",
    "bench --draft-model nothere": "no model 'nothere'",
    "bench --plan nothere": "--plan nothere: there is no such file",
    "bench --quality-text nothere": "--quality-text nothere: there is no such file",
    "bench --lora a=nothere": "nothere/adapter_config.json is missing",
    "bench freeze --dataset sharegtp": "no dataset 'sharegtp': the nearest is sharegpt",
    "bench freeze nothere": "no model 'nothere'",
    "quantize --calibration nothere": "calibration data 'nothere' is no .txt",
    "quantize --calibration nothere.txt": "calibration file nothere.txt does not exist",
    "quantize --calibration folder/nothere.jsonl": "calibration file folder/nothere.jsonl does not exist",
    "quantize --calibration ./nothere": "calibration file nothere does not exist",
    "quantize --calibration broken.yaml": "calibration file broken.yaml is neither .txt",
    "merge nothere other": "no model 'nothere'",
    "merge owner/name other": "no model 'owner/name'",
    "merge stories3M broken.yaml": "broken.yaml/adapter_config.json is missing",
    "convert owner/name --format gguf": "no model 'owner/name'",
    "merge stories3M nothere": "nothere/adapter_config.json is missing",
    "merge stories3M a b --weights 1": "--weights '1': write 2 numbers",
    "convert nothere --format gguf": "no model 'nothere'",
    "convert stories3M --format gguff": "unknown format 'gguff': the nearest is gguf",
    "convert stories3M --format zzz": f"{', '.join(format_names())}, hf",
    "verify nothere": "nothere is no folder",
    f"verify {MODELS / 'stories260K'}": "is not quantized: its config has no quantization_config",
    "batch nothere.jsonl": "nothere.jsonl",
    f"run {'a' * 3000}": "File name too long",
    f"quantize --model {'a' * 3000}": "File name too long",
    "run nonrecipe": "no recipe 'nonrecipe'",
    "run quickstrat": "the nearest is quickstart",
    "run broken.yaml": "broken.yaml, line 1: not YAML",
    "run method.yaml": "unknown method 'gpqt': the nearest is gptq",
    "run key.yaml": "unknown key 'modle'",
    "run bits.yaml": "--bits 9: method gptq has 2, 3, 4, 5, 6, 8",
    "run model.yaml": "no model 'nothere'",
    "compare nothere other": "nothere is missing",
    "compare deep.json other": "deep.json is nested too deeply",
    "report nothere other": "nothere is missing",
    "deploy nothere": "no model 'nothere'",
    "kv-plan --model nothere": "no model 'nothere'",
    "serve-local nothere": "no model 'nothere'",
    "serve-local --draft-model nothere": "no model 'nothere'",
    "serve-local --lora a=nothere": "nothere/adapter_config.json is missing",
    "serve-local --device cdua": "choose auto, cpu, cuda, mps or cuda:N",
}
_POINTS = [{"phase": "decode", "mbu": 0.5}, {"phase": "prefill", "mfu": 0.4}]
_ON_CPU = {
    "roofline": {"ceilings": {"bandwidth": 1e10, "flops": 1e11}, "points": _POINTS},
    "environment": {"machine": "here"},
    "identity": {"device": "cpu"},
}
FILES = {
    "cpu.json": json.dumps({"llmopt": _ON_CPU}),
    "broken.yaml": "name: [",
    "method.yaml": "name: a\nvariants: [{name: b, quantize: {method: gpqt}}]\n",
    "bits.yaml": "name: a\nvariants: [{name: b, quantize: {method: gptq, bits: 9}}]\n",
    "key.yaml": "name: a\nmodle: b\nvariants: [{name: b}]\n",
    "model.yaml": "name: a\nmodel: nothere\nvariants: [{name: b}]\n",
    "deep.json": "[" * 100_000,
    "taken/config.json": "{}",
}
RUN = """
import contextlib, io, json, sys
from llmopt.cli.main import main
for line in json.loads(sys.argv[1]):
    said, code = io.StringIO(), None
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try: main(line.split())
        except SystemExit as stop: code = stop.code
    heavy = sorted({"torch", "transformers", "scipy"} & {*sys.modules})
    print(json.dumps([line, code, said.getvalue(), heavy]))
    sys.stdout.flush()
    if heavy: break
"""


def test_every_command_refuses_before_torch(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps([*LINES])],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    told = [json.loads(line) for line in done.stdout.splitlines()]
    for line, code, said, imported in told:
        assert (line, code, imported) == (line, 2, []), said
        assert said.startswith("error: ") and said.count("\n") == 1, (line, said)
        assert LINES[line] in said
    assert len(told) == len(LINES)
    assert {path.name for path in tmp_path.iterdir()} == {Path(name).parts[0] for name in FILES}


def takes(method: Method, bits: int) -> bool:
    """Whether `--bits` is one of the method's, by its scheme."""
    try:
        return method.scheme(SchemeOptions(bits=bits)).bits == bits
    except BadInput:
        return False


def test_the_names_known_without_torch_are_those_of_the_registries() -> None:
    for method in METHODS.values():
        assert method.scheme(SchemeOptions()).bits == method.bits
        assert method.widths == tuple(bits for bits in range(17) if takes(method, bits))
        assert method.default_format in FORMATS
        assert callable(import_module(f"llmopt.quant.methods.{method.module}").quantize_layer)
    assert [*format_names()] == [*FORMATS]
    for builder in DATASETS.values():
        module, _, function = builder.partition(".")
        assert callable(getattr(import_module(f"llmopt.bench.workloads.{module}"), function))
    assert {*PATHS} == {*BACKENDS.values()}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gpqt", "the nearest is gptq; choose one of awq, gptq"),
        ("GPTQ", "the nearest is gptq; choose one of awq, gptq"),
        ("zzz", "choose one of awq, gptq"),
    ],
)
def test_the_nearest_name_is_offered_where_one_is_like_it(name: str, text: str) -> None:
    assert offer(name, ("awq", "gptq")) == text


def test_a_missing_package_of_the_run_folder_is_told_before_the_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from llmopt.bench.options.options import BenchOptions
    from llmopt.bench.session.run_sessions import open_session

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ModuleNotFoundError, match="pyarrow"):
        open_session(BenchOptions(model="stories260K"))
