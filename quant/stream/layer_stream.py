"""Layer-by-layer execution of a decoder: only the current layer's weights are in memory.

transformers' model is built on the meta device from its config; each layer's weights are loaded from the
checkpoint before it runs and freed afterwards. Weights, hidden states and statistics are float32; GEMMs may
be computed in bfloat16, see `compute_dtype`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ...base.errors import BadInput, first_line
from ...base.processor import multiplies_bf16
from ...base.progress import Progress
from ..base.device import HOST, hooks, temporaries_kept
from ..base.lanes import Share, share_of
from ..families.layer_map import LayerMap
from ..methods.base import InputStatistics, in_lanes
from ..model.architecture import Architecture
from ..model.auto import check_grouped_norm
from ..model.checkpoint import Checkpoint
from ..model.experts import routed_tokens
from .calibration import Images
from .calls import (
    Call,
    InputRows,
    Shares,
    Splits,
    States,
    outcome_of,
    paired,
    read_states,
    with_tensors,
)
from .chain import Chain, Rows, Walk, chain_of
from .final_submodules import Finals, FinalSubmodules, passing
from .replay import Replay, SampleReplay, VisionReplay

KEPT_BYTES = 2**30  # of final submodules' outputs, or as much as the hidden states
TOKENS_PER_BATCH = 1024  # larger: page faults of temporaries; smaller: slower GEMMs
_IGNORED_BUFFER = "rotary_emb.inv_freq"  # in old checkpoints; every model computes it


class LayerStream:
    """The decoder layers of a checkpoint, materialised one by one; names are on disk, relative to a layer.
    GEMMs have dtype `compute`, sums and activations float32. `device` keeps statistics, the host states.
    `step` is called after each batch of a pass. Raises BadInput: transformers rejects the config."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        architecture: Architecture,
        compute: torch.dtype = torch.float32,
        device: torch.device = HOST,
    ):
        self.checkpoint = checkpoint
        self.architecture = architecture
        self.compute = compute
        self.device = device
        self._meta_model = architecture.meta_model
        self._layers = self._meta_model.layers
        self.num_layers = len(self._layers)
        self.vocab_size = int(self._meta_model.config.vocab_size)
        self.hidden_size = int(self._meta_model.config.hidden_size)
        self.is_latent = bool(checkpoint.text_config.get("kv_lora_rank"))
        self.step: Callable[[], None] = lambda: None
        self._prepared: Walk | None = None

    def prefix(self, index: int) -> str:
        return self.architecture.layer_prefix(index)

    def family(self, index: int) -> LayerMap:
        return self.architecture.layers[index]

    def prepare(self, token_ids: torch.Tensor, images: Images = ()) -> None:
        """Find how layers follow each other, for samples of this length. BadInput: not one by one."""
        check_grouped_norm(self._meta_model.config, str(self._meta_model.checkpoint.path))
        sample = token_ids[:1]
        number = next((row for row, inputs in enumerate(images) if inputs.num_images), None)
        with self._around(), torch.no_grad():
            if number is not None:
                sample = token_ids[number : number + 1]
                walk = VisionReplay if self._meta_model.ends else SampleReplay
                self._prepared = walk(self._meta_model, sample, images[number])
                return
            self._prepared = chain_of(self._meta_model, sample) or Replay(self._meta_model, sample)

    @contextmanager
    def _around(self) -> Iterator[None]:
        """The weights around the layers; what fails inside is the user's to know, in a line."""
        try:
            # A method that runs the layer again has made the device the default; what is around it is here.
            with self._meta_model.around, nullcontext() if self.device == HOST else HOST:
                yield
        except BadInput:
            raise
        except Exception as error:  # a model's own code may raise anything
            reason = first_line(error)
            raise BadInput(
                f"{self.checkpoint.path}: the layers of model type "
                f"{self.architecture.family!r} cannot be run one by one: {reason}"
            ) from error

    @property
    def _walk(self) -> Walk:
        assert self._prepared is not None, "prepare comes first"
        return self._prepared

    def embed(self, token_ids: torch.Tensor, images: Images = ()) -> States:
        with self._around(), torch.no_grad():
            return replace(self._walk.enter(token_ids, self.rows(token_ids)), images=images)

    def shares(self, splits: Splits) -> Shares:
        return {name: share_of(len(ids), self.rows(ids)) for name, (ids, _) in splits.items()}

    def begin(self, splits: Splits, shares: Shares, saved: Path | None) -> dict[str, States]:
        """The states of this worker's samples: that enter the first layer, or that were saved."""
        if saved is not None:
            return read_states(saved, splits, shares)
        owns = {name: share.own if share else slice(None) for name, share in shares.items()}
        return {
            name: self.embed(ids[owns[name]], images[owns[name]])
            for name, (ids, images) in splits.items()
        }

    def head_inputs(self, states: States) -> Iterator[torch.Tensor]:
        """Inputs `[samples, length, hidden]` of the output projection, batch by batch, from the states after
        the last layer; with gradients where these have them."""
        with self._around():
            for rows in self.batches(states):
                yield self._walk.head_input(states, rows)

    def read_instead(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._meta_model.replaced = tensors

    def head(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._meta_model.output_projection()

    def rows(self, token_ids: torch.Tensor, tokens: int = 0) -> int:
        """Batch size: samples `[samples, length]` per forward, of so many tokens; 0: as many as usual."""
        most = tokens or TOKENS_PER_BATCH
        return self._walk.max_rows or max(1, most // max(1, token_ids.shape[1]))

    def batches(self, states: States) -> Iterator[slice]:
        """Cut samples into as many at a time as the layers are run on."""
        batch = self.rows(states.token_ids)
        for start in range(0, len(states), batch):
            yield slice(start, start + batch)
            self.step()

    def tensors(self, index: int, but: Collection[str] = ()) -> dict[str, torch.Tensor]:
        """The tensors of a layer in the checkpoint's dtype, `but` those of some relative names."""
        start = self.prefix(index) + "."
        names = (
            name.removeprefix(start) for name in self.checkpoint.names if name.startswith(start)
        )
        return {
            name: self.checkpoint.tensor(start + name)
            for name in names
            if name not in but and not name.endswith(_IGNORED_BUFFER)
        }

    def load(self, index: int, tensors: dict[str, torch.Tensor]) -> None:
        """Load a layer's weights; BadInput where they are not of this architecture. `unload` frees them."""
        self._meta_model.fill(index, tensors)
        if self.device != HOST:
            self._layers[index].to(self.device)

    def unload(self, index: int) -> None:
        self._meta_model.empty(index)

    def loaded(self, indices: Iterable[int], progress: Progress) -> Iterator[int]:
        """Load layers one after the other, each freed before the next, and count them."""
        for index in indices:
            self.load(index, self.tensors(index))
            yield index
            self.unload(index)
            self.checkpoint.release()
            progress.advance()

    def final_submodules(self, index: int, states: States) -> FinalSubmodules | None:
        """Submodules shared by passes over these states; None on devices, in no plain chain, or too large."""
        if self.device != HOST or not isinstance(self._walk, Chain) or not len(states):
            return None
        linears = self.linears(index)
        most = max(KEPT_BYTES, sum(tensor.nbytes for tensor in states.tensors.values()))
        finals = FinalSubmodules(self._layers[index], linears, len(states), self.compute, most)
        with torch.no_grad():
            return finals.probe(lambda: self.outputs(index, states, torch.arange(1)))

    def run(
        self,
        index: int,
        states: States,
        *,
        in_place: bool = False,
        finals: FinalSubmodules | None = None,
        **overrides: Any,
    ) -> States:
        """The states after a loaded layer; `in_place`: those before need not outlive the call. `overrides`
        replace arguments of the model, such as `past_key_values`."""
        walk, layer = self._walk, self._layers[index]
        if not walk.called(index):
            return states
        following = walk.following(index, states, in_place=in_place)
        with temporaries_kept(), torch.no_grad():
            for rows, call in self._calls(index, states):
                with passing(finals, rows, ()), self._precision():
                    outcome = outcome_of(
                        call, lambda call=call: layer(*call.arguments, **(call.named | overrides))
                    )
                walk.keep(index, outcome, following, rows)
        return following

    def outputs(self, index: int, states: States, samples: torch.Tensor) -> dict[str, torch.Tensor]:
        """Outputs of a loaded layer for some samples, by name in the states after it, with gradients."""
        if states.images and len(samples) > 1:
            parts = [self.outputs(index, states, sample) for sample in samples.split(1)]
            return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        layer, call = self._layers[index], self._call(index, states, samples)
        with self._precision():
            outcome = outcome_of(call, lambda: layer(*call.arguments, **call.named))
        return self._walk.read(index, outcome, len(samples))

    def called(self, index: int) -> bool:
        return self._walk.called(index)

    @contextmanager
    def replaced(self, index: int, weights: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """A context in which linears of a loaded layer have these parameters as their weights."""
        modules = {name: self._module(index, name) for name in weights}
        before = {name: module.weight for name, module in modules.items()}
        for name, module in modules.items():
            module.weight = weights[name]
        try:
            yield
        finally:
            for name, module in modules.items():
                module.weight = before[name]

    def _calls(self, index: int, states: States) -> Iterator[tuple[slice, Call]]:
        with self._around():
            for rows in self.batches(states):
                yield rows, self._moved(self._walk.call(index, states, rows))

    def _call(self, index: int, states: States, rows: Rows) -> Call:
        with self._around():
            return self._moved(self._walk.call(index, states, rows))

    def _moved(self, call: Call) -> Call:
        """A copy of a call with its tensors on the device."""
        if self.device == HOST:
            return call
        return with_tensors(call, lambda tensor: tensor.to(self.device))

    def measure(
        self,
        index: int,
        states: States,
        only: Collection[str] | None = None,
        *,
        replaced: Mapping[str, torch.Tensor] = MappingProxyType({}),
        floats: States | None = None,
        finals: Finals = Finals(),
        final: Collection[str] | None = None,
        share: Share | None = None,
    ) -> dict[str, InputStatistics]:
        """Run a loaded layer and collect input statistics of `only` its linears and routers, or of all. Those
        with one input share a record; an expert's covers its tokens.

        Args:
            replaced: weights `[out, in]` in place of the layer's own.
            floats: states of the float model, for a cross term; an expert's has common tokens.
            finals: submodules that passes over the same states share.
            final: linears that will not change; None: those that are replaced.
            share: this worker's part of the samples.
        """
        family = self.family(index)
        groups = {members[0]: members for members in input_groups(family, only)}
        records = {
            name: InputStatistics(self._module(index, name).weight.shape[1], self.device)
            for name in groups
        }
        if finals.behind is not None:
            finals.behind.replaced(replaced)
        final = replaced if final is None else final
        batches = self.batches(states) if self._walk.called(index) else ()
        tokens = ((rows, states.token_ids[rows].numel()) for rows in batches)
        with temporaries_kept():
            for rows, num_tokens in in_lanes(tokens, records.values(), share):
                wanted: dict[str, InputRows] = {}
                if floats is not None:
                    with passing(finals.floats, rows, family.linears, groups):
                        self._observe(index, floats, rows, groups, wanted.__setitem__)
                add = partial(_add, records, wanted, num_tokens)
                with self.substituted(index, replaced), passing(finals.behind, rows, final, groups):
                    self._observe(index, states, rows, groups, add)
        return {name: records[key] for key, members in groups.items() for name in members}

    def _observe(
        self,
        index: int,
        states: States,
        rows: slice,
        names: Collection[str],
        see: Callable[[str, InputRows], None],
    ) -> None:
        """Run a batch through a loaded layer until all the named linears were called; `see` takes the inputs
        of each call, in the GEMM's dtype."""
        unseen = set(names)

        def hook(_: nn.Module, inputs: Any, named: dict[str, Any], name: str, holder: Any) -> None:
            given = (inputs[0] if inputs else next(iter(named.values()))).to(self.compute)
            see(name, InputRows(given, routed_tokens(holder)))
            unseen.discard(name)
            if not unseen:
                raise _EarlyExit

        layer, handles = self._layers[index], []
        for name in names:
            holder = layer.get_submodule(self._path(index, name).rpartition(".")[0])
            seeing = partial(hook, name=name, holder=holder)  # the holder may be an expert
            module = self._module(index, name)
            handles.append(module.register_forward_pre_hook(seeing, with_kwargs=True))
        call = self._call(index, states, rows)
        with hooks(handles), suppress(_EarlyExit), torch.no_grad(), self._precision():
            layer(*call.arguments, **call.named)

    def _precision(self) -> AbstractContextManager[Any]:
        if self.compute == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self.compute, cache_enabled=False)

    def weights(self, index: int, names: Collection[str]) -> dict[str, torch.Tensor]:
        return {name: self._module(index, name).weight.data for name in names}

    def substitute(
        self, index: int, tensors: Mapping[str, torch.Tensor], leaf: str = "weight"
    ) -> None:
        for name, tensor in tensors.items():
            getattr(self._module(index, name), leaf).data = tensor.to(self.device, torch.float32)

    @contextmanager
    def substituted(self, index: int, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """A context in which linears of a loaded layer have these weights."""
        before = self.weights(index, tensors)
        self.substitute(index, tensors)
        try:
            yield
        finally:
            self.substitute(index, before)

    def linears(self, index: int) -> dict[str, nn.Module]:
        return {name: self._module(index, name) for name in self.family(index).linears}

    def _module(self, index: int, name: str) -> Any:
        return self._layers[index].get_submodule(self._path(index, name))

    def _path(self, index: int, name: str) -> str:
        return self._meta_model.names_in_layer(index)[f"{name}.weight"].removesuffix(".weight")


def _add(
    records: Mapping[str, InputStatistics],
    wanted: Mapping[str, InputRows],
    num_tokens: int,
    name: str,
    inputs: InputRows,
) -> None:
    """Add the inputs of a linear to its record, and their differences from those `wanted`, if any are."""
    records[name].add(inputs.rows)
    if name in wanted and (pair := paired(inputs, wanted[name], num_tokens)) is not None:
        records[name].add_cross(*pair)


def input_groups(family: LayerMap, only: Collection[str] | None = None) -> list[list[str]]:
    """Linears (of `only`) by the tensor that they read, and the routers."""
    groups = [*family.shared_inputs, *((router,) for router in family.routers)]
    chosen = ([name for name in group if only is None or name in only] for group in groups)
    return [members for members in chosen if members]


def compute_dtype(name: str, stored: torch.dtype, device: torch.device = HOST) -> torch.dtype:
    """The dtype of GEMMs: float32, bfloat16, or `auto`, which takes bfloat16 where the weights are stored in
    it and the device's bfloat16 GEMM is faster than float32; BadInput for another value."""
    if name == "auto":
        on_gpu = device.type == "cuda"
        quick = torch.cuda.is_bf16_supported(False) if on_gpu else multiplies_bf16()
        return torch.bfloat16 if quick and stored == torch.bfloat16 else torch.float32
    if name not in ("float32", "bfloat16"):
        raise BadInput(f"--compute {name!r}: choose auto, float32 or bfloat16")
    return torch.float32 if name == "float32" else torch.bfloat16


class _EarlyExit(Exception):
    """Ends a forward pass once all requested inputs are recorded."""
