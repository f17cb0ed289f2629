"""Libraries' kernels, where the packages are installed: our calls run their Python side up to the launch.

On the pretended card, which launches nothing. FlashInfer's modules, which need nvcc, are a record of their calls.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from llmopt.engine.kernels.attention import library_attention
from llmopt.engine.kernels.attention.batch import AttentionRule
from llmopt.engine.kernels.elementwise.dispatch import delta_rule_fla

from ...support.attention_world import World
from ...support.pretended_cuda.card import Card
from ...support.pretended_cuda.runtime import pretended_cuda

FLASHINFER = {"decode": ([1, 1, 1], {}), "prefill": ([1, 7, 2], {})}
FLASHINFER["window"] = ([1, 7, 2], {"window": 6, "softcap": 2.0})


@pytest.mark.parametrize("case", FLASHINFER)
def test_flashinfer_plans_and_runs_our_batches(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flashinfer")
    core = pytest.importorskip("flashinfer.jit.core")
    news, rule = FLASHINFER[case]
    called: list[str] = []

    class Module:
        def __getattr__(self, name: str) -> Any:
            def call(*_: Any) -> torch.Tensor:
                called.append(name)
                return torch.zeros(16, dtype=torch.int64)

            return call

    monkeypatch.setattr(core.JitSpec, "build_and_load", lambda *_, **__: Module())
    with pretended_cuda(Card()):
        kind = {"kv_heads": 2, "stored": torch.bfloat16, "dtype": torch.bfloat16, "dims": (64, 64)}
        world = World([21, 9, 33], news, device="cuda:0", **kind)
        _, batch = world.batch()
        attend = library_attention.attend_flashinfer(None)  # pyright: ignore[reportArgumentType]
        given = world.queries, world.keys, world.values, batch, AttentionRule(0.3, **rule)
        assert [attend(*given).shape for _ in range(2)] == [world.queries.shape] * 2
    assert called.count("plan") == 1 and [name.endswith("run") for name in called[1:]] == [True] * 2


def test_fla_takes_our_delta_rule_to_its_launches() -> None:
    pytest.importorskip("fla.ops.gated_delta_rule")
    with pretended_cuda(card := Card()):
        rows, gates = torch.zeros(130, 4, 64, device="cuda"), torch.zeros(130, 4, device="cuda")
        before = torch.zeros(4, 64, 64, device="cuda")
        out, state = delta_rule_fla(rows, rows, rows, gates, gates, before)
    assert out.shape == (130, 4, 64) and state.shape == (4, 64, 64)
    assert sum(entry.kind == "triton" for entry in card.log) == 5
