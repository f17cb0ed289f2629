"""Calls of decoder layers: arguments, outcomes, states between them, and ranges of keys and values, for fp8.

`forward` is the model's pass with stubs as layers. Arguments and results are nested values; what a layer
writes into lists and dicts that it is given is part of its outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from ...base.atomic_io import write_tensors
from ...base.errors import BadInput
from ..base.device import hooks
from ..base.lanes import Share
from ..base.scheme import LARGEST, KvStrategy
from ..base.workers import gathered
from ..model.meta_model import MetaModel
from .calibration import Images

Container = MutableMapping[Any, Any] | list[Any]


def tensors_of(value: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    with_tensors(value, lambda tensor: tensors.append(tensor) or tensor)
    return tensors


def with_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy in which `change` was applied to every tensor; other leaves are kept."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        parts = {name: with_tensors(part, change) for name, part in value.items()}
        return type(value)(**parts) if is_dataclass(value) else parts
    if isinstance(value, tuple):
        parts = [with_tensors(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [with_tensors(part, change) for part in value]
    return value


def containers_of(value: Any) -> list[Container]:
    """The lists and dicts in a nested value, which a layer may write into."""
    inner: list[Container] = []
    if isinstance(value, (list, MutableMapping)):
        inner.append(value)
    if isinstance(value, (tuple, list, Mapping)):
        for part in value.values() if isinstance(value, Mapping) else value:
            inner += containers_of(part)
    return inner


def entries_of(container: Container) -> dict[Any, Any]:
    return dict(enumerate(container) if isinstance(container, list) else container)


class Call(NamedTuple):
    """Arguments of a layer's call."""

    arguments: tuple[Any, ...]
    named: dict[str, Any]

    def split(self) -> tuple[torch.Tensor, Call]:
        """The hidden states, and the other arguments."""
        if self.arguments:
            return self.arguments[0], Call(self.arguments[1:], self.named)
        named = dict(self.named)
        return named.pop("hidden_states"), Call((), named)


Stub = Callable[[int, Call], Any]
"""Takes a layer's index and call, and returns its result."""


class Reached(Exception):
    """Raised by a stub to end the pass."""


def forward(
    model: MetaModel,
    input_ids: torch.Tensor,
    stub: Stub,
    images: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> torch.Tensor | None:
    """Run the model on `[samples, length]` ids with `stub` in place of its layers, up to its output
    projection, whose input is returned; None if a stub raised `Reached`, or one of `model.ends` was called.
    Call it inside `MetaModel.around`. `images` are other arguments of the model, such as `pixel_values`."""
    head = model.model.get_output_embeddings()
    read: list[torch.Tensor] = []

    def at_head(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        read.append(inputs[0])
        raise Reached

    # Before the hook that would load its weight.
    handles = [] if head is None else [head.register_forward_pre_hook(at_head, prepend=True)]

    def end(*_: Any) -> Any:
        raise Reached

    try:
        with (
            hooks(handles),
            _replaced(model.layers, stub),
            _replaced(model.ends, end),
            model.around.lookup,
        ):
            model.model(input_ids=input_ids, use_cache=False, **images)
    except Reached:
        return read[0] if read else None
    raise ValueError("its output projection was not called")


@contextmanager
def _replaced(layers: Sequence[Any], stub: Stub) -> Iterator[None]:
    for index, layer in enumerate(layers):
        layer.forward = lambda *given, _at=index, **named: stub(_at, Call(given, named))
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


class Outcome(NamedTuple):
    """A result, and the writes: number of the container among the arguments', key, and value."""

    result: Any
    writes: tuple[tuple[int, Any, Any], ...]

    def play(self, call: Call, tensors: list[torch.Tensor]) -> Any:
        """Return such an outcome, with these tensors, from a call: the writes are made."""
        rest = iter(tensors)
        result, writes = with_tensors(self, lambda _: next(rest))
        containers = containers_of(call)
        for number, key, value in writes:
            container = containers[number]
            if isinstance(container, list) and key == len(container):
                container.append(value)
            else:
                container[key] = value
        return result


def outcome_of(call: Call, run: Callable[[], Any]) -> Outcome:
    """The outcome of `run`, which runs a layer on the arguments of `call`."""
    containers = containers_of(call)
    before = [entries_of(container) for container in containers]
    result = run()
    writes = tuple(
        (number, key, value)
        for number, container in enumerate(containers)
        for key, value in entries_of(container).items()
        if key not in before[number] or value is not before[number][key]
    )
    return Outcome(result, writes)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor of an outcome: shape for one sample, dimension of the samples, or value without any."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    dim: int | None
    value: torch.Tensor | None

    def by_sample(self, tensor: torch.Tensor, samples: int) -> torch.Tensor:
        assert self.dim is not None
        return tensor.movedim(self.dim, 0).unflatten(0, (samples, self.shape[self.dim]))

    def restored(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self.dim is not None
        return tensor.flatten(0, 1).movedim(0, self.dim)

    def blank(self, samples: int) -> torch.Tensor:
        """Zeros in place of a tensor that nothing reads."""
        if self.dim is None:
            assert self.value is not None
            return self.value
        shape = list(self.shape)
        shape[self.dim] *= samples
        return torch.zeros(shape, dtype=self.dtype)


@dataclass(frozen=True, slots=True)
class Template:
    """The structure of a layer's outcome, with its tensors described."""

    outcome: Outcome
    leaves: tuple[Leaf, ...]


def template_of(once: Outcome, twice: Outcome) -> Template:
    """The template of the outcomes for one sample and for two; ValueError where they differ otherwise."""
    leaves = []
    for first, second in zip(tensors_of(once), tensors_of(twice), strict=True):
        shape = tuple(first.shape)
        if first.dim() != second.dim():
            raise ValueError("a tensor that they return changes its dimensions with the samples")
        differing = [dim for dim in range(first.dim()) if shape[dim] != second.shape[dim]]
        dim = differing[0] if differing else None
        if len(differing) > 1 or (dim is not None and second.shape[dim] != 2 * shape[dim]):
            raise ValueError("a tensor that they return changes its shape with the samples")
        leaves.append(Leaf(first.dtype, shape, dim, first.clone() if dim is None else None))
    return Template(with_tensors(once, lambda _: torch.empty(0)), tuple(leaves))


@dataclass(frozen=True, slots=True)
class States:
    """The tensors that enter a layer.

    Attributes:
        tensors: `hidden` of a plain chain; else by number of layer and tensor what earlier layers returned.
            The samples are the first dimension of each; of a vision tower's, their numbers come first in the
            names.
        images: images of each sample; empty where none has any.
    """

    token_ids: torch.Tensor
    tensors: dict[str, torch.Tensor]
    images: Images = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    def stored(self, name: str) -> dict[str, torch.Tensor]:
        return {f"{name}.{key}": tensor for key, tensor in self.tensors.items()}

    @classmethod
    def restored(
        cls, name: str, samples: tuple[torch.Tensor, Images], stored: Mapping[str, torch.Tensor]
    ) -> States:
        """Inverse of `stored`, for the token ids and images of these samples."""
        start, (token_ids, images) = f"{name}.", samples
        own = {key: tensor.clone() for key, tensor in stored.items() if key.startswith(start)}
        tensors = {key.removeprefix(start): tensor for key, tensor in own.items()}
        return cls(token_ids, tensors, images)

    def part(self, rows: slice) -> States:
        tensors = {name: tensor[rows] for name, tensor in self.tensors.items()}
        return States(self.token_ids[rows], tensors, self.images[rows])

    def put(self, rows: slice | torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            self.tensors[name][rows] = tensor

    def finite(self) -> bool:
        """True if all floats are; checks minimum and maximum, which takes no copy."""
        return all(
            bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())
            for tensor in self.tensors.values()
            if tensor.numel() and tensor.is_floating_point()
        )


Splits = Mapping[str, tuple[torch.Tensor, Images]]
"""Token ids and images of samples, by the name of the states that come of them."""
Shares = Mapping[str, Share | None]
"""Share of this worker; None: the process is alone."""


def write_states(path: Path, states: Mapping[str, States], shares: Shares) -> None:
    """Write states of several names to a file, or those of this worker's lanes to one for each lane."""
    files: dict[Path, dict[str, torch.Tensor]] = {}
    for name, own in states.items():
        if (share := shares[name]) is None:
            files.setdefault(path, {}).update(own.stored(name))
            continue
        for lane in share.lanes:
            part = own.part(share.rows(lane))
            files.setdefault(_of_lane(path, name, lane), {}).update(part.stored(name))
    for file, tensors in files.items():
        write_tensors(file, tensors)


def read_states(path: Path, splits: Splits, shares: Shares) -> dict[str, States]:
    """The states that `write_states` wrote, of any number of workers."""
    states_by_name: dict[str, States] = {}
    for name, (token_ids, images) in splits.items():
        if (share := shares[name]) is None:
            states_by_name[name] = States.restored(name, (token_ids, images), load_file(path))
            continue
        lanes = share.lanes or range(1)  # of which a worker without samples reads the shapes
        stored = [load_file(_of_lane(path, name, lane)) for lane in lanes]
        whole = {key: torch.cat([part[key] for part in stored]) for key in stored[0]}
        states = States.restored(name, (token_ids[share.own], images[share.own]), whole)
        states_by_name[name] = states if share.lanes else states.part(slice(0))
    return states_by_name


def _of_lane(path: Path, name: str, lane: int) -> Path:
    return path.with_name(f"{path.stem}-{name}-{lane:02d}{path.suffix}")


class InputRows(NamedTuple):
    """Inputs `[..., in]` of a linear from one batch; `tokens`: each row's, -1 for none; None: all."""

    rows: torch.Tensor
    tokens: torch.Tensor | None = None


def paired(
    inputs: InputRows, wanted: InputRows, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The rows of both `[pairs, in]` of common tokens of a batch; None where the tokens are not known."""
    ours, theirs = (part.rows.reshape(-1, part.rows.shape[-1]) for part in (inputs, wanted))
    if inputs.tokens is None or wanted.tokens is None:
        # Any other number of rows is a choice of tokens that nobody tells, which may differ.
        in_order = inputs.tokens is wanted.tokens and len(ours) == len(theirs)
        return (ours, theirs) if in_order and len(ours) % num_tokens == 0 else None
    most = max(
        (int(part.max()) for part in (inputs.tokens, wanted.tokens) if len(part)), default=-1
    )
    places = torch.full((most + 2,), -1, device=theirs.device)  # the last, at -1, is of no token
    sent = wanted.tokens >= 0
    places[wanted.tokens[sent]] = sent.nonzero()[:, 0]
    positions = places[inputs.tokens]
    both = positions >= 0
    return ours[both], theirs[positions[both]]


@dataclass(slots=True)
class KvRanges:
    """Largest magnitudes of each KV head's keys (after RoPE) and values, float32 `[kv_heads]`. Passed as
    `past_key_values`: attention calls `update`. Latent attention gives latent and rotated keys, cached as one
    vector: both have the range of the two."""

    latent: bool = False
    key: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    value: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Observe `[samples, heads, length, width]` keys and values; returns them unchanged."""
        if not keys.numel():
            return keys, values
        largest = [part.abs().amax(dim=(0, 2, 3)).float().cpu() for part in (keys, values)]
        if self.latent and keys.shape[1] == values.shape[1] == 1:
            largest = [torch.maximum(*largest)] * 2
        if self.key.numel():
            largest = [
                torch.maximum(*pair) for pair in zip((self.key, self.value), largest, strict=True)
            ]
        self.key, self.value = largest
        return keys, values

    def scales(self, kind: str, strategy: KvStrategy = "tensor") -> dict[str, torch.Tensor]:
        """Steps `self_attn.k_scale` and `.v_scale`, float32: `[1]`, or `[kv_heads, 1, 1]` per head."""
        steps = {}
        for letter, largest in (("k", self.key), ("v", self.value)):
            step = largest / LARGEST[kind]
            step = torch.where(step > 0, step, 1.0)
            whole = step.amax().view(1) if strategy == "tensor" else step.view(-1, 1, 1).clone()
            steps[f"self_attn.{letter}_scale"] = whole
        return steps

    def of_all_workers(self) -> KvRanges:
        """The ranges over the tokens of all workers, which meet."""
        seen = [pair for pair in gathered((self.key, self.value)) if pair[0].numel()]
        if not seen:
            return self
        keys, values = (torch.stack(parts).amax(dim=0) for parts in zip(*seen, strict=True))
        return KvRanges(self.latent, keys, values)

    def checked(self, prefix: str) -> KvRanges:
        """The ranges themselves; BadInput where keys and values, or the latent, were not measured."""
        if not self.key.numel():
            raise BadInput(
                f"--kv-cache: no keys and values of {prefix} were measured (statistics that were made "
                "without --kv-cache do not have them)"
            )
        if self.latent and not torch.equal(self.key, self.value):
            raise BadInput(
                f"--kv-cache: {prefix} has latent attention, of which servers cache the latent, and "
                "transformers' module caches its keys and values: its scale was not measured"
            )
        return self


def kv_heads(text_config: dict[str, Any]) -> int:
    """KV heads of a layer that the cache holds, by the model's config; latent attention caches one vector."""
    if text_config.get("kv_lora_rank"):
        return 1
    heads = text_config.get("num_key_value_heads") or text_config.get("num_attention_heads")
    return int(heads or text_config.get("n_head") or 1)
