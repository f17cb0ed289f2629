"""KL divergence and passkey retrieval under KV eviction, against the full cache.

    python tools/kv_eviction.py MODEL --output docs/measured/cpu/kv-eviction.json
    python tools/kv_eviction_table.py

Each policy has the same budgets, shares of the prompt: attention sinks with a window (StreamingLLM), SnapKV
and H2O. Retrieval: a pass key at several depths of a text of the bundled stories, asked for at its end (the
passkey retrieval of Mohtashami and Jaggi, arXiv:2305.16300); a hit is a continuation that begins with the
key. KL: the tokens that follow a prompt are forced, and the distribution before each is compared with the
full cache's, in nats. KV memory is measured: the blocks in use when the last token is computed. The file is
written after each policy.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from llmopt.bench.machine.environment import machine_name
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.engine import Engine
from llmopt.engine.execution.step_loop import StepRecorder
from llmopt.recipes import DATA

SHARES = (0.12, 0.25, 0.5)
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
SINKS = 4
KEY_DIGITS = 5
OPENING = (
    "There is a pass key hidden inside a lot of irrelevant text. Find it and memorize it. I will "
    "quiz you about it.\n\n"
)
QUESTION = "\n\nWhat is the pass key? The pass key is"


@dataclass(frozen=True, slots=True)
class Policy:
    """What stays in the cache, and the engine's options for it."""

    name: str
    share: float
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one policy gave.

    Attributes:
        budget: tokens that stay of a prompt.
        hits, asked: pass keys.
        kl: mean over the forced tokens, in nats.
        kv_bytes: of one sequence at its last token, in blocks; `peak_kv_bytes` at most.
        num_evicted: tokens, over all prompts.
    """

    policy: str
    share: float
    budget: int
    hits: int
    asked: int
    kl: float
    kv_bytes: int
    peak_kv_bytes: int
    num_evicted: int


@dataclass(frozen=True, slots=True)
class Needle:
    """A prompt with a pass key, and the key's digits."""

    prompt: list[int]
    key: str


def main() -> int:
    arguments = _arguments()
    outcomes: list[Outcome] = []
    full: list[torch.Tensor] = []
    for policy in policies(arguments.tokens):
        engine = _engine(arguments, policy)
        needles = list(_needles(engine, arguments))
        passages = list(_passages(engine, arguments))
        hits, steps = 0, Steps(engine)
        for needle in needles:
            answer = steps.run(needle.prompt, SamplingParams(temperature=0, max_tokens=8))
            text = engine.tokenizer.decode(answer, skip_special_tokens=True)
            hits += text.strip().startswith(needle.key)
        forced = [_forced(steps, passage, arguments.tokens) for passage in passages]
        logprobs = torch.cat(forced).log_softmax(-1)
        full = full or [logprobs]
        kl = (full[0].exp() * (full[0] - logprobs)).sum(-1).mean()
        budget = round(policy.share * arguments.tokens)
        counts = len(needles), float(kl), steps.last_bytes, steps.peak_bytes
        evicted = engine.stats.num_evicted_tokens
        outcomes.append(Outcome(policy.name, policy.share, budget, hits, *counts, evicted))
        print(outcomes[-1], flush=True)
        engine.close()
        _write(arguments, outcomes)
    return 0


def policies(num_tokens: int) -> Iterator[Policy]:
    """The full cache first, then each policy at each budget."""
    yield Policy("full", 1.0, {})
    for share in SHARES:
        budget = round(share * num_tokens)
        yield Policy("sinks", share, {"window": budget - SINKS, "attention_sinks": SINKS})
        for method in ("snapkv", "h2o"):
            yield Policy(method, share, {"kv_budget": budget, "kv_eviction": method})


class Steps:
    """Runs requests one by one, and measures the KV cache in use."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._block_bytes = engine.memory.kv_cache_bytes // (engine.stats.kv_blocks_total + 1)
        self._number = 0
        self._recorder = engine.recorder = StepRecorder(engine.scheduler)
        self.last_bytes = 0

    @property
    def peak_bytes(self) -> int:
        """The most at any time, while prompts are computed too."""
        return max(step.kv_blocks_used for step in self._recorder.steps) * self._block_bytes

    def run(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        """The tokens that follow a prompt."""
        engine, tokens = self._engine, []
        engine.add_request(f"r{self._number}", prompt, params)
        self._number += 1
        while engine.has_unfinished():
            (output,) = engine.step() or (None,)
            tokens += [] if output is None else output.new_token_ids
            if used := engine.stats.kv_blocks_used:
                self.last_bytes = used * self._block_bytes
        engine.scheduler.check_integrity()
        return tokens


def _forced(steps: Steps, passage: Sequence[int], num_prompt: int) -> torch.Tensor:
    """Logits [tokens, vocab] before each token of a passage but the first after its prompt."""
    logits: list[torch.Tensor] = []

    def force(history: Sequence[int], row: torch.Tensor) -> torch.Tensor:
        logits.append(row.clone())
        forced = torch.full_like(row, -torch.inf)
        forced[passage[len(history)]] = 0.0
        return forced

    count = len(passage) - num_prompt
    params = SamplingParams(
        temperature=0, max_tokens=count, ignore_eos=True, logits_processors=(force,)
    )
    steps.run(passage[:num_prompt], params)
    # The first comes from the whole prompt, whatever is evicted behind it.
    return torch.stack(logits[1:count])


def _needles(engine: Engine, arguments: argparse.Namespace) -> Iterator[Needle]:
    """Prompts of the asked length, with a key at every depth."""
    random, stories = Random(arguments.seed), _story_tokens(engine)
    opening, question = engine.encode(OPENING), engine.encode(QUESTION)
    for _ in range(arguments.haystacks):
        for depth in DEPTHS:
            key = "".join(random.choices("123456789", k=KEY_DIGITS))
            needle = engine.encode(
                f"\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n"
            )
            room = arguments.tokens - len(opening) - len(needle) - len(question)
            start = random.randrange(len(stories) - room)
            hay = stories[start : start + room]
            place = round(depth * room)
            yield Needle([*opening, *hay[:place], *needle, *hay[place:], *question], key)


def _passages(engine: Engine, arguments: argparse.Namespace) -> Iterator[list[int]]:
    """Texts of a prompt and the tokens that are forced after it."""
    stories, length = _story_tokens(engine), arguments.tokens + arguments.forced
    for number in range(arguments.passages):
        yield stories[number * length : (number + 1) * length]


def _story_tokens(engine: Engine) -> list[int]:
    stories = (DATA / "evaluation.txt").read_text(encoding="utf-8")
    return list(engine.tokenizer(stories, add_special_tokens=False).input_ids)


def _engine(arguments: argparse.Namespace, policy: Policy) -> Engine:
    size = arguments.block_size
    return Engine(
        EngineConfig(
            arguments.model,
            max_num_seqs=1,
            block_size=size,
            num_blocks=-(-(arguments.tokens + arguments.forced) // size) + 2,
            enable_prefix_caching=False,
            num_threads=arguments.threads,
            **policy.options,
        )
    )


def _write(arguments: argparse.Namespace, outcomes: Sequence[Outcome]) -> None:
    result = {
        "model": Path(arguments.model).name,
        "machine": machine_name("cpu"),
        "text": "bundled evaluation stories",
        "prompt_tokens": arguments.tokens,
        "forced_tokens": arguments.passages * (arguments.forced - 1),
        "block_size": arguments.block_size,
        "depths": DEPTHS,
        "haystacks": arguments.haystacks,
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a folder, or a bundled model's name")
    parser.add_argument("--tokens", type=int, default=1024, help="of a prompt")
    parser.add_argument("--haystacks", type=int, default=2, help="with a key at every depth each")
    parser.add_argument("--passages", type=int, default=2, help="whose next tokens are forced")
    parser.add_argument("--forced", type=int, default=33, help="tokens after a passage's prompt")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="a JSON file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
