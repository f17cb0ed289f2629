"""Mixed precision: what a choice costs is predicted as it is measured, and the program finds the least of it."""

from __future__ import annotations

import ctypes
import itertools
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llmopt.base.errors import BadInput
from llmopt.base.progress import Silent
from llmopt.quant.convert.verify import PROVEN, verify
from llmopt.quant.gguf import assemble
from llmopt.quant.gguf.container import GgufFile
from llmopt.quant.kinds.registry import scheme_record
from llmopt.quant.methods.options import MethodOptions
from llmopt.quant.pipeline import candidates, divergence, mixed_precision, prepare, stages
from llmopt.quant.pipeline.candidates import Choice
from llmopt.quant.pipeline.mixed_precision import (
    Lane,
    allocate,
    c_prints_logged,
    front,
    mixed_plan,
)
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.pipeline.prepare import search_fronts
from llmopt.quant.plan.request import QuantizeRequest
from llmopt.quant.stream.layer_stream import LayerStream
from safetensors.torch import load_file

from tools.mixtures import Measured, rank_correlation

from ...support.quant_support import STORIES, TINY


@pytest.mark.whole
def test_expected_divergence_ranks_mixtures_as_the_measured_does(tmp_path: Path) -> None:
    measured = Measured.of(STORIES, tmp_path, 3.5, num_samples=64, seq_len=128, held_out=32)
    assert rank_correlation(measured, 20, tilt=1.5) >= 0.95
    # Mixtures of about one size differ less, and by sums of many small differences.
    assert rank_correlation(measured, 40) >= 0.9


def hypervolume(points: Sequence[tuple[int, float]], corner: tuple[int, float]) -> float:
    """Area between a corner and the points that are better in both, bytes and divergence."""
    area, worst = 0.0, corner[1]
    for size, loss in sorted(points):
        if loss < worst and size < corner[0]:
            area += (corner[0] - size) * (worst - loss)
            worst = loss
    return area


def front_share(choices: Sequence[Choice], losses: Mapping[tuple[int, ...], float]) -> float:
    """Hypervolume of our front over that of every mixture, whose losses these are."""

    def point(mixture: tuple[int, ...]) -> tuple[int, float]:
        return sum(c.bytes[at] for c, at in zip(choices, mixture, strict=True)), losses[mixture]

    every = list(map(point, losses))
    corner = max(size for size, _ in every) + 1, max(losses.values())
    ours = [
        point(allocation.chosen) for allocation in front(choices, 32, partial(allocate, choices))
    ]
    return hypervolume(ours, corner) / hypervolume(every, corner)


def test_the_front_is_that_of_all_mixtures() -> None:
    draw = random.Random(0)
    choices = [
        Choice(
            (str(n),), (10, 20, 30), tuple(sorted((draw.random() for _ in range(3)), reverse=True))
        )
        for n in range(5)
    ]
    every = itertools.product(range(3), repeat=5)
    losses = {m: sum(c.costs[at] for c, at in zip(choices, m, strict=True)) for m in every}
    assert front_share(choices, losses) >= 0.98


@pytest.mark.whole
def test_the_front_is_that_of_all_mixtures_in_measured_divergence(tmp_path: Path) -> None:
    """Five groups of linears with three candidates each."""
    left = r"layers\.([1-3]\.|4\.(self_attn|mlp\.down))"
    measured = Measured.of(
        STORIES, tmp_path, 3.5, kept=3, num_samples=16, seq_len=64, held_out=16, ignore=(left,)
    )
    assert len(measured.choices) == 5
    every = list(itertools.product(range(3), repeat=5))
    known = dict(zip(every, measured.divergences(every), strict=True))
    assert front_share(measured.choices, known) >= 0.98


@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 50), st.integers(0, 1000)), min_size=3, max_size=3),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 120),
)
@settings(deadline=None)  # the first call loads the solver
def test_an_allocation_is_the_best_of_all_within_the_bound(
    raw: list[list[tuple[int, int]]], extra: int
) -> None:
    choices = [
        Choice((str(number),), tuple(s for s, _ in three), tuple(float(c) for _, c in three))
        for number, three in enumerate(raw)
    ]
    least = sum(min(choice.bytes) for choice in choices)

    def total(picked: tuple[int, ...], part: str) -> float:
        return sum(getattr(c, part)[at] for c, at in zip(choices, picked, strict=True))

    every = [
        one
        for one in itertools.product(range(3), repeat=len(choices))
        if total(one, "bytes") <= least + extra
    ]
    found = allocate(choices, least + extra)
    assert found.bytes == total(found.chosen, "bytes") and found.chosen in every
    assert found.cost == total(found.chosen, "costs")
    assert found.cost <= min(total(one, "costs") for one in every) * (1 + 1e-4)
    with pytest.raises(BadInput, match="too small"):
        allocate(choices, least - 1)
    same = allocate(choices, sum(max(choice.bytes) for choice in choices), exclusive=True)
    assert len(set(same.chosen)) == 1


def test_the_screen_is_free_of_what_the_solver_prints(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG", "llmopt"), c_prints_logged():
        ctypes.CDLL(None).puts(b"from C")
    print("the result")
    assert capfd.readouterr().out == "the result\n"
    assert caplog.messages == ["from C"]


@pytest.mark.parametrize(
    ("model", "weight_format", "mixed"),
    [(TINY, "gguf", True), pytest.param(STORIES, "awq", False, marks=pytest.mark.whole)],
)
def test_a_format_holds_what_is_chosen(
    tmp_path: Path, model: Path, weight_format: str, mixed: bool
) -> None:
    """ggml's types tensor by tensor; one scheme for the whole file of awq."""
    request = QuantizeRequest(
        model, tmp_path / "out", method="auto", target_bpw=5.4, format=weight_format,
        num_samples=4, seq_len=64, held_out=2, model_name="m",
    )  # fmt: skip
    result = quantize(request)
    schemes = {json.dumps(module["scheme"]) for module in result.manifest["modules"]}
    assert (len(schemes) > 1) == mixed
    assert result.manifest["summary"]["bits_per_weight"] <= 5.4
    assert result.manifest["search"]["gap"] <= 1e-3
    assert verify(result.output).status == PROVEN


def auto(folder: Path, name: str, **options: Any) -> QuantizeRequest:
    """A search on a few tokens, whose statistics are kept."""
    usual: dict[str, Any] = {
        "num_samples": 4, "seq_len": 64, "held_out": 2, "model_name": "m", "method": "auto",
        "format": "compressed-tensors", "stats": folder / "stats", "ignore": (r"layers\.[2-4]",),
    }  # fmt: skip
    return QuantizeRequest(STORIES, folder / name, **(usual | options))


def test_a_front_is_rebuilt_by_targets_and_nothing_is_solved_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    solved: list[str] = []
    real = divergence.solve_layer

    def solve(plan: Any, family: Any, prefix: str, *rest: Any) -> Any:
        solved.append(prefix)
        if len(solved) == 2:
            raise KeyboardInterrupt
        return real(plan, family, prefix, *rest)

    monkeypatch.setattr(candidates, "solve_layer", solve)
    asked = auto(tmp_path, "none", candidates=("int3", "int4", "int8"))
    with pytest.raises(KeyboardInterrupt):
        search_fronts([asked])
    blocks = auto(tmp_path, "none", format="gguf", candidates=("Q4_0", "Q8_0"))
    lane, other = search_fronts([asked, blocks])
    assert len(solved) == 5  # two layers of two formats, and that of the interrupt twice
    points = front(lane.choices, 6, lane.allocate)
    assert [one.cost for one in points] == sorted((one.cost for one in points), reverse=True)
    # It reads the tokenizer, which no mixture changes.
    monkeypatch.setattr(assemble, "check_source", None)
    last = front(other.choices, 3, other.allocate)[-1]
    assert last.cost == 0 and len(lane.divergences([{}], Silent())) == 1

    solved.clear()
    point = points[2]
    rebuilt = replace(asked, output=tmp_path / "out", target_bytes=lane.target_bytes(point))
    manifest = quantize(rebuilt).manifest
    assert not solved
    records = {module["module"]: module["scheme"] for module in manifest["modules"]}
    assert records == {name: scheme_record(s) for name, s in lane.schemes_of(point).items()}
    again = quantize(replace(rebuilt, output=tmp_path / "again"))
    names = [path.name for path in again.output.iterdir()]
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (again.output / name).read_bytes()


def test_statistics_of_a_search_serve_other_methods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search measures fewer samples than other methods would; other data is refused."""
    monkeypatch.setattr(prepare, "SEARCH_TOKENS", 128)
    monkeypatch.setattr(prepare, "SEARCH_TOKENS_PER_INPUT", 0)
    search = auto(tmp_path, "none", candidates=("int4", "int8"))
    search_fronts([search])
    options = MethodOptions.asked(true_sequential=False)
    awq = auto(tmp_path, "awq", method="awq", bits=4, options=options)
    notes = quantize(awq).notes
    assert "note: --stats are those of a search, of 2 of the 4 samples" in notes
    with pytest.raises(BadInput, match="other calibration data"):
        quantize(replace(awq, seed=1, output=tmp_path / "other"))
    assert (tmp_path / "awq").is_dir() and not (tmp_path / "other").exists()


def test_most_layers_are_solved_for_one_scheme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The costs of the others have the ratios of the nearest layer that is solved for all."""
    every_layer = auto(tmp_path, "none", candidates=("int3", "int4", "int8"), ignore=())
    monkeypatch.setattr(candidates, "_SOLVED_SHARE", 1.0)
    (whole,) = search_fronts([every_layer])
    for path in (tmp_path / "stats").glob("costs-*"):
        path.unlink()
    solved: dict[str, int] = {}
    real = divergence.solve_layer

    def solve(plan: Any, family: Any, prefix: str, tensors: Any, wanted: Any, *rest: Any) -> Any:
        solved[prefix] = len(wanted)
        return real(plan, family, prefix, tensors, wanted, *rest)

    monkeypatch.setattr(candidates, "solve_layer", solve)
    monkeypatch.setattr(candidates, "_SOLVED_LAYERS", 2)
    monkeypatch.setattr(candidates, "_SOLVED_ROWS", 96)
    (lane,) = search_fronts([every_layer])
    first, *middle, last = (count for _, count in sorted(solved.items()))
    assert first == last and {*middle} == {len(lane.search.plan.modules) // 5}
    for choice, exact in zip(lane.choices, whole.choices, strict=True):
        assert (choice.modules, choice.bytes) == (exact.modules, exact.bytes)
        pairs = zip(choice.costs, exact.costs, strict=True)
        assert all(0.5 * other <= cost <= 2 * other for cost, other in pairs)
    bound = sum(sum(choice.bytes[number] for choice in lane.choices) for number in (0, -2)) // 2
    chosen = lane.allocate(bound).chosen
    assert whole.expected(chosen) < 1.1 * whole.allocate(bound).cost


def test_codes_without_true_sequential_are_those_of_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No layer is run again: the statistics tell all that the solver needs. A mixture that is clearly better
    than one scheme by its expected KL is not solved to be compared."""
    few = {"ignore": (r"layers\.[1-4]",), "candidates": ("int4", "int8")}
    options = MethodOptions.asked(true_sequential=False)
    monkeypatch.setattr(stages, "online", None)
    monkeypatch.setattr(mixed_precision, "divergences", None)
    result = quantize(auto(tmp_path, "out", target_bpw=6.0, options=options, **few))
    record = result.manifest["search"]
    assert (record["taken"], record["mixed"]["kl"], record["kl_tokens"]) == ("mixed", None, 0)
    assert any(": expected KL: mixed" in note for note in result.notes)
    assert "behind the quantized layers" not in result.manifest["error"]


@pytest.mark.parametrize(("least", "factor", "samples"), [(2, 0, 2), (0, 1, 8), (10**6, 0, 12)])
def test_kinds_are_compared_by_the_first_samples(
    least: int, factor: int, samples: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At least so many tokens, and so many for each input of the widest linear."""
    monkeypatch.setattr(prepare, "SEARCH_TOKENS", least * 64)
    monkeypatch.setattr(prepare, "SEARCH_TOKENS_PER_INPUT", factor)
    most = (r"layers\.[1-4]",)
    search_fronts([auto(tmp_path, "none", candidates=("int4",), ignore=most, num_samples=12)])
    measured = load_file(tmp_path / "stats" / "layer-00000.safetensors")
    ending = ".num_tokens"
    names = [name for name in measured if name.startswith("calibration") and name.endswith(ending)]
    assert names
    assert {int(measured[name]) for name in names} == {samples * 64}


@pytest.mark.parametrize("calls", [3, 7], ids=["forward", "backward"])
def test_a_killed_pass_for_sensitivities_goes_on(
    calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the layer that it was in: each is run forward and backward once."""
    asked = auto(tmp_path, "none", candidates=("int4",), ignore=(r"layers\.[1-4]",))
    (lane,) = search_fronts([replace(asked, stats=tmp_path / "whole")])
    loaded: list[int] = []
    real = LayerStream.load

    def load(stream: LayerStream, index: int, tensors: Any) -> None:
        loaded.append(index)
        if len(loaded) == 5 + calls:  # the pass for the statistics has five
            raise KeyboardInterrupt
        real(stream, index, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(LayerStream, "load", load)
        with pytest.raises(KeyboardInterrupt):
            search_fronts([asked])
    left = loaded[5:]
    assert len(left) == calls
    loaded[:] = [-1] * 12  # beyond the interrupt
    monkeypatch.setattr(LayerStream, "load", load)
    (again,) = search_fronts([asked])
    assert [*left[:-1], *loaded[12:]] == [0, 1, 2, 3, 4, 4, 3, 2, 1, 0]
    assert again.choices == lane.choices
    assert {path.name for path in asked.stats.iterdir()} == {
        path.name for path in (tmp_path / "whole").iterdir()
    }


def test_costs_are_scaled_by_layer_as_they_are_felt_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = auto(tmp_path, "none", candidates=("int3", "int8"))
    (plain_lane,) = search_fronts([asked])
    assert not plain_lane.excess  # of few tokens scales are noise
    monkeypatch.setattr(mixed_precision, "SCALE_TOKENS", plain_lane.samples[0].numel())
    (lane,) = search_fronts([asked])
    early = [".layers.0." in choice.modules[0] for choice in lane.choices]
    assert len({*zip(early, lane.excess, strict=True)}) == 2  # one scale for each of two layers
    uniform = [lane.search.nearest(3.5)] * len(early)
    (loss,) = lane.divergences([lane.search.schemes[uniform[0]]], Silent())
    plain = sum(choice.costs[at] for choice, at in zip(lane.choices, uniform, strict=True))
    assert abs(lane.expected(uniform) / loss - 1) < abs(plain / loss - 1)

    bound = sum(sum(choice.bytes[at] for choice in lane.choices) for at in (0, -2)) // 2
    shares = []
    for first in (True, False):  # where the errors of a layer are felt more, it has more bytes
        excess = tuple(3.0 * (one is first) for one in early)
        search = replace(lane.search, budget=bound)
        other = replace(lane, excess=excess, level=1e-6, search=search)
        *_, found = both = other.proposals(bound)
        pairs = zip(lane.choices, found.chosen, early, strict=True)
        shares.append(sum(choice.bytes[at] for choice, at, one in pairs if one))
        assert len(both) == 2
        for losses in ([1.0, 2.0, 3.0], [2.0, 1.0, 3.0]):  # the less measured one is taken
            monkeypatch.setattr(Lane, "divergences", lambda *_, losses=losses: losses)
            assert mixed_plan(other, Silent()).schemes == other.schemes_of(
                both[losses.index(min(losses))]
            )
    assert shares[0] > shares[1]


def test_the_embedding_of_a_gguf_file_is_a_choice(tmp_path: Path) -> None:
    kinds = ("Q2_K", "Q4_0", "Q8_0")
    (lane,) = search_fronts([auto(tmp_path, "none", format="gguf", candidates=kinds)])
    table = lane.choices[-1]
    assert table.modules == ("model.embed_tokens",)
    types = [lane.search.schemes[number]["model.embed_tokens"] for number in range(3)]
    losses = lane.divergences([{"model.embed_tokens": one} for one in types], Silent())
    assert losses == sorted(losses, reverse=True)
    for cost, loss in zip(table.costs[:2], losses[:2], strict=True):  # the last is bfloat16's noise
        assert cost / 2 < loss < 2 * cost
    target = lane.search.rest_bytes + sum(choice.bytes[1] for choice in lane.choices)
    result = quantize(auto(tmp_path, "out", format="gguf", candidates=kinds, target_bytes=target))
    assert 0.98 * target < result.preflight.tensor_bytes["gguf"] <= target
    file = GgufFile(next(result.output.glob("*.gguf")))
    assert file.tensors["token_embd.weight"].type in ("Q4_0", "Q8_0")
    assert verify(result.output).status == PROVEN


def test_floats_and_integers_are_mixed_in_one_file(tmp_path: Path) -> None:
    kinds = ("int2", "int3-asym", "int5", "fp8", "nvfp4", "mxfp4")
    asked = auto(tmp_path, "out", candidates=kinds)
    (lane,) = search_fronts([asked])
    labels = {lane.search.label(number) for number in range(len(lane.search.schemes))}
    assert labels >= {"int3 g128 asym", "fp8 channel", "nvfp4", "mxfp4", "16 bits"}
    ends = [sum(each.bytes[place] for each in lane.choices) for place in (0, -1)]
    bound = lane.search.rest_bytes + (3 * ends[0] + ends[1]) // 4
    result = quantize(replace(asked, target_bytes=bound))
    grids = {module["scheme"]["grid"] for module in result.manifest["modules"]}
    assert len(grids) > 1 and verify(result.output).status == PROVEN


def test_what_is_chosen_is_made_as_awq_makes_its_own(tmp_path: Path) -> None:
    """With one kind to choose: scales are folded, and layers run with GPTAQ, `--stats` or not."""
    target = quantize(auto(tmp_path, "auto", candidates=("int4-asym",), target_bpw=4.16))
    (scheme,) = {module["scheme"]["group_size"] for module in target.manifest["modules"]}
    own = quantize(
        auto(
            tmp_path, "awq", method="awq", bits=4, group_size=scheme, stats=None, rotations=(),
            symmetric=False, format="compressed-tensors",
        )
    )  # fmt: skip
    auto_files, awq_files = (sorted(one.output.glob("*.safetensors")) for one in (target, own))
    assert [file.read_bytes() for file in auto_files] == [file.read_bytes() for file in awq_files]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"candidates": ("int4", "Q4_K")}, "--candidates Q4_K: int weights are mixed of int2, "),
        ({"candidates": ("fp7",), "format": "gguf"}, "--candidates fp7: GGUF has Q4_0, "),
        ({"candidates": ("nvfp4",), "format": "gptq"}, "format gptq cannot hold nvfp4"),
        ({"candidates": ("int4",), "method": "awq"}, "--candidates belong to --method auto"),
    ],
    ids=str,
)
def test_candidates_that_cannot_be(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        search_fronts([auto(tmp_path, "none", **options)])
