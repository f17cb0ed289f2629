"""`llmopt merge`: fold LoRA and DoRA adapters into the weights of a checkpoint."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ..base.atomic_io import check_output
from ..base.errors import BadInput
from ..base.option import option
from .options.command import with_options
from .options.shared import json_option, output_option


@with_options
def merge(
    base: Annotated[
        Path, typer.Argument(help="Folder of the checkpoint, plain or quantized, or a .gguf file.")
    ],
    adapters: Annotated[list[Path], typer.Argument(help="Folders of PEFT adapters.")],
    weights: str | None = option(
        None, "Factor of each adapter, as in 0.7,0.3. Default: 1 for each."
    ),
    dtype: str = option("auto", "auto (that of the base), float32, bfloat16 or float16."),
    output: Path | None = output_option("folder", "Folder to create. Default: ./BASE-merged."),
    as_json: bool = json_option(),
) -> None:
    """Fold LoRA and DoRA adapters into the weights of a checkpoint."""
    from ..quant.convert.adapter import LoraSettings
    from ..quant.source.models import resolve_model, short_name

    path = resolve_model(str(base), local=True)
    try:
        texts = ["1"] * len(adapters) if weights is None else weights.split(",")
        factors = [float(word) for word in texts]
    except ValueError:
        factors = []
    if len(factors) != len(adapters) or not all(map(math.isfinite, factors)):
        raise BadInput(
            f"--weights {weights!r}: write {len(adapters)} numbers with commas, one for each adapter"
        )
    for adapter in adapters:
        LoraSettings.read(adapter)
    folder = output or Path(f"{short_name(base)}-merged")
    check_output(folder, "--output", folder=True)
    # Nothing before imports torch.
    from ..quant.convert.plain import WeightedAdapter
    from ..quant.convert.plain import merge as run
    from ..quant.source.models import open_checkpoint
    from .output.console import TerminalProgress, result_console, say

    given = [WeightedAdapter(*pair) for pair in zip(adapters, factors, strict=True)]
    with TerminalProgress() as progress:
        result = run(open_checkpoint(path), given, folder, dtype=dtype, progress=progress)
    largest = max(result.modules, key=result.modules.__getitem__)
    say(
        f"{result.output}: {len(result.modules)} linears changed, most {largest} by "
        f"{result.modules[largest]:.2%} of its norm; the dtype keeps at least {result.kept:.1%} of every "
        "change",
        result_console(as_json, asdict(result)),
    )
    for note in result.notes:
        say(note)
