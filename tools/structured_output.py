"""Validity and cost of structured output, over JSON schemas of growing nesting.

    python tools/structured_output.py --json numbers.json

Makes `--schemas` schemas from a seed, ten levels of nesting deep at most, and lets the bundled model, which
has never seen JSON, write a text for each under the schema's token mask. `jsonschema` judges the texts. The
same prompt then runs without a mask for as many tokens; which of the two comes first alternates. Compared is
the time from the first token to the last of each, one sequence at a time, and then with `--batch` at once.
The time to compile a schema is told beside it, since it comes before the first token.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
from llmopt.bench.machine.environment import machine_name
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.engine import Engine
from llmopt.engine.sampling.grammar import GrammarCompiler
from llmopt.recipes import DEFAULT_MODEL

DEPTHS = 10
MAX_TOKENS = 480
PROMPTS = ("Once upon a time", "Lily and Tom", "The big dog", "One day")


def make_schema(depth: int, source: random.Random) -> dict[str, Any]:
    """A schema of `depth` levels whose texts are bounded, so that every one comes to an end."""
    if depth == 0:
        return _leaf(source)
    inner = make_schema(depth - 1, source)
    kind = source.choice(("object", "object", "object", "array", "anyOf", "$ref"))
    if kind == "array":
        return {"type": "array", "items": inner, "minItems": 1, "maxItems": 1 + (depth < 4)}
    if kind == "anyOf":
        return {"anyOf": [_object(source, inner), _leaf(source)]}
    if kind == "$ref" and "$defs" not in json.dumps(inner):
        return {"$defs": {"part": inner}, **_object(source, {"$ref": "#/$defs/part"})}
    return _object(source, inner)


def _object(source: random.Random, inner: dict[str, Any]) -> dict[str, Any]:
    names = source.sample("abcdefgh", 2)
    parts = [inner, _leaf(source)]
    source.shuffle(parts)
    return {
        "type": "object",
        "properties": dict(zip(names, parts, strict=True)),
        "required": names,
        "additionalProperties": False,
    }


def _leaf(source: random.Random) -> dict[str, Any]:
    low = source.randint(-50, 50)
    return source.choice(
        [
            {"type": "string", "maxLength": source.randint(1, 12)},
            {"type": "string", "pattern": "^[A-Z][a-z]{2,6}$"},
            {"type": "integer", "minimum": low, "maximum": low + source.randint(0, 300)},
            {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 10},
            {"type": "boolean"},
            {"type": ["boolean", "null"]},
            {"enum": ["red", 7, None, True]},
            {"const": {"x": [1, 2]}},
        ]
    )


def make_schemas(count: int, seed: int) -> list[tuple[int, dict[str, Any]]]:
    """(depth, schema): as many of each depth, from shallow to deep."""
    source = random.Random(seed)
    depths = [1 + index * DEPTHS // count for index in range(count)]
    return [(depth, _rooted(make_schema(depth, source))) for depth in depths]


def _rooted(schema: dict[str, Any]) -> dict[str, Any]:
    """With its definitions at the top, where `$ref` looks for them."""
    found: dict[str, Any] = {}

    def without(part: Any) -> Any:
        if isinstance(part, list):
            return [without(one) for one in part]
        if not isinstance(part, dict):
            return part
        found.update(part.get("$defs", {}))
        return {key: without(value) for key, value in part.items() if key != "$defs"}

    bare = without(schema)
    return {**bare, "$defs": {name: without(one) for name, one in found.items()}} if found else bare


class Run:
    """Timings of one or several sequences that run together."""

    def __init__(self, engine: Engine, params: Sequence[SamplingParams]) -> None:
        self.token_ids: list[list[int]] = [[] for _ in params]
        self.reasons: list[str | None] = [None] * len(params)
        for index, own in enumerate(params):
            engine.add_request(str(index), PROMPTS[index % len(PROMPTS)], own)
        first = last = 0.0
        while engine.has_unfinished():
            for piece in engine.step():
                last = time.perf_counter()
                first = first or last
                index = int(piece.request_id)
                self.token_ids[index] += piece.new_token_ids
                self.reasons[index] = piece.finish_reason
        self.seconds = last - first


def free(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def interleaved(engine: Engine, masked: list[SamplingParams], swap: bool) -> tuple[Run, Run]:
    """(with masks, without): as many tokens of each."""
    if not swap:
        own = Run(engine, masked)
        return own, Run(engine, [free(len(tokens)) for tokens in own.token_ids])
    lengths = [len(tokens) for tokens in Run(engine, masked).token_ids]
    plain = Run(engine, [free(length) for length in lengths])
    return Run(engine, masked), plain


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    engine = Engine(EngineConfig(asked.model, dtype=asked.dtype, num_threads=1))
    compiler = GrammarCompiler(engine.tokenizer, engine.vocab_size, engine.eos_token_ids)
    schemas = make_schemas(asked.schemas, asked.seed)
    Run(engine, [free(64)])

    compile_ms: list[float] = []

    def constrained(schema: dict[str, Any]) -> SamplingParams:
        begin = time.perf_counter()
        mask = compiler.json_schema_mask(schema)
        compile_ms.append(1000 * (time.perf_counter() - begin))
        return SamplingParams(temperature=0, max_tokens=MAX_TOKENS, token_mask=mask)

    valid: dict[int, int] = dict.fromkeys(range(1, DEPTHS + 1), 0)
    ratios: dict[str, list[float]] = {"one at a time": [], f"{asked.batch} at once": []}
    totals = {name: [0.0, 0.0] for name in ratios}
    num_tokens = 0

    def compare(name: str, group: list[dict[str, Any]], round_: int) -> Run:
        masked, plain = interleaved(engine, [constrained(one) for one in group], bool(round_ % 2))
        if masked.seconds:
            ratios[name].append(masked.seconds / plain.seconds)
        totals[name][0] += masked.seconds
        totals[name][1] += plain.seconds
        return masked

    for index, (depth, schema) in enumerate(schemas):
        run = compare("one at a time", [schema], index)
        num_tokens += len(run.token_ids[0])
        ends = engine.eos_token_ids
        written = engine.tokenizer.decode([t for t in run.token_ids[0] if t not in ends])
        try:
            jsonschema.validate(json.loads(written), schema)
            valid[depth] += run.reasons[0] == "stop"
        except (ValueError, jsonschema.ValidationError) as error:
            print(
                f"schema {index}, {depth} deep: {str(error).splitlines()[0]} in {written[:200]!r}"
            )
    for round_, begin in enumerate(range(0, len(schemas), asked.batch)):
        group = [schema for _, schema in schemas[begin : begin + asked.batch]]
        compare(f"{asked.batch} at once", group, round_)

    print(f"{asked.model} in {asked.dtype} on {machine_name(str(engine.device))}, one thread")
    print(f"{sum(valid.values())} of {len(schemas)} texts are valid, {num_tokens} tokens in all")
    print("  by depth: " + ", ".join(f"{depth}: {count}" for depth, count in valid.items()))
    loss = {name: 1 - plain / own for name, (own, plain) in totals.items()}
    for name, each in ratios.items():
        low, middle, high = statistics.quantiles(each, n=4)
        print(
            f"  {name}: decode speed {loss[name]:.1%} lower with masks (time of a text "
            f"{middle:.3f} times that without, quartiles {low:.3f} to {high:.3f})"
        )
    print(
        f"  a schema compiles in {statistics.median(compile_ms):.2f} ms ({max(compile_ms):.1f} at most)"
    )
    if asked.json:
        record = {
            "model": asked.model,
            "dtype": asked.dtype,
            "machine": machine_name(str(engine.device)),
            "schemas": len(schemas),
            "seed": asked.seed,
            "valid": sum(valid.values()),
            "valid_by_depth": valid,
            "tokens": num_tokens,
            "decode_speed_loss": loss,
            "seconds_with_and_without_masks": totals,
            "time_ratios": ratios,
            "compile_ms": {"median": statistics.median(compile_ms), "most": max(compile_ms)},
        }
        asked.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
