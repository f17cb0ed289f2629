"""The tokenizer of a checkpoint, and which tokens end a sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..quant.checkpoint import read_json
from ..quant.errors import BadInput
from ..quant.models import tokenizer_arguments


def load_tokenizer(model: Path) -> Any:
    """The tokenizer of a model.

    Raises:
        BadInput: it does not load.
    """
    from transformers import AutoTokenizer

    arguments = tokenizer_arguments(model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(**arguments)
    except Exception as error:  # transformers raises whatever the broken file led to
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BadInput(f"{model}: the tokenizer does not load: {reason}") from error
    # Our own check says how long is too long; the tokenizer's warning would only add noise.
    tokenizer.model_max_length = int(1e30)
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


def end_token_ids(folder: Path, config: dict[str, Any], tokenizer: Any) -> frozenset[int]:
    """Every id that ends a sequence: the generation config's, else the model's, and the tokenizer's."""
    path = folder / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    listed = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = set(listed) if isinstance(listed, list) else {listed}
    ids.add(tokenizer.eos_token_id)
    return frozenset(token for token in ids if token is not None)
