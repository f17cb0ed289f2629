"""Final submodules: what passes share gives the bytes of passes that share nothing, and layers run less often."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.quant.methods.options import MethodOptions
from llmopt.quant.pipeline.pipeline import prepare, quantize
from llmopt.quant.plan.manifest import MANIFEST_NAME
from llmopt.quant.plan.request import QuantizeRequest
from llmopt.quant.stream import layer_stream
from llmopt.quant.stream.final_submodules import FinalSubmodules
from torch.nn import functional

from ...support.model_families import FAMILIES, save_model

Counts = dict[str, int]


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counts]:
    """Counts products of linears and attention."""
    counts = {"linear": 0, "scaled_dot_product_attention": 0}
    with monkeypatch.context() as patch:
        for name in counts:
            real = getattr(functional, name)

            def count(*args: Any, name: str = name, real: Any = real, **kwargs: Any) -> Any:
                counts[name] += 1
                return real(*args, **kwargs)

            patch.setattr(functional, name, count)
        yield counts


def written(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, **given: Any
) -> tuple[dict[str, bytes], Counts]:
    """The files of a run, and how often linears and attention were computed."""
    request = QuantizeRequest(
        folder / "model",
        folder / name,
        **{"method": "gptq", "format": "compressed-tensors", "group_size": 32, "held_out": 1}
        | given,
        num_samples=4,
        seq_len=32,
    )
    monkeypatch.setattr(layer_stream, "TOKENS_PER_BATCH", 32)  # a sample in a batch
    prepare(request)  # tries foldable pairs once
    with counted(monkeypatch) as counts:
        quantize(request)
    files = {path.name: path.read_bytes() for path in (folder / name).glob("*.safetensors")}
    assert files and (folder / name / MANIFEST_NAME).exists()
    return files, counts


@pytest.mark.sweep(5)
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "given"),
    [
        ("llama-2", {}),
        ("llama-2", {"options": MethodOptions(asymmetric=True)}),
        ("llama-2", {"method": "awq"}),
        ("llama-2", {"revert_worse": True, "kv_cache": "fp8"}),
        ("cohere", {}),
        ("olmo-2", {}),
        ("qwen3-moe-unnormalised", {}),
    ],
)
def test_shared_passes_change_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, given: Any, compute: str
) -> None:
    config, overrides = FAMILIES[family]
    save_model(tmp_path / "model", config, {**overrides, "num_hidden_layers": 2})
    given = {**given, "compute": compute}
    shared, fewer = written(tmp_path, "shared", monkeypatch, **given)
    monkeypatch.setattr(layer_stream.LayerStream, "final_submodules", lambda *_: None)
    apart, more = written(tmp_path, "apart", monkeypatch, **given)
    assert shared == apart
    assert fewer["linear"] < more["linear"]


def test_attention_is_computed_once_for_each_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Besides the probe, the pass that measures `o_proj` is the only one that needs it."""
    save_model(tmp_path / "model", "LlamaConfig", {"num_hidden_layers": 2})
    _, counts = written(tmp_path, "run", monkeypatch, held_out=0, compute="float32")
    probes, batches = 1, 4
    assert counts["scaled_dot_product_attention"] == 2 * (probes + batches)


def test_nothing_is_kept_beyond_the_bytes_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without room each stage runs the layer again: three stages behind attention, and the end."""
    save_model(tmp_path / "model", "LlamaConfig", {"num_hidden_layers": 2})
    real = FinalSubmodules.__init__

    def without_room(self: FinalSubmodules, *args: Any) -> None:
        layer, linears, samples, compute, _ = args
        real(self, layer, linears, samples, compute, 0)

    monkeypatch.setattr(FinalSubmodules, "__init__", without_room)
    _, counts = written(tmp_path, "run", monkeypatch, held_out=0, compute="float32")
    assert counts["scaled_dot_product_attention"] == 2 * (1 + 4 * 4)


def test_a_submodule_is_run_where_its_linears_are_measured(tmp_path: Path) -> None:
    """A layer of one child whose output is its last linear's: replayed only behind its final inputs."""

    first, last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    class Child(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = first, last

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x).relu())

    layer = torch.nn.Sequential(Child())
    linears = {"first": first, "last": last}
    finals = FinalSubmodules(layer, linears, 2, torch.float32, 2**20)
    states = torch.randn(2, 3, 4)
    finals.probe(lambda: layer(states[:1]))
    before = layer(states)
    for rows in (slice(0, 1), slice(1, 2)):
        with finals.passing(rows, ["first"], ["last"]):
            layer(states[rows])
    last.weight.data.mul_(2)
    first.weight.data.zero_()  # not read again
    with finals.passing(slice(0, 2), ["first", "last"]):
        again = layer(torch.zeros_like(states))
    bias = last.bias
    assert torch.allclose(again - bias, 2 * (before - bias), atol=1e-6)
    with finals.passing(slice(0, 2), ["last"], ["first"]):
        assert not torch.equal(layer(states), again)
