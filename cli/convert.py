"""`llmopt convert`: convert a quantized checkpoint to another format."""

from __future__ import annotations

from dataclasses import MISSING, asdict
from pathlib import Path
from typing import Annotated

import typer

from ..base.atomic_io import check_output
from ..base.option import option
from ..quant.kinds.registry import format_names
from .options.command import with_options
from .options.shared import json_option, output_option, trust_option


@with_options
def convert(
    source: Annotated[
        Path, typer.Argument(help="Folder of a quantized checkpoint, or a .gguf file.")
    ],
    target: str = option(
        MISSING,
        f"{', '.join(format_names())}; or hf: dequantized, a checkpoint for transformers.",
        flag="--format",
    ),
    output: Path | None = output_option("folder", "Folder to create. Default: ./SOURCE-FORMAT."),
    allow_loss: bool = option(
        False,
        "Requantize weights that the format cannot represent exactly.",
    ),
    trust_remote_code: bool = trust_option(),
    as_json: bool = json_option(),
) -> None:
    """Convert a quantized checkpoint to another format, or to plain weights."""
    from ..quant.methods.registry import check_format
    from ..quant.source.models import open_checkpoint, refuse_mock, resolve_model, short_name

    is_plain = target == "hf"
    check_format(target, ["hf"])
    path = resolve_model(str(source), local=True)
    refuse_mock(path, "convert")
    folder = output or Path(f"{short_name(source)}-{target}")
    check_output(folder, "--output", folder=True)
    # Nothing before imports torch.
    from ..quant.convert.convert import convert as run
    from .output.console import TerminalProgress, result_console, say

    opened = open_checkpoint(path, trust_remote_code=trust_remote_code)
    with TerminalProgress() as progress:
        result = run(opened, target, folder, allow_loss=allow_loss, progress=progress)
    console = result_console(as_json, asdict(result) | {"lossless": result.lossless})
    changed = {name: record for name, record in result.modules.items() if record["reason"]}
    for name, record in () if is_plain else changed.items():
        lost = f"{record['error']:.2e} of its square" if record["error"] else "weights the same"
        say(f"  {name}: {lost}; {record['reason']}", console)
    kept = len(result.modules) - len(changed)
    done = f"{kept} of {len(result.modules)} linears are unchanged"
    if is_plain:
        largest = max((record["error"] for record in changed.values()), default=0.0)
        done = f"{len(result.modules)} linears dequantized, each within {largest:.1e} of its square"
    formats = f"{result.source_format} → {result.target_format}"
    say(f"{result.output}: {formats}, {result.scheme}; {done}", console)
    say(f"loads in: {result.loads_in}", console)
