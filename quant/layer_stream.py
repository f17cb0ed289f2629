"""A decoder run one layer at a time: only the layer in work has weights in memory.

The model is built on the meta device from its config, so the layers are transformers' own; each gets its
weights from the checkpoint when its turn comes and loses them afterwards. Everything is float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from .checkpoint import Checkpoint
from .errors import BadInput
from .families import Family
from .methods.base import InputStatistics

TOKENS_PER_BATCH = 4096
_IGNORED_BUFFER = "rotary_emb.inv_freq"  # old checkpoints carry what every model computes


class LayerStream:
    """The decoder layers of a checkpoint, materialised one by one.

    Args:
        checkpoint: a plain (unquantized) checkpoint of a supported family.

    Raises:
        BadInput: transformers does not accept the config.
    """

    def __init__(self, checkpoint: Checkpoint, family: Family):
        self.checkpoint = checkpoint
        self._family = family
        self._model = _meta_model(checkpoint)
        self.num_layers = len(self._model.layers)
        self.vocab_size = int(self._model.config.vocab_size)
        self.hidden_size = int(self._model.config.hidden_size)
        self._arguments: list[dict[str, Any]] = []
        self._norm = self._model.norm
        self._model.norm = nn.Identity()

    def prefix(self, index: int) -> str:
        """Name of a layer in the checkpoint."""
        return f"model.layers.{index}"

    @torch.no_grad()
    def prepare(self, token_ids: torch.Tensor) -> None:
        """Learn what the model passes to each of its layers (mask, rotary angles) for samples of this length.

        Args:
            token_ids: int64 `[samples, length]`; one sample is enough, since all have one length.
        """
        recorders = [_Recorder() for _ in range(self.num_layers)]
        layers, self._model.layers = self._model.layers, nn.ModuleList(recorders)
        try:
            self._model(inputs_embeds=self.embed(token_ids[:1]), use_cache=False)
        finally:
            self._model.layers = layers
        self._arguments = [recorder.arguments for recorder in recorders]

    @torch.no_grad()
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Hidden states `[samples, length, hidden]` that enter the first layer, float32."""
        table = self.checkpoint.tensor("model.embed_tokens.weight")
        return nn.functional.embedding(token_ids, table).to(torch.float32)

    @torch.no_grad()
    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """What `lm_head` reads, from the outputs of the last layer."""
        weight = self.checkpoint.tensor("model.norm.weight").to(torch.float32)
        self._norm.load_state_dict({"weight": weight}, assign=True)
        return self._norm(hidden)

    def tensors(self, index: int) -> dict[str, torch.Tensor]:
        """The tensors of a layer in the checkpoint's dtype, named relative to the layer."""
        start = self.prefix(index) + "."
        return {
            name.removeprefix(start): tensor
            for name, tensor in self.checkpoint.tensors(start)
            if not name.endswith(_IGNORED_BUFFER)
        }

    def load(self, index: int, tensors: dict[str, torch.Tensor]) -> nn.Module:
        """Give a layer its weights; `unload` takes them away again.

        Raises:
            BadInput: the checkpoint's tensors are not those of this architecture.
        """
        layer = self._model.layers[index]
        state = {name: tensor.to(torch.float32) for name, tensor in tensors.items()}
        try:
            layer.load_state_dict(state, strict=True, assign=True)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise BadInput(
                f"{self.checkpoint.folder}: {self.prefix(index)} does not fit its config: {reason}"
            ) from error
        return layer

    def unload(self, index: int) -> None:
        """Free the weights of a layer."""
        self._model.layers[index].to("meta")

    @torch.no_grad()
    def run(
        self,
        index: int,
        hidden: torch.Tensor,
        out: torch.Tensor | None = None,
        **overrides: Any,
    ) -> torch.Tensor:
        """Outputs `[samples, length, hidden]` of a loaded layer.

        Args:
            out: where to put them; `hidden` itself will do, since no sample looks at another.
            overrides: in place of what the model passes to its layers, such as `past_key_values`.
        """
        layer = self._model.layers[index]
        outputs = torch.empty_like(hidden) if out is None else out
        arguments = self._arguments[index] | overrides
        batch = max(1, TOKENS_PER_BATCH // hidden.shape[1])
        for start in range(0, hidden.shape[0], batch):
            rows = slice(start, start + batch)
            result = layer(hidden[rows], **arguments)
            outputs[rows] = result[0] if isinstance(result, tuple) else result
        return outputs

    def measure(self, index: int, hidden: torch.Tensor) -> dict[str, InputStatistics]:
        """Run a loaded layer and gather what each linear sees; those with one input share one record."""
        layer = self._model.layers[index]
        statistics: dict[str, InputStatistics] = {}
        handles = []
        for group in self._family.shared_inputs:
            linear = layer.get_submodule(group[0])
            assert isinstance(linear, nn.Linear)
            record = InputStatistics(linear.in_features)
            statistics |= dict.fromkeys(group, record)
            handles.append(linear.register_forward_pre_hook(_recording(record)))
        try:
            self.run(index, hidden)
        finally:
            for handle in handles:
                handle.remove()
        return statistics

    def weights(self, index: int, linears: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """Float32 weights `[out, in]` of a loaded layer; they share its memory."""
        layer = self._model.layers[index]
        return {name: layer.get_parameter(f"{name}.weight").data for name in linears}

    def substitute(self, index: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put other weights into a loaded layer, by the name of the linear, norm or router."""
        layer = self._model.layers[index]
        for name, tensor in tensors.items():
            layer.get_parameter(f"{name}.weight").data = tensor.to(torch.float32)

    def remeasure(
        self, index: int, hidden: torch.Tensor, replaced: Mapping[str, torch.Tensor]
    ) -> dict[str, InputStatistics]:
        """`measure` with some weights replaced; the layer is afterwards as it was."""
        before = self.weights(index, tuple(replaced))
        self.substitute(index, replaced)
        try:
            return self.measure(index, hidden)
        finally:
            self.substitute(index, before)


def _recording(record: InputStatistics) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
    def hook(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        record.add(inputs[0])

    return hook


class _Recorder(nn.Module):
    """Stands where a layer was and keeps what the model passed to it."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments: dict[str, Any] = {}

    def forward(self, hidden: torch.Tensor, **arguments: Any) -> torch.Tensor:
        self.arguments = arguments
        return hidden


def _meta_model(checkpoint: Checkpoint) -> Any:
    """The decoder of a checkpoint without weights, its rotary tables on the CPU."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(checkpoint.folder)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        decoder: Any = model.model
        decoder.rotary_emb = type(decoder.rotary_emb)(config=config)
    except (
        Exception
    ) as error:  # a wrong config fails in whatever line of transformers meets it first
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadInput(f"{checkpoint.folder}/config.json is not usable: {reason}") from error
    return decoder.eval()
