"""Write the probe's answers for the bundled models: `python tools/probe_table.py [NAME... | all | check]`.

Planning a bundled model must import no torch, so what the probe says of those without a table rule is kept in
`engine/probe/bundled.json`, by config hash. What is there stays, but for the models that are named.
With `check` nothing is written: the models that have a rule are probed as well, and held against it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from llmopt.engine.planner.catalog import table_configs
from llmopt.engine.planner.engine_rules import RULES, CacheKnobs
from llmopt.engine.planner.probed_shape import ProbedShape
from llmopt.engine.probe.answers import config_hash
from llmopt.engine.probe.oracle import probe
from llmopt.quant.base.atomic_io import write_atomically
from llmopt.quant.families.config import current_names, has_table_rule, model_shape
from llmopt.quant.families.shapes import ModelShape

BUNDLED = Path(__file__).parents[1] / "engine" / "probe" / "bundled.json"


LENGTHS = (4, 512, 20_000)


def main() -> int:
    """Probe and write, or compare; 1 if a rule says something else."""
    wanted = set(sys.argv[1:])
    if wanted == {"check"}:
        return _check()
    old = json.loads(BUNDLED.read_text()) if BUNDLED.exists() else {}
    answers = {}
    for name, config in table_configs().items():
        if has_table_rule(config):
            continue
        raw = current_names(config)
        key = config_hash(raw)
        if key in old and not wanted & {name, "all"}:
            answers[key] = old[key]
            continue
        started = time.perf_counter()
        measured = probe(raw)
        answers[key] = measured.as_dict()
        print(
            f"{name}: {measured.num_parameters():,} parameters, {measured.cache_bytes(4096):,} B of cache "
            f"at 4,096 tokens, {time.perf_counter() - started:.1f} s",
            flush=True,
        )
        write_atomically(BUNDLED, _text({**old, **answers}))
    write_atomically(BUNDLED, _text(answers))
    return 0


def _check() -> int:
    """Print for each model with a rule whether parameters and cache are those of the probe."""
    wrong = 0
    named = {name: current_names(config) for name, config in table_configs().items()}
    ruled = {name: config for name, config in named.items() if has_table_rule(config)}
    for name, config in ruled.items():
        raw = config.get("text_config", config)  # the table's row is the text model
        table, probed = model_shape(raw), ProbedShape.from_facts(probe(raw), raw)
        says = [_facts(shape) for shape in (table, probed)]
        same = says[0] == says[1]
        wrong += not same
        print(
            f"{name}: {'the same' if same else f'the rule says {says[0]}, the module {says[1]}'}",
            flush=True,
        )
    print(f"{len(ruled)} models with a rule, {wrong} differ from their module")
    return 1 if wrong else 0


def _facts(shape: ModelShape | ProbedShape) -> tuple[object, ...]:
    """Parameters, active ones, bytes of cache at some lengths, whether tied, longest context."""
    rule = RULES["transformers"]
    cache = (rule.kv_bytes(shape, length, 2, CacheKnobs()) for length in LENGTHS)
    return shape.num_parameters, shape.num_active_parameters, *cache, shape.tied, shape.max_context


def _text(answers: dict[str, object]) -> bytes:
    rows = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in answers.items())
    return ("{\n" + ",\n".join(rows) + "\n}\n").encode()


if __name__ == "__main__":
    sys.exit(main())
