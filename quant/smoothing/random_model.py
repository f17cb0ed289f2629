"""A small random model with the structure of a checkpoint: its config shrunk, its weights random."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..base.errors import BadInput, first_line
from ..families.registry import type_of
from ..model.auto import auto_class
from ..model.checkpoint import Checkpoint
from ..model.experts import with_experts_apart
from ..model.meta_model import MetaModel

NUM_TOKENS = 24
_SEED = 11


@dataclass(frozen=True, slots=True)
class RandomModel:
    """A random model in float32 on the CPU, ready to be run.

    Attributes:
        model: with its output projection.
        layers: its decoder layers, experts apart where the checkpoint stores them apart.
        names: for each layer, the name on disk of each of its modules that has a weight, relative to it.
        token_ids: int64 `[1, NUM_TOKENS]`.
    """

    model: Any
    layers: list[nn.Module]
    names: list[dict[str, str]]
    token_ids: torch.Tensor

    @torch.no_grad()
    def logits(self) -> torch.Tensor:
        """Logits `[1, NUM_TOKENS, vocab]` of the tokens."""
        result = self.model(input_ids=self.token_ids, use_cache=False)
        return result.logits if hasattr(result, "logits") else result[0]


def random_model(config: Any) -> RandomModel:
    """The random model of a transformers config.

    Its weights have unit gain and its norms are not 1, so that no channel equals another.

    Raises:
        BadInput: transformers cannot build it, or its decoder layers are not to be told.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            model = auto_class(config).from_config(
                config,
                dtype=torch.float32,
                attn_implementation="eager",
                trust_remote_code=False,
            )
            model.eval().requires_grad_(False)
            layers, names = _layers_and_names(model)
            randomize(model)
    except BadInput:
        raise
    except Exception as error:  # a module may raise anything about its config
        raise BadInput(
            f"no random model of type {type_of(config)!r} can be built: {first_line(error)}"
        ) from error
    return RandomModel(model, layers, names, sample_token_ids(config))


def _layers_and_names(model: Any) -> tuple[list[nn.Module], list[dict[str, str]]]:
    """The decoder layers of a model and their names on disk, experts apart as `MetaModel` has them."""
    with tempfile.TemporaryDirectory() as folder:
        with no_progress_bar():
            model.save_pretrained(folder)
        meta_model = MetaModel(with_experts_apart(Checkpoint(Path(folder))))
        kinds = [type(layer) for layer in meta_model.layers]
        layers = next(
            (
                list(module)[: len(kinds)]
                for module in model.modules()
                if isinstance(module, nn.ModuleList)
                and [type(each) for each in module][: len(kinds)] == kinds
            ),
            None,
        )
        if layers is None:
            raise BadInput(f"{type(model).__name__} has no list of decoder layers")
        names = []
        for index, (layer, split) in enumerate(zip(layers, meta_model.layers, strict=True)):
            _take_experts(layer, split)
            held = dict(layer.named_parameters())
            names.append(
                {
                    name.removesuffix(".weight"): disk.removesuffix(".weight")
                    for disk, name in meta_model.names_in_layer(index).items()
                    if disk.endswith(".weight") and name.endswith(".weight") and name in held
                }
            )
    return layers, names


def _take_experts(layer: nn.Module, split: nn.Module) -> None:
    """Give a layer the modules whose class differs in the layer of the meta model, with empty weights."""
    for path, module in list(split.named_modules()):
        try:
            present = layer.get_submodule(path)
        except AttributeError:
            continue
        if type(present) is not type(module):
            layer.set_submodule(path, module.to_empty(device="cpu"))


@contextmanager
def no_progress_bar() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Random weights with unit gain; vectors are moved from where they are."""
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape)
        if parameter.dim() == 1:
            parameter.add_(0.3 * noise)
        else:
            parameter.copy_(noise * parameter.shape[-1] ** -0.5)


def sample_token_ids(config: Any) -> torch.Tensor:
    """Distinct ordinary tokens: none that the config gives a meaning."""
    parts = [config, config.get_text_config(decoder=True)]
    special = {
        value
        for part in parts
        for name, value in vars(part).items()
        if name.endswith(("token_id", "token_index")) and isinstance(value, int)
    }
    vocabulary = int(parts[-1].vocab_size)
    ordinary = [token for token in range(1, vocabulary) if token not in special] or [0]
    order = torch.randperm(len(ordinary), generator=torch.Generator().manual_seed(_SEED))
    picked = [ordinary[int(order[i % len(order)])] for i in range(NUM_TOKENS)]
    return torch.tensor([picked])
