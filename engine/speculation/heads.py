"""Draft heads: their checkpoints, EAGLE's in its authors' or converters' names, and Medusa's proposals.

Medusa's head k predicts the token k + 2 positions ahead (Cai et al., "Medusa", arXiv:2401.10774).
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from ...base.errors import BadInput, first_line
from ...quant.model.checkpoint import SINGLE_NAME, Checkpoint, read_json
from ..base.device import packed
from ..model.decoder.decoder import Decoder
from ..model.decoder.loader import LayerLoader
from ..model.decoder.reader import CheckpointReader, model_spec
from ..model.layers.attention import HeadAttention, Rotation
from ..model.layers.embedding import TokenEmbedding
from ..model.layers.projection import Projection, Weights
from ..model.layers.spec import KvLayout, LoadingOptions
from ..sampling.sampler import Sampler
from ..scheduling.step_plan import ScheduledRow
from .eagle import ConcatenatedInput, DraftVocabularyHead, EagleHead, EagleWeights, FusedInput
from .proposer import (
    DraftTokens,
    Proposer,
    SamplingRowOf,
    TargetStates,
    TreeExpansion,
    coupled_chains,
    expand_trees,
)

FILES = (SINGLE_NAME, "medusa_lm_head.safetensors", "medusa_lm_head.pt", "pytorch_model.bin")
"""File names of published heads, in order of precedence."""


class HeadsCheckpoint(Checkpoint):
    """A `Checkpoint` of small draft heads, read at once. BadInput: missing, cut off, or no named tensors."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = self.path = Path(folder)
        self.config = read_json(self.folder / "config.json")
        path = next((p for name in FILES if (p := self.folder / name).is_file()), None)
        if path is None:
            raise BadInput(f"{self.folder} has no heads: none of {', '.join(FILES)} is there")
        self._tensors = _tensors(path)
        self.shard_of = dict.fromkeys(self._tensors, path.name)

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            raise BadInput(f"{self.folder} has no tensor {name!r}")
        return self._tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensor(name).shape)


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise BadInput(f"{path} is cut off or damaged: {first_line(error)}") from error
    if not isinstance(tensors, dict) or not all(
        isinstance(x, torch.Tensor) for x in tensors.values()
    ):
        raise BadInput(f"{path} does not hold named tensors")
    return tensors


_LAYERS = ("layers.0.", "midlayer.")
"""Prefixes of the single layer: EAGLE, EAGLE-3."""


def load_eagle(checkpoint: HeadsCheckpoint, target: Decoder, loading: LoadingOptions) -> EagleHead:
    """Load `target`'s EAGLE head. BadInput: a missing tensor, a size or config that is not its head's."""
    folder, config = checkpoint.folder, checkpoint.config
    spec = model_spec(config)
    shape, rope = spec.shape, spec.ropes[0]
    if "fc.weight" not in checkpoint:
        raise BadInput(f"{folder}: no EAGLE head: the file has no fc.weight")
    if shape.num_layers != 1 or shape.latent is not None or shape.experts is not None:
        raise BadInput(f"{folder}: config.json describes no EAGLE head: it is one dense layer")
    if rope is None:
        raise BadInput(f"{folder}: config.json describes no EAGLE head: it has no rotation")
    is_eagle3 = any(f"{layer}hidden_norm.weight" in checkpoint for layer in _LAYERS)
    read = shape.hidden_size
    if is_eagle3:
        read = config.get("target_hidden_size") or read
    _agree(folder, "hidden size", read, target.spec.shape.hidden_size)
    _agree(folder, "vocabulary", shape.vocab_size, target.vocab_size)
    layer = next((x for x in _LAYERS if f"{x}self_attn.q_proj.weight" in checkpoint), _LAYERS[0])
    biases = {
        field: f"{layer}self_attn.{linear}.bias" in checkpoint
        for field, linear in (("qkv_bias", "q_proj"), ("output_bias", "o_proj"))
    }
    spec = replace(spec, shape=replace(shape, **biases))
    reader = CheckpointReader(checkpoint, loading)
    load = _eagle3_weights if is_eagle3 else _eagle_weights
    weights = load(_HeadLoader(reader, spec, "", loading.dtype, None, checkpoint, layer, target))
    reader.finish(lambda name: name.endswith(spec.names.buffers) or name == "t2d")
    return EagleHead(spec, rope, weights, target, loading)


@dataclass(frozen=True, slots=True)
class _HeadLoader(LayerLoader):
    """Loads the parts of a head for `target`, whose layer has the prefix `layer`."""

    checkpoint: HeadsCheckpoint
    layer: str
    target: Decoder

    def own_embedding(self) -> TokenEmbedding:
        """The head's embedding; the target's where the head has none and the widths agree."""
        shape, shared = self.spec.shape, self.target.weights.embedding
        if "embed_tokens.weight" not in self.checkpoint and shared.width == shape.hidden_size:
            return shared
        return self.embedding("embed_tokens.weight", tied=False)

    def fc(self, in_features: int) -> Projection:
        bias, out = "fc.bias" in self.checkpoint, self.spec.shape.hidden_size
        return self.reader.projection(["fc"], in_features, [out], bias=bias)

    def attention(self, in_features: int) -> HeadAttention:
        rotation = Rotation(0, self.spec.rotary_interleaved)
        return self.head_attention(self.layer, 0, rotation, in_features)


def _eagle_weights(source: _HeadLoader) -> EagleWeights:
    hidden = source.spec.shape.hidden_size
    return EagleWeights(
        embedding=source.own_embedding(),
        aux_hidden_state_layers=(),
        aux_fusion=None,
        input_fusion=FusedInput(source.fc(2 * hidden)),
        attention=source.attention(hidden),
        mlp_norm=source.norm(f"{source.layer}post_attention_layernorm", hidden),
        mlp=source.block(source.layer, 0),
        scores=None,
    )


def _eagle3_weights(source: _HeadLoader) -> EagleWeights:
    config, layer, shape = source.checkpoint.config, source.layer, source.spec.shape
    hidden, read = shape.hidden_size, source.target.spec.shape.hidden_size
    folder, count = source.checkpoint.folder, source.target.spec.shape.num_layers
    usual = (2, count // 2, count - 3)
    aux_layers = tuple(config.get("eagle_aux_hidden_state_layer_ids") or usual)
    if not all(isinstance(index, int) and 0 <= index < count for index in aux_layers):
        raise BadInput(
            f"{folder}: auxiliary hidden states of the layers {[*aux_layers]}; the model has {count}"
        )
    draft_vocab_size = config.get("draft_vocab_size") or shape.vocab_size
    token_ids = None
    if "d2t" in source.checkpoint:
        offsets = source.reader.numbers("d2t", draft_vocab_size)
        token_ids = torch.arange(draft_vocab_size, device=source.reader.device) + offsets
        if not bool(((token_ids >= 0) & (token_ids < shape.vocab_size)).all()):
            raise BadInput(f"{folder}: d2t maps to token ids outside the vocabulary")
    elif draft_vocab_size != shape.vocab_size:
        raise BadInput(
            f"{folder}: a draft vocabulary of {draft_vocab_size} tokens, and no d2t that maps it"
        )
    return EagleWeights(
        embedding=source.own_embedding(),
        aux_hidden_state_layers=aux_layers,
        aux_fusion=source.fc(len(aux_layers) * read),
        input_fusion=ConcatenatedInput(
            source.norm(f"{layer}input_layernorm", hidden),
            source.norm(f"{layer}hidden_norm", hidden),
            bool(config.get("norm_before_residual", False)),
        ),
        attention=source.attention(2 * hidden),
        mlp_norm=source.norm(f"{layer}post_attention_layernorm", hidden),
        mlp=source.block(layer, 0),
        scores=DraftVocabularyHead(
            source.norm("norm", hidden),
            source.reader.projection(["lm_head"], hidden, [draft_vocab_size], bias=False),
            token_ids,
            shape.vocab_size,
        ),
    )


def _agree(folder: Path, what: str, actual: int, expected: int) -> None:
    if actual != expected:
        raise BadInput(f"{folder}: a head for a {what} of {actual}; the model's is {expected}")


_LAYOUTS = (
    ("{head}.{block}.linear", "{head}.{blocks}"),  # as Medusa's authors publish heads
    ("blocks.{head}.layers.{block}", "lm_heads.{head}"),  # as vLLM's converter writes them
)
"""Module names: of a block by head and its index, of the output by head and number of blocks."""


@dataclass(frozen=True, slots=True)
class MedusaHead(Weights):
    """Residual blocks `x + silu(linear x)`, and a projection onto the vocabulary."""

    blocks: Sequence[Projection]
    output: Projection

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits, float32 [rows, vocab], of final hidden states [rows, hidden]."""
        for block in self.blocks:
            hidden = hidden + functional.silu(block(hidden))
        return self.output(hidden).float()


@dataclass(frozen=True, slots=True)
class MedusaHeads:
    """Head k, from 0 on, predicts the token k + 2 positions after the one whose hidden state it reads."""

    heads: Sequence[MedusaHead]

    kv_layouts: tuple[KvLayout, ...] = ()

    @property
    def bytes_held(self) -> int:
        return sum(head.weight_bytes for head in self.heads)

    @property
    def bytes_per_position(self) -> int:
        return self.heads[0].weight_bytes


def load_medusa(
    checkpoint: HeadsCheckpoint, hidden_size: int, vocab_size: int, loading: LoadingOptions
) -> MedusaHeads:
    """Medusa heads, as many as the file's tensors say: configs may lack it. BadInput: none, or misfits."""
    names = next((n for n in _LAYOUTS if _module(n[0], 0, 0) in checkpoint), None)
    if names is None:
        raise BadInput(
            f"{checkpoint.folder}: no Medusa heads: the file has neither "
            + " nor ".join(_module(block, 0, 0) for block, _ in _LAYOUTS)
        )
    block_name, output_name = names
    num_blocks = next(i for i in count() if _module(block_name, 0, i) not in checkpoint)
    num_heads = next(i for i in count() if _module(block_name, i, 0) not in checkpoint)
    head_size = checkpoint.shape(_module(block_name, 0, 0))[-1]
    if head_size != hidden_size:
        raise BadInput(
            f"{checkpoint.folder}: heads for a hidden size of {head_size}; the model's is {hidden_size}"
        )
    output = f"{output_name.format(head=0, blocks=num_blocks)}.weight"
    if output in checkpoint and checkpoint.shape(output)[0] != vocab_size:
        raise BadInput(
            f"{checkpoint.folder}: heads for {checkpoint.shape(output)[0]} tokens; the model has "
            f"{vocab_size}"
        )
    reader = CheckpointReader(checkpoint, loading)
    heads = []
    for head in range(num_heads):
        modules = [block_name.format(head=head, block=i) for i in range(num_blocks)]
        blocks = [
            reader.projection([m], hidden_size, [hidden_size], bias=f"{m}.bias" in checkpoint)
            for m in modules
        ]
        top = output_name.format(head=head, blocks=num_blocks)
        heads.append(
            MedusaHead(blocks, reader.projection([top], hidden_size, [vocab_size], bias=False))
        )
    reader.finish(lambda name: False)
    return MedusaHeads(heads)


def _module(pattern: str, head: int, block: int) -> str:
    return f"{pattern.format(head=head, block=block)}.weight"


class MedusaProposer(Proposer):
    """Medusa proposer: the heads read the final hidden state that the last known token was sampled from."""

    def __init__(self, heads: MedusaHeads, width: int) -> None:
        self._heads = heads.heads
        self._width = width
        self._sampler = Sampler()
        self._hidden: dict[tuple[str, int], torch.Tensor] = {}
        self.bytes_held = heads.bytes_held

    def observe(self, steps: Sequence[TargetStates]) -> None:
        self._hidden = {step.place: step.hidden[-1] for step in steps}

    def propose(
        self, rows: Sequence[ScheduledRow], draw: SamplingRowOf
    ) -> Mapping[str, DraftTokens]:
        known = [
            row
            for row in rows
            if row.num_draft_tokens and (row.sequence_id, row.end - 1) in self._hidden
        ]
        if self._width == 1:
            return self._chains(known, draw) if known else {}
        expansions = [TreeExpansion(row, self._width) for row in known]

        def logits(active: Sequence[TreeExpansion]) -> torch.Tensor:
            by_row = self._heads[active[0].level](self._last_hidden([tree.row for tree in active]))
            of_nodes = [index for index, tree in enumerate(active) for _ in tree.frontier]
            return by_row.index_select(0, packed([of_nodes], by_row.device)[0])

        return expand_trees(expansions, self._sampler, draw, logits)

    def _chains(
        self, rows: Sequence[ScheduledRow], draw: SamplingRowOf
    ) -> Mapping[str, DraftTokens]:
        def follow(
            rows: Sequence[ScheduledRow], chains: Sequence[list[int]], *_: Any
        ) -> torch.Tensor:
            return self._heads[len(chains[0])](self._last_hidden(rows))

        first = self._heads[0](self._last_hidden(rows))
        return coupled_chains(rows, first, self._sampler, draw, follow)

    def _last_hidden(self, rows: Sequence[ScheduledRow]) -> torch.Tensor:
        return torch.stack([self._hidden[row.sequence_id, row.end - 1] for row in rows])
