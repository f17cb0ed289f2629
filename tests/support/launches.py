"""Launches of a decode step, counted.

A small model of each family runs in bfloat16 in Triton's interpreter, and one forward pass of four sequences
is watched: every Triton launch, and every torch operation that is a kernel on a GPU (views and allocations
are none). Counted is what a layer takes; what a step takes once is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from .model_families import save_model

ROWS = 4
FUSED = ("aten::rms_norm", "aten::layer_norm")
"""Operations that a GPU runs whole, though a CPU splits them."""


class _Watch(TorchDispatchMode):
    """Counts the operations that write memory which is not their arguments'."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = str(func), kwargs or {}
        if func.name() not in FUSED and torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), "CompositeImplicitAutograd"
        ):
            # Inference mode shows it whole; on a GPU its parts are what is launched.
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        if not name.startswith(("aten.empty", "aten.new_empty", "aten.detach", "prim.")):
            given = _storages((args, kwargs))
            if func._schema.is_mutable or not _storages(out) <= given:
                self._counts[name] += 1
        return out


def _storages(values: Any) -> set[int]:
    leaves = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return {leaf.untyped_storage()._cdata for leaf in leaves if not leaf.is_mkldnn}


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Within the block, count launches by the name of their kernel or operation."""
    from triton.runtime.interpreter import InterpretedFunction

    counts: Counter[str] = Counter()
    run: Any = InterpretedFunction.run

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts[self.fn.__name__] += 1
        with _disable_current_modes():
            return run(self, *args, **kwargs)

    patched: Any = InterpretedFunction
    patched.run = counted
    try:
        with _Watch(counts):
            yield counts
    finally:
        patched.run = run


def launches_per_layer(config_class: str, overrides: dict[str, Any], folder: Path) -> Counter[str]:
    """Launches of the last layer of a model, in a decode step; `folder` is where it is written."""
    from llmopt.engine.config.config import EngineConfig
    from llmopt.engine.core.engine import Engine
    from llmopt.engine.execution.decode_inputs import DecodeInputs

    save_model(folder, config_class, overrides)
    torch.set_num_threads(1)
    config = EngineConfig(
        folder, device="cpu", dtype="bfloat16", max_model_len=64, num_blocks=9, enforce_eager=True
    )
    engine = Engine(config)
    try:
        cache, decoder = engine.runner.cache, engine.runner.decoder
        inputs = DecodeInputs(ROWS, 4, cache.block_size, engine.device, engine.dtype)
        states = () if cache.states is None else cache.states.tensors
        return _of_last_layer(decoder, inputs, cache.layers, states)
    finally:
        engine.close()


def _of_last_layer(
    decoder: Any, inputs: Any, caches: Any, states: Sequence[torch.Tensor]
) -> Counter[str]:
    """A forward pass with the last layer twice, less one as it is: what layers share is made once a step."""
    counts: list[Counter[str]] = []
    layers = decoder.weights.layers
    decoder._cache_indices = (*decoder._cache_indices, decoder._cache_indices[-1])
    decoder._layouts = [*decoder._layouts, decoder._layouts[-1]]
    for chosen in ([*layers, layers[-1]], layers):
        object.__setattr__(decoder.weights, "layers", chosen)
        step = inputs.step(ROWS, 0, (), None, states)
        with counting() as counted:
            decoder.forward(step, caches)
        counts.append(counted)
    return counts[0] - counts[1]
