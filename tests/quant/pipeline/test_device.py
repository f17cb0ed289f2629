"""`--device`: layers run and are solved there, and nothing mixes with the host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.base import option
from llmopt.base.errors import BadInput
from llmopt.cli.main import main
from llmopt.cli.output.quantize_tables import _remarks
from llmopt.quant.base.device import HOST
from llmopt.quant.base.scheme import Scheme
from llmopt.quant.convert.verify import PROVEN, verify
from llmopt.quant.kinds.base.kind import kind_of
from llmopt.quant.kinds.ggml.scheme import GgufScheme
from llmopt.quant.kinds.integer.scheme import IntScheme
from llmopt.quant.kinds.trellis import viterbi
from llmopt.quant.methods.base import InputStatistics, LayerResult
from llmopt.quant.methods.int_rounding import IntRounding
from llmopt.quant.methods.options import MethodOptions
from llmopt.quant.methods.registry import METHODS
from llmopt.quant.pipeline import quantized_layer
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.request import QuantizeRequest
from torch.utils._python_dispatch import TorchDispatchMode

from ...support.model_families import FAMILIES, save_model
from ...support.pretend_device import NAME, pretended_device
from ...support.pretended_cuda.card import Card
from ...support.pretended_cuda.runtime import pretended_cuda

TINY: dict[str, Any] = {"num_hidden_layers": 1, "num_key_value_heads": 8}


def request(output: Path, method: str, **options: Any) -> QuantizeRequest:
    """A request for the model beside the output."""
    given = {"num_samples": 2, "seq_len": 32, "compute": "float32", "group_size": -1} | options
    return QuantizeRequest(output.parent / "model", output, method, **given)


FEW_STEPS = MethodOptions(iters=3, batch_size=1)
ON_DEVICE: dict[str, dict[str, Any]] = {
    "rtn": {"format": "compressed-tensors"},
    "gptq": {"format": "compressed-tensors"},
    "awq": {"format": "compressed-tensors"},
    "hqq": {"format": "compressed-tensors"},
    "squeezellm": {"group_size": None},
    "smoothquant": {"group_size": None},
    "quip": {"group_size": None},
    "autoround": {"format": "compressed-tensors", "options": FEW_STEPS},
    "fp8": {"group_size": None},
    "int8": {"group_size": None},
    "nf4": {"group_size": None},
    "fp4": {"group_size": None},
    "nvfp4": {"group_size": None},
    "mxfp4": {"group_size": None},
    "trellis": {"group_size": None, "bits": 3},
}
"""Every method, but auto, which searches among these."""


def test_every_method_is_there() -> None:
    assert {*ON_DEVICE} == {*METHODS} - {"auto"}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("method", ON_DEVICE)
def test_everything_is_computed_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Mixing with the host is an error there; the errors are those of a run on the host."""
    options = ON_DEVICE[method]
    monkeypatch.setattr(option, "KINDS", ("cpu", NAME))
    shape = TINY
    if method == "trellis":
        shape = TINY | {"hidden_size": 128, "intermediate_size": 128}
        monkeypatch.setattr(viterbi, "_search", _searched_on_the_host)
    save_model(tmp_path / "model", "LlamaConfig", shape)
    here = quantize(request(tmp_path / "here", method, **options))
    solved: set[str] = set()
    real = quantized_layer._on_host

    def on_host(result: LayerResult) -> LayerResult:
        parts = [part for weight in result.weights.values() for part in weight.parts().values()]
        solved.update(part.device.type for part in (*parts, *result.norms.values()))
        return real(result)

    monkeypatch.setattr(quantized_layer, "_on_host", on_host)
    with pretended_device() as mode:
        there = quantize(request(tmp_path / "there", method, device=NAME, **options))
    assert mode.operations > 400 and solved == {NAME}
    assert there.manifest["calibration"]["device"] == NAME
    assert verify(there.output).status == PROVEN
    errors = [run.manifest["summary"]["error"] for run in (here, there)]
    # Scales of AWQ and QuIP# differ in their last bits, and error feedback then takes other codes: with fewer
    # tokens than inputs, as here, many are about as good.
    near = 0.1 if method in ("awq", "quip") else 0.02
    assert errors[1] == pytest.approx(errors[0], rel=near)


WIDE: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 512, "intermediate_size": 512}
"""Linears of several chunks of the host's, of which a device makes one."""
LINEARS = 7


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_step_of_a_tuned_rounding_takes_few_launches(symmetric: bool) -> None:
    card, shape = Card(), (512, 1024)
    with pretended_cuda(card), torch.device("cuda", 0):
        rounding = IntRounding(torch.ones(shape), IntScheme(4, 128, symmetric), torch.float16)
        into, gradient = torch.empty(shape), torch.ones(shape)
        with card.during("step"):
            rounding.descend(gradient, 0.1)
            rounding.write(into)
    assert card.launches("step").total() <= 72


@pytest.mark.whole
@pytest.mark.parametrize("symmetric", [False, True])
def test_an_iteration_of_autoround_takes_few_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, symmetric: bool
) -> None:
    """Count the layer, its gradients and the step of each rounding, whatever the linears' size; views count too."""
    monkeypatch.setattr(option, "KINDS", ("cpu", NAME))
    save_model(tmp_path / "model", "LlamaConfig", WIDE)
    operations = []
    for iters in (2, 4):
        options = MethodOptions(iters=iters, batch_size=1)
        given = {"group_size": 128, "symmetric": symmetric, "num_samples": 1, "seq_len": 8}
        with pretended_device() as mode:
            output = tmp_path / str(iters)
            asked = request(output, "autoround", device=NAME, options=options, **given)
            quantize(replace(asked, format="compressed-tensors"))
        operations.append(mode.operations)
    assert (operations[1] - operations[0]) / 2 / LINEARS <= 140


MOST_LAUNCHES = {
    IntScheme(4, 128, True): 190, IntScheme(4, 128, False): 373, GgufScheme("Q4_0"): 331, GgufScheme("Q4_K"): 1664,
}  # fmt: skip


@pytest.mark.parametrize("scheme", MOST_LAUNCHES, ids=lambda scheme: scheme.label)
def test_a_search_of_ranges_takes_few_launches_and_finds_the_same(scheme: Scheme) -> None:
    """All of a linear is searched at once on a card, and all tries of a step; on the host rows go by themselves."""
    random = torch.Generator().manual_seed(1)
    weight, importance = (
        torch.randn(512, 1024, generator=random),
        torch.rand(1024, generator=random),
    )
    here = kind_of(scheme).round(weight, torch.float16, name="it", importance=importance)
    card = Card()
    with pretended_cuda(card), torch.device("cuda", 0):
        given = weight.to("cuda"), importance.to("cuda")
        with card.during("search"):
            there = kind_of(scheme).round(given[0], torch.float16, name="it", importance=given[1])
        moved = there.to("cpu")
    assert card.launches("search").total() <= MOST_LAUNCHES[scheme]
    errors = [
        float(((each.dequantize() - weight).square() * importance).sum()) for each in (here, moved)
    ]
    assert errors[1] == pytest.approx(errors[0], rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gram_matrix_of_16_bit_inputs_takes_tensor_cores_that_round_nothing(
    dtype: torch.dtype,
) -> None:
    """TF32 has the sign, exponent and first ten bits of the mantissa of float32: 13 bits are dropped."""
    settings: Any = torch.backends.cuda.matmul
    before, seen = settings.fp32_precision, []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if "addmm" in str(func):
                seen.append((settings.fp32_precision, args[2].contiguous().view(torch.int32)))
            return func(*args, **(kwargs or {}))

    inputs = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    statistics = InputStatistics(32)
    with Watch():
        statistics.add(inputs)
    ((precision, bits),) = seen
    assert precision == ("tf32" if dtype.itemsize == 2 else before)
    assert bool((bits & 0x1FFF == 0).all()) is (dtype.itemsize == 2)
    assert settings.fp32_precision == before
    exact = inputs.double().T @ inputs.double()
    torch.testing.assert_close(statistics.gram.double(), exact, rtol=1e-5, atol=1e-4)


def _searched_on_the_host(
    targets: torch.Tensor, first: torch.Tensor, bits: int, name: str
) -> torch.Tensor:
    """The C search, in place of torch's, which takes minutes on a CPU and is held against it elsewhere."""
    library = viterbi.native_viterbi().library
    if library is None:
        pytest.skip("there is no C compiler")
    with HOST:
        found = viterbi._native_search(targets.to(HOST), first.to(HOST), bits, name)
    return found.to(targets.device)


@pytest.mark.parametrize("method", ["gptq", "autoround", "fp8"])
def test_a_solver_that_fails_is_named_and_falls_back_where_that_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Name what raised, and on which linear; else a method is rounding to nearest under its own name."""

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("Expected all tensors to be on the same device\nmore")

    solvers = {"gptq": "gptq.Solver", "autoround": "autoround.tune", "fp8": "rounding.round_weight"}
    save_model(tmp_path / "model", "LlamaConfig", TINY)
    asked = request(tmp_path / "out", method, group_size=None, num_samples=1)
    with monkeypatch.context() as patched:
        patched.setattr(f"llmopt.quant.methods.{solvers[method]}", broken)
        with pytest.raises(BadInput) as refused:
            quantize(asked)
        said = str(refused.value)
        assert said.startswith(f"method {method} fails on model.layers.0.self_attn.q_proj")
        assert "RuntimeError: Expected all tensors to be on the same device: --allow" in said
        assert "\n" not in said and not asked.output.exists()
        if method == "fp8":
            return  # rounding to nearest itself fails
        result = quantize(replace(asked, allow_fallback=True))
    manifest = result.manifest
    reason = f"{method} failed: RuntimeError: Expected all tensors to be on the same device"
    assert {module["fallback"] for module in manifest["modules"]} == {reason}
    assert manifest["summary"]["num_fallbacks"] == 7
    assert manifest["options"]["allow_fallback"] is True
    assert any("7 linears such as" in line for line in _remarks(manifest["modules"]))
    assert verify(result.output).status == PROVEN


@pytest.mark.sweep(1)
@pytest.mark.parametrize("family", ["gemma-3", "qwen3-moe"])
def test_windows_and_experts_run_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setattr(option, "KINDS", ("cpu", NAME))
    save_model(tmp_path / "model", *FAMILIES[family])
    options = {"format": "compressed-tensors", "seq_len": 16, "num_samples": 1}
    asked = request(tmp_path / "here", "gptq", **options)
    here = quantize(asked)
    with pretended_device():
        there = quantize(replace(asked, output=tmp_path / "there", device=NAME))
    errors = [run.manifest["summary"]["error"] for run in (here, there)]
    assert errors[1] == pytest.approx(errors[0], rel=0.05)


def test_statistics_and_kv_ranges_are_kept_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(option, "KINDS", ("cpu", NAME))
    options = {"stats": tmp_path / "stats", "kv_cache": "fp8", "format": "compressed-tensors"}
    save_model(tmp_path / "model", "LlamaConfig", TINY)
    with pretended_device():
        made = quantize(request(tmp_path / "out", "gptq", device=NAME, **options))
    assert verify(made.output).status == PROVEN


def test_a_device_that_is_not_there_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    for asked, words in (("cuda", "take cpu"), ("cuda:3", "take cpu"), ("tpu", "choose cpu, cuda")):
        with pytest.raises(SystemExit) as ended:
            main(["quantize", "-o", str(tmp_path / "out"), "--device", asked])
        shown = capsys.readouterr().err
        assert ended.value.code == 2
        assert f"--device {asked}: " in shown and words in " ".join(shown.split())
        assert "Traceback" not in shown
    assert not list(tmp_path.iterdir())
