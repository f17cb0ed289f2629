"""The engine on the pretended card: loaded, and stepped through prefill, mixed batches and decode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.kernels.common.verdicts import VARIABLE

from .card import Card
from .runtime import pretended_cuda

SAMPLED = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=5, ignore_eos=True, seed=1)
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


@dataclass
class Served:
    """What a run left behind.

    Attributes:
        graphs: how many decode steps were captured.
        captured: launches of the kernels of one captured step.
    """

    card: Card
    graphs: int = 0
    captured: Counter[str] = field(default_factory=Counter)
    num_tokens: dict[str, int] = field(default_factory=dict)

    @property
    def faults(self) -> list[str]:
        return sorted(set(self.card.faults()))


@contextmanager
def engine_on(
    card: Card, folder: Path, *, trials: bool = False, **options: Any
) -> Iterator[Engine]:
    """An engine on the card; without trials, since no kernel of the pretended card computes anything."""
    defaults = {"device": "cuda", "dtype": "bfloat16", "max_num_seqs": 2, "max_model_len": 64}
    with pytest.MonkeyPatch.context() as patched, pretended_cuda(card):
        if not trials:
            patched.setenv(VARIABLE, "off")
        config: Any = defaults | options
        engine = Engine(EngineConfig(folder, **config))
        try:
            yield engine
        finally:
            engine.close()


def serve(
    card: Card,
    folder: Path,
    params: Sequence[SamplingParams] = (SAMPLED, GREEDY),
    *,
    adapters: Sequence[str | None] = (),
    prompt_tokens: int = 7,
    trials: bool = False,
    **options: Any,
) -> Served:
    """Load the model and serve a request for each of `params`; each begins while the one before decodes."""
    served = Served(card)
    with engine_on(card, folder, trials=trials, **options) as engine:
        captured = card.launches("load", captured=True)
        served.graphs = card.captures
        served.captured = Counter(
            {name: count // max(1, served.graphs) for name, count in captured.items()}
        )
        with card.during("step"):
            for index, each in enumerate(params):
                tokens = list(range(1, prompt_tokens + index))
                lora = adapters[index] if adapters else None
                engine.add_request(str(index), tokens, each, lora=lora)
                _step(engine, served)
                _step(engine, served)
            while engine.has_unfinished():
                _step(engine, served)
    return served


def _step(engine: Engine, served: Served) -> None:
    for output in engine.step():
        served.num_tokens[output.request_id] = output.num_output_tokens
