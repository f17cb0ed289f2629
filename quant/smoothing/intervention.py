"""Interventions on a random model: divide a module's channels, restore what reads them, compare the logits.

A pair (source, targets) can be folded iff a division of the source's channels reaches the targets' inputs
channel by channel and nothing else. So a trial divides each channel by its own scale, and gives every linear
whose input is the former one times such scales that back. Equal logits prove the pair; from the scales
follows which channel each input comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...base.errors import BadInput, first_line
from ..base.device import hooks
from ..stream.calls import tensors_of
from .small_model import RandomModel

LARGEST_SCALE = 256.0  # far from 1, so that clamps and soft caps show
_SAME_OUTPUT = 1e-6  # relative to the largest value
_TOLERANCE = 1e-4  # of a channel that is scaled by one factor
UNKNOWN, UNREACHED = -1, -2


class _NotFoldable(Exception):
    """A linear's input changed in another way than channel by channel, or a layer's output changed."""


class _LayerDone(Exception):
    """A layer returned what it returned before."""


class Intervention:
    """Trials on the decoder layers of a random model; BadInput where it does not run, or gives NaN. For each
    layer: `readers` are its modules with a matrix by path, `norms` those with a vector, `order` the paths of
    both as they run, `inputs` those of every call of a reader, and `outputs` those of its own calls."""

    def __init__(self, model: RandomModel):
        self.model = model
        self.readers: list[dict[str, nn.Module]] = []
        self.norms: list[dict[str, nn.Module]] = []
        self.inputs: list[dict[str, list[torch.Tensor]]] = []
        self.order: list[list[str]] = []
        self.outputs: list[list[list[torch.Tensor]]] = []
        self.logits = self._recorded()
        if not bool(torch.isfinite(self.logits).all()):
            raise BadInput("the random model of this config gives NaN: its pairs cannot be proven")

    def _recorded(self) -> torch.Tensor:
        """The logits of a pass that fills the attributes."""
        handles = []
        for layer in self.model.layers:
            inputs: dict[str, list[torch.Tensor]] = {}
            order: list[str] = []
            outputs: list[list[torch.Tensor]] = []

            def record(
                _: nn.Module,
                arguments: tuple[Any, ...],
                named: dict[str, Any],
                path: str,
                inputs: dict[str, list[torch.Tensor]] | None,
                order: list[str] = order,
            ) -> None:
                order.append(path)
                if inputs is not None:
                    inputs.setdefault(path, []).append(_input(arguments, named))

            for path, module in layer.named_modules():
                if (dims := _weight_dims(module)) in (1, 2):
                    hook = partial(record, path=path, inputs=inputs if dims == 2 else None)
                    handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            handles.append(
                layer.register_forward_hook(
                    lambda _, __, output, outputs=outputs: outputs.append(tensors_of(output))
                )
            )
            self.outputs.append(outputs)
            self.inputs.append(inputs)
            self.order.append(order)
        try:
            with hooks(handles):
                logits = self.model.logits()
        except Exception as error:  # a module may raise anything
            raise BadInput(f"its random model does not run: {first_line(error)}") from error
        for layer, order in zip(self.model.layers, self.order, strict=True):
            ran = {path: layer.get_submodule(path) for path in dict.fromkeys(order)}
            self.readers.append({p: m for p, m in ran.items() if _weight_dims(m) == 2})
            self.norms.append({p: m for p, m in ran.items() if _weight_dims(m) == 1})
        return logits

    def trial(
        self,
        index: int,
        source: str,
        rows: slice = slice(None),
        offset: float = 0.0,
        *,
        whole: bool = True,
    ) -> dict[str, torch.Tensor] | None:
        """Divide the rows of one source of a layer; None if that cannot be folded.

        `offset` is added to a norm's weight; `whole` compares logits, not the layer's outputs. For each
        target the source's row `[in]`, from the first divided one; `UNKNOWN`: zero channels, `UNREACHED`:
        unchanged.
        """
        module = self.model.layers[index].get_submodule(source)
        scales = spread(len(_parameter(module)[rows]))
        targets: dict[str, torch.Tensor] = {}
        # Every reader gets its former input back where that was scaled, which is collected.
        handles = [
            reader.register_forward_pre_hook(
                _restorer(path, self.inputs[index][path], scales, targets), with_kwargs=True
            )
            for path, reader in self.readers[index].items()
        ]
        if not whole and len(self.outputs[index]) == 1:
            before = self.outputs[index][0]

            def end_layer(_: nn.Module, __: Any, output: Any) -> None:
                now = tensors_of(output)
                if len(now) != len(before) or not all(map(_close, now, before)):
                    raise _NotFoldable
                raise _LayerDone

            handles.append(self.model.layers[index].register_forward_hook(end_layer))
        with hooks(handles), _divided(module, scales, rows, offset):
            try:
                same = _close(self.model.logits(), self.logits)
            except _NotFoldable:
                return None
            except _LayerDone:
                same = True
        return targets if same and targets else None


def spread(count: int) -> torch.Tensor:
    """Distinct scales `[count]` in random order, none near 1, float32."""
    powers = torch.linspace(-1, 1, 2 * ((count + 1) // 2) + 2)  # evenly many: none is 0
    powers = powers[torch.randperm(len(powers), generator=torch.Generator().manual_seed(count))]
    return LARGEST_SCALE ** powers[:count]


def channel_map(
    now: torch.Tensor, before: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor | None:
    """Which of the scales divided each channel of an input `[..., in]`; None if not each by one of them."""
    x, y = (part.flatten(0, -2).double() for part in (before, now))
    energy = x.square().sum(dim=0)
    alive = energy > 0
    ratio = torch.where(alive, (x * y).sum(dim=0) / energy.clamp(min=1e-300), 1.0)
    off = (y - ratio * x).abs().amax(dim=0)
    if bool((off > _TOLERANCE * y.abs().amax(dim=0)).any()) or bool((ratio <= 0).any()):
        return None
    logs, order = scales.double().log().sort()
    wanted = -ratio.log()
    right = torch.searchsorted(logs, wanted).clamp(max=len(logs) - 1)
    left = (right - 1).clamp(min=0)
    nearest = torch.where((wanted - logs[left]).abs() < (logs[right] - wanted).abs(), left, right)
    matches = (logs[nearest] - wanted).abs() < _TOLERANCE
    unreached = wanted.abs() < _TOLERANCE
    if bool((alive & ~matches & ~unreached).any()):
        return None
    indices = torch.where(unreached, UNREACHED, order[nearest])
    return torch.where(alive, indices, UNKNOWN)


def _weight_dims(module: nn.Module) -> int:
    """Dimensions of a module's own weight; 0 for embeddings, and where the bias is not one number a row."""
    weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
    if weight is None or isinstance(module, nn.Embedding):
        return 0
    return 0 if bias is not None and bias.shape != weight.shape[:1] else weight.dim()


def _parameter(module: nn.Module, name: str = "weight") -> torch.Tensor:
    parameter = module._parameters[name]
    assert parameter is not None
    return parameter


@contextmanager
def _divided(module: nn.Module, scales: torch.Tensor, rows: slice, offset: float) -> Iterator[None]:
    """Divide the rows of a module's weight, and of its bias, while the context is open."""
    before = {name: p.clone() for name, p in module._parameters.items() if p is not None}
    weight = _parameter(module)
    with torch.no_grad():
        divisors = scales.view(-1, *[1] * (weight.dim() - 1))
        weight[rows] = (weight[rows] + offset) / divisors - offset
        if "bias" in before:
            _parameter(module, "bias")[rows] /= scales
        try:
            yield
        finally:
            for name, tensor in before.items():
                _parameter(module, name).copy_(tensor)


def _input(arguments: Sequence[Any], named: dict[str, Any]) -> torch.Tensor:
    return arguments[0] if arguments else next(iter(named.values()))


def _close(now: torch.Tensor, before: torch.Tensor) -> bool:
    return bool((now - before).abs().max() <= _SAME_OUTPUT * before.abs().max())


def _restorer(
    path: str,
    former: Sequence[torch.Tensor],
    scales: torch.Tensor,
    targets: dict[str, torch.Tensor],
) -> Callable[..., Any]:
    calls = iter(former)

    def hook(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        before, now = next(calls, None), _input(arguments, named)
        if before is None or before.shape != now.shape:
            raise _NotFoldable
        if torch.equal(before, now):
            return None
        channels = channel_map(now, before, scales)
        if channels is None or len(channels) != _parameter(module).shape[-1]:
            raise _NotFoldable
        if path in targets and not torch.equal(targets[path], channels):
            raise _NotFoldable
        targets[path] = channels
        if arguments:
            return (before, *arguments[1:]), named
        return arguments, {**named, next(iter(named)): before}

    return hook


_SAME = 1e-4  # relative; a norm after a projection keeps this much of a uniform scale


@dataclass(frozen=True, slots=True)
class ScoreLinears:
    """Linears of a layer that feed attention scores; a norm takes the length of `normalized` ones."""

    all: frozenset[str]
    normalized: frozenset[str]


class _ScoresRead(Exception):
    """Ends a forward pass after a layer."""


_Scores = list[tuple[frozenset[str], torch.Tensor]]
"""Inputs of softmaxes over tokens, each with the modules of the layer that were running."""


class _SoftmaxInputs(TorchDispatchMode):
    """Records the inputs of softmaxes over the tokens, while a module of the layer is running."""

    def __init__(self, running: Collection[str], num_tokens: int):
        super().__init__()
        self.running, self.num_tokens = running, num_tokens
        self.scores: _Scores = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._softmax.default and self.running:
            shape, tokens = args[0].shape, self.num_tokens
            if len(shape) >= 3 and shape[-2] == tokens and shape[-1] >= tokens:
                self.scores.append((frozenset(self.running), args[0].clone()))
        return func(*args, **(kwargs or {}))


def score_linears(model: RandomModel, index: int, linears: Collection[str]) -> ScoreLinears:
    """The linears of a layer, by path, that feed scores of the attention module that holds them."""
    layer = model.layers[index]
    before = _scores(model, layer)
    every, normalized = set(), set()
    for path in linears:
        module, holder = layer.get_submodule(path), path.rpartition(".")[0]
        if not any(holder in running for running, _ in before):
            continue
        uneven = _scores(model, layer, module, lambda width: spread(width).sqrt())
        if not _same(before, uneven, holder):
            every.add(path)
            even = _scores(model, layer, module, lambda width: torch.full((width,), 4.0))
            if _same(before, even, holder):
                normalized.add(path)
    return ScoreLinears(frozenset(every), frozenset(normalized))


@torch.no_grad()
def _scores(
    model: RandomModel,
    layer: nn.Module,
    scaled: nn.Module | None = None,
    factors: Callable[[int], torch.Tensor] = torch.ones,
) -> _Scores:
    """The softmax inputs of one layer, with the output channels of one module multiplied by factors."""
    running: set[str] = set()
    handles = []
    for path, module in layer.named_modules():

        def leave(*_: Any, path: str = path) -> None:
            running.discard(path)
            if not path:
                raise _ScoresRead

        handles += [
            module.register_forward_pre_hook(lambda *_, path=path: running.add(path)),
            module.register_forward_hook(leave),
        ]
    if scaled is not None:

        def scale(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
            return output * factors(output.shape[-1])

        handles.append(scaled.register_forward_hook(scale))
    inputs = _SoftmaxInputs(running, model.token_ids.shape[1])
    with hooks(handles), inputs, suppress(_ScoresRead):
        model.logits()
    return inputs.scores


def _same(before: _Scores, after: _Scores, holder: str) -> bool:
    """True if the softmaxes inside a module read the same, where they are not masked."""
    if len(before) != len(after):
        return False
    for (running, former), (_, values) in zip(before, after, strict=True):
        if holder not in running:
            continue
        if former.shape != values.shape:
            return False
        kept = former > torch.finfo(former.dtype).min / 2
        gap, size = (former - values)[kept].abs(), former[kept].abs()
        if gap.numel() and not bool(gap.max() <= _SAME * size.max()):
            return False
    return True
