"""`llmopt merge`: fold LoRA and DoRA adapters into the weights of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options.common import Json


def merge(
    base: Annotated[Path, typer.Argument(help="Folder of the checkpoint, plain or quantized.")],
    adapters: Annotated[list[Path], typer.Argument(help="Folders of PEFT adapters.")],
    weights: Annotated[
        str | None,
        typer.Option(help="Factor of each adapter, as in 0.7,0.3. Default: 1 for each."),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(help="auto (that of the base), float32, bfloat16 or float16."),
    ] = "auto",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder to create. Default: ./BASE-merged."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Fold LoRA and DoRA adapters into the weights of a checkpoint."""
    from dataclasses import asdict

    from ..quant.adapters.merge import WeightedAdapter
    from ..quant.adapters.merge import merge as run
    from ..quant.model.checkpoint import Checkpoint
    from .output.console import TerminalProgress, emit_json, result_console

    factors = _factors(weights, len(adapters))
    given = [WeightedAdapter(*pair) for pair in zip(adapters, factors, strict=True)]
    folder = output or Path(f"{base.resolve().name}-merged")
    result = run(Checkpoint(base), given, folder, dtype=dtype, progress=TerminalProgress())
    if as_json:
        emit_json(asdict(result))
    console = result_console(as_json)
    largest = max(result.modules, key=result.modules.__getitem__)
    console.print(
        f"{result.output}: {len(result.modules)} linears changed, most {largest} by "
        f"{result.modules[largest]:.2%} of its norm; the dtype keeps at least {result.kept:.1%} of every "
        "change",
        soft_wrap=True,
        markup=False,
    )


def _factors(text: str | None, count: int) -> list[float]:
    """The factors of `count` adapters.

    Raises:
        BadInput: not as many finite numbers.
    """
    import math

    from ..quant.base.errors import BadInput

    if text is None:
        return [1.0] * count
    try:
        factors = [float(word) for word in text.split(",")]
    except ValueError:
        factors = []
    if len(factors) != count or not all(map(math.isfinite, factors)):
        raise BadInput(
            f"--weights {text!r}: write {count} numbers with commas, one for each adapter"
        )
    return factors
