"""Quantizes with one package, in the environment that has it: `worker.py PACKAGE TASK.json ANSWER.json`.

The task of `real.py` holds the model, the calibration tokens, the method and the grid; the answer says how
long it took. Packages without a file format that is read here write a plain checkpoint with dequantized
weights, and say how many bytes the quantized ones take.
"""

# Each package lives in an environment of its own.
# pyright: reportMissingImports=false
from __future__ import annotations

import ctypes
import json
import resource
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

Task = dict[str, Any]
Answer = dict[str, Any]


def peak_bytes() -> int:
    """The most memory that this process held. `ru_maxrss` would count what its parent held at the fork."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    found = (int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    return next(found, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def llmopt(task: Task) -> Answer:
    """This package."""
    from llmopt.quant.methods.options import MethodOptions
    from llmopt.quant.pipeline.pipeline import quantize
    from llmopt.quant.plan.manifest import MANIFEST_NAME
    from llmopt.quant.plan.request import QuantizeRequest

    options: dict[str, Any] = {"true_sequential": task["sequential"]}
    if task["method"] == "autoround":
        options["iters"] = task["iters"]
    options |= {key: task[key] for key in ("asymmetric", "solver", "finetune_steps") if key in task}
    request = QuantizeRequest(
        Path(task["model"]),
        Path(task["output"]),
        method=task["method"],
        calibration=task.get("calibration"),
        num_samples=len(task["tokens"]),
        seq_len=len(task["tokens"][0]),
        held_out=task.get("held_out", 0),
        seed=task.get("seed", 0),
        errors=task.get("errors", True),
        options=MethodOptions(**options),
        **_own_grid(task),
    )
    answer: Answer = {"version": "llmopt", "notes": quantize(request).notes}
    manifest = next(Path(task["output"]).rglob(MANIFEST_NAME), None)
    if manifest and request.errors:  # without errors it read no text
        answer["calibration_sha256"] = json.loads(manifest.read_text())["calibration"]["sha256"]
    return answer


def _own_grid(task: Task) -> dict[str, Any]:
    """The options of the request that say the grid."""
    if "target_bytes" in task:
        grid = {"target_bytes": task["target_bytes"], "format": task["format"]}
        return grid | {
            "stats": Path(task["stats"]),
            "candidates": tuple(task.get("candidates", ())),
        }
    if gguf_type := task.get("gguf_type"):
        return {"gguf_type": gguf_type, "format": "gguf"}
    if "target_bpw" in task:
        return {"target_bpw": task["target_bpw"]}
    if task["method"] in ("trellis", "quip", "squeezellm"):
        return {"bits": task["bits"]}
    if "scheme" in task:
        return {}  # the method is the grid
    # Only compressed-tensors holds every width.
    grid = {key: task[key] for key in ("bits", "group_size", "symmetric")}
    grid["format"] = "compressed-tensors"
    return grid | ({"rotations": tuple(task["rotations"])} if "rotations" in task else {})


def llmcompressor(task: Task) -> Answer:
    import torch
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationScheme,
        QuantizationStrategy,
        QuantizationType,
    )
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from transformers import AutoModelForCausalLM

    def integers(bits: int) -> QuantizationScheme:
        weights = QuantizationArgs(
            num_bits=bits,
            type=QuantizationType.INT,
            strategy=QuantizationStrategy.GROUP,
            group_size=task["group_size"],
            symmetric=task["symmetric"],
        )
        return QuantizationScheme(targets=["Linear"], weights=weights)

    if "scheme" in task:
        grid: dict[str, Any] = {"targets": "Linear", "scheme": task["scheme"]}
    elif "target_bpw" in task:
        from llmcompressor.entrypoints.higgs import get_higgs_config

        config = get_higgs_config(
            task["model"],
            [integers(bits) for bits in task["widths"]],
            ignore=["lm_head", "re:.*embed_tokens"],
            # It counts codes alone: a group has a scale of 16 bits beside them.
            target_avg_bitwidth=task["target_bpw"] - 16 / task["group_size"],
        )
        grid = {"config_groups": config.config_groups}
    else:
        grid = {"config_groups": {"group_0": integers(task["bits"])}}
    grid["ignore"] = ["lm_head"]
    modifiers = {
        "rtn": lambda: [QuantizationModifier(**grid)],
        "gptq": lambda: [GPTQModifier(**grid)],
        "awq": lambda: [AWQModifier(), QuantizationModifier(**grid)],
    }
    model = AutoModelForCausalLM.from_pretrained(
        task["model"], dtype=torch.bfloat16, trust_remote_code=False
    )
    oneshot(
        model=model,
        dataset=Dataset.from_list(_rows(task)),
        recipe=modifiers[task["method"]](),
        max_seq_length=len(task["tokens"][0]),
        num_calibration_samples=len(task["tokens"]),
        shuffle_calibration_samples=False,
    )
    model.save_pretrained(task["output"], save_compressed=True)
    return {"version": f"llmcompressor {version('llmcompressor')}"}


def _rows(task: Task) -> list[dict[str, Any]]:
    return [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in task["tokens"]]


def gptqmodel(task: Task) -> Answer:
    import torch
    from gptqmodel import GPTQModel, QuantizeConfig

    # The file of a method is of its own format; AWQ's is asymmetric, and GPTQ's first version symmetric.
    gptq = "gptq" if task["symmetric"] else "gptq_v2"
    config = QuantizeConfig(
        bits=task["bits"],
        group_size=task["group_size"],
        sym=task["symmetric"],
        method=task["method"],
        format=gptq if task["method"] == "gptq" else "gemm",
        device="cpu",
    )
    model = GPTQModel.load(task["model"], config, dtype=torch.bfloat16)
    model.quantize(_rows(task), batch_size=1)
    model.save(task["output"])
    return {"version": f"gptqmodel {version('gptqmodel')}"}


def autoround(task: Task) -> Answer:
    import torch
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokens = torch.tensor(task["tokens"])
    model = AutoModelForCausalLM.from_pretrained(
        task["model"], dtype=torch.bfloat16, trust_remote_code=False
    )
    tokenizer = AutoTokenizer.from_pretrained(task["model"], trust_remote_code=False)
    if "target_bpw" in task:
        grid = _auto_scheme(task, tokenizer)
    else:
        # Rows of equal length: it takes the first so many.
        grid = {"dataset": [row[None] for row in tokens], "bits": task["bits"]}
        grid |= {"group_size": task["group_size"], "sym": task["symmetric"]}
    quantizer = AutoRound(
        model,
        tokenizer,
        iters=task["iters"],
        nsamples=len(tokens),
        seqlen=tokens.shape[1],
        batch_size=8,
        device_map="cpu",
        **grid,
    )
    quantizer.quantize_and_save(output_dir=task["output"], format="auto_gptq")
    return {"version": f"auto-round {version('auto-round')}"}


def _auto_scheme(task: Task, tokenizer: Any) -> dict[str, Any]:
    """auto-round's AutoScheme, which reads texts from a file: two rows each, cut to the length of one."""
    from auto_round import AutoScheme
    from auto_round.schemes import QuantizationScheme

    rows = task["tokens"]
    pairs = zip(rows, [*rows[1:], rows[0]], strict=True)
    texts = Path(task["output"]).with_name("texts.json")
    texts.write_text(json.dumps(tokenizer.batch_decode([one + other for one, other in pairs])))
    options = [
        QuantizationScheme(bits, task["group_size"], task["symmetric"]) for bits in task["widths"]
    ]
    scheme = AutoScheme(task["target_bpw"], options, nsamples=len(rows), seqlen=len(rows[0]))
    return {"scheme": scheme, "dataset": str(texts)}


def llamacpp(task: Task) -> Answer:
    """llama.cpp's quantize, through its Python binding."""
    import llama_cpp as lib

    params = lib.llama_model_quantize_default_params()
    params.nthread = task["threads"]
    params.ftype = getattr(lib, "LLAMA_FTYPE_MOSTLY_" + task["gguf_type"])
    if "tables" not in task:  # the embeddings are not compared: 0 is float32
        params.token_embedding_type = params.output_tensor_type = 0
    if task["imatrix"]:
        entries = json.loads(Path(task["imatrix_file"]).read_text())
        # An entry without name ends it.
        array = (lib.llama_model_imatrix_data * (len(entries) + 1))()
        for slot, (name, values) in zip(array, entries.items(), strict=False):
            slot.name = name.encode()
            slot.data = (ctypes.c_float * len(values))(*values)
            slot.size = len(values)
        params.imatrix = ctypes.cast(array, ctypes.POINTER(lib.llama_model_imatrix_data))
    lib.llama_backend_init()
    code = lib.llama_model_quantize(
        task["float_gguf"].encode(), task["output"].encode(), ctypes.byref(params)
    )
    if code:
        raise RuntimeError(f"llama_model_quantize ended with {code}")
    return {"version": f"llama-cpp-python {version('llama-cpp-python')}", "wrote": "gguf"}


def hqq(task: Task) -> Answer:
    import torch
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    model, linears = _plain(task)
    config = BaseQuantizeConfig(nbits=task["bits"], group_size=task["group_size"], axis=1)
    stored = 0
    for linear in linears:
        quantized = HQQLinear(
            linear, config, compute_dtype=torch.bfloat16, device="cpu", del_orig=False
        )
        packed = quantized.state_dict()
        stored += _bytes([packed["W_q"], packed["scale"], packed["zero"]])
        linear.weight.data = quantized.dequantize().to(linear.weight.dtype)
    model.save_pretrained(task["output"])
    return {"version": f"hqq {version('hqq')}", "wrote": "plain", "stored_bytes": stored}


def torchao(task: Task) -> Answer:
    import torch
    from torchao.quantization import IntxWeightOnlyConfig, MappingType, PerGroup, quantize_

    model, linears = _plain(task)
    chosen = {id(linear) for linear in linears}
    config = IntxWeightOnlyConfig(
        weight_dtype=getattr(torch, f"int{task['bits']}"),
        granularity=PerGroup(task["group_size"]),
        mapping_type=MappingType.SYMMETRIC if task["symmetric"] else MappingType.ASYMMETRIC,
    )
    quantize_(model, config, filter_fn=lambda module, _: id(module) in chosen)
    stored = 0
    for linear in linears:
        weight = linear.weight
        # What it saves are these tensors: codes below 8 bits lie in bytes.
        names = [*weight.tensor_data_names, *getattr(weight, "optional_tensor_data_names", ())]
        stored += _bytes([getattr(weight, name) for name in names])
        linear.weight = torch.nn.Parameter(weight.dequantize().float(), requires_grad=False)
    model.save_pretrained(task["output"])
    return {"version": f"torchao {version('torchao')}", "wrote": "plain", "stored_bytes": stored}


def _plain(task: Task) -> tuple[Any, list[Any]]:
    """The plain model in float32, which holds every value of the checkpoint, and its layers' linears."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        task["model"], dtype=torch.float32, trust_remote_code=False
    )
    return model, [each for each in model.model.modules() if isinstance(each, torch.nn.Linear)]


def _bytes(tensors: list[Any]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors if each is not None)


PACKAGES: dict[str, Callable[[Task], Answer]] = {
    each.__name__: each
    for each in (llmopt, llmcompressor, gptqmodel, autoround, llamacpp, hqq, torchao)
}


def main() -> None:
    package, given, answered = sys.argv[1:]
    task: Task = json.loads(Path(given).read_text())
    if (
        package == "llmopt"
    ):  # as its command: torch's threads spin briefly if it is loaded before torch
        import_module("llmopt.base.processor")
    if package != "llamacpp":
        import torch

        torch.set_num_threads(task["threads"])
    begun = time.perf_counter()
    answer = PACKAGES[package](task)
    answer["seconds"] = time.perf_counter() - begun
    used = resource.getrusage(resource.RUSAGE_SELF)  # imports included: a command has them, too
    answer |= {"cpu_seconds": used.ru_utime + used.ru_stime, "peak_bytes": peak_bytes()}
    Path(answered).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
