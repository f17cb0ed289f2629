"""Compile what `llmopt contact` launches ahead of a card, without one: `python -m tools.kernel_cache FOLDER`.

The contact's stages run on the pretended card in their own shapes, with a layer of each kind, and Triton
makes each kernel that they launch, by the way that it takes on a GPU, into FOLDER. There

    TRITON_CACHE_DIR=FOLDER llmopt contact

then compiles nothing, given the same Triton, the same llmopt and a card of that capability. The pretended
card computes nothing, so a trial there would take each kernel for wrong: it goes on as if they were right.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

STAGES = (
    "machine", "kernels", "graphs", "llama-8b", "llama-8b-int4", "llama-8b-fp8", "experts", "hybrid",
    "quantizers",
)  # fmt: skip
"""Those of the contact on one card; vLLM's kernels are its own."""
CAPABILITIES = (80, 86, 89, 90, 100, 120)
Made = list[tuple[str, bool]]
"""Kernels that launches asked for, and whether the cache had each."""


@contextmanager
def making(capability: int) -> Iterator[Made]:
    """Within the block a launch makes its kernel by Triton's own way, and is not run."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver, jit

    made: Made = []
    own: Any = jit.JITFunction.run
    target = GPUTarget("cuda", capability, 32)

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        made.append((src.name, cache_hit))

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        pretended = driver._active
        known = vars(pretended) if isinstance(pretended, SimpleNamespace) else {}
        given = {"get_current_device": lambda: 0} | known
        given |= {"get_current_target": lambda: target, "get_current_stream": lambda _: 0}
        with patch.object(driver, "_active", SimpleNamespace(**given)):
            own(self, *args, grid=grid, warmup=True, **kwargs)

    with (
        patch.object(jit.JITFunction, "run", run),
        patch.object(knobs.compilation, "listener", listen),
    ):
        yield made


@contextmanager
def contact_card(capability: int) -> Iterator[None]:
    """The pretended card of a contact, within `making`: launches make their kernels, trials pass, and large
    products are idle."""
    import torch
    from llmopt.engine.kernels.common import devices, verdicts
    from triton.runtime import jit

    from tests.support.pretended_cuda.card import Card
    from tests.support.pretended_cuda.command import measuring_nothing
    from tests.support.pretended_cuda.runtime import pretended_cuda
    from tools.gpu_matrix import ARCHITECTURES

    make: Any = jit.JITFunction.run
    limits = ARCHITECTURES[capability].limits
    card = Card(capability=divmod(capability, 10), shared_bytes=limits.shared_bytes)
    with ExitStack() as stack:
        stack.enter_context(measuring_nothing())
        stack.enter_context(pretended_cuda(card))
        launch: Any = jit.JITFunction.run

        def run(self: Any, *args: Any, **kwargs: Any) -> None:
            make(self, *args, **kwargs)
            launch(self, *args, **kwargs)

        driver = devices.DEPENDENT_CUDA
        for target, name, value in (
            (jit.JITFunction, "run", run),
            (verdicts, "relative_error", lambda found, expected: 0.0),
            (torch._C, "_cuda_getDriverVersion", lambda: driver),
        ):
            stack.enter_context(patch.object(target, name, value, create=True))
        stack.enter_context(_idle_products())
        yield


def _idle_products() -> Any:
    """A mode in which torch's large products are zeros: nothing depends on their values."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Idle(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten.mm.default:
                return args[0].new_zeros(args[0].shape[0], args[1].shape[1])
            if func is torch.ops.aten.bmm.default:
                return args[0].new_zeros(*args[0].shape[:2], args[1].shape[2])
            return func(*args, **(kwargs or {}))

    return Idle()


def run_stage(name: str, home: Path, *, small: bool) -> None:
    """Run the cases of a stage; what one raises, which is no kernel's fault here, is told."""
    from llmopt.bench.contact.models import FULL, SMALL, World
    from llmopt.bench.contact.stages import CASES

    scale = replace(SMALL if small else FULL, calibration=(2, 32))
    if not small and name.startswith("llama"):
        scale = replace(scale, config={"num_hidden_layers": 1})
    if name == "experts":
        scale = replace(scale, layers=1)
    for case in CASES[name](World("cuda", scale, home)):
        try:
            for _ in case.run():
                pass
        except Exception as error:
            print(f"  {name}, {case.name}: {type(error).__name__}: {error}", file=sys.stderr)


def make_cache(folder: Path, capability: int, stages: Sequence[str], *, small: bool) -> Made:
    """Make the kernels of the stages into a folder."""
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    os.environ.pop("TRITON_INTERPRET", None)
    with making(capability) as made, tempfile.TemporaryDirectory() as home:
        for name in stages:
            before = len(made)
            with contact_card(capability):
                run_stage(name, Path(home), small=small)
            found = [had for _, had in made[before:]]
            print(f"{name}: {len(found)} kernels, {len(found) - sum(found)} new", flush=True)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where TRITON_CACHE_DIR will point")
    parser.add_argument("--capability", type=int, choices=CAPABILITIES, default=90)
    parser.add_argument("--stage", nargs="*", choices=STAGES, default=STAGES)
    parser.add_argument("--small", action="store_true", help="the small shapes of a test")
    given = parser.parse_args()
    made = make_cache(given.folder, given.capability, given.stage, small=given.small)
    return 0 if made else 1


if __name__ == "__main__":
    sys.exit(main())
