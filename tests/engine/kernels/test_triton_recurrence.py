"""Recurrent steps in Triton against torch's: outputs, and the states in their slots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.engine import LLM, SamplingParams
from llmopt.engine.kernels.common.devices import VARIABLE
from llmopt.engine.kernels.common.verdicts import relative_error
from llmopt.engine.kernels.elementwise.dispatch import RowKernelQuery, recurrence_trial
from llmopt.engine.kernels.elementwise.recurrence import ConvCall, StateRows, TorchRecurrence

from ...support.model_families import FAMILIES, save_model
from ...support.triton_world import DEVICE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_step_is_the_references(dtype: torch.dtype) -> None:
    """Sequences with a state are stepped, and those whose slots hold their last owners' leavings."""
    from llmopt.engine.kernels.elementwise.triton_recurrence import TritonRecurrence

    trial = recurrence_trial(RowKernelQuery(DEVICE, dtype, 1))
    expected, got = trial.compute(TorchRecurrence), trial.compute(TritonRecurrence)
    assert relative_error(got, expected) <= trial.tolerance


@pytest.mark.parametrize("gated", [False, True])
def test_windows_of_any_width_move_on(gated: bool) -> None:
    """Channels that fill no program, a window of three; what a fresh slot holds does not count."""
    from llmopt.engine.kernels.elementwise.triton_recurrence import TritonRecurrence

    torch.manual_seed(0)
    channels, parts = 300, 3 if gated else 1
    x, weight = torch.randn(2, parts * channels, device=DEVICE), torch.randn(channels, 3)
    held = torch.randn(4, channels, 3, device=DEVICE)
    held[1] = float("nan")
    slots = torch.tensor([3, 1], device=DEVICE)
    rows, taps = StateRows(slots, torch.tensor([False, True], device=DEVICE)), weight.to(DEVICE)
    states = [held.clone() for _ in "ab"]
    outs = [
        kernel.conv(ConvCall(x, state, rows, taps, None, gated=gated))
        for kernel, state in zip((TorchRecurrence(), TritonRecurrence()), states, strict=True)
    ]
    torch.testing.assert_close(outs[1], outs[0])
    torch.testing.assert_close(states[1], states[0])
    assert torch.equal(states[1][[0, 2]], held[[0, 2]]), "other sequences' states are as they were"


HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": (
        "Qwen3NextConfig",
        {
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
            "linear_value_head_dim": 16, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "lfm-2": ("Lfm2Config", {"layer_types": ["conv", "full_attention", "conv"]}),
    "granite-4": FAMILIES["granite-4"],
}  # fmt: skip


@pytest.mark.sweep(1)
@pytest.mark.parametrize("family", HYBRIDS)
def test_greedy_tokens_are_those_of_torch(
    family: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save_model(tmp_path, *HYBRIDS[family])
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)

    def tokens() -> list[tuple[int, ...]]:
        options: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 32}
        llm = LLM(tmp_path, device=DEVICE, dtype="float32", max_model_len=64, **options)
        prompts = [[1, 5, 9], [1, 2, 3, 4, 5]]
        return [tuple(result.token_ids) for result in llm.generate(prompts, params)]

    monkeypatch.setenv(VARIABLE, "off")
    expected = tokens()
    monkeypatch.setenv(VARIABLE, "interpret" if DEVICE == "cpu" else "auto")
    assert tokens() == expected
