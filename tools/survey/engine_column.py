"""Column `engine`: greedy tokens of the engine against transformers' own `generate`, in float32."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from llmopt.base.errors import BadInput
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.core.llm import LLM
from llmopt.engine.model.adapter.packed import PackedForward
from llmopt.engine.model.adapter.sequential import SequentialForward
from llmopt.engine.model.decoder.decoder import Decoder
from llmopt.recipes import MODELS
from transformers import AutoTokenizer

from tests.support.survey.case import Case, Verdict, spread_weights

PROMPT_LENGTHS = (5, 23, 70)
NEW_TOKENS = 16
CHUNK = 9
BLOCK = 4


class EngineColumn:
    """Exact: the tokens of prompts that are generated together, in chunks, are transformers' own."""

    name = "engine"

    def verdict(self, case: Case) -> Verdict:
        """Generate with both; the detail says which modules ran."""
        model = spread_weights(copy.deepcopy(case.model))
        folder = case.folder / self.name
        model.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(MODELS / "stories260K", trust_remote_code=False)
        tokenizer.save_pretrained(folder)
        prompts = list(_prompts(case.raw))
        try:
            llm = LLM(
                folder,
                dtype="float32",
                device="cpu",
                num_threads=1,
                max_model_len=128,
                block_size=BLOCK,
                num_blocks=150,
                prefill_chunk_size=CHUNK,
            )
        except BadInput as error:
            return Verdict("refused", _relative(str(error), folder))
        params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
        results = llm.generate(prompts, params)
        for prompt, result in zip(prompts, results, strict=True):
            expected = greedy_tokens(model, prompt)
            if result.completions[0].token_ids != expected:
                same = _common(result.completions[0].token_ids, expected)
                return Verdict("wrong", f"prompt of {len(prompt)} tokens, token {same} differs")
        return Verdict("exact", _way(llm.engine.runner.decoder))


def greedy_tokens(model: Any, prompt: list[int]) -> list[int]:
    """transformers' own greedy continuation, without an end token."""
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        try:
            output = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                num_beams=1,
                max_new_tokens=NEW_TOKENS,
                pad_token_id=0,
            )
        except (
            AttributeError
        ):  # `generate` of an omni model reads a field that its part's config lacks
            output = ids
            for _ in range(NEW_TOKENS):
                logits = model(input_ids=output, use_cache=False).logits
                output = torch.cat([output, logits[:, -1:].argmax(-1)], dim=1)
    return output[0, len(prompt) :].tolist()


def _prompts(raw: Mapping[str, Any]) -> Iterator[list[int]]:
    """Random tokens without the config's special ones; each prompt begins like the one before it."""
    special = set(_token_ids(raw))
    plain = [token for token in range(10, 100) if token not in special]
    generator = torch.Generator().manual_seed(2)
    first: list[int] = []
    for length in PROMPT_LENGTHS:
        draws = torch.randint(len(plain), (length,), generator=generator).tolist()
        first = first[: length // 3] + [plain[i] for i in draws[min(len(first), length // 3) :]]
        yield first


def _token_ids(value: Any, name: str = "") -> Iterator[int]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _token_ids(part, str(key))
    elif isinstance(value, list):
        for part in value:
            yield from _token_ids(part, name)
    elif isinstance(value, int) and "token" in name:
        yield value


def _way(model: Any) -> str:
    """What ran: the decoder, or transformers' modules in one batch (packed) or by sequence."""
    ways = {Decoder: "decoder", PackedForward: "packed", SequentialForward: "sequential"}
    ran = getattr(model, "_forward", model)
    return next(way for kind, way in ways.items() if isinstance(ran, kind))


def _common(got: list[int], expected: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), -1)


def _relative(line: str, folder: Path) -> str:
    """A message without the temporary folder."""
    return line.replace(f"{folder}: ", "").replace(str(folder), "")
