"""Speed with and without speculative decoding, and the acceptance rate.

    python tools/speculation.py --model stories3M --draft-model stories260K --output speculation.json
    python tools/speculation.py --model stories3M --heads heads --output heads.json

`--heads` takes the folder that `tools/train_heads.py` writes: Medusa and EAGLE heads propose in place of a
draft model, as chains and as trees of several widths.

Prompts are beginnings of the evaluation text. Every variant completes all of them once per round,
interleaved; the ratio to the variant without speculation is of the same round. With float32 and coupled
acceptance the tokens must be those without speculation, and the run fails where they are not."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmopt.bench.quality.passage import EVALUATION_TEXT
from llmopt.engine import LLM, SamplingParams
from llmopt.engine.config.config import SpeculationConfig

PROMPT_TOKENS = 48


class Variant:
    """A proposer, or none, with an engine of its own."""

    def __init__(self, given: argparse.Namespace, speculation: SpeculationConfig | None) -> None:
        self.speculation = speculation
        self.llm = LLM(
            given.model,
            dtype=given.dtype,
            num_threads=given.threads,
            max_num_seqs=given.batch,
            enable_prefix_caching=False,
            speculation=speculation,
        )
        self.tokens_per_second: list[float] = []

    def run(self, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
        """Complete the prompts, and record the speed."""
        began = time.perf_counter()
        tokens = [one.token_ids for one in self.llm.generate(prompts, params)]
        seconds = time.perf_counter() - began
        self.tokens_per_second.append(sum(map(len, tokens)) / seconds)
        return tokens

    def row(self, base: Variant) -> dict[str, Any]:
        """The variant's record, relative to the one without speculation."""
        stats = self.llm.engine.stats
        ratios = [
            own / other
            for own, other in zip(self.tokens_per_second, base.tokens_per_second, strict=True)
        ]
        return {
            "speculation": None if self.speculation is None else asdict(self.speculation),
            "tokens_per_second": self.tokens_per_second,
            "ratio": statistics.median(ratios),
            "ratio_range": [min(ratios), max(ratios)],
            "num_guesses": stats.num_draft_tokens,
            "tokens_per_step": stats.num_generated_tokens / stats.num_steps,
            "acceptance": stats.num_accepted_tokens / max(1, stats.num_draft_tokens),
        }


def main() -> None:
    given = _arguments()
    choices = _choices(given)
    found = []
    for temperature in (0.0, 0.8):
        params = SamplingParams(
            temperature=temperature, seed=7, max_tokens=given.max_tokens, ignore_eos=True
        )
        variants = [Variant(given, choice) for choice in (None, *choices)]
        prompts = _prompts(variants[0].llm, given.batch)
        expected: list[list[int]] = []
        for number in range(given.rounds):
            for variant in variants:
                tokens = variant.run(prompts, params)
                if variant is variants[0]:
                    expected = tokens
                exact = variant.speculation is None or variant.speculation.acceptance == "coupled"
                if given.dtype == "float32" and exact and tokens != expected:
                    raise SystemExit(f"round {number}: {variant.speculation} changed the tokens")
        for variant in variants:
            row = {"temperature": temperature, **variant.row(variants[0])}
            found.append(row)
            name, rule = "none", ""
            if (own := variant.speculation) is not None:
                name = own.method
                rule = own.acceptance if own.width == 1 else f"tree of {own.width}"
            print(
                f"temperature {temperature:.1f} {name:6s} {rule:10s} "
                f"{statistics.median(variant.tokens_per_second):7.0f} tokens/s  {row['ratio']:.2f}x "
                f"({row['ratio_range'][0]:.2f}-{row['ratio_range'][1]:.2f})  "
                f"{row['tokens_per_step']:.2f} tokens/step  {row['acceptance']:.1%} stood",
                flush=True,
            )
    if given.output:
        record = {"options": vars(given), "rows": found}
        text = json.dumps(record, indent=1, default=str)
        given.output.write_text(text + "\n", encoding="utf-8")


def _choices(given: argparse.Namespace) -> list[SpeculationConfig]:
    if given.heads is not None:
        return [
            SpeculationConfig(method, given.heads / method, given.num_tokens, tree_width=width)
            for method in ("medusa", "eagle")
            for width in given.widths
        ]
    return [
        SpeculationConfig("ngram", num_tokens=given.num_tokens, acceptance="coupled"),
        SpeculationConfig("draft", given.draft_model, given.num_tokens),
        SpeculationConfig("draft", given.draft_model, given.num_tokens, acceptance="rejection"),
    ]


def _prompts(llm: LLM, count: int) -> list[list[int]]:
    stories = EVALUATION_TEXT.read_text(encoding="utf-8").split("\n\n")
    encoded = (llm.engine.encode(story)[:PROMPT_TOKENS] for story in stories)
    return [tokens for tokens in encoded if len(tokens) == PROMPT_TOKENS][:count]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", default="stories3M")
    parser.add_argument("--draft-model", default="stories260K")
    parser.add_argument("--heads", type=Path, help="folder with medusa and eagle")
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2, 4], help="of trees")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--num-tokens", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, help="JSON file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
