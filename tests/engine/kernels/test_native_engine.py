"""The whole engine on packed weights: every path of the C kernels, and none, under every schedule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.base.processor import VARIABLE
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.quant.base.scheme import Activations
from llmopt.quant.kinds.integer.scheme import IntScheme

from ...support.native_paths import native_paths
from ...support.quantized_world import random_model, write_checkpoint

HERE = ["off", *native_paths()]
PROMPTS = [[3 + (7 * i + 11 * j) % 500 for j in range(3 + 5 * i)] for i in range(6)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SCHEMES = {
    "weights": IntScheme(4, 32, False),
    "both": IntScheme(8, -1, True, Activations("int8")),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name, scheme in SCHEMES.items():
        folders[name] = tmp_path_factory.mktemp(name)
        write_checkpoint(folders[name], random_model(), "compressed-tensors", scheme)
    return folders


def engine(folder: Path, **options: Any) -> Engine:
    return Engine(EngineConfig(folder, device="cpu", dtype="float32", num_threads=1, **options))


def run(built: Engine, prompts: list[list[int]]) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in prompts]
    for index, prompt in enumerate(prompts):
        built.add_request(str(index), prompt, GREEDY)
    while built.has_unfinished():
        for output in built.step():
            tokens[int(output.request_id)].extend(output.new_token_ids)
    return tokens


@pytest.mark.sweep(5)
@pytest.mark.parametrize("path", HERE)
@pytest.mark.parametrize(("kind", "bits"), [("weights", 16), ("weights", 8), ("both", 16)])
def test_tokens_depend_on_no_neighbour_and_no_chunk(
    checkpoints: dict[str, Path], kind: str, bits: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, path)
    folder, options = checkpoints[kind], {"cpu_activations": bits}
    alone = run(engine(folder, max_num_seqs=1, **options), PROMPTS)
    assert run(engine(folder, **options), PROMPTS) == alone
    assert run(engine(folder, prefill_chunk_size=5, block_size=4, **options), PROMPTS) == alone


@pytest.mark.parametrize("path", HERE)
def test_logits_are_those_of_the_codes_on_every_path(
    checkpoints: dict[str, Path], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    expected = engine(checkpoints["weights"]).prompt_logits(PROMPTS[5])
    monkeypatch.setenv(VARIABLE, path)
    built = engine(checkpoints["weights"])
    torch.testing.assert_close(built.prompt_logits(PROMPTS[5]), expected, atol=1e-4, rtol=1e-4)


def test_eight_bit_inputs_move_logits_a_little_and_only_when_asked(
    checkpoints: dict[str, Path],
) -> None:
    if len(HERE) == 1:
        pytest.skip("no C kernels for this processor")
    exact, rounded = (
        engine(checkpoints["weights"], cpu_activations=bits).prompt_logits(PROMPTS[5])
        for bits in (16, 8)
    )
    moved = (rounded - exact).norm() / exact.norm()
    assert 1e-4 < moved < 0.1


def test_a_step_reads_the_packed_bytes(checkpoints: dict[str, Path]) -> None:
    if len(HERE) == 1:
        pytest.skip("no C kernels for this processor")
    config = json.loads((checkpoints["weights"] / "config.json").read_text())
    head = config["vocab_size"] * config["hidden_size"] * 4
    linears = 2 * (192 * (192 + 64 + 64 + 192) + 3 * 192 * 320)
    read = engine(checkpoints["weights"]).memory.weight_bytes_per_step - head
    # 4-bit codes, a scale and a zero code for every 32 of them, biases and norms
    assert linears * 0.5 < read < linears * (0.5 + 5 / 32) + 40_000


def test_other_widths_of_input_are_refused() -> None:
    with pytest.raises(BadInput, match="cpu_activations = 4: choose 8 or 16"):
        EngineConfig("stories3M", cpu_activations=4)
