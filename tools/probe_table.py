"""Write the probe's answers for bundled models that have none: `python -m tools.probe_table`.

Planning a bundled model must import no torch, so what the probe says of those without a table rule is kept in
`engine/planner/bundled.json`, by config hash. A line that is removed there is made again.
"""

from __future__ import annotations

import json

from llmopt.base.atomic_io import write_atomically
from llmopt.engine.planner import catalog
from llmopt.engine.probe.oracle import probe
from llmopt.quant.families.config import current_names, has_table_rule

from tools import kimi_k3


def main() -> None:
    path = catalog.ANSWERS
    kept = json.loads(path.read_text(encoding="utf-8"))
    needed = {}
    for name, config in catalog.table_configs().items():
        if has_table_rule(config):
            continue
        raw = current_names(config)
        key = catalog.config_hash(raw)
        if key not in kept:
            print(f"probing {name}", flush=True)
            sized = kimi_k3.sizes(raw) if raw["model_type"] == "kimi_k3" else probe(raw)
            kept[key] = sized.as_dict()
        needed[key] = kept[key]
    lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in needed.items())
    write_atomically(path, "{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
