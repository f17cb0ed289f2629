"""Layer-by-layer execution of a decoder: only the current layer's weights are in memory.

transformers' model is built on the meta device from its config; each layer's weights are loaded from the
checkpoint before it runs and freed afterwards. Weights, hidden states and statistics are float32; GEMMs may
be computed in bfloat16, see `compute_dtype`.
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

TOKENS_PER_BATCH = 1024  # larger: page faults of temporaries; smaller: slower GEMMs
_IGNORED_BUFFER = "rotary_emb.inv_freq"  # in old checkpoints; every model computes it


@dataclass(frozen=True, slots=True)
class _Call:
    """Arguments of a layer's call besides the hidden states."""

    arguments: tuple[Any, ...]
    named: dict[str, Any]


class LayerStream:
    """The decoder layers of a checkpoint, materialised one by one.

    All names of linears and tensors are those on disk, relative to the layer.

    Args:
        checkpoint: a plain (unquantized) checkpoint.
        architecture: its layers.
        compute: dtype of the GEMMs inside the layers; accumulation and activations are float32.

    Raises:
        BadInput: transformers rejects the config.
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
        """Record the arguments of each layer (mask, RoPE cos/sin) for samples of this length.

        Args:
            token_ids: int64 `[samples, length]`; one sample is enough, since all have one length.

        Raises:
            BadInput: the layers do not form a chain, or read the token ids.
        """
        with self._meta_model.non_layer_weights(token_ids[:1]) as sample:
            self._calls = self._recorded(sample)[1]
            mirrored = self._recorded(sample.flip(1))[1]
            twice = self._recorded(sample.repeat(2, 1))[1]
        if not _all(torch.equal, self._calls, mirrored):
            raise self._no_chain("they take more per-sample inputs than the hidden states")
        # Where an argument depends on the batch size (ALiBi of some models), samples run one by one.
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
        """Run the model with stub layers; returns the first layer's input, and each layer's call."""
        reason = "unknown structure"
        for as_tuple in (False, True):  # a layer's return type
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
        """Apply the final norm to the outputs of the last layer, the input of `lm_head`.

        Raises:
            BadInput: this model type has no known final norm.
        """
        return self._meta_model.final_norm()(hidden)

    def _rows(self, samples: torch.Tensor) -> int:
        """Batch size: samples `[samples, length, ...]` per forward."""
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
        """Load a layer's weights; `unload` frees them.

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
            out: output buffer; may be `hidden` itself, since samples are independent.
            overrides: arguments that replace the recorded ones, such as `past_key_values`.
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
        """Run a loaded layer and collect input statistics of its linears and routers.

        Those with one input share one record. An expert's record covers the tokens routed to it, and is zero
        where there are none.

        Args:
            only: names to collect for; None: all. All of a layer with many experts takes much memory.
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
        """`measure` with some weights `[out, in]` replaced, and restored afterwards."""
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
        """Replace weights of a loaded layer, by the name of the linear, norm or router."""
        for name, tensor in tensors.items():
            self._module(index, name).weight.data = tensor.to(torch.float32)

    def _module(self, index: int, name: str) -> Any:
        """The module of a linear, norm or router."""
        path = self._meta_model.names_in_layer(index)[f"{name}.weight"].removesuffix(".weight")
        return self._layers[index].get_submodule(path)


def compute_dtype(asked: str, stored: torch.dtype) -> torch.dtype:
    """The dtype of GEMMs: `auto` takes bfloat16 where the weights are stored in it and the CPU's bfloat16
    GEMM is faster than float32.

    Raises:
        BadInput: a value other than `auto`, `float32` and `bfloat16`.
    """
    if asked == "auto":
        quick = stored == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported()
        return torch.bfloat16 if quick else torch.float32
    if asked not in ("float32", "bfloat16"):
        raise BadInput(f"--compute {asked!r}: choose auto, float32 or bfloat16")
    return torch.float32 if asked == "float32" else torch.bfloat16


class _EarlyExit(Exception):
    """Ends a forward pass once all requested inputs are recorded."""


def _recording_inputs(
    record: InputStatistics, unseen: set[InputStatistics], compute: torch.dtype
) -> Callable[..., None]:
    """A forward pre-hook that accumulates a module's input, in its GEMM dtype, and ends the pass once no
    other module is pending."""

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
    """Replace every layer's forward by the identity, recording its call."""

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
    """Whether an argument for one sample broadcasts to several."""
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
