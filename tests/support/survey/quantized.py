"""A surveyed type quantized, and loaded by transformers: shared by the columns after `engine`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from llmopt.base.errors import BadInput
from llmopt.quant.formats.registry import quantized_modules, read_quantized, tensor_names
from llmopt.quant.methods.options import MethodOptions
from llmopt.quant.model.auto import auto_class
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.model.experts import LEAVES, experts_of, fused, parts_of, with_experts_apart
from llmopt.quant.model.parameters import ModelParameters
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.request import QuantizeRequest
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import CompressedTensorsConfig, PreTrainedTokenizerFast

from .case import Case, Verdict

# Widths of tiny models: 4 bits in groups where a group divides them, else 8 bits per channel.
GRIDS = ({"bits": 4}, {"bits": 8, "group_size": -1})
SAMPLES, LENGTH = 8, 16
WORDS = 64  # token ids that every tiny vocabulary has


@dataclass(frozen=True, slots=True)
class Quantized:
    """A finished checkpoint of a type, or why there is none.

    Attributes:
        needs: what transformers needs to load it, by our table of loaders; None: it says that it does not.
        refused: why it was not written, or, by that table, why transformers does not load it.
    """

    folder: Path
    needs: str | None = None
    refused: str = ""


def quantized(case: Case, method: str) -> Quantized:
    """The type's checkpoint by a method as compressed-tensors, made once; refused with the reason."""
    made = case.notes.setdefault("quantized", {})
    if method not in made:
        made[method] = _quantize(case, method)
    return made[method]


def source(case: Case) -> Path:
    """The folder of the type's plain checkpoint with a tokenizer and a calibration text, made once."""
    if "source" not in case.notes:
        assert case.raw
        _leave_ones(case.model)
        case.model.save_pretrained(case.folder)
        # Single characters: where transformers reads the file as another kind of tokenizer, they stay words.
        words = {chr(ord("0") + index): index for index in range(WORDS)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(case.folder)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(3, WORDS, (2 * SAMPLES, LENGTH), generator=generator)
        text = "\n\n".join(" ".join(chr(ord("0") + index) for index in row) for row in ids.tolist())
        (case.folder / "calibration.txt").write_text(text)
        case.notes["source"] = case.folder
    return case.notes["source"]


@torch.no_grad()
def _leave_ones(model: Any) -> None:
    """Vectors away from where transformers sets them: a norm of ones would hide a fold."""
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def _quantize(case: Case, method: str) -> Quantized:
    folder, output = source(case), case.folder / f"quantized-{method}"
    options: dict[str, Any] = {"errors": False} if method == "rtn" else {"held_out": 0}
    # What the command leaves to the method: its solver, its targets and its rotations.
    options |= {"rotations": None, "options": MethodOptions(asymmetric=None)}
    refused = ""
    for grid in GRIDS:
        request = QuantizeRequest(
            folder,
            output,
            method=method,
            format="compressed-tensors",
            calibration=str(folder / "calibration.txt"),
            num_samples=SAMPLES,
            seq_len=LENGTH,
            **grid,
            **options,
        )
        try:
            result = quantize(request)
        except BadInput as error:
            refused = refused or str(error)
            if "group size" not in str(error):
                break
        else:
            row = next(row for row in result.preflight.loaders if row.name == "transformers")
            return Quantized(
                output, row.reason if row.loads else None, "" if row.loads else row.reason
            )
    return Quantized(output, refused=refused)


def dequantized(folder: Path) -> Path:
    """A plain checkpoint with the quantized linears as our reader dequantizes them, the rest as it is."""
    output = folder.with_name(folder.name + "-plain")
    if not output.exists():
        checkpoint = Checkpoint(folder)
        modules = quantized_modules(checkpoint)
        packed = set().union(*(tensor_names(checkpoint, module) for module in modules))
        state = {name: checkpoint.tensor(name) for name in checkpoint.names if name not in packed}
        for module in modules:
            state[f"{module}.weight"] = read_quantized(checkpoint, module).dequantize().float()
        config = {k: v for k, v in checkpoint.config.items() if k != "quantization_config"}
        write_plain(output, fused_again(checkpoint, state), config)
    return output


def write_plain(output: Path, state: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> Path:
    """A folder with these tensors and this config."""
    output.mkdir()
    tensors = {name: tensor.contiguous() for name, tensor in state.items()}
    save_file(tensors, output / "model.safetensors", {"format": "pt"})
    (output / "config.json").write_text(json.dumps(config))
    return output


def fused_again(
    checkpoint: Checkpoint, state: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The tensors as in the plain model: experts that transformers does not merge in one tensor again."""
    parameters = ModelParameters(checkpoint.config)
    whole = dict(state)
    for path, disk in parameters.experts_apart(state).items():
        module = parameters.module(path)
        experts = [
            {leaf: whole.pop(f"{disk}.{number}.{leaf}.weight") for leaf in LEAVES}
            for number in range(len(module.down_proj))
        ]
        whole |= {f"{disk}.{name}": tensor for name, tensor in fused(module, experts).items()}
    return whole


def loaded(case: Case, folder: Path, needs: str = "") -> Any:
    """transformers' model of a folder in float32, loaded with what our table says that it needs."""
    load: Any = auto_class(case.config).from_pretrained
    options: dict[str, Any] = {}
    if "dequantize=True" in needs:
        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    model = load(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        trust_remote_code=False,
        **options,
    )
    return model.eval()


def decompress(model: Any) -> Any:
    """The model with weights in place of compressed-tensors' codes, as its first forward pass leaves it."""
    from compressed_tensors.compressors import decompress_module
    from compressed_tensors.quantization import QuantizationStatus

    for module in model.modules():
        if getattr(module, "quantization_status", None) == QuantizationStatus.COMPRESSED:
            decompress_module(module)
    return model


def differing(one: Any, other: Any) -> Iterator[str]:
    """Names of the parameters and buffers in which two models differ."""
    left, right = one.state_dict(), other.state_dict()
    missing = {name: tuple(tensor.shape) for name, tensor in right.items() if name not in left}
    parts = parts_of(missing)  # of fused experts, in whose place there are linears
    if parts.keys() <= left.keys():
        fused_names = {part.tensor for part in parts.values()}
        apart = {name: part.of(right[part.tensor]) for name, part in parts.items()}
        right = {n: t for n, t in right.items() if n not in fused_names} | apart
    for name, tensor in right.items():
        if name not in left or not torch.equal(left[name].float(), tensor.float()):
            yield name


def written_and_loaded(case: Case, method: str) -> Verdict:
    """Exact: every unquantized tensor is the source's, and transformers loads each parameter as ours."""
    made = quantized(case, method)
    if made.refused:
        return Verdict("refused", made.refused)
    plain, checkpoint = Checkpoint(source(case)), Checkpoint(made.folder)
    modules = quantized_modules(checkpoint)
    if experts_of(f"{module}.weight" for module in modules):
        plain = with_experts_apart(plain)
    stored = {name for module in modules for name in tensor_names(checkpoint, module)}
    for name in plain.names:
        if name.removesuffix(".weight") in modules or name in stored:
            continue
        if name not in checkpoint or not torch.equal(checkpoint.tensor(name), plain.tensor(name)):
            return Verdict("wrong", f"{name} is not that of the source")
    try:
        theirs = decompress(loaded(case, made.folder, made.needs or ""))
    except Exception as error:  # a loader may fail in any way
        return Verdict("wrong", f"transformers does not load it: {type(error).__name__}: {error}")
    wrong = list(differing(theirs, loaded(case, dequantized(made.folder))))
    if wrong:
        return Verdict(
            "wrong", f"{len(wrong)} parameters differ in transformers, such as {wrong[0]}"
        )
    return Verdict("exact", f"{len(modules)} linears")
