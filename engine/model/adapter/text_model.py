"""The text model inside a multimodal one, and the modules that text never reaches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from ....quant.base.device import hooks
from ..layers.embedding import EmbeddedRows

Result = TypeVar("Result")


def text_decoder(model: Any) -> Any:
    """The outermost module that is built from the model's text config; else the model itself."""
    config = model.config.get_text_config(decoder=True)
    modules = (m for m in model.modules() if getattr(m, "config", None) is config)
    return next((m for m in modules if hasattr(m, "set_attn_implementation")), model)


def plain_tokens(model: Any, count: int) -> torch.Tensor:
    """Ordinary token ids, int64 [count]: the first that the config does not name, repeated if too few."""
    parts = (model.config, model.config.get_text_config(decoder=True))
    special = {
        value
        for part in parts
        for name, value in vars(part).items()
        if "token" in name and isinstance(value, int)
    }
    vocabulary = model.get_input_embeddings().weight.shape[0]
    plain = [token for token in range(min(vocabulary, 1000)) if token not in special][:count]
    return torch.tensor([plain[index % len(plain)] for index in range(count)])


def token_arguments(
    model: Any, token_ids: torch.Tensor, embedded: EmbeddedRows | None
) -> dict[str, torch.Tensor]:
    """Arguments of a forward pass for its tokens: ids [tokens], or embeddings where some are of images."""
    if embedded is None:
        return {"input_ids": token_ids[None]}
    embeddings = model.get_input_embeddings()(token_ids)
    return {"inputs_embeds": embedded.replace(embeddings)[None]}


def own_pass(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, Any]:
    output = model(input_ids=tokens[None], use_cache=True)
    return output.logits[0].float(), getattr(output, "past_key_values", None)


def run_and_drop_uncalled(
    model: nn.Module, decoder: nn.Module, run: Callable[[], Result]
) -> Result:
    """Run a pass of text; free the weights of modules outside `decoder` that it does not call. The modules
    stay, with empty weights. In the decoder nothing is freed: other texts reach other experts."""
    needed = set(decoder.modules())
    if model in needed:
        return run()
    with hooks(
        module.register_forward_pre_hook(lambda called, _: needed.add(called))
        for module in model.modules()
        if module not in needed
    ):
        result = run()
    kept = {id(tensor) for module in needed for tensor in _tensors(module)}
    for module in model.modules():
        if needed.isdisjoint(module.modules()):
            for tensor in _tensors(module):
                if id(tensor) not in kept:
                    tensor.data = tensor.new_empty(0)
    return result


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)
