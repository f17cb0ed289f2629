"""Submodules of a layer whose weights are final: what they gave is kept, and later passes leave them out.

In true-sequential order a layer is run once for each stage and once more. Attention whose projections are
done gives the same again; where a submodule returns its last linear's output, that linear's input, measured
anyway, is all that is needed. Values are the same, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from ..base.device import hooks


@dataclass(slots=True)
class _Kept:
    """A tensor for each sample, filled batch by batch."""

    num_samples: int
    values: torch.Tensor | None = None
    done: int = 0

    @property
    def complete(self) -> bool:
        return self.done == self.num_samples

    def put(self, rows: slice, part: torch.Tensor) -> None:
        if self.values is None:
            self.values = part.new_empty(self.num_samples, *part.shape[1:])
        self.values[rows] = part
        self.done += len(part)

    def rows(self, rows: slice) -> torch.Tensor:
        assert self.values is not None
        return self.values[rows].clone()


@dataclass(slots=True)
class _Submodule:
    """A child that returns a tensor, alone or at `place` of a tuple, by `last`, a linear's output."""

    module: nn.Module
    linears: frozenset[str]
    last: str | None
    length: int | None
    place: int
    inputs: _Kept
    outputs: _Kept = field(repr=False)

    def keep(self, rows: slice, output: Any) -> None:
        self.outputs.put(rows, output if self.length is None else output[self.place])
        if self.outputs.complete:
            self.inputs.values = None

    def returned(self, output: torch.Tensor) -> Any:
        if self.length is None:
            return output
        return tuple(output if index == self.place else None for index in range(self.length))


class FinalSubmodules:
    """Submodules of one loaded layer, run on so many samples, kept up to `most_bytes` in `compute`."""

    def __init__(
        self,
        layer: nn.Module,
        linears: Mapping[str, nn.Module],
        num_samples: int,
        compute: torch.dtype,
        most_bytes: int,
    ):
        self._layer, self._linears = layer, dict(linears)
        self._num_samples, self._compute, self._left = num_samples, compute, most_bytes
        self._submodules: list[_Submodule] = []
        self._sums: dict[str, int] = {}

    def probe(self, run: Callable[[], object]) -> FinalSubmodules:
        """Find what the submodules return, by a pass of one sample."""
        outputs: dict[nn.Module, list[Any]] = {}
        inputs: dict[nn.Module, torch.Tensor] = {}

        def keep(module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
            outputs.setdefault(module, []).append(output)
            if given:
                inputs[module] = given[0]

        children = list(self._layer.children())
        handles = [m.register_forward_hook(keep) for m in {*children, *self._linears.values()}]
        with hooks(handles):
            run()
        for child in children:
            if len(outputs.get(child, ())) == 1 and child not in self._linears.values():
                self._add(child, outputs, inputs)
        return self

    def _add(
        self,
        child: nn.Module,
        outputs: Mapping[nn.Module, list[Any]],
        inputs: Mapping[nn.Module, torch.Tensor],
    ) -> None:
        output = outputs[child][0]
        parts = output if isinstance(output, tuple) else (output,)
        tensors = [index for index, part in enumerate(parts) if part is not None]
        inside = {id(module) for module in child.modules()}
        names = frozenset(name for name, module in self._linears.items() if id(module) in inside)
        if not names or len(tensors) != 1 or not _by_sample(parts[tensors[0]]):
            return
        last = next(
            (
                name
                for name in names
                if len(gave := outputs.get(self._linears[name], [])) == 1
                and gave[0] is parts[tensors[0]]
                and _by_sample(inputs.get(self._linears[name]))
            ),
            None,
        )
        kept = [parts[tensors[0]], *([inputs[self._linears[last]]] if last else [])]
        width = kept[0].element_size()  # of inputs too: the dtype of the GEMM
        self._left -= (size := sum(part.numel() for part in kept) * width * self._num_samples)
        if self._left < 0:
            self._left += size
            return
        length = len(parts) if isinstance(output, tuple) else None
        empty = _Kept(self._num_samples), _Kept(self._num_samples)
        self._submodules.append(_Submodule(child, names, last, length, tensors[0], *empty))

    @contextmanager
    def passing(
        self, rows: slice, final: Collection[str], measured: Collection[str] = ()
    ) -> Iterator[None]:
        """A context for a batch: final submodules are kept, kept ones not run, `measured` ones run. `final`
        linears will not change, nor those before them; the pass ends after the `measured` ones."""
        with ExitStack() as stack:
            for submodule in self._submodules:
                stack.enter_context(self._pass_through(submodule, rows, final, measured))
            yield

    @contextmanager
    def _pass_through(
        self, submodule: _Submodule, rows: slice, final: Collection[str], measured: Collection[str]
    ) -> Iterator[None]:
        module, last = submodule.module, submodule.last
        handle = None
        others = submodule.linears - {last}
        if submodule.linears.isdisjoint(measured):
            if submodule.outputs.complete:
                part = submodule.outputs.rows(rows)
                module.forward = lambda *_, **__: submodule.returned(part)
            elif last is not None and submodule.inputs.complete:
                given = submodule.inputs.rows(rows)
                linear = self._linears[last]
                module.forward = lambda *_, **__: submodule.returned(linear(given))
            if measured and not submodule.outputs.complete and submodule.linears <= {*final}:
                handle = module.register_forward_hook(
                    lambda _, __, output: submodule.keep(rows, output)
                )
        elif (
            last is not None
            and last in measured
            and others <= {*final}
            and not submodule.inputs.complete
        ):
            handle = self._linears[last].register_forward_pre_hook(
                lambda _, inputs: submodule.inputs.put(rows, inputs[0].to(self._compute)),
                prepend=True,  # measuring ends the pass
            )
        try:
            yield
        finally:
            module.__dict__.pop("forward", None)
            if handle is not None:
                handle.remove()

    def replaced(self, weights: Mapping[str, torch.Tensor]) -> None:
        for name, weight in weights.items():
            if name not in self._sums:
                self._sums[name] = _sum(weight)

    def holds_for(self, weights: Mapping[str, torch.Tensor]) -> bool:
        return all(_sum(weights[name]) == total for name, total in self._sums.items())


class Finals(NamedTuple):
    """Final submodules of a layer after the quantized layers, and of the float model's; None: none kept."""

    behind: FinalSubmodules | None = None
    floats: FinalSubmodules | None = None


def passing(
    finals: FinalSubmodules | None,
    rows: slice,
    final: Collection[str],
    measured: Collection[str] = (),
) -> AbstractContextManager[None]:
    return finals.passing(rows, final, measured) if finals else nullcontext()


def _by_sample(part: Any) -> bool:
    return isinstance(part, torch.Tensor) and part.dim() > 2 and len(part) == 1


def _sum(weight: torch.Tensor) -> int:
    return int(weight.contiguous().view(torch.int32).sum(dtype=torch.int64))
