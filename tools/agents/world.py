"""Make what the clients meet: a tiny model with a long context, the script of its answers, a picture and a
paper."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from .clients import CUT_CALL, CUT_NAME, KINDS, Client, final

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} as <tool_call>{}</tool_call>\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{{ '\\n' }}"
    "{% endfor %}assistant:"
)
CONTEXT = 262_144
RESULT = "RESULT-7731"
"""Marks the tool round trip: no prompt has it before the client has run the call."""


def write_model(folder: Path, texts: Iterable[str]) -> None:
    """One random layer behind a byte-level tokenizer that is trained on `texts`: agents' prompts are long."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=4096, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def write_files(folder: Path) -> None:
    """The picture and the paper that clients send."""
    for name in ("picture.png", "paper.pdf"):
        Image.new("RGB", (32, 32), "red").save(folder / name)


def script(clients: Iterable[Client]) -> Sequence[Mapping[str, str]]:
    """The model's answers: a client's words choose its first one, what its tools return the next."""
    entries = [
        {"after": RESULT, "text": final("tool")},
        {"after": CUT_NAME, "text": final("cut")},  # what the client has made of the cut-off call
    ]
    for client in clients:
        for kind in KINDS:
            call = client.calls.get(kind)
            text = (
                _called(*call)
                if call
                else CUT_CALL
                if kind == "cut" and client.is_agent
                else final(kind)
            )
            entries.append({"after": f"{client.name}-{kind}", "text": text})
        entries += [{"after": after, "text": text} for after, text in client.more]
    return entries


def _called(name: str, arguments: Mapping[str, Any]) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
