"""`llmopt quantize`: a model in, a quantized checkpoint and its error report out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .options.common import ModelArgument, ModelOption

if TYPE_CHECKING:
    from ..quant.plan.plan import QuantizeRequest

GRID, METHOD, DATA, RUN = "Grid", "Method", "Calibration data", "Run"


def quantize(
    model: ModelArgument = None,
    model_option: ModelOption = None,
    method: Annotated[
        str,
        typer.Option(
            help="How codes are chosen: awq, gptq, rtn, smoothquant, hqq, squeezellm, int8, fp8, "
            "nf4, fp4; or auto: gptq with the bits of each linear chosen under a target."
        ),
    ] = "awq",
    format_name: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="awq, gptq, compressed-tensors, bitsandbytes, fp8, squeezellm or gguf; several "
            "with commas. Default: the method's own if it holds the scheme, else compressed-tensors.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder to create. Default: ./MODEL-METHOD-BITSbit."),
    ] = None,
    bits: Annotated[
        int | None,
        typer.Option(help="Bits of a weight. Default: the method's own.", rich_help_panel=GRID),
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(
            help="Input channels that share a scale; -1: one scale per output channel. "
            "Default: the largest of 128, 64, 32, 16 that divides every width.",
            rich_help_panel=GRID,
        ),
    ] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option(
            "--symmetric/--asymmetric",
            help="Zero in the middle, or wherever fits. Default: as the format prefers.",
            rich_help_panel=GRID,
        ),
    ] = None,
    granularity: Annotated[
        str | None,
        typer.Option(help="fp8: scales per tensor, channel or block.", rich_help_panel=GRID),
    ] = None,
    activations: Annotated[
        str | None,
        typer.Option(help="8-bit inputs: dynamic, static or none.", rich_help_panel=GRID),
    ] = None,
    double_quant: Annotated[
        bool,
        typer.Option(
            "--double-quant", help="nf4, fp4: magnitudes in 8 bits.", rich_help_panel=GRID
        ),
    ] = False,
    outlier_threshold: Annotated[
        float | None,
        typer.Option(
            help="int8: inputs beyond it are multiplied in 16 bits (LLM.int8()).",
            rich_help_panel=GRID,
        ),
    ] = None,
    sparse: Annotated[
        float | None,
        typer.Option(help="squeezellm: share of weights kept as floats.", rich_help_panel=GRID),
    ] = None,
    gguf_type: Annotated[
        str | None,
        typer.Option(help="Block type or mix, such as Q4_K_M or Q8_0.", rich_help_panel=GRID),
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option(
            help="Other options for the linears that a regular expression finds, such as "
            "'down_proj$=bits:8,group_size:64'. Repeatable.",
            rich_help_panel=GRID,
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            help="Regular expression: linears that it finds stay as they are. Repeatable.",
            rich_help_panel=GRID,
        ),
    ] = None,
    quantize_lm_head: Annotated[
        bool,
        typer.Option(
            "--quantize-lm-head", help="Quantize the output projection too.", rich_help_panel=GRID
        ),
    ] = False,
    act_order: Annotated[
        Literal["static", "dynamic", "none"],
        typer.Option(help="gptq: the order in which channels are rounded.", rich_help_panel=METHOD),
    ] = "static",
    damp: Annotated[
        float, typer.Option(help="gptq: damping of the Hessian.", rich_help_panel=METHOD)
    ] = 0.01,
    mse: Annotated[
        bool,
        typer.Option("--mse", help="gptq: search the range of each group.", rich_help_panel=METHOD),
    ] = False,
    true_sequential: Annotated[
        bool,
        typer.Option(
            "--true-sequential/--no-true-sequential",
            help="gptq: later linears of a layer see what the earlier ones became.",
            rich_help_panel=METHOD,
        ),
    ] = True,
    alpha: Annotated[
        float,
        typer.Option(
            help="smoothquant: how much of the difficulty moves into the weights.",
            rich_help_panel=METHOD,
        ),
    ] = 0.5,
    target_bpw: Annotated[
        float | None,
        typer.Option(
            help="auto: at most so many bits per quantized weight.", rich_help_panel=METHOD
        ),
    ] = None,
    target_size: Annotated[
        str | None,
        typer.Option(help="auto: all tensors at most so large: 3.5GiB.", rich_help_panel=METHOD),
    ] = None,
    kv_cache: Annotated[
        str | None,
        typer.Option(
            help="Measure and store scales for a KV cache of fp8 or int8.", rich_help_panel=METHOD
        ),
    ] = None,
    revert_worse: Annotated[
        bool,
        typer.Option(
            "--revert-worse",
            help="Round plainly what the method made worse than plain rounding.",
            rich_help_panel=METHOD,
        ),
    ] = False,
    calibration: Annotated[
        str | None,
        typer.Option(
            help="A .txt or .jsonl file or a hub dataset id. Default: bundled stories.",
            rich_help_panel=DATA,
        ),
    ] = None,
    num_samples: Annotated[
        int, typer.Option(help="Calibration samples.", rich_help_panel=DATA)
    ] = 64,
    seq_len: Annotated[
        int | None,
        typer.Option(
            help="Tokens in a sample. Default: 256, or the model's context if shorter.",
            rich_help_panel=DATA,
        ),
    ] = None,
    held_out: Annotated[
        int | None,
        typer.Option(
            help="Further samples, to measure on alone. Default: an eighth.", rich_help_panel=DATA
        ),
    ] = None,
    evaluation: Annotated[
        str | None,
        typer.Option(
            help="A .txt or .jsonl file that calibration texts must not overlap with. "
            "Default: the bundled evaluation text.",
            rich_help_panel=DATA,
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Shuffles the calibration texts.", rich_help_panel=DATA)
    ] = 0,
    compute: Annotated[
        str,
        typer.Option(
            help="Products of the calibration passes: float32, bfloat16, or auto: bfloat16 for models "
            "stored in it where the CPU is faster at it.",
            rich_help_panel=DATA,
        ),
    ] = "auto",
    stats: Annotated[
        Path | None,
        typer.Option(
            help="Folder of statistics of the float model: measured into it once, read from it by "
            "later runs with other bits, groups or methods.",
            rich_help_panel=DATA,
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Only say what would be written, with what time and memory, and who loads it.",
            rich_help_panel=RUN,
        ),
    ] = False,
    tensor_parallel: Annotated[
        int,
        typer.Option(
            "--tensor-parallel-size",
            min=1,
            help="Ranks of vLLM, for the table of loaders.",
            rich_help_panel=RUN,
        ),
    ] = 1,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart",
            help="Throw away the unfinished work of an earlier run.",
            rich_help_panel=RUN,
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print the result alone, as JSON, on stdout.", rich_help_panel=RUN
        ),
    ] = False,
) -> None:
    """Quantize a model's weights; an interrupted run goes on where it stopped."""
    from ..engine.base.units import parse_bytes
    from ..quant.base.errors import BadInput
    from ..quant.methods.base import MethodOptions
    from ..quant.model.models import resolve_model
    from ..quant.plan.plan import QuantizeRequest
    from ..recipes import DEFAULT_MODEL

    if model is not None and model_option is not None and model != model_option:
        raise BadInput(f"two models were given, {model!r} and {model_option!r}: give one")
    name = model or model_option or DEFAULT_MODEL
    folder = resolve_model(name)
    label = Path(name).name or folder.resolve().name
    options: dict[str, Any] = {
        "model": folder,
        "method": method,
        "bits": bits,
        "group_size": group_size,
        "symmetric": symmetric,
        "granularity": granularity,
        "activations": activations,
        "double_quant": double_quant,
        "outlier_threshold": outlier_threshold,
        "sparse_fraction": sparse,
        "gguf_type": gguf_type,
        "options": MethodOptions(act_order, damp, true_sequential, mse, alpha),
        "format": format_name,
        "overrides": tuple(override or ()),
        "calibration": calibration,
        "num_samples": num_samples,
        "seq_len": seq_len,
        "held_out": held_out,
        "evaluation": evaluation,
        "ignore": tuple(ignore or ()),
        "lm_head": quantize_lm_head,
        "revert_worse": revert_worse,
        "target_bpw": target_bpw,
        "target_bytes": None if target_size is None else parse_bytes(target_size),
        "kv_cache": kv_cache,
        "compute": compute,
        "stats": stats,
        "tensor_parallel": tensor_parallel,
        "seed": seed,
        "restart": restart,
        "model_name": label,
    }
    kind = gguf_type or (f"{target_bpw:g}bpw" if target_bpw else target_size)
    target = output or Path(_default_output(label, method, bits, kind))
    request = QuantizeRequest(output=target, **options)
    if dry_run:
        _dry_run(request, as_json)
    else:
        _run(request, as_json)


def _default_output(label: str, method: str, bits: int | None, kind: str | None) -> str:
    """The name of the folder: what was quantized, how, and to how many bits."""
    from ..quant.methods.base import SchemeOptions
    from ..quant.methods.registry import METHODS

    if kind is not None:
        return f"{label}-{kind}"
    if bits is None and method in METHODS:
        bits = METHODS[method].scheme(SchemeOptions()).bits
    return f"{label}-{method}-{bits or 4}bit"


def _dry_run(request: QuantizeRequest, as_json: bool) -> None:
    from ..quant.pipeline.pipeline import prepare
    from ..quant.pipeline.preflight import preflight
    from .output.console import TerminalProgress, emit_json, people, result_console
    from .output.quantize_tables import show_preflight

    session = prepare(request, TerminalProgress())
    for note in session.notes:
        people.print(note, soft_wrap=True)
    answer = preflight(session)
    if as_json:
        emit_json(answer.as_dict())
    else:
        show_preflight(answer, result_console(as_json))


def _run(request: QuantizeRequest, as_json: bool) -> None:
    import time

    from ..quant.manifest.journal import work_folder
    from ..quant.pipeline.pipeline import quantize as run
    from .output.console import TerminalProgress, emit_json, people, result_console
    from .output.quantize_tables import show_result

    progress = TerminalProgress()
    began = time.monotonic()
    try:
        result = run(request, progress)
    except KeyboardInterrupt:
        progress.finish()
        where = work_folder(request.output)
        if where.exists():
            people.print(
                f"interrupted: the finished layers are in {where}; the same command goes on from there",
                soft_wrap=True,
            )
        else:
            people.print("interrupted before any layer was finished")
        raise typer.Exit(130) from None
    finally:
        progress.finish()
    seconds = time.monotonic() - began
    if as_json:
        emit_json(
            {
                "output": str(result.output),
                "seconds": round(seconds, 3),
                "layer_seconds": [round(value, 3) for value in result.layer_seconds],
                "peak_bytes": result.peak_bytes,
                "preflight": result.preflight.as_dict(),
                "resumed_layers": result.resumed_layers,
                "loads_in": result.loads_in,
                "notes": list(result.notes),
                "manifest": result.manifest,
            }
        )
    show_result(result, seconds, result_console(as_json))
