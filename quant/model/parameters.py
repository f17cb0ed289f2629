"""Parameters of transformers' model of a checkpoint, the tensors they are loaded from, the unquantized ones.

Names are mapped by transformers' rules: renamings, converters, prefix. A loader that is not told which
modules stay unquantized looks for codes in each linear, or leaves it uninitialised. vLLM takes the names on
disk, transformers those of its modules: a config lists both.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ...base.errors import BadInput
from .architecture import HEAD
from .auto import build_on_meta, read_config
from .checkpoint import Checkpoint, kind_name
from .experts import GATE, experts_of, patch_of
from .meta_model import WeightMap


class Loaded(NamedTuple):
    """The parameters that a tensor on disk becomes.

    Attributes:
        parameters: names; empty where transformers does not load it.
        converted: True if it is computed with, such as merged with others, and not just renamed.
        as_weight: True if the conversion is of tensors named `weight`, to which the quantizers of
            transformers add the names of codes and scales.
    """

    parameters: tuple[str, ...]
    converted: bool = False
    as_weight: bool = False


class ModelParameters:
    """The names of a model's parameters, and those of the tensors that they are loaded from.

    Attributes:
        linears: names of the modules of class `nn.Linear`, in the order of the model.

    Args:
        raw: the raw `config.json`; its `quantization_config` is not read.
        folder: folder of the checkpoint, for one that brings its own code.
        apart: True if its files hold each expert by itself: transformers exchanges some modules then.

    Raises:
        BadInput: transformers does not know the model type, or does not build it.
    """

    def __init__(
        self,
        raw: Mapping[str, Any],
        folder: Path | None = None,
        *,
        trust_remote_code: bool = False,
        apart: bool = False,
    ):
        plain = {key: value for key, value in raw.items() if key != "quantization_config"}
        config = read_config(plain, folder, trust_remote_code=trust_remote_code)
        self._model: Any = build_on_meta(config, trust_remote_code=trust_remote_code)
        text_config = self._model.config.get_text_config(decoder=True)
        self._apart: tuple[str, Collection[str]] | None = None
        for path, module in list(self._model.named_modules()) if apart else ():
            if (patch := patch_of(module)) is not None:
                with torch.device("meta"):
                    split = patch["module_name"](text_config)
                self._model.set_submodule(path, split)
                self._apart = self._apart or (path, tuple(patch["quantization_methods"]))
        self._state = self._model.state_dict()
        self.linears = tuple(
            path for path, module in self._model.named_modules() if isinstance(module, nn.Linear)
        )

    def experts_apart(self, names: Iterable[str]) -> dict[str, str]:
        """Fused experts of the model whose weights are on disk by expert, though transformers does not merge
        them: the path of each module, and the module on disk."""
        paths = {}
        for disk, count in experts_of(names).items():
            weight = f"{disk}.0.{GATE}.weight"
            renamed = WeightMap([weight], self._model).renamed_names[weight]
            target = renamed.removesuffix(f".0.{GATE}.weight")
            whole = self._state.get(f"{target}.gate_up_proj")
            merged = self.loaded_from([weight])[weight].parameters
            if not merged and whole is not None and len(whole) == count:
                paths[target] = disk
        return paths

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._state)

    def module(self, path: str) -> Any:
        return self._model.get_submodule(path)

    def loaded_from(self, names: Iterable[str]) -> dict[str, Loaded]:
        """The parameters that each tensor on disk becomes, or becomes a part of."""
        weight_map = WeightMap(names, self._model)
        loaded: dict[str, Loaded] = {}
        for name, target in weight_map.targets.items():
            if target not in self._state:
                loaded[name] = Loaded(())
                continue
            sources = weight_map.merged_from(name)
            loaded[name] = Loaded(
                tuple(weight_map.all_targets(name)),
                converted=bool(sources),
                as_weight=bool(sources) and all(source.endswith(".weight") for source in sources),
            )
        return loaded

    def weight_shapes(self, modules: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """The shape of each module's weight (names on disk), where it is one parameter of the model."""
        loaded = self.loaded_from(f"{module}.weight" for module in modules)
        return {
            name.removesuffix(".weight"): tuple(self._state[entry.parameters[0]].shape)
            for name, entry in loaded.items()
            if len(entry.parameters) == 1 and not entry.converted
        }

    def split_weights(self) -> list[str]:
        return WeightMap((), self._model).split_weights

    def missing(self, names: Iterable[str]) -> list[str]:
        """Parameters that no tensor of `names` is loaded into, without those that are tied or optional."""
        tied = getattr(self._model, "all_tied_weights_keys", None) or {}
        given = {name for loaded in self.loaded_from(names).values() for name in loaded.parameters}
        given |= {name for name, source in tied.items() if source in given}
        given |= {source for name, source in tied.items() if name in given}
        optional = getattr(self._model, "_keys_to_ignore_on_load_missing", None) or ()
        return [
            name
            for name in self._state
            if name not in given and not any(re.search(pattern, name) for pattern in optional)
        ]

    def unplaced(self, names: Iterable[str]) -> list[str]:
        """Tensors that load no parameter, without buffers, layers beyond the model's and ignored names."""
        ignored = [
            *_BUFFERS,
            *(getattr(self._model, "_keys_to_ignore_on_load_unexpected", None) or ()),
        ]
        layers = getattr(self._model.config.get_text_config(decoder=True), "num_hidden_layers", 0)

        def may_remain(name: str) -> bool:
            layer = _LAYER.search(name)
            beyond = layer is not None and int(layer[1]) >= layers
            return beyond or any(re.search(pattern, name) for pattern in ignored)

        loaded = self.loaded_from(names)
        return [n for n, to in loaded.items() if not to.parameters and not may_remain(n)]

    def replaced(self, quant_method: str) -> str | None:
        """The first module in whose place transformers puts another, with other names, for a quantized
        checkpoint of this method, or leaves one though the files hold that other; None: there is none."""
        if self._apart is not None and quant_method not in self._apart[1]:
            return self._apart[0]
        for path, module in self._model.named_modules():
            patch = patch_of(module)
            if patch is not None and quant_method in patch["quantization_methods"]:
                return path
        return None

    def needs_weights(self, linears: Collection[str]) -> str | None:
        """Why transformers cannot initialise the model without `weight` in these linears; None: it can."""
        model = copy.deepcopy(self._model)  # on the meta device: no memory
        for path in linears:
            del model.get_submodule(path).weight
        for module in model.modules():
            try:
                with torch.no_grad():
                    model._init_weights(module)
            except AttributeError as error:
                if "'weight'" in str(error):
                    return f"{type(module).__name__} is initialised by a weight that has codes"
            except Exception:  # initialisations that need real numbers
                continue
        return None


_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
_BUFFERS = (r"rotary_emb\.", r"\.attn\.(masked_)?bias$", r"(^|\.)mtp\.", r"position_ids$")


def model_parameters(checkpoint: Checkpoint) -> ModelParameters | str:
    """The parameters of transformers' model of a checkpoint, or why transformers has none."""
    # A plain weight's name for each module with a weight or codes.
    weights = {f"{name.rpartition('.')[0]}.weight" for name in checkpoint.names}
    try:
        return ModelParameters(
            checkpoint.config,
            checkpoint.folder,
            trust_remote_code=checkpoint.trust_remote_code,
            apart=bool(experts_of(weights)),
        )
    except BadInput as error:
        return str(error)


def unquantized_modules(
    checkpoint: Checkpoint, quantized: Collection[str], parameters: ModelParameters | str
) -> tuple[str, ...]:
    """Linears, embeddings and fused experts not `quantized` (names on disk), output projection first."""
    on_disk: dict[str, None] = {}
    for name in checkpoint.names:
        module, _, leaf = name.rpartition(".")
        dimensions = len(checkpoint.shape(name)) if module not in quantized else 0
        fused_experts = dimensions == 3 and module.endswith(".experts")
        if fused_experts or (leaf == "weight" and dimensions == 2):
            on_disk[module] = None
    plain = () if isinstance(parameters, str) else plain_linears(parameters, quantized)
    names = [name for name in {**on_disk, **dict.fromkeys(plain)} if name not in quantized]
    head = [] if HEAD in quantized else [HEAD]
    return (*head, *(name for name in names if name != HEAD))


def plain_linears(parameters: ModelParameters, quantized: Collection[str]) -> list[str]:
    """The linears of transformers' modules that have a weight and no codes, or one computed from codes."""
    loaded = parameters.loaded_from(f"{module}.weight" for module in quantized)
    with_codes = {
        name.removesuffix(".weight")
        for tensor in loaded.values()
        if not tensor.converted
        for name in tensor.parameters
    }
    return [name for name in parameters.linears if name not in with_codes]


def by_kind(names: Iterable[str]) -> list[str]:
    """Names that differ in layer or expert as one, with their number: `model.layers.*.mlp.gate (24)`."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(kind_name(name), []).append(name)
    return [
        members[0] if len(members) == 1 else f"{kind} ({len(members)})"
        for kind, members in kinds.items()
    ]
