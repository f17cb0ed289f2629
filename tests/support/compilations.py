"""Which kernels Triton would compile: the cache keys of launches, which take no time and write nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

CAPABILITY = 90


@cache
def _kernel_and_binder(function: Any) -> tuple[Any, Any]:
    """The kernel as a GPU would have it, and what tells the compile-time part of its arguments."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime import jit

    backend = make_backend(GPUTarget("cuda", CAPABILITY, 32))
    options = {"do_not_specialize": function.kwargs["do_not_specialize"]}
    kernel = jit.JITFunction(function.fn, **options)
    return kernel, jit.create_function_from_signature(kernel.signature, kernel.params, backend)


@contextmanager
def recording_compilations(monkeypatch: Any) -> Iterator[set[tuple[str, str]]]:
    """Within the block launches only add their cache key; what they would have written is zeros."""
    from triton.runtime.interpreter import InterpretedFunction

    keys: set[tuple[str, str]] = set()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        binder = _kernel_and_binder(self)[1]
        _, specialization, options = binder(*args, **kwargs, debug=False, instrumentation_mode="")
        keys.add((self.fn.__name__, str(specialization) + str(sorted(options.items()))))

    with monkeypatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", run)
        patch.setattr(torch, "empty", torch.zeros)
        patch.setattr(torch, "empty_like", torch.zeros_like)
        patch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
        yield keys
