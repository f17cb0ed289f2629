"""lm-eval model requests on a backend: loglikelihood, rolling loglikelihood, generate-until, chat templates.

Tokens are split, truncated and windowed as in lm-eval's `hf` model, so that its numbers are reproduced.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...engine.base.sampling_params import SamplingParams
from ...quant.base.errors import BadInput
from .backend import GenerationRequest, TaskBackend, summed
from .windows import clipped, rolling_windows

DEFAULT_NEW_TOKENS = 256
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
SAMPLING = ("top_p", "top_k", "min_p", "repetition_penalty")


def generation_params(wanted: Mapping[str, Any], seed: int) -> SamplingParams:
    """A task's `generation_kwargs` as sampling parameters: greedy unless it samples.

    Raises:
        BadInput: a key without a counterpart in the engine.
    """
    given = dict(wanted)
    lengths = [given.pop(name, None) for name in LENGTHS]
    until = given.pop("until", None) or []
    temperature = float(given.pop("temperature", 0.0))
    do_sample = given.pop("do_sample", None)
    if do_sample and temperature == 0.0 and "temperature" not in wanted:
        temperature = 1.0
    if given.pop("num_beams", 1) != 1:
        raise BadInput("a task asks for beam search (num_beams), which the engine does not do")
    chosen = {name: given.pop(name) for name in SAMPLING if name in given}
    if given:
        raise BadInput(
            f"a task has the generation_kwargs {', '.join(given)}: unknown to the engine"
        )
    return SamplingParams(
        max_tokens=int(next((n for n in lengths if n is not None), DEFAULT_NEW_TOKENS)),
        temperature=0.0 if do_sample is False else temperature,
        stop=tuple(stop for stop in ([until] if isinstance(until, str) else until) if stop),
        seed=seed,
        **chosen,
    )


class TaskScorer:
    """lm-eval's model requests on a backend."""

    def __init__(self, backend: TaskBackend, seed: int = 0) -> None:
        self._backend = backend
        self._tokenizer = backend.tokenizer
        self._seed = seed

    @property
    def max_inputs(self) -> int:
        """Most input tokens of a scored window."""
        return self._backend.max_inputs

    @property
    def prefix_token(self) -> int:
        """The replacement of an empty context: BOS, else EOS."""
        bos = self._tokenizer.bos_token_id
        return self._tokenizer.eos_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, for lm-eval's records."""
        return str(self._tokenizer.name_or_path)

    @property
    def chat_template(self) -> str | None:
        """Source of the tokenizer's chat template; None without one, or where the server applies its own."""
        return None if self._backend.sends_messages else self._tokenizer.chat_template

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, add_generation_prompt: bool = True
    ) -> str:
        """A conversation as text; as JSON for a server that applies the template.

        Raises:
            BadInput: the template rejects the conversation.
        """
        if self._backend.sends_messages:
            return json.dumps(messages, ensure_ascii=False)
        try:
            return self._tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        except Exception as error:  # templates raise what they like
            raise BadInput(f"the chat template rejects a conversation: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Token ids of a text with special tokens, without a duplicate BOS."""
        bos = self._tokenizer.bos_token
        begins = bos is not None and text.startswith(bos)
        return list(self._tokenizer.encode(text, add_special_tokens=not begins))

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Token ids of both, split after the context's tokens; trailing spaces move to the continuation."""
        if not context:
            tokens = list(self._tokenizer.encode(continuation, add_special_tokens=False))
            if tokens[:1] == [self.prefix_token]:
                return tokens[:1], tokens[1:]
            return [self.prefix_token], tokens
        kept = context.rstrip()
        continuation = context[len(kept) :] + continuation
        begin = self.encode(kept)
        return begin, self.encode(kept + continuation)[len(begin) :]

    def loglikelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Per (context, continuation): log-probability in nats, and whether it is the greedy continuation."""
        windows = [clipped(*self.encode_pair(*pair), self.max_inputs) for pair in pairs]
        return [summed(each) for each in self._backend.score(windows, "continuations of the tasks")]

    def rolling_loglikelihoods(self, texts: Sequence[str]) -> list[float]:
        """Log-probability of each whole text in nats, in windows where it exceeds the context."""
        windows = [
            list(rolling_windows(self.encode(text), self.prefix_token, self.max_inputs))
            for text in texts
        ]
        flat = [window for each in windows for window in each]
        scores = iter(self._backend.score(flat, "texts of the tasks"))
        return [math.fsum(summed(next(scores))[0] for _ in each) for each in windows]

    def generate(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """The generated text for each context up to a stop string, which is excluded.

        A context too long for the new tokens is truncated on the left.

        Raises:
            BadInput: the new tokens alone exceed the context length.
        """
        longest = self._backend.longest
        prompts = []
        for number, (context, wanted) in enumerate(requests):
            params = generation_params(wanted, self._seed + number)
            max_context = longest - (params.max_tokens or 0)
            if max_context < 1:
                raise BadInput(
                    f"a task generates up to {params.max_tokens} tokens; {longest} fit, prompt included"
                )
            if self._backend.sends_messages:
                prompts.append(GenerationRequest([], params, json.loads(context)))
            else:
                prompts.append(GenerationRequest(self.encode(context)[-max_context:], params))
        return self._backend.generate(prompts, "generations of the tasks")
