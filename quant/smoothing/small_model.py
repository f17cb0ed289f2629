"""Small configs of the same structure: widths divided by one factor, fewer experts, tokens and layers.

Widths are products (`hidden = heads * head_dim`), so one factor for all keeps what the config says true.
Counts of heads and groups stay, and with them the order of the channels.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...base.errors import BadInput, first_line
from ..families.registry import type_of
from ..model.auto import auto_class
from ..model.checkpoint import Checkpoint
from ..model.experts import with_experts_apart
from ..model.meta_model import MetaModel

_WIDTH = re.compile(
    r"hidden_size|intermediate_size|head_dim|(_|^)(dim|rank|width|d_model|d_head|d_ssm|n_embd|n_inner|d_ff"
    r"|channels|hidden_dim|ffn_dim|embed_dim)(_|$)|_(dim|rank|width|dimension)$"
)
_NO_WIDTH = re.compile(r"vocab|window|chunk|patch|image|kernel|block|state|num_|axis")
_EXPERTS = re.compile(r"^(n|num|moe_num|moe)(_routed|_local)?_experts$")
_CHOSEN = re.compile(r"experts_per_tok(en)?$|^moe_top_?k(_experts)?$|^top_k_experts$")
_DEPTH = re.compile(r"^(num_hidden_layers|n_layers?|num_layers)$")
_TOKEN = re.compile(r"_token_(id|index)$")
_MIN_HIDDEN, _MIN_HEAD = 64, 8
_VOCABULARY = 512
_MOST_CHOSEN = 4
_CHUNK = 16  # of state-space scans, which pad to it
_TEXT_PARTS = ("text_config", "llm_config", "language_config")
Raw = dict[str, Any]
NUM_TOKENS = 24
_SEED = 11


def small_config(raw: Mapping[str, Any], num_layers: int | None) -> Raw:
    """A raw config with the structure of another, and with so many text layers; None keeps all."""
    text = _text(raw)
    small = _small(raw, _factor(text), text is raw, num_layers)
    small.pop("quantization_config", None)
    small["dtype"] = "float32"
    return small


def text_layers(raw: Mapping[str, Any]) -> int:
    return next((v for k, v in _text(raw).items() if _DEPTH.match(k) and isinstance(v, int)), 0)


def _text(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a raw config that says what the text model is."""
    for name in _TEXT_PARTS:
        if isinstance(raw.get(name), Mapping):
            return _text(raw[name])
    return raw


def _factor(text: Mapping[str, Any]) -> int:
    """The factor of all widths: a power of two that leaves heads that RoPE can turn."""
    hidden = text.get("hidden_size") or text.get("n_embd") or text.get("d_model") or _MIN_HIDDEN
    heads = text.get("num_attention_heads") or text.get("n_head") or 1
    widths = {key: value for key, value in text.items() if "head" in key and _is_width(key)}
    dims = [value for value in widths.values() if isinstance(value, int)]
    if not isinstance(heads, int):
        heads = 1
    dims = [value for value in dims if value >= _MIN_HEAD] or [hidden // heads]
    factor = 1
    while (
        hidden // (2 * factor) >= _MIN_HIDDEN
        and min(dims) // (2 * factor) >= _MIN_HEAD // 2
        and max(dims) // (2 * factor) >= _MIN_HEAD
        and all(width % (2 * factor) == 0 for width in (hidden, *dims))
    ):
        factor *= 2
    return factor


def _is_width(name: str) -> bool:
    return _WIDTH.search(name) is not None and _NO_WIDTH.search(name) is None


def _small(raw: Mapping[str, Any], factor: int, is_text: bool, num_layers: int | None) -> Raw:
    depth = text_layers(raw) if is_text else 0
    cut = num_layers if is_text and num_layers is not None and num_layers < depth else None
    groups = next((raw[k] for k in ("n_group", "num_expert_group") if raw.get(k)), 1)
    small: Raw = {}
    for name, value in raw.items():
        if isinstance(value, Mapping):
            inner = name in _TEXT_PARTS
            config = inner or name.endswith("_config")
            small[name] = (
                _small(value, factor, inner, num_layers) if config else _small_rope(value, factor)
            )
        elif isinstance(value, bool):
            small[name] = value
        elif isinstance(value, int):
            small[name] = _small_number(name, value, factor, int(groups))
            if cut is not None and _DEPTH.match(name):
                small[name] = cut
        elif isinstance(value, (list, str)):
            values = value[:cut] if cut is not None and len(value) == depth else value
            if isinstance(values, list) and _is_width(name) and _all_integers(values):
                values = [max(1, width // factor) for width in values]
            small[name] = values
        else:
            small[name] = value
    return small


def _all_integers(values: Any) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) for value in values)


def _small_number(name: str, value: int, factor: int, groups: int) -> int:
    if name.endswith("chunk_size"):
        return min(value, _CHUNK)
    if "vocab_size" in name:
        return min(value, _VOCABULARY)
    if _TOKEN.search(name) and value >= _VOCABULARY:
        return _VOCABULARY - 1 - len(name) % 16
    if _EXPERTS.match(name):
        return min(value, max(2 * _MOST_CHOSEN, 2 * groups))
    if _CHOSEN.search(name):
        return min(value, _MOST_CHOSEN)
    if _is_width(name) and value > factor:
        return -(-value // factor)
    return value


def _small_rope(rope: Mapping[str, Any], factor: int) -> Raw:
    """RoPE's settings for heads that are narrower by a factor: factors of each frequency, and sections."""
    small: Raw = {}
    for name, value in rope.items():
        if isinstance(value, Mapping):
            small[name] = _small_rope(value, factor)
        elif name.endswith("section") and isinstance(value, list) and _all_integers(value):
            half = max(len(value), sum(value) // factor)
            rest = half // len(value)
            small[name] = [half - rest * (len(value) - 1), *[rest] * (len(value) - 1)]
        elif isinstance(value, list) and len(value) >= _MIN_HEAD:
            small[name] = value[: max(1, len(value) // factor)]
        else:
            small[name] = value
    return small


@dataclass(frozen=True, slots=True)
class RandomModel:
    """A random model in float32 on the CPU, ready to be run.

    Attributes:
        layers: decoder layers, experts apart where the checkpoint stores them apart.
        names: names on disk of each layer's modules that have a weight, relative to the layer.
    """

    model: Any
    layers: list[nn.Module]
    names: list[dict[str, str]]
    token_ids: torch.Tensor

    @torch.no_grad()
    def logits(self) -> torch.Tensor:
        result = self.model(input_ids=self.token_ids, use_cache=False)
        return result.logits if hasattr(result, "logits") else result[0]


def random_model(config: Any) -> RandomModel:
    """The random model of a config, of unit gain, with norms that are not 1; BadInput: it cannot be built."""
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            model = auto_class(config).from_config(
                config, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
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
        layers = [model.get_submodule(path) for path in meta_model.paths]
        names = []
        for index, (layer, split) in enumerate(zip(layers, meta_model.layers, strict=True)):
            # Experts that are apart in the layer of the meta model are so here, with empty weights.
            for path, module in list(split.named_modules()):
                with suppress(AttributeError):  # the layer has no such module
                    if type(layer.get_submodule(path)) is not type(module):
                        layer.set_submodule(path, module.to_empty(device="cpu"))
            parameters = dict(layer.named_parameters())
            names.append(
                {
                    name.removesuffix(".weight"): disk.removesuffix(".weight")
                    for disk, name in meta_model.names_in_layer(index).items()
                    if disk.endswith(".weight") and name.endswith(".weight") and name in parameters
                }
            )
    return layers, names


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
