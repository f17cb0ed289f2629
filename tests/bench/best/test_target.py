"""The question of `llmopt best`: what is refused, what is promised by default, and which folder holds its answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llmopt.bench.best import search
from llmopt.bench.best.search import Target
from llmopt.bench.best.target import DEFAULT_MAX_KL, BestRequest, open_folder
from llmopt.quant.base.errors import BadInput


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"size": 10**6, "target_bpw": 4.0}, "--size and --target-bpw"),
        ({"size": 0}, "--size 0"),
        ({"target_bpw": float("nan")}, "--target-bpw"),
        ({"loads_in": "vlm"}, "--loads-in vlm: the nearest is vllm"),
        ({"output_tokens": 8}, "--output-len is a part of the context"),
        ({"slo": "tpot"}, "--slo 'tpot'"),
        ({"slo": ""}, "--slo names no limit"),
        ({"max_kl": -0.1}, "--max-kl -0.1"),
        ({"promise": ("klx<=0.1",)}, "--promise nothing is called 'klx'"),
        ({"promise": ("latency<=1",)}, "'latency': there are perplexity, kl,"),
        ({"promise": ("nonsense",)}, "cannot read 'nonsense': write limits such as \"flips<=2%"),
        ({"promise": ("kl>=0.1",)}, "bound it from its worse side, by <="),
        ({"promise": ("top1<=90%",)}, "bound it from its worse side, by >="),
        ({"promise": ("kl<=0.1",), "max_kl": 0.1}, "--max-kl and --promise kl"),
        ({"promise": ("p99_ttft_ms<=100",)}, "--promise p99_ttft_ms is no score"),
        (
            {"promise": ("task.gsm8k.exact_match>=-2%",)},
            "--promise task.gsm8k.exact_match is no score",
        ),
        ({"promise": ("flips<=2%",), "quality_full": False}, "--no-quality-full leaves it out"),
        ({"sequences": 0}, "--concurrency 0"),
        ({"finalists": 0}, "--finalists 0"),
        ({"finalists": 11}, "--finalists 11"),
    ],
)
def test_bad_input_is_one_line(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput) as caught:
        BestRequest(**given)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "limits"),
    [
        ({}, [("kl", DEFAULT_MAX_KL)]),
        ({"size": 10**6}, []),
        ({"target_bpw": 4.0}, []),
        ({"max_kl": 0.02}, [("kl", 0.02)]),
        ({"size": 10**6, "max_kl": 0.02}, [("kl", 0.02)]),
        ({"promise": ("top1>=90%", "flips<=2%")}, [("top1", 0.9), ("flips", 0.02)]),
    ],
)
def test_promises(given: dict[str, Any], limits: list[tuple[str, float]]) -> None:
    """A KL divergence is promised where nothing else bounds the answer."""
    found = BestRequest(**given).limits
    assert [(one.quantity.key, one.bound) for one in found] == limits


def test_a_folder_holds_the_answer_to_one_question(tmp_path: Path) -> None:
    folder = tmp_path / "best"
    first = BestRequest(size=10**6).question("stories3M", "cpu")
    open_folder(folder, BestRequest(size=10).question("stories3M", "cpu"))  # nothing came of it
    open_folder(folder, first)
    (folder / "statistics").mkdir()
    open_folder(folder, first)  # resumed
    with pytest.raises(BadInput, match="another question, whose size is 1000000, not 2000000"):
        open_folder(folder, BestRequest(size=2 * 10**6).question("stories3M", "cpu"))
    shared = BestRequest(size=10**6, stats=tmp_path / "other")  # its statistics are by content
    open_folder(folder, shared.question("stories3M", "cpu"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    with pytest.raises(BadInput, match="holds other files"):
        open_folder(tmp_path / "full", first)


@pytest.mark.parametrize(
    ("gpu", "loads_in", "local", "name", "is_here"),
    [
        ("h100", "llmopt", "NVIDIA H100 80GB HBM3", "H100 SXM", True),
        ("h100", "vllm", "NVIDIA H100 80GB HBM3", "H100 SXM", False),  # vLLM's speed is not ours
        ("h100", "llmopt", "A card of tomorrow", "H100 SXM", False),
        ("cpu", "llmopt", "A card of tomorrow", "cpu", True),
        (None, "llama.cpp", None, "cpu", False),
    ],
)
def test_speed_is_measured_where_this_machine_and_its_engine_are_the_target(
    gpu: str | None, loads_in: str, local: str | None, name: str, is_here: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(search, "local_gpu", lambda: local)
    target = Target.of(BestRequest(gpu=gpu, loads_in=loads_in), "stories3M")
    assert (target.device.name, target.is_here) == (name, is_here)


def test_a_gpu_that_the_table_lacks_is_named_with_what_helps() -> None:
    with pytest.raises(BadInput, match=r"--gpu: no GPU 'h1000' in the table .*, or cpu$"):
        Target.of(BestRequest(gpu="h1000"), "stories3M")
