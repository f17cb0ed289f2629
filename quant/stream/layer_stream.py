"""A decoder run one layer at a time: only the layer in work has weights in memory.

The model is built on the meta device from its config, so the layers are transformers' own; each gets its
weights from the checkpoint when its turn comes and loses them afterwards. Weights, hidden states and
statistics are float32; products may be computed in bfloat16, see `compute_dtype`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..base.errors import BadInput
from ..base.memory import temporaries_kept
from ..methods.base import InputStatistics
from ..model.architecture import Architecture
from ..model.checkpoint import Checkpoint
from ..model.families import Family
from ..model.meta_model import MetaModel

TOKENS_PER_BATCH = 1024  # temporaries of more cost page faults, of less the speed of products
_IGNORED_BUFFER = "rotary_emb.inv_freq"  # old checkpoints carry what every model computes


@dataclass(frozen=True, slots=True)
class _Call:
    """What the model passes to a layer besides the hidden states."""

    arguments: tuple[Any, ...]
    named: dict[str, Any]


class LayerStream:
    """The decoder layers of a checkpoint, materialised one by one.

    All names of linears and tensors are those on disk, relative to the layer.

    Args:
        checkpoint: a plain (unquantized) checkpoint.
        architecture: its layers.
        compute: dtype of the matrix products inside the layers; sums and what lies between are float32.

    Raises:
        BadInput: transformers does not accept the config.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        architecture: Architecture,
        compute: torch.dtype = torch.float32,
    ):
        self.checkpoint = checkpoint
        self.architecture = architecture
        self.compute = compute
        self._meta_model = MetaModel(checkpoint)
        self._layers = self._meta_model.layers
        self.num_layers = len(self._layers)
        self.vocab_size = int(self._meta_model.config.vocab_size)
        self.hidden_size = int(self._meta_model.config.hidden_size)
        self._calls: list[_Call] = []
        self._max_rows: int | None = None

    def prefix(self, index: int) -> str:
        """Name of a layer in the checkpoint."""
        return self.architecture.layer_prefix(index)

    def family(self, index: int) -> Family:
        """Linears, routers and folds of a layer."""
        return self.architecture.layers[index]

    def prepare(self, token_ids: torch.Tensor) -> None:
        """Learn what the model passes to each of its layers (mask, rotary angles) for samples of this length.

        Args:
            token_ids: int64 `[samples, length]`; one sample is enough, since all have one length.

        Raises:
            BadInput: the layers of this model do not form a chain, or look at the tokens themselves.
        """
        with self._meta_model.non_layer_weights(token_ids[:1]) as sample:
            self._calls = self._recorded(sample)[1]
            mirrored = self._recorded(sample.flip(1))[1]
            twice = self._recorded(sample.repeat(2, 1))[1]
        if not _all(torch.equal, self._calls, mirrored):
            raise self._no_chain("they are told more of each sample than its hidden states")
        # Where an argument grows with the samples (ALiBi of some models), samples go one by one.
        self._max_rows = None if _all(_broadcasts, self._calls, twice) else 1

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Hidden states `[samples, length, hidden]` that enter the first layer, float32."""
        hidden = torch.empty(*token_ids.shape, self.hidden_size)
        batch = self._rows(token_ids)
        with self._meta_model.non_layer_weights(token_ids) as input_ids:
            for start in range(0, len(token_ids), batch):
                rows = slice(start, start + batch)
                hidden[rows] = self._recorded(input_ids[rows])[0]
        return hidden

    @torch.no_grad()
    def _recorded(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, list[_Call]]:
        """Run the model without its layers; what enters the first one, and how each is called."""
        reason = "unknown structure"
        for as_tuple in (False, True):  # what the layers of a model return
            records: list[tuple[torch.Tensor, _Call]] = []
            try:
                with _recording_layers(self._layers, records, as_tuple):
                    self._meta_model.decoder(input_ids=input_ids, use_cache=False)
            except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                continue
            if len(records) == self.num_layers and all(
                hidden.shape == records[0][0].shape for hidden, _ in records
            ):
                return records[0][0], [call for _, call in records]
        raise self._no_chain(reason)

    def _no_chain(self, reason: str) -> BadInput:
        return BadInput(
            f"{self.checkpoint.folder}: the layers of model type "
            f"{self.architecture.model_type!r} cannot be run one by one: {reason}"
        )

    @torch.no_grad()
    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """What `lm_head` reads, from the outputs of the last layer.

        Raises:
            BadInput: this model type has no norm there.
        """
        return self._meta_model.final_norm()(hidden)

    def _rows(self, samples: torch.Tensor) -> int:
        """How many samples `[samples, length, ...]` go through a layer at once."""
        return self._max_rows or max(1, TOKENS_PER_BATCH // max(1, samples.shape[1]))

    def tensors(self, index: int) -> dict[str, torch.Tensor]:
        """The tensors of a layer in the checkpoint's dtype."""
        start = self.prefix(index) + "."
        return {
            name.removeprefix(start): tensor
            for name, tensor in self.checkpoint.tensors(start)
            if not name.endswith(_IGNORED_BUFFER)
        }

    def load(self, index: int, tensors: dict[str, torch.Tensor]) -> None:
        """Give a layer its weights; `unload` takes them away again.

        Raises:
            BadInput: the checkpoint's tensors are not those of this architecture.
        """
        self._meta_model.fill(index, tensors)

    def unload(self, index: int) -> None:
        """Free the weights of a layer."""
        self._meta_model.empty(index)

    def run(
        self, index: int, hidden: torch.Tensor, out: torch.Tensor | None = None, **overrides: Any
    ) -> torch.Tensor:
        """Outputs `[samples, length, hidden]` of a loaded layer.

        Args:
            out: where to put them; `hidden` itself will do, since no sample looks at another.
            overrides: in place of what the model passes to its layers, such as `past_key_values`.
        """
        layer, call = self._layers[index], self._calls[index]
        outputs = torch.empty_like(hidden) if out is None else out
        named = call.named | overrides
        batch = self._rows(hidden)
        with temporaries_kept(), torch.no_grad(), self._precision():
            for start in range(0, hidden.shape[0], batch):
                rows = slice(start, start + batch)
                result = layer(hidden[rows], *call.arguments, **named)
                outputs[rows] = result[0] if isinstance(result, tuple) else result
        return outputs

    def measure(
        self, index: int, hidden: torch.Tensor, only: Collection[str] | None = None
    ) -> dict[str, InputStatistics]:
        """Run a loaded layer and gather what each linear and each router sees.

        Those with one input share one record. An expert sees only the tokens that are sent to it: one
        that gets none has a record of zeros.

        Args:
            only: names to gather for; None: all. A layer of many experts needs much memory for all.
        """
        family = self.family(index)
        groups = [*family.shared_inputs, *((router,) for router in family.routers)]
        statistics: dict[str, InputStatistics] = {}
        handles = []
        unseen: set[InputStatistics] = set()
        for group in groups:
            members = [name for name in group if only is None or name in only]
            if not members:
                continue
            module = self._module(index, members[0])
            record = InputStatistics(module.weight.shape[1])
            statistics |= dict.fromkeys(members, record)
            handles.append(
                module.register_forward_pre_hook(
                    _recording_inputs(record, unseen, self.compute), with_kwargs=True
                )
            )
        records = set(statistics.values())
        batch = self._rows(hidden)
        layer, call = self._layers[index], self._calls[index]
        try:
            with temporaries_kept(), torch.no_grad(), self._precision():
                for start in range(0, hidden.shape[0], batch):
                    unseen |= records
                    with suppress(_EarlyExit):
                        layer(hidden[start : start + batch], *call.arguments, **call.named)
        finally:
            for handle in handles:
                handle.remove()
        return statistics

    def _precision(self) -> AbstractContextManager[Any]:
        enabled = self.compute != torch.float32
        return torch.autocast("cpu", self.compute, enabled=enabled, cache_enabled=False)

    def remeasure(
        self,
        index: int,
        hidden: torch.Tensor,
        replaced: Mapping[str, torch.Tensor],
        only: Collection[str] | None = None,
    ) -> dict[str, InputStatistics]:
        """`measure` with some weights `[out, in]` replaced; afterwards the layer is as it was."""
        before = self.weights(index, replaced)
        self.substitute(index, replaced)
        try:
            return self.measure(index, hidden, only)
        finally:
            self.substitute(index, before)

    def weights(self, index: int, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Float32 weights of a loaded layer, `[out, in]` of linears; they share its memory."""
        return {name: self._module(index, name).weight.data for name in names}

    def substitute(self, index: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put other weights into a loaded layer, by the name of the linear, norm or router."""
        for name, tensor in tensors.items():
            self._module(index, name).weight.data = tensor.to(torch.float32)

    def _module(self, index: int, name: str) -> Any:
        """The module of a linear, norm or router."""
        path = self._meta_model.names_in_layer(index)[f"{name}.weight"].removesuffix(".weight")
        return self._layers[index].get_submodule(path)


def compute_dtype(asked: str, stored: torch.dtype) -> torch.dtype:
    """The dtype of matrix products: `auto` takes bfloat16 where the weights are stored in it and the CPU
    multiplies it faster than float32.

    Raises:
        BadInput: another word than `auto`, `float32` and `bfloat16`.
    """
    if asked == "auto":
        quick = stored == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported()
        return torch.bfloat16 if quick else torch.float32
    if asked not in ("float32", "bfloat16"):
        raise BadInput(f"--compute {asked!r}: choose auto, float32 or bfloat16")
    return torch.float32 if asked == "float32" else torch.bfloat16


class _EarlyExit(Exception):
    """What the layer computes from here on nobody asked for."""


def _recording_inputs(
    record: InputStatistics, unseen: set[InputStatistics], compute: torch.dtype
) -> Callable[..., None]:
    """A hook that takes in what a module reads, in the dtype that it multiplies, and ends the pass where
    no other module waits for its own."""

    def hook(_: nn.Module, inputs: tuple[torch.Tensor, ...], named: dict[str, Any]) -> None:
        record.add((inputs[0] if inputs else next(iter(named.values()))).to(compute))
        unseen.discard(record)
        if not unseen:
            raise _EarlyExit

    return hook


@contextmanager
def _recording_layers(
    layers: nn.ModuleList, records: list[tuple[torch.Tensor, _Call]], as_tuple: bool
) -> Iterator[None]:
    """Make every layer pass its input on unchanged and write down how it was called."""

    def forward(*arguments: Any, **named: Any) -> Any:
        hidden = arguments[0] if arguments else named.pop("hidden_states")
        records.append((hidden, _Call(arguments[1:], named)))
        return (hidden,) if as_tuple else hidden

    for layer in layers:
        layer.forward = forward
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _broadcasts(once: torch.Tensor, twice: torch.Tensor) -> bool:
    """Whether what was passed for one sample serves for several at once."""
    return once.dim() == twice.dim() and all(
        before in (1, after) for before, after in zip(once.shape, twice.shape, strict=True)
    )


def _all(agree: Callable[[torch.Tensor, torch.Tensor], bool], one: Any, other: Any) -> bool:
    """Whether all tensors in two equally nested structures agree."""
    if isinstance(one, torch.Tensor):
        return agree(one, other)
    if isinstance(one, _Call):
        return _all(agree, (one.arguments, one.named), (other.arguments, other.named))
    if isinstance(one, dict):
        return all(_all(agree, value, other[name]) for name, value in one.items())
    if isinstance(one, (tuple, list)):
        return all(_all(agree, *pair) for pair in zip(one, other, strict=True))
    return True
