"""Write the probe's answers for the bundled models: `python tools/probe_table.py [NAME... | all]`.

Planning a bundled model must import no torch, so what the probe says of those without a table rule is kept in
`engine/planner/bundled.json`, by config hash. What is there stays, but for the models that are named.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from llmopt.engine.planner.catalog import config_hash, table_configs
from llmopt.engine.probe.oracle import probe
from llmopt.quant.base.atomic_io import write_atomically
from llmopt.quant.families.config import current_names, has_table_rule

BUNDLED = Path(__file__).parents[1] / "engine" / "planner" / "bundled.json"


def main() -> None:
    wanted = set(sys.argv[1:])
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


def _text(answers: dict[str, object]) -> bytes:
    rows = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in answers.items())
    return ("{\n" + ",\n".join(rows) + "\n}\n").encode()


if __name__ == "__main__":
    main()
