"""Options of `llmopt quantize`: the grid, the method, the calibration data, the run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import typer

from .common import Json


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """What is made: by which method, in which format, where."""

    method: Annotated[
        str,
        typer.Option(
            help="How codes are chosen: awq, gptq, rtn, smoothquant, hqq, squeezellm, int8, fp8, "
            "nf4, fp4; or auto: gptq with the bits of each linear chosen under a target."
        ),
    ] = "awq"
    format: Annotated[
        str | None,
        typer.Option(
            help="awq, gptq, compressed-tensors, bitsandbytes, fp8, squeezellm or gguf; several "
            "with commas. Default: the method's own if it holds the scheme, else compressed-tensors.",
        ),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder to create. Default: ./MODEL-METHOD-BITSbit."),
    ] = None


@dataclass(frozen=True, slots=True)
class GridOptions:
    """The grid that weights and activations are rounded to."""

    PANEL: ClassVar = "Grid"

    bits: Annotated[
        int | None, typer.Option(help="Bits of a weight. Default: the method's own.")
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
            help="Zero in the middle, or wherever fits. Default: as the format prefers.",
        ),
    ] = None
    granularity: Annotated[
        str | None, typer.Option(help="fp8: scales per tensor, channel or block.")
    ] = None
    activations: Annotated[
        str | None, typer.Option(help="8-bit inputs: dynamic, static or none.")
    ] = None
    double_quant: Annotated[
        bool, typer.Option("--double-quant", help="nf4, fp4: magnitudes in 8 bits.")
    ] = False
    outlier_threshold: Annotated[
        float | None,
        typer.Option(help="int8: inputs beyond it are multiplied in 16 bits (LLM.int8())."),
    ] = None
    sparse_fraction: Annotated[
        float | None,
        typer.Option("--sparse", help="squeezellm: share of weights kept as floats."),
    ] = None
    gguf_type: Annotated[
        str | None, typer.Option(help="Block type or mix, such as Q4_K_M or Q8_0.")
    ] = None


@dataclass(frozen=True, slots=True)
class LinearOptions:
    """Linears with another grid, and those that keep their weights."""

    PANEL: ClassVar = "Grid"

    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--override",
            help="Other options for the linears that a regular expression finds, such as "
            "'down_proj$=bits:8,group_size:64'. Repeatable.",
        ),
    ] = None
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            help="Regular expression: linears that it finds stay as they are. Repeatable."
        ),
    ] = None
    lm_head: Annotated[
        bool, typer.Option("--quantize-lm-head", help="Quantize the output projection too.")
    ] = False


@dataclass(frozen=True, slots=True)
class SolverOptions:
    """How the method chooses codes."""

    PANEL: ClassVar = "Method"

    act_order: Annotated[
        Literal["static", "dynamic", "none"],
        typer.Option(help="gptq: the order in which channels are rounded."),
    ] = "static"
    damp: Annotated[float, typer.Option(help="gptq: damping of the Hessian.")] = 0.01
    mse: Annotated[bool, typer.Option("--mse", help="gptq: search the range of each group.")] = (
        False
    )
    true_sequential: Annotated[
        bool,
        typer.Option(
            "--true-sequential/--no-true-sequential",
            help="gptq: later linears of a layer see what the earlier ones became.",
        ),
    ] = True
    alpha: Annotated[
        float,
        typer.Option(help="smoothquant: how much of the difficulty moves into the weights."),
    ] = 0.5


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Targets of `auto`, scales of the KV cache, and what to do with linears that came out worse."""

    PANEL: ClassVar = "Method"

    target_bpw: Annotated[
        float | None, typer.Option(help="auto: at most so many bits per quantized weight.")
    ] = None
    target_size: Annotated[
        str | None, typer.Option(help="auto: all tensors at most so large: 3.5GiB.")
    ] = None
    kv_cache: Annotated[
        str | None,
        typer.Option(help="Measure and store scales for a KV cache of fp8 or int8."),
    ] = None
    revert_worse: Annotated[
        bool,
        typer.Option(
            "--revert-worse", help="Round plainly what the method made worse than plain rounding."
        ),
    ] = False


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """What the method sees of the model's inputs."""

    PANEL: ClassVar = "Calibration data"

    calibration: Annotated[
        str | None,
        typer.Option(help="A .txt or .jsonl file or a hub dataset id. Default: bundled stories."),
    ] = None
    num_samples: Annotated[int, typer.Option(help="Calibration samples.")] = 64
    seq_len: Annotated[
        int | None,
        typer.Option(help="Tokens in a sample. Default: 256, or the model's context if shorter."),
    ] = None
    held_out: Annotated[
        int | None,
        typer.Option(help="Further samples, to measure on alone. Default: an eighth."),
    ] = None
    evaluation: Annotated[
        str | None,
        typer.Option(
            help="A .txt or .jsonl file that calibration texts must not overlap with. "
            "Default: the bundled evaluation text."
        ),
    ] = None
    seed: Annotated[int, typer.Option(help="Random seed of the calibration texts' order.")] = 0
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
            help="Folder of statistics of the float model: measured into it once, read from it by "
            "later runs with other bits, groups or methods."
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class QuantizeRunOptions:
    """What the run does beside, or in place of, writing a checkpoint."""

    PANEL: ClassVar = "Run"

    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Only say what would be written, with what time and memory, and who loads it.",
        ),
    ] = False
    tensor_parallel: Annotated[
        int,
        typer.Option(
            "--tensor-parallel-size", min=1, help="Ranks of vLLM, for the table of loaders."
        ),
    ] = 1
    restart: Annotated[
        bool,
        typer.Option("--restart", help="Throw away the unfinished work of an earlier run."),
    ] = False
    as_json: Json = False
