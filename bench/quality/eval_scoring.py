"""lm-eval model requests on the engine: loglikelihood, rolling loglikelihood, generate-until.

Tokens are split, truncated and windowed as in lm-eval's `hf` model, so that its numbers are reproduced.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ...quant.base.errors import BadInput
from ...quant.base.progress import Progress, Silent

if TYPE_CHECKING:
    from ...engine.base.sampling_params import SamplingParams
    from ...engine.engine import Engine
    from ...engine.scheduling.outputs import TokenLogprobs

# Requests queued in the engine at once: enough for full batches, few enough to poll cheaply.
QUEUED = 256
DEFAULT_NEW_TOKENS = 256
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
SAMPLING = ("top_p", "top_k", "min_p", "repetition_penalty")


class Window(NamedTuple):
    """Input tokens, and the targets predicted at the last `len(targets)` positions."""

    inputs: list[int]
    targets: list[int]


def clipped(context: Sequence[int], continuation: Sequence[int], max_inputs: int) -> Window:
    """The continuation with the context truncated on the left to `max_inputs` tokens.

    Raises:
        BadInput: a part is empty, or the continuation alone does not fit.
    """
    if not context or not continuation:
        raise BadInput("a task gives a context or a continuation without any token")
    if len(continuation) > max_inputs:
        raise BadInput(
            f"a continuation of {len(continuation)} tokens exceeds the {max_inputs} that fit"
        )
    whole = [*context, *continuation]
    return Window(whole[-(max_inputs + 1) :][:-1], list(continuation))


def rolling_windows(tokens: Sequence[int], prefix: int, max_inputs: int) -> Iterator[Window]:
    """Windows over a text that predict each token once, the first one after `prefix`.

    Each holds `max_inputs` tokens where the text is long enough; the last one overlaps for context.
    """
    whole = [prefix, *tokens]  # tokens[i] is predicted by whole[: i + 1]
    for begin in range(0, len(tokens), max_inputs):
        end = min(begin + max_inputs, len(tokens))
        yield Window(whole[max(0, end - max_inputs) : end], whole[begin + 1 : end + 1])


def summed(scored: Iterable[TokenLogprobs | None]) -> tuple[float, bool]:
    """(sum of log-probabilities in nats, whether each token is the likeliest) of a continuation."""
    kept = [token for token in scored if token is not None]
    return math.fsum(token.logprob for token in kept), all(token.rank == 1 for token in kept)


def generation_params(wanted: Mapping[str, Any], seed: int) -> SamplingParams:
    """A task's `generation_kwargs` as sampling parameters: greedy unless it samples.

    Raises:
        BadInput: a key without a counterpart in the engine.
    """
    from ...engine.base.sampling_params import SamplingParams

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
        stop=tuple(one for one in ([until] if isinstance(until, str) else until) if one),
        seed=seed,
        **chosen,
    )


class EngineScorer:
    """lm-eval's model requests on an idle engine, batched."""

    def __init__(self, engine: Engine, progress: Progress | None = None, seed: int = 0) -> None:
        self._engine = engine
        self._progress = progress or Silent()
        self._seed = seed
        slots = engine.stats.kv_blocks_total * engine.scheduler.config.block_size
        self.max_inputs = min(engine.max_model_len, slots)

    @property
    def prefix_token(self) -> int:
        """The replacement of an empty context: BOS, else EOS."""
        tokenizer = self._engine.tokenizer
        found = tokenizer.bos_token_id
        return tokenizer.eos_token_id if found is None else found

    def encode(self, text: str) -> list[int]:
        """Token ids of a text with special tokens, without a duplicate BOS."""
        tokenizer = self._engine.tokenizer
        begins = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
        return list(tokenizer.encode(text, add_special_tokens=not begins))

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Token ids of both, split after the context's tokens; trailing spaces move to the continuation."""
        if not context:
            tokens = list(self._engine.tokenizer.encode(continuation, add_special_tokens=False))
            if tokens[:1] == [self.prefix_token]:
                return tokens[:1], tokens[1:]
            return [self.prefix_token], tokens
        kept = context.rstrip()
        continuation = context[len(kept) :] + continuation
        begin = self.encode(kept)
        return begin, self.encode(kept + continuation)[len(begin) :]

    def loglikelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Per (context, continuation): log-probability in nats, and whether it is the greedy continuation."""
        return self._score(
            [clipped(*self.encode_pair(*pair), self.max_inputs) for pair in pairs],
            "continuations of the tasks",
        )

    def rolling_loglikelihoods(self, texts: Sequence[str]) -> list[float]:
        """Log-probability of each whole text in nats, in windows where it exceeds the context."""
        windows = [
            list(rolling_windows(self.encode(text), self.prefix_token, self.max_inputs))
            for text in texts
        ]
        scores = iter(self._score([one for each in windows for one in each], "texts of the tasks"))
        return [math.fsum(next(scores)[0] for _ in each) for each in windows]

    def generate(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """The generated text for each context up to a stop string, which is excluded.

        A context too long for the new tokens is truncated on the left.

        Raises:
            BadInput: the new tokens alone exceed the context length.
        """
        prompts = []
        longest = self._engine.scheduler.longest_sequence
        for number, (context, wanted) in enumerate(requests):
            params = generation_params(wanted, self._seed + number)
            max_context = longest - (params.max_tokens or 0)
            if max_context < 1:
                raise BadInput(
                    f"a task generates up to {params.max_tokens} tokens; {longest} fit, prompt included"
                )
            prompts.append((self.encode(context)[-max_context:], params))
        answers = self._complete(prompts, "generations of the tasks")
        return [
            self.decode(tokens, params.stop)
            for (tokens, _), (_, params) in zip(answers, prompts, strict=True)
        ]

    def decode(self, tokens: Sequence[int], stops: Sequence[str] = ()) -> str:
        """New tokens as text up to a stop string, decoded alone as in lm-eval: a leading space may go."""
        text = self._engine.tokenizer.decode(tokens, skip_special_tokens=True)
        for stop in stops:
            text = text.split(stop)[0]
        return text

    def _score(self, windows: Sequence[Window], what: str) -> list[tuple[float, bool]]:
        from ...engine.base.sampling_params import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        # A request holds the last target and one generated token beyond the inputs of a window.
        longest = self._engine.scheduler.longest_sequence
        short = [one for one in windows if len(one.inputs) + 2 <= longest]
        prompts = [([*one.inputs, one.targets[-1]], params) for one in short]
        answers = iter(self._complete(prompts, what))
        sums = []
        for window in windows:
            if len(window.inputs) + 2 <= longest:
                scored = next(answers)[1][-len(window.targets) :]
            else:
                scored = self._score_full(window)
            sums.append(summed(scored))
        return sums

    def _score_full(self, window: Window) -> list[TokenLogprobs]:
        """Score a window that fills the context and leaves no position to generate."""
        from ...engine.sampling.logprobs import rows_per_slice, sliced_logprobs

        engine = self._engine
        hidden = engine.hidden_states(window.inputs)[-len(window.targets) :]
        logits, num_rows = engine.runner.decoder.logits, rows_per_slice(engine.vocab_size)
        return sliced_logprobs(logits, hidden, window.targets, 0, num_rows)

    def _complete(
        self, prompts: Sequence[tuple[list[int], SamplingParams]], what: str
    ) -> list[tuple[list[int], tuple[TokenLogprobs | None, ...]]]:
        """New tokens and prompt logprobs of each prompt, batched by the engine."""
        written: list[list[int]] = [[] for _ in prompts]
        scores: list[tuple[TokenLogprobs | None, ...]] = [()] * len(prompts)
        left, active = deque(enumerate(prompts)), set[str]()
        self._progress.start(what, len(prompts), "requests")
        try:
            while left or active:
                while left and len(active) < QUEUED:
                    number, (tokens, params) = left.popleft()
                    self._engine.add_request(str(number), tokens, params)
                    active.add(str(number))
                for output in self._engine.step():
                    written[int(output.request_id)].extend(output.new_token_ids)
                    if output.prompt_logprobs is not None:
                        scores[int(output.request_id)] = output.prompt_logprobs
                    if output.finish_reason is not None:
                        active.remove(output.request_id)
                        self._progress.advance()
        finally:
            for request_id in active:
                self._engine.abort(request_id)
            self._progress.finish()
        return list(zip(written, scores, strict=True))
