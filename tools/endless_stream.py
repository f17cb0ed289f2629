"""Streaming far beyond a model's context (StreamingLLM): perplexity and blocks, with and without sinks.

    python tools/endless_stream.py --tokens 50000 --window 256 --sinks 4

The bundled stories3M (context 512) reads concatenated bundled evaluation stories as one request: the
same `--stretch` tokens again and again, so that every row of the table is about the same text. First with
the first `--sinks` tokens and the last `--window` in the cache, then with the window alone. Ends with 1 if
the number of blocks grew or if perplexity with sinks rose by more than `--flat`.

How much a model loses without its sink tokens depends on the model: large ones have learnt to attend to them
and break down, the bundled small ones have not.

Source of what is measured: Xiao et al., "Efficient Streaming Language Models with Attention Sinks"
(arXiv:2309.17453), figures 3 and 5.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.engine import Engine
from llmopt.recipes import DATA


@dataclass(frozen=True, slots=True)
class Stream:
    """One run over the text.

    Attributes:
        ends: where the rows of the table end, in tokens.
        perplexity: of the tokens of each row.
        blocks: KV blocks in use, the most in each row.
        kv_bytes: of the whole cache.
    """

    sinks: int
    window: int
    ends: list[int]
    perplexity: list[float]
    blocks: list[int]
    kv_bytes: int


def main() -> int:
    arguments = _arguments()
    sinks = run_stream(arguments, arguments.sinks)
    alone = run_stream(arguments, 0)
    print(f"{'tokens':>14}  {'sinks + window':>20}  {'window alone':>20}")
    print(f"{'':>14}  {'perplexity':>12}{'blocks':>8}  {'perplexity':>12}{'blocks':>8}")
    for index, end in enumerate(sinks.ends):
        cells = [f"{x.perplexity[index]:12.2f}{x.blocks[index]:8d}" for x in (sinks, alone)]
        print(f"{f'... {end:,}':>14}  {'  '.join(cells)}")
    if arguments.output is not None:
        rows = {"sinks_and_window": asdict(sinks), "window_alone": asdict(alone)}
        arguments.output.write_text(json.dumps(rows, indent=2) + "\n")
    return judge(sinks, alone, arguments.flat)


def run_stream(arguments: argparse.Namespace, sinks: int) -> Stream:
    """Read the whole text as one request, and score every token of it on the way."""
    engine = Engine(
        EngineConfig(
            arguments.model,
            window=arguments.window,
            attention_sinks=sinks,
            kv_cache_dtype=arguments.kv_cache_dtype,
            max_num_seqs=1,
            # The tokens of a step are cached beside the window, and all of them attend to it.
            prefill_chunk_size=max(1, arguments.window // 2),
            enable_prefix_caching=False,
        )
    )
    tokens = _text(engine, arguments.tokens, arguments.stretch)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    engine.add_request("stream", tokens, params)
    # As long as the sink tokens are within the window, both runs are the same.
    ends = [arguments.window, *range(arguments.stretch, len(tokens) + 1, arguments.stretch)]
    blocks = [0] * len(ends)
    scores: list[float] = []
    while engine.has_unfinished():
        row = min(bisect_right(ends, engine.stats.num_computed_tokens), len(ends) - 1)
        outputs = engine.step()
        blocks[row] = max(blocks[row], engine.stats.kv_blocks_used)
        for output in outputs:
            scores += [one.logprob for one in output.prompt_logprobs or () if one is not None]
    parts = [scores[begin:end] for begin, end in pairwise([0, *ends])]
    perplexity = [math.exp(-sum(part) / len(part)) for part in parts]
    return Stream(sinks, arguments.window, ends, perplexity, blocks, engine.memory.kv_cache_bytes)


def judge(sinks: Stream, alone: Stream, flat: float) -> int:
    """0 if memory was constant and perplexity flat with sinks; says how far it was higher without."""
    constant = all(max(x.blocks[2:]) <= x.blocks[1] for x in (sinks, alone))
    rise = max(sinks.perplexity[2:]) / sinks.perplexity[1]
    apart = [b / a for a, b in zip(sinks.perplexity[1:], alone.perplexity[1:], strict=True)]
    print(
        f"KV cache of {sinks.kv_bytes:,} bytes, blocks {'constant' if constant else 'not constant'}; with "
        f"{sinks.sinks} sinks perplexity is at most {rise:.3f} times that of the first pass; the window "
        f"alone has {min(apart):.3f} to {max(apart):.3f} times the perplexity with sinks"
    )
    return int(not constant or rise > flat)


def _text(engine: Engine, count: int, stretch: int) -> Sequence[int]:
    stories = [s for s in (DATA / "evaluation.txt").read_text().split("\n\n") if s.strip()]
    tokens = engine.encode("\n\n".join(stories))[:stretch]
    return (tokens * -(-count // len(tokens)))[:count]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Perplexity and blocks of a stream without end.")
    parser.add_argument("--model", default="stories3M")
    parser.add_argument("--tokens", type=int, default=50_000)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--stretch", type=int, default=5_000, help="tokens of a row of the table")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument(
        "--flat", type=float, default=1.15, help="the rise that still counts as flat"
    )
    parser.add_argument("--output", type=Path, help="a JSON file for the numbers")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
