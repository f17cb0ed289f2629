"""The question of `llmopt best`: what is refused, what is promised by default, and which folder holds its answer."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.base.option import keywords_of_words
from llmopt.base.progress import Silent
from llmopt.bench.best import search
from llmopt.bench.best.decision import mean_speed
from llmopt.bench.best.first_answer import BudgetedProgress
from llmopt.bench.best.search import Target
from llmopt.bench.best.target import DEFAULT_MAX_KL, BestRequest, open_folder
from llmopt.engine.planner import load_plan
from llmopt.engine.planner.simulation import simulate
from llmopt.engine.planner.weights import WeightRecipe


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"size": 10**6, "target_bpw": 4.0}, "--size and --target-bpw"),
        ({"size": 0}, "--size 0"),
        ({"target_bpw": float("nan")}, "--target-bpw"),
        ({"loads_in": "vlm"}, "--loads-in vlm: the nearest is vllm"),
        ({"output_tokens": 8}, "--output-len is a part of the context"),
        ({"request_rate": 0.0}, "--request-rate 0"),
        (
            {"request_rate": 2.0, "sequences": 8},
            "--concurrency and --request-rate are both the load",
        ),
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
        ({"worth": 1.0}, "--worth 1"),
        ({"quality_text": Path("none.txt")}, "--quality-text none.txt: there is no such file"),
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
    with pytest.raises(BadInput, match="another question, with size 1000000, not 2000000"):
        open_folder(folder, BestRequest(size=2 * 10**6).question("stories3M", "cpu"))
    shared = BestRequest(size=10**6, stats=tmp_path / "other")  # its statistics are by content
    open_folder(folder, shared.question("stories3M", "cpu"))
    (text := tmp_path / "text.txt").write_text("Once upon a time.")
    with pytest.raises(BadInput, match=f"with quality-text None, not {text}"):
        open_folder(folder, BestRequest(size=10**6, quality_text=text).question("stories3M", "cpu"))
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


def test_vllm_on_a_cpu_gets_what_it_was_seen_to_load(tmp_path: Path) -> None:
    kinds = {}
    for gpu in ("cpu", "h100"):
        target = Target.of(BestRequest(gpu=gpu, loads_in="vllm"), "stories3M")
        lanes, (request,) = search._lanes(target, tmp_path, "auto")
        assert {each["name"] for each in lanes if each["refused"] is None} == {"compressed-tensors"}
        kinds[gpu] = set(request.candidates)
    assert kinds["cpu"] == {"int4", "int4-asym"}  # there are no kernels for 8 bits of weights alone
    assert kinds["h100"] >= {"int4", "int4-asym", "int8", "fp8", "nvfp4"}


def test_transformers_gets_no_zero_points_which_it_does_not_mix(tmp_path: Path) -> None:
    target = Target.of(BestRequest(loads_in="transformers"), "stories3M")
    lanes, (request, *_) = search._lanes(target, tmp_path, "auto")
    assert lanes[0]["name"] == "compressed-tensors"
    assert set(request.candidates) == {"int2", "int3", "int4", "int6", "int8"}


def test_a_gpu_that_the_table_lacks_is_named_with_what_helps() -> None:
    with pytest.raises(BadInput, match=r"no GPU 'h1000' in the table: near are H100 SXM"):
        Target.of(BestRequest(gpu="h1000"), "stories3M")


def test_the_speed_of_a_mixture_is_that_of_its_kinds() -> None:
    """On a card that multiplies fp8 twice as fast, half of each is between the two; a mean of one kind is
    that kind's."""
    target = Target.of(BestRequest(gpu="h100", context="512", loads_in="vllm"), "stories3M")
    kinds = [WeightRecipe(name, 8, scale_bits=0, stored_bytes=10**7) for name in ("fp8", "int8")]
    fast, slow = (target.planned(kind, "bf16")["speed"] for kind in kinds)
    alone = mean_speed([(1.0, fast)])
    assert alone["tokens_per_s"] == pytest.approx(fast["tokens_per_s"])
    assert alone | {"tokens_per_s": fast["tokens_per_s"]} == fast
    mixed = mean_speed([(0.5, fast), (0.5, slow)])
    for name in ("tpot_ms", "ttft_ms", "e2el_ms"):
        assert fast[name] != slow[name] and mixed[name] == (fast[name] + slow[name]) / 2
    edges = zip(fast["band"], slow["band"], strict=True)
    assert mixed["band"] == pytest.approx([sum(one) / 2 for one in edges])
    assert mean_speed([(0.5, fast), (0.5, slow | {"band": None})])["band"] is None


def test_mixtures_of_other_bytes_are_not_simulated_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """But those of another kind."""
    monkeypatch.setattr(load_plan, "_SIMULATIONS", deque(maxlen=64))
    asked: list[Any] = []

    def counted(server: Any, clock: Any, *rest: Any) -> Any:
        asked.append(clock.recipe.name)
        return simulate(server, clock, *rest)

    monkeypatch.setattr(load_plan, "simulate", counted)
    target = Target.of(BestRequest(gpu="h100", sequences=64, loads_in="vllm"), "stories3M")
    asks = ("fp8", 10**7), ("fp8", 2 * 10**7), ("int8", 10**7)
    kinds = [WeightRecipe(name, 8, scale_bits=0, stored_bytes=size) for name, size in asks]
    first, other, third = (target.planned(kind, "bf16") for kind in kinds)
    assert first == other != third
    assert asked == 2 * ["fp8"] + 2 * ["int8"]  # clients of equal requests, and the data set's


def test_a_command_line_writes_the_loader_in_any_case() -> None:
    given = keywords_of_words(BestRequest, {"loads_in": "vLLM", "max_kl": "0.02"})
    assert (given["loads_in"], given["max_kl"]) == ("vllm", 0.02)


def test_the_bar_of_the_machine_says_what_it_is_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []

    class Shown(Silent):
        def start(self, description: str, total: int, unit: str) -> None:
            shown.append(description)

        def note(self, message: str) -> None:
            shown.append(message)

    def bench(options: Any, progress: Any) -> Any:
        progress.note("sharegpt: the prompts are a stand-in")
        progress.start("bench", 1000, "%")
        progress.note("warning: the clock drifts")
        return SimpleNamespace(interrupted=True)

    monkeypatch.setattr(search, "run_bench", bench)
    target = Target.of(BestRequest(gpu="cpu"), "stories260K")
    with pytest.raises(KeyboardInterrupt):
        search.measure_machine(target, tmp_path, Shown())
    assert shown == ["speed of this machine, bench", "warning: the clock drifts"]


def test_a_budget_ends_the_work_at_the_next_report() -> None:
    """Within a step as between steps, and not before it is spent."""
    times = iter((0.0, 50.0, 100.0, 100.5, 100.5))
    progress = BudgetedProgress(Silent(), 100.0, lambda: next(times))
    progress.start("layers", 3, "layers")
    progress.advance()
    with pytest.raises(KeyboardInterrupt):
        progress.advance()
    assert progress.is_spent


@pytest.mark.parametrize("changed", [BestRequest(budget=0.5), BestRequest(worth=0.5)])
def test_a_resumed_search_may_have_another_budget(changed: BestRequest) -> None:
    question = changed.question("stories3M", "cpu")
    assert question == BestRequest().question("stories3M", "cpu")
