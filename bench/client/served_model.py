"""The model behind a server: its served name, tokenizer and maximum sequence length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...quant.base.errors import BadInput
from ...quant.models import is_local, resolve_model
from ...quant.tokenizer.load import load_tokenizer
from ..options.options import BenchOptions
from .address import Address

DEFAULT_CONTEXT = 32768


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model behind a server, with the tokenizer of its prompts."""

    model: str
    tokenizer_name: str
    tokenizer: Any
    max_model_len: int


def find_served(options: BenchOptions, address: Address) -> ServedModel:
    """Resolve the served model name and its tokenizer.

    Raises:
        BadInput: no `--model` and a server that does not list one, or no tokenizer under any of its names.
    """
    card: dict[str, Any] = {}
    try:
        card = address.model_card()
    except BadInput:
        # With every option set, a failing server shows as failed requests, which are counted.
        if options.model is None:
            raise
    model = options.model or card["id"]
    names = [options.tokenizer] if options.tokenizer else [model, card.get("root")]
    tokenizer_name, folder = find_tokenizer([name for name in names if name], options)
    limit = options.max_model_len or card.get("max_model_len")
    tokenizer = load_tokenizer(folder, trust_remote_code=options.trust_remote_code)
    return ServedModel(model, tokenizer_name, tokenizer, limit or DEFAULT_CONTEXT)


def find_tokenizer(names: Sequence[str], options: BenchOptions) -> tuple[str, Path]:
    """(name, folder) of the first of `names` that is a model here. Only a name from the options may be looked
    up on the hub; a name reported by the server is looked up on this machine."""
    for name in names:
        given = name in (options.tokenizer, options.model)
        if is_local(name) or (given and (options.tokenizer or "/" in name)):
            return name, resolve_model(name)
    raise BadInput(
        f"no tokenizer for {' or '.join(map(repr, names))}: give --tokenizer FOLDER, a .gguf file, a bundled "
        "model or a hub id"
    )
