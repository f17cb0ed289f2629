"""The roofline model: measured points are below measured ceilings, and the bytes counted for a decode step are
those of the tensors that it reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.bench.options.options import BenchOptions
from llmopt.bench.session.target_sessions import load_engine
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.kernels.linear.linear import OneDnnLinear
from llmopt.engine.kernels.linear.native_linear import PackedLinear
from llmopt.engine.planner.speed import decode_step_bytes
from llmopt.quant.families.config import model_shape
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.pipeline.pipeline import quantize
from llmopt.quant.plan.request import QuantizeRequest
from llmopt.recipes import MODELS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LOOK_UPS = ("aten::embedding", "aten::index", "aten::index_select", "aten::new_empty")
RECORDED = Path(__file__).parents[3] / "docs" / "measured" / "cpu" / "rooflines.json"


@pytest.mark.parametrize("name", ["original", "rtn-8bit", "rtn-4bit", "awq-4bit"])
def test_recorded_points_are_below_the_recorded_ceilings(name: str) -> None:
    roofline = json.loads(RECORDED.read_text())[name]["roofline"]
    bandwidth, flops = (roofline["ceilings"][key] for key in ("bandwidth", "flops"))
    assert {point["phase"] for point in roofline["points"]} == {"prefill", "decode"}
    for point in roofline["points"]:
        roof = min(flops, point["intensity"] * bandwidth)
        assert 0 < point["achieved_flops"] <= roof
        assert 0 < point["achieved_bandwidth"] <= bandwidth
        assert point["of_roof"] == pytest.approx(point["achieved_flops"] / roof)


def memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """(what names its memory, bytes of it); a packed oneDNN weight hides its storage."""
    try:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    except NotImplementedError:
        return id(tensor), tensor.numel() * tensor.dtype.itemsize


class TensorsRead(TorchDispatchMode):
    """Collects the memory that operations read and none of them allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[int, int] = {}
        self._made: dict[int, torch.Tensor] = {}  # held, so that no address comes again

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        taken = [memory_of(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        given = [(memory_of(x)[0], x) for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        is_view = any(name in dict(taken) for name, _ in given)
        # A view reads nothing, and a look-up reads rows, not the table; C's makes its output by new_empty.
        if not is_view and func.overloadpacket._qualified_op_name not in LOOK_UPS:
            self.read |= {name: size for name, size in taken if name not in self._made}
        self._made |= {name: x for name, x in given if name not in dict(taken)}
        return result


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("quantized") / "rtn"
    request = QuantizeRequest(
        model=MODELS / "stories3M", output=output, method="rtn", bits=4, symmetric=False
    )
    return quantize(request).output


def with_packed_weights(seen: TensorsRead) -> Callable[..., torch.Tensor]:
    """`PackedLinear.__call__` that adds the memory passed to the C kernel, which no torch operation shows."""
    honest = PackedLinear.__call__

    def call(linear: PackedLinear, *inputs: Any) -> torch.Tensor:
        tensors = [*linear.weight._tensors.values(), linear.bias]
        seen.read |= {tensor.data_ptr(): tensor.nbytes for tensor in tensors if tensor is not None}
        return honest(linear, *inputs)

    return call


def with_few_rows(seen: TensorsRead) -> Callable[..., torch.Tensor]:
    """The same of `OneDnnLinear`, where it is multiplied in its packed layout."""
    honest = OneDnnLinear.__call__

    def call(linear: OneDnnLinear, x: torch.Tensor) -> torch.Tensor:
        if linear.words is not None:
            seen.read[linear.words.data_ptr()] = linear.words.nbytes
        return honest(linear, x)

    return call


@pytest.mark.parametrize("kind", ["plain", "quantized"])
def test_counted_bytes_are_those_of_the_tensors_read(
    kind: str, quantized: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = quantized if kind == "quantized" else MODELS / "stories3M"
    # Replayed steps run below Python, out of reach of a dispatch mode.
    engine = load_engine(BenchOptions(num_threads=1, enforce_eager=True), folder)
    engine.add_request("one", [1, 20, 30], SamplingParams(max_tokens=8, ignore_eos=True))
    engine.step()  # the prompt
    with TensorsRead() as seen:
        monkeypatch.setattr(PackedLinear, "__call__", with_packed_weights(seen))
        monkeypatch.setattr(OneDnnLinear, "__call__", with_few_rows(seen))
        engine.step()
    engine.abort("one")
    # The cache is one or a few large buffers, counted by what is used of it, not whole.
    cache_bytes = engine.memory.kv_cache_bytes
    weights = sum(size for size in seen.read.values() if size < cache_bytes / 20)
    shape = model_shape(Checkpoint(folder).config)
    counted = decode_step_bytes(shape, 1, 0, engine.memory.weight_bytes_per_step, 2, 2)
    assert counted == pytest.approx(weights, rel=0.03)
