"""Sensitivity of the model's output to errors in the outputs of its linears.

To second order a small error `d` in the outputs of a linear moves the distribution of the next token by a KL
divergence of half of `dᵀFd`. `F` is the Fisher information: the second moment of the gradient `g` of
`log p(y)` with respect to these outputs, for tokens `y` that the model itself would draw. For a change `D` of
the weight `d` is `Dx`, and of `F` the diagonal is taken: half of the mean of `sum_o g_o² (D_o x)²` over
tokens. The weight of an output is its mean `g_o²`; that of a token, by which the second moment of the inputs
is taken, is its sum of `g²` over outputs: the first token of a text may have large inputs that nothing feels.

One pass forward and one backward over few samples measure it, a layer in memory at a time, with the states
that enter each layer on disk between the two: a pass that was killed goes on at its layer. The samples are
held out: the solver fits the codes to those of the calibration, and errors on them are too small. Errors are
in nats a token, whatever layer they are in, and so add up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from ...base.atomic_io import write_atomically, write_tensors
from ...base.progress import Progress
from ..base.device import HOST, hooks
from ..families.layer_map import LayerMap
from ..methods.base import InputStatistics, quadratic_form
from ..plan.selection import HEAD
from ..stream.calibration import Images
from ..stream.calls import States
from ..stream.layer_stream import LayerStream
from .divergence import LOGITS, plain_logits, scaled_logits
from .quantized_layer import HEAD_FAMILY

_TOKENS = 8192
_ROWS = 4096  # of an embedding or output head by which the errors of all are told
_ENTERING, _BEHIND = "entering", "behind"
_HEAD, _EMBEDDING = "sensitivity-head", "sensitivity-embedding"
_TABLE = "model.embed_tokens"
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class LayerSensitivity:
    """Weights of a layer's errors, by the relative names of its linears.

    Attributes:
        outputs: mean of `g_o²` over tokens, float32 `[out]`; without linears that no token reached, or that
            are not called as modules.
        inputs: second moment of the inputs by the tokens' weights, float32 `[in, in]`; one tensor for all
            linears that share an input.
    """

    outputs: Tensors
    inputs: Tensors

    def expected(
        self,
        linear: str,
        delta: torch.Tensor,
        statistics: InputStatistics,
        rows: slice = slice(None),
    ) -> float:
        """Expected KL divergence in nats a token of a change of some rows of a linear's weight `[rows, in]`;
        where its outputs have no weights, all have the layer's mean."""
        if linear in self.outputs:
            errors = quadratic_form(delta, self.inputs[linear].to(delta.device))
            weights = self.outputs[linear][rows].to(errors)
        else:
            errors = statistics.row_errors(delta) / max(1, statistics.num_tokens)
            known = [weights.mean() for weights in self.outputs.values()]
            weights = torch.stack(known).mean().to(errors) if known else torch.ones(()).to(errors)
        return 0.5 * float((errors * weights).sum())


@dataclass(frozen=True, slots=True)
class TableSensitivity:
    """Weights of errors in the rows of an embedding, where tokens are looked up, and of an output projection.

    Attributes:
        tokens: share of a row in what is felt, float32 `[vocabulary]`; None: it is not known.
        channels: mean square of the gradient of each channel of the embedding, float32 `[hidden]`.
        outputs, inputs: factors of the projection, as in `LayerSensitivity`.
    """

    tokens: torch.Tensor | None
    channels: torch.Tensor | None
    outputs: torch.Tensor
    inputs: torch.Tensor

    def felt(self, *, embedding: bool, head: bool) -> torch.Tensor:
        """The rows of a table that are felt most, by which its errors are told."""
        weights = torch.zeros_like(self.outputs)
        if embedding and self.tokens is not None:
            weights += self.tokens / self.tokens.sum()
        if head:
            weights += self.outputs / self.outputs.sum()
        return weights.topk(min(_ROWS, len(weights))).indices

    def expected(
        self, rows: torch.Tensor, delta: torch.Tensor, *, embedding: bool, head: bool
    ) -> float:
        """Expected KL divergence in nats a token of a change `[rows, hidden]`; other rows change alike."""
        cost = 0.0
        if embedding and self.tokens is not None and self.channels is not None:
            weights = self.tokens[rows] / self.tokens[rows].sum()
            cost += 0.5 * float(weights @ (delta.square() @ self.channels))
        if head:
            errors = quadratic_form(delta, self.inputs)
            weights = self.outputs[rows].to(errors)
            cost += 0.5 * float(weights @ errors * self.outputs.sum() / weights.sum())
        return cost


class Sensitivities:
    """Sensitivities of all layers and of the output projection, in files of a folder."""

    def __init__(self, folder: Path):
        self._folder = folder

    @property
    def complete(self) -> bool:
        return self._path("sensitivity").is_file()

    def measure(
        self, stream: LayerStream, token_ids: torch.Tensor, images: Images, progress: Progress
    ) -> None:
        """Run the model forward and backward over the first samples `[samples, length]`."""
        count = max(1, _TOKENS // token_ids.shape[1])
        samples = token_ids[:count], images[:count]
        layers = range(stream.num_layers)
        progress.start("measuring gradients", 2 * len(layers), "layers")
        stream.prepare(*samples)
        backward = _Backward(stream, samples[0])
        behind = [index for index in (*layers, len(layers)) if self._path(_BEHIND, index).is_file()]
        if behind:
            batches: dict[int, dict[str, torch.Tensor]] = {}
            for key, tensor in load_file(self._path(_BEHIND, behind[0])).items():
                number, _, name = key.partition(".")
                batches.setdefault(int(number), {})[name] = tensor.to(stream.device)
            backward.behind = [batches[number] for number in sorted(batches)]
        else:
            self._forward(stream, samples, backward, progress)
        left = layers[: behind[0] if behind else None]
        progress.advance(2 * len(layers) - len(left) if behind else 0)
        for index in stream.loaded(reversed(left), progress):
            entering = load_file(self._path(_ENTERING, index))
            backward.through(index, States.restored(_ENTERING, samples, entering))
            self._write("sensitivity", index, backward.stored(stream.family(index)))
            if not index:
                self._write(_EMBEDDING, None, backward.stored_embedding(entering))
            self._keep(backward.behind, index)
        progress.finish()
        write_atomically(self._path("sensitivity"), b"")
        for name in (_ENTERING, _BEHIND):
            for path in self._folder.glob(f"{name}-*"):
                path.unlink()

    def _forward(
        self,
        stream: LayerStream,
        samples: tuple[torch.Tensor, Images],
        backward: _Backward,
        progress: Progress,
    ) -> None:
        """Write the states that enter each layer, and begin the backward pass after the last."""
        layers = range(stream.num_layers)
        begun = [index for index in layers if self._path(_ENTERING, index).is_file()]
        if begun:
            stored = load_file(self._path(_ENTERING, begun[-1]))
            states = States.restored(_ENTERING, samples, stored)
        else:
            states = stream.embed(*samples)
            self._write(_ENTERING, 0, states.stored(_ENTERING))
        first = len(begun[:-1])
        progress.advance(first)
        for index in stream.loaded(layers[first:], progress):
            states = stream.run(index, states, in_place=True)
            if index + 1 < len(layers):
                self._write(_ENTERING, index + 1, states.stored(_ENTERING))
        backward.begin(states)
        self._write(_HEAD, None, backward.stored(HEAD_FAMILY))
        self._keep(backward.behind, len(layers))

    def _keep(self, behind: Sequence[Tensors], index: int) -> None:
        """Keep the gradients of the states that enter a layer, in place of those that leave it."""
        named = {
            f"{number}.{name}": gradient.to(HOST)
            for number, batch in enumerate(behind)
            for name, gradient in batch.items()
        }
        self._write(_BEHIND, index, named)
        for path in (self._path(_ENTERING, index), self._path(_BEHIND, index + 1)):
            path.unlink(missing_ok=True)

    def read(self, index: int | None, family: LayerMap) -> LayerSensitivity:
        """The sensitivity of a layer, or of the output projection (None)."""
        tensors = load_file(self._path(_HEAD if index is None else "sensitivity", index))
        outputs, inputs = {}, {}
        for linear, first in ((name, group[0]) for group in family.shared_inputs for name in group):
            if f"outputs.{linear}" in tensors:
                outputs[linear] = tensors[f"outputs.{linear}"]
            if f"inputs.{first}" in tensors:
                inputs[linear] = tensors[f"inputs.{first}"]
        return LayerSensitivity(outputs, inputs)

    def read_tables(self) -> TableSensitivity:
        """The sensitivity of the embedding and of the output projection."""
        embedding, head = (load_file(self._path(name)) for name in (_EMBEDDING, _HEAD))
        felt = embedding.get("tokens"), embedding.get("channels")
        return TableSensitivity(*felt, head[f"outputs.{HEAD}"], head[f"inputs.{HEAD}"])

    def _write(self, name: str, index: int | None, tensors: Tensors) -> None:
        write_tensors(self._path(name, index), tensors)

    def _path(self, name: str, index: int | None = None) -> Path:
        layer = "" if index is None else f"-{index:05d}"
        return self._folder / f"{name}{layer}.safetensors"


class _Backward:
    """The layer-wise backward pass, with the statistics of the last layer, and the gradients of the states
    after the next layer, batch by batch (`behind`)."""

    def __init__(self, stream: LayerStream, token_ids: torch.Tensor):
        self._stream, self._token_ids = stream, token_ids
        self._generator = torch.Generator().manual_seed(0)
        self._outputs: dict[str, torch.Tensor] = {}
        self._inputs: dict[str, InputStatistics] = {}
        self.behind: list[dict[str, torch.Tensor]] = []

    def begin(self, states: States) -> None:
        self.behind = [self._from_head(batch) for batch in self._batches(states)]

    def through(self, index: int, states: States) -> None:
        """Go on through a loaded layer, which these states enter."""
        if not self._stream.called(index):
            return
        for number, batch in enumerate(self._batches(states)):
            self.behind[number] = self._through_batch(index, batch, self.behind[number])

    def stored(self, family: LayerMap) -> dict[str, torch.Tensor]:
        """The sensitivity of the last layer, for its file; what was seen is forgotten."""
        tensors = {
            f"outputs.{n}": total / self._token_ids.numel() for n, total in self._outputs.items()
        }
        for group in family.shared_inputs:
            if group[0] in self._inputs:
                total = sum(float(self._outputs[linear].sum()) for linear in group)
                tensors[f"inputs.{group[0]}"] = self._inputs[group[0]].gram.to(HOST) / (total or 1)
        self._outputs, self._inputs = {}, {}
        return tensors

    def stored_embedding(self, entering: Tensors) -> dict[str, torch.Tensor]:
        """The sensitivity of the embedding by row and channel, once the first layer is done; unseen tokens
        share what those seen once leave open (Good and Turing)."""
        table, states = f"{_TABLE}.weight", entering.get(f"{_ENTERING}.hidden")
        if states is None or table not in self._stream.checkpoint:
            return {}
        ids = self._token_ids.flatten()
        gradients = torch.cat([batch["hidden"] for batch in self.behind]).to(HOST, torch.float32)
        squares = gradients.flatten(0, -2).square()
        rows = self._stream.checkpoint.tensor(table)
        scale = states.float().square().sum() / rows[ids].float().square().sum()
        counts = torch.bincount(ids, minlength=len(rows))
        felt = torch.zeros(len(rows)).index_add_(0, ids, squares.sum(dim=1))
        once = int((counts == 1).sum())
        shares = (felt / felt.sum() * len(ids) + once / len(rows)) / (len(ids) + once)
        return {"tokens": shares, "channels": squares.mean(dim=0) * scale}

    def _batches(self, states: States) -> list[States]:
        """The states batch by batch, in tensors of their own that take gradients."""
        size = self._stream.rows(states.token_ids)
        batches = []
        for rows in (slice(start, start + size) for start in range(0, len(states), size)):
            kept = {
                name: tensor[rows].clone().requires_grad_(tensor.is_floating_point())
                for name, tensor in states.tensors.items()
            }
            batches.append(States(states.token_ids[rows], kept, states.images[rows]))
        return batches

    def _from_head(self, states: States) -> dict[str, torch.Tensor]:
        """Gradients of the states after the last layer, for tokens that are drawn."""
        weight, bias = self._stream.head()
        with torch.enable_grad():
            (inputs,) = self._stream.head_inputs(states)
        gradients = []
        for part in inputs.detach().flatten(0, -2).float().split(max(1, LOGITS // len(weight))):
            with torch.enable_grad():
                plain = plain_logits(part.requires_grad_(), weight, bias)
                logs = scaled_logits(self._stream, plain).log_softmax(dim=-1)
                drawn = torch.multinomial(logs.exp().detach(), 1, generator=self._generator)
                sources = part, plain
                gradient = torch.autograd.grad(logs.gather(1, drawn).sum(), sources)
            gradients.append(gradient[0])
            self._add((HEAD,), part.detach(), gradient[1:])
        given = torch.cat(gradients).view_as(inputs)
        return _gradients({HEAD: inputs}, {HEAD: given}, states.tensors)

    def _through_batch(
        self, index: int, states: States, behind: Tensors
    ) -> dict[str, torch.Tensor]:
        """Gradients of the states of a batch that enter a layer, from those after it."""
        stream = self._stream
        seen: dict[str, torch.Tensor] = {}
        entered: dict[str, torch.Tensor] = {}

        def keep(
            _: nn.Module, inputs: tuple[Any, ...], named: Any, output: torch.Tensor, name: str
        ) -> None:
            entered[name] = (inputs[0] if inputs else next(iter(named.values()))).detach()
            # Gradients begin at an output that has none.
            seen[name] = output if output.requires_grad else output.requires_grad_()

        keeping = (
            module.register_forward_hook(partial(keep, name=name), with_kwargs=True)
            for name, module in stream.linears(index).items()
        )
        with torch.enable_grad(), hooks(keeping):
            outputs = stream.outputs(index, states, torch.arange(len(states)))
        passing = {name: part for name, part in behind.items() if name not in outputs}
        named = {f"{_ENTERING}.{name}": part for name, part in states.tensors.items()}
        gradients = _gradients(outputs, behind, named | seen)
        for group in stream.family(index).shared_inputs:
            if all(linear in seen and linear in gradients for linear in group):
                self._add(group, entered[group[0]], [gradients[linear] for linear in group])
        for name in states.tensors:
            if (gradient := gradients.get(f"{_ENTERING}.{name}")) is not None:
                passing[name] = passing[name] + gradient if name in passing else gradient
        return passing

    def _add(
        self, group: tuple[str, ...], inputs: torch.Tensor, gradients: Sequence[torch.Tensor]
    ) -> None:
        """Add the tokens of a batch, for linears that share an input."""
        squares = [gradient.float().flatten(0, -2).square() for gradient in gradients]
        for linear, part in zip(group, squares, strict=True):
            total = self._outputs.get(linear, 0) + part.sum(dim=0)
            self._outputs[linear] = total.to(HOST)
        tokens = inputs.float().flatten(0, -2)
        record = self._inputs.setdefault(group[0], InputStatistics(tokens.shape[1], tokens.device))
        weights = torch.stack([part.sum(dim=1) for part in squares]).sum(dim=0)
        record.add(tokens * weights.sqrt()[:, None])


def _gradients(outputs: Tensors, given: Tensors, sources: Tensors) -> dict[str, torch.Tensor]:
    """Gradients of the sources that have any, from those `given` of the outputs."""
    ends = [name for name in given if name in outputs and outputs[name].requires_grad]
    begins = {name: tensor for name, tensor in sources.items() if tensor.requires_grad}
    if not ends or not begins:
        return {}
    gradients = torch.autograd.grad(
        [outputs[name] for name in ends],
        list(begins.values()),
        [given[name].to(outputs[name]) for name in ends],
        allow_unused=True,
    )
    return {name: part for name, part in zip(begins, gradients, strict=True) if part is not None}
