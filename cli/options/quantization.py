"""Options of `llmopt quantize`: the grid, the method, the calibration data, the run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import typer

from .common import Json, TrustRemoteCode, writable_folder, writable_if_new


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """Method, format and output of the checkpoint."""

    method: Annotated[
        str,
        typer.Option(
            help="Quantization method: awq, gptq, autoround, rtn, smoothquant, hqq, squeezellm, int8, fp8, "
            "nf4, fp4, nvfp4, mxfp4, trellis, quip; or auto: gptq with mixed precision under a target."
        ),
    ] = "awq"
    format: Annotated[
        str | None,
        typer.Option(
            help="awq, gptq, compressed-tensors, modelopt, bitsandbytes, fp8, squeezellm, exl3, quip or "
            "gguf; several with commas. Default: the method's own if it supports the scheme, else "
            "compressed-tensors.",
        ),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            callback=writable_folder,
            help="Folder to create. Default: ./MODEL-METHOD-BITSbit.",
        ),
    ] = None


def whole_bits(text: str) -> int:
    """A width; a mean of several is said to be a target."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text} is not a whole number of bits: a mean over linears of several widths is "
            "--target-bpw, of --method trellis and auto"
        ) from None


@dataclass(frozen=True, slots=True)
class GridOptions:
    """Quantization grid of weights and activations."""

    PANEL: ClassVar = "Grid"

    bits: Annotated[
        int | None,
        typer.Option(
            parser=whole_bits, metavar="INTEGER", help="Bits per weight. Default: the method's."
        ),
    ] = None
    group_size: Annotated[
        int | None,
        typer.Option(
            help="Input channels that share a scale; -1: one scale per output channel. "
            "Default: the largest of 128, 64, 32, 16 that divides every width."
        ),
    ] = None
    symmetric: Annotated[
        bool | None,
        typer.Option(
            "--symmetric/--asymmetric",
            help="Without or with zero points. Default: as the format prefers.",
        ),
    ] = None
    granularity: Annotated[
        str | None, typer.Option(help="fp8: scales per tensor, channel or block.")
    ] = None
    activations: Annotated[
        str | None, typer.Option(help="Activation quantization: dynamic, static or none.")
    ] = None
    double_quant: Annotated[
        bool, typer.Option("--double-quant", help="nf4, fp4: quantize the absmax values to 8 bits.")
    ] = False
    outlier_threshold: Annotated[
        float | None,
        typer.Option(help="int8: inputs beyond it are computed in 16 bits (LLM.int8())."),
    ] = None
    sparse_fraction: Annotated[
        float | None,
        typer.Option("--sparse", help="squeezellm: fraction of weights kept as floats."),
    ] = None
    gguf_type: Annotated[
        str | None, typer.Option(help="Block type or mix, such as Q4_K_M or Q8_0.")
    ] = None
    imatrix: Annotated[
        Path | None,
        typer.Option(
            callback=writable_if_new,
            help="GGUF: importance matrix to weigh errors by, in llama.cpp's formats (.gguf, .dat); "
            "measured and written where there is no such file.",
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class LinearOptions:
    """Per-linear overrides, and exclusions."""

    PANEL: ClassVar = "Grid"

    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--override",
            help="Options for the linears that match a regular expression, such as "
            "'down_proj$=bits:8,group_size:64'. Repeatable.",
        ),
    ] = None
    ignore: Annotated[
        list[str] | None,
        typer.Option(help="Regular expression: matching linears are not quantized. Repeatable."),
    ] = None
    lm_head: Annotated[
        bool, typer.Option("--quantize-lm-head", help="Quantize the output projection too.")
    ] = False
    vision: Annotated[
        bool,
        typer.Option("--quantize-vision", help="Quantize the vision tower and the projector too."),
    ] = False


@dataclass(frozen=True, slots=True)
class SolverOptions:
    """Hyperparameters of the method."""

    PANEL: ClassVar = "Method"

    solver: Annotated[
        Literal["auto", "nearest", "gptq"],
        typer.Option(
            help="How codes are chosen on the method's grid: the nearest, or by GPTQ's error feedback "
            "(awq, rtn, smoothquant, int8, fp8, nf4, fp4, squeezellm). auto: gptq for awq."
        ),
    ] = "auto"
    act_order: Annotated[
        Literal["group-aware", "static", "dynamic", "none"],
        typer.Option(help="gptq: activation order, the order in which channels are quantized."),
    ] = "group-aware"
    asymmetric: Annotated[
        bool | None,
        typer.Option(
            "--asymmetric-calibration/--no-asymmetric-calibration",
            help="gptq: aim at the outputs of the float model (GPTAQ); takes its states along. "
            "Default: with awq, trellis and quip.",
        ),
    ] = None
    damp: Annotated[float, typer.Option(help="gptq: damping of the Hessian.")] = 0.01
    ranges: Annotated[
        Literal["weighted", "minmax", "mse"],
        typer.Option(
            help="Range of each group: of least error weighted by the inputs' mean squares, minimum to "
            "maximum, or (gptq) of least unweighted error."
        ),
    ] = "weighted"
    true_sequential: Annotated[
        bool,
        typer.Option(
            "--true-sequential/--no-true-sequential",
            help="gptq: measure later linears of a layer behind the quantized earlier ones.",
        ),
    ] = True
    judge: Annotated[
        Literal["linear", "layer"],
        typer.Option(
            help="awq: choose scales by the error of each linear's output, or of the layer's."
        ),
    ] = "linear"
    alpha: Annotated[
        float,
        typer.Option(help="smoothquant: migration strength, from activations to weights."),
    ] = 0.5
    iters: Annotated[
        int, typer.Option(help="autoround: steps of sign gradient descent for each layer.")
    ] = 200
    finetune_steps: Annotated[
        int,
        typer.Option(
            help="trellis, quip: steps of Adam on the scales of each layer, towards the float model's output "
            "(QuIP#'s fine-tuning): such as 100."
        ),
    ] = 0
    lr: Annotated[
        float | None,
        typer.Option(
            help="First step: autoround: in steps of the grid, default 1/iters; trellis, quip: in mean "
            "scales."
        ),
    ] = None
    batch_size: Annotated[
        int, typer.Option(help="autoround, trellis, quip: calibration samples in a step.")
    ] = 8


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Targets of `auto` and `trellis`, KV-cache scales, and fallback to RTN."""

    PANEL: ClassVar = "Method"

    target_bpw: Annotated[
        float | None, typer.Option(help="auto, trellis: maximum bits per quantized weight.")
    ] = None
    target_size: Annotated[
        str | None, typer.Option(help="auto, trellis: maximum size of all tensors: 3.5GiB.")
    ] = None
    rotate: Annotated[
        str | None,
        typer.Option(
            help="R1,R2: fold random Hadamard rotations of the residual stream (R1) and of the heads' "
            "values (R2) into the weights first; the float model's logits stay. Default: R2 with awq; none: "
            "no rotation."
        ),
    ] = None
    kv_cache: Annotated[
        str | None,
        typer.Option(
            help="fp8: calibrate and store the scales of an fp8 KV cache; int8: servers measure its scales."
        ),
    ] = None
    kv_cache_strategy: Annotated[
        Literal["tensor", "attn_head"],
        typer.Option(help="fp8 scales for a layer's keys and values, or for each KV head."),
    ] = "tensor"
    revert_worse: Annotated[
        bool,
        typer.Option(
            "--revert-worse",
            help="Fall back to round-to-nearest where the method is worse than it.",
        ),
    ] = False


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """Calibration data options."""

    PANEL: ClassVar = "Calibration data"

    calibration: Annotated[
        str | None,
        typer.Option(
            help="A .txt, .jsonl or .json file or a hub dataset id; conversations get the chat template; "
            "rows may have `images`, a list of paths. Default: bundled text (code, dialogue, prose, 40 "
            "languages), for models that read images bundled pictures before it."
        ),
    ] = None
    num_samples: Annotated[
        int | None,
        typer.Option(
            help="Calibration samples. Default: 512 for methods that are calibrated, or what the text holds."
        ),
    ] = None
    seq_len: Annotated[
        int | None,
        typer.Option(help="Tokens in a sample. Default: 2048, or the model's context if shorter."),
    ] = None
    held_out: Annotated[
        int | None,
        typer.Option(help="Held-out samples, for measuring only. Default: an eighth."),
    ] = None
    errors: Annotated[
        bool,
        typer.Option(
            "--errors/--no-errors",
            help="Measure output errors. Without, data-free methods (rtn, hqq, fp8, int8, nf4, fp4, nvfp4, "
            "mxfp4) read no calibration text and run no layer.",
        ),
    ] = True
    evaluation: Annotated[
        str | None,
        typer.Option(
            help="A .txt or .jsonl file that calibration texts must not overlap with. "
            "Default: the bundled evaluation text."
        ),
    ] = None
    seed: Annotated[int, typer.Option(help="Random seed of the calibration texts' order.")] = 0
    device: Annotated[
        str,
        typer.Option(
            help="Where layers are run and solved: cpu, cuda, cuda:N, or several with commas."
        ),
    ] = "cpu"
    compute: Annotated[
        str,
        typer.Option(
            help="GEMMs of the calibration passes: float32, bfloat16, or auto: bfloat16 for models "
            "stored in it where the CPU is faster at it."
        ),
    ] = "auto"
    stats: Annotated[
        Path | None,
        typer.Option(
            callback=writable_if_new,
            help="Folder of cached statistics of the float model: measured once, reused by "
            "later runs with other bits, groups or methods.",
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class QuantizeRunOptions:
    """Dry run, restart and output options."""

    PANEL: ClassVar = "Run"

    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Only predict sizes, time, memory and compatible loaders; write nothing.",
        ),
    ] = False
    tensor_parallel: Annotated[
        int,
        typer.Option(
            "--tensor-parallel-size",
            min=1,
            help="vLLM tensor-parallel size, for the table of loaders.",
        ),
    ] = 1
    trust_remote_code: TrustRemoteCode = False
    restart: Annotated[
        bool,
        typer.Option("--restart", help="Discard the unfinished work of an earlier run."),
    ] = False
    as_json: Json = False
