"""Column `plan`: parameters and cache bytes of kv-plan against the real model on the CPU."""

from __future__ import annotations

from llmopt.base.errors import BadInput
from llmopt.engine.planner.catalog import shape_of
from llmopt.engine.planner.engine_rules import RULES, CacheKnobs
from llmopt.engine.planner.probed_shape import ProbedShape
from llmopt.engine.probe.measure import cache_after, cache_bytes

from tests.support.survey.case import Case, Verdict

LENGTHS = (4, 8, 256, 512)
MAX_OPERATORS = 5_000_000
ELEMENT_BYTES = 4


class PlanColumn:
    """Exact: as many parameters, and as many bytes of cache at every length, as transformers holds."""

    name = "plan"

    def verdict(self, case: Case) -> Verdict:
        """Compare kv-plan's shape with the model that transformers builds."""
        try:
            shape = shape_of(case.raw, case.folder)
        except BadInput as error:
            return Verdict("refused", str(error))
        parameters = sum(p.numel() for p in case.model.parameters())
        if shape.num_parameters != parameters:
            return Verdict("wrong", f"{shape.num_parameters:,} parameters, not {parameters:,}")
        for length in LENGTHS:
            held = cache_bytes(cache_after(case.model, length, MAX_OPERATORS))
            planned = RULES["transformers"].kv_bytes(shape, length, ELEMENT_BYTES, CacheKnobs())
            if held != planned:
                return Verdict("wrong", f"{planned:,} B of cache at {length} tokens, not {held:,}")
        return Verdict("exact", "probe" if isinstance(shape, ProbedShape) else "table")
