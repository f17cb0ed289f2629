"""Write checkpoints with the tools of their names, in those tools' environments.

    PYTHON -m tools.check_truth.make TASKS.json FOLDER

Nothing here is llmopt's. Each checkpoint is made in a process of its own by `truth.py`; a tool that
refuses is a fact too, and its message is kept in FOLDER/NAME.refused.
"""

# The packages live in environments of their own.
# pyright: reportMissingImports=false
from __future__ import annotations

import ctypes
import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .models import copy_tokenizer, write_model

SAMPLES, LENGTH = 16, 64
Task = dict[str, Any]


def calibration() -> list[list[int]]:
    """Random sequences."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 512, (SAMPLES, LENGTH), generator=generator).tolist()


def loaded(plain: Path, **options: Any) -> Any:
    options.setdefault("dtype", torch.bfloat16)
    return AutoModelForCausalLM.from_pretrained(plain, **options)


def transformers(task: Task, plain: Path, folder: Path) -> None:
    if not task["options"]:
        shutil.copytree(plain, folder, dirs_exist_ok=True)
        return
    config = import_module("transformers").FineGrainedFP8Config()
    quantizer: Any = import_module("transformers.quantizers.quantizer_finegrained_fp8")
    # It asks for a GPU before it quantizes, and quantizes in plain torch.
    quantizer.FineGrainedFP8HfQuantizer.validate_environment = lambda *_, **__: None
    loaded(plain, quantization_config=config).save_pretrained(folder)


def llmcompressor(task: Task, plain: Path, folder: Path) -> None:
    recipe = dict(task["options"])
    modifiers: Any = import_module("llmcompressor.modifiers.quantization")
    kind = modifiers.QuantizationModifier
    if recipe.pop("gptq", False):
        kind = import_module("llmcompressor.modifiers.gptq").GPTQModifier
    if recipe.pop("awq", False):
        kind = import_module("llmcompressor.modifiers.awq").AWQModifier
    if "kv_cache_scheme" in recipe or "config_groups" in recipe:
        targets: dict[str, Any] = {}
    else:
        targets = {"targets": "Linear"}
    if recipe.get("scheme") and "kv_cache_scheme" in recipe:
        targets = {"targets": "Linear"}
    recipe.setdefault("ignore", ["lm_head", "re:.*mlp.gate$", "re:.*block_sparse_moe.gate$"])
    rows = {"input_ids": calibration(), "attention_mask": [[1] * LENGTH] * SAMPLES}
    model = loaded(plain)
    import_module("llmcompressor").oneshot(
        model=model,
        recipe=kind(**targets, **recipe),
        dataset=import_module("datasets").Dataset.from_dict(rows),
        num_calibration_samples=SAMPLES,
        max_seq_length=LENGTH,
    )
    model.save_pretrained(folder, save_compressed=True)


def autoround(task: Task, plain: Path, folder: Path) -> None:
    options = {"bits": 4, "group_size": 128, "sym": True} | task["options"]
    form = options.pop("format")
    if "scheme" in options:
        options = {"scheme": options["scheme"]}  # it brings bits and groups
    tuner = import_module("auto_round").AutoRound(
        loaded(plain),
        AutoTokenizer.from_pretrained(plain, trust_remote_code=False),
        iters=0,
        dataset=[torch.tensor([row]) for row in calibration()],
        seqlen=LENGTH,
        nsamples=SAMPLES,
        batch_size=1,
        **options,
    )
    tuner.quantize_and_save(str(folder), format=form)
    for inner in [path for path in folder.iterdir() if path.is_dir()]:
        for path in inner.iterdir():
            path.replace(folder / path.name)
        inner.rmdir()


def gptqmodel(task: Task, plain: Path, folder: Path) -> None:
    library: Any = import_module("gptqmodel")
    options = {"bits": 4, "group_size": 128} | task["options"]
    config = library.QuantizeConfig(offload_to_disk=False, **options)
    model = library.GPTQModel.load(str(plain), config, device="cpu", dtype=torch.float16)
    rows = [{"input_ids": row, "attention_mask": [1] * LENGTH} for row in calibration()]
    model.quantize(rows, batch_size=1)
    model.save(str(folder))


def bitsandbytes(task: Task, plain: Path, folder: Path) -> None:
    config = import_module("transformers").BitsAndBytesConfig(**task["options"])
    loaded(plain, quantization_config=config).save_pretrained(folder)


def modelopt(task: Task, plain: Path, folder: Path) -> None:
    quantization: Any = import_module("modelopt.torch.quantization")
    export: Any = import_module("modelopt.torch.export")
    config = dict(getattr(quantization, task["options"]["config"]))
    if kv := task["options"].get("kv"):
        update = import_module(
            "modelopt.torch.quantization.utils"
        ).update_quant_cfg_with_kv_cache_quant
        config = update(config, getattr(quantization, kv)["quant_cfg"])
    model = loaded(plain)

    def forward(part: Any) -> None:
        for row in calibration():
            part(torch.tensor([row]))

    model = quantization.quantize(model, config, forward)
    export.export_hf_checkpoint(model, export_dir=str(folder))


class QuantizeParameters(ctypes.Structure):
    """`llama_model_quantize_params` of llama.cpp v0.5.0, with room for fields that came later.

    https://github.com/ggml-org/llama.cpp/blob/master/include/llama.h
    """

    _fields_ = (
        ("nthread", ctypes.c_int32),
        ("ftype", ctypes.c_int32),
        ("tensor_types", ctypes.c_int32 * 2),
        ("flags", ctypes.c_bool * 8),
        ("rest", ctypes.c_uint8 * 128),
    )


def llamacpp(task: Task, plain: Path, folder: Path) -> None:
    """llama.cpp's converter, as auto-round ships it, then `llama_model_quantize` of $LIBLLAMA."""
    kind = task["options"]["type"]
    shipped = find_spec("auto_round")
    assert shipped is not None and shipped.origin is not None
    sys.path.append(str(Path(shipped.origin).parent / "export" / "export_to_gguf"))
    package: Any = import_module("gguf")
    known, enums = package.MODEL_ARCH, package.LlamaFileType
    # The converter names architectures that the released gguf package does not have yet.
    package.MODEL_ARCH = type("", (), {"__getattr__": lambda _, name: getattr(known, name, None)})()
    conversion: Any = import_module("conversion")
    architecture = json.loads((plain / "config.json").read_text())["architectures"][0]
    model_class = conversion.get_model_class(architecture)
    # The bundled tokenizer, whatever tokenizer the family has as a rule.
    model_class.set_vocab = lambda self: self._set_vocab_llama_hf()
    whole = folder / "whole.gguf"
    with torch.inference_mode():
        # The name is not the family's: llama.cpp wants Phi-3's own tokens of a model that is called so.
        model_class(plain, enums.MOSTLY_BF16, whole, model_name="tiny").write()
    library = ctypes.CDLL(os.environ["LIBLLAMA"])
    library.llama_model_quantize_default_params.restype = QuantizeParameters
    library.llama_backend_init()
    parameters = library.llama_model_quantize_default_params()
    parameters.ftype, parameters.nthread = int(enums[f"MOSTLY_{kind}"]), 2
    output = folder / f"{task['folder']}.gguf"
    paths = (str(whole).encode(), str(output).encode())
    status = library.llama_model_quantize(*paths, ctypes.byref(parameters))
    whole.unlink()
    if status:
        raise RuntimeError(f"llama_model_quantize ended with {status}")


MAKERS: dict[str, Callable[[Task, Path, Path], None]] = {
    "transformers": transformers,
    "llmcompressor": llmcompressor,
    "autoround": autoround,
    "gptqmodel": gptqmodel,
    "bitsandbytes": bitsandbytes,
    "modelopt": modelopt,
    "llamacpp": llamacpp,
}


def make(task: Task, parent: Path) -> None:
    """Make one checkpoint under a temporary name, or write why its tool refused."""
    folder = parent / task["folder"]
    refused = parent / f"{task['folder']}.refused"
    if folder.exists() or refused.exists():
        return
    part, plain = parent / "part", parent / "plain" / task["family"]
    shutil.rmtree(part, ignore_errors=True)
    try:
        if not plain.exists():
            write_model(task["family"], plain)
        part.mkdir()
        MAKERS[task["tool"]](task, plain, part)
        if not (part / "tokenizer.json").exists() and not list(part.rglob("*.gguf")):
            copy_tokenizer(part)
        part.rename(folder)
        print(f"made {task['folder']}", flush=True)
    except Exception as error:
        traceback.print_exc()
        refused.write_text(f"{type(error).__name__}: {error}\n")
        print(f"refused {task['folder']}: {type(error).__name__}: {str(error)[:200]}", flush=True)


if __name__ == "__main__":
    for case in json.loads(Path(sys.argv[1]).read_text()):
        make(case, Path(sys.argv[2]))
