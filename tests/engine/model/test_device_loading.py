"""Loading to a GPU: what is stored is sent by pinned memory, and unpacked there, to the bits of the host's unpacking."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.engine.base.device import PinnedStaging, placed_on
from llmopt.engine.kernels.common.verdicts import VARIABLE
from llmopt.engine.model.adapter.open import open_model
from llmopt.engine.model.layers.spec import LoadingOptions
from llmopt.quant.base.scheme import Activations
from llmopt.quant.formats.registry import quantized_modules, read_quantized
from llmopt.quant.kinds.codebook.scheme import CodebookScheme
from llmopt.quant.kinds.e8p.scheme import E8pScheme
from llmopt.quant.kinds.fp4.scheme import Fp4Scheme
from llmopt.quant.kinds.fp8.scheme import FloatScheme
from llmopt.quant.kinds.integer.scheme import IntScheme
from llmopt.quant.kinds.lookup.scheme import LookupScheme
from llmopt.quant.kinds.trellis.scheme import TrellisScheme
from llmopt.quant.kinds.vectorwise.scheme import VectorwiseScheme
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.source.models import open_checkpoint

from ...support.gguf_support import random_model as gguf_model
from ...support.gguf_support import write_model
from ...support.pretended_cuda.card import Card
from ...support.pretended_cuda.runtime import pretended_cuda
from ...support.quantized_world import random_model, write_checkpoint

SHAPE = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 8,
    "num_key_value_heads": 8,
}  # fmt: skip
MOST_BYTES = SHAPE["hidden_size"] * SHAPE["intermediate_size"] // 2
"""A linear in 4 bits: what the host makes while it loads must not grow with the weights, as unpacked codes do."""
KINDS: dict[str, tuple[str, Any]] = {
    "gptq": ("gptq", IntScheme(4, 32, True)),
    "gptq, act-order": ("gptq", IntScheme(4, 32, False, permuted=True)),
    "gptq, 3 bits": ("gptq", IntScheme(3, 32, True)),
    "awq": ("awq", IntScheme(4, 32, False)),
    "int4": ("compressed-tensors", IntScheme(4, 32, True)),
    "int4 with zero points": ("compressed-tensors", IntScheme(4, 32, False)),
    "int8": ("compressed-tensors", IntScheme(8, -1, True, Activations("int8"))),
    "fp8": ("compressed-tensors", FloatScheme("channel", Activations("fp8"))),
    "fp8 in blocks": ("fp8", FloatScheme("block", Activations("fp8", "group128"))),
    "nvfp4": ("compressed-tensors", Fp4Scheme("nvfp4")),
    "nvfp4, modelopt": ("modelopt", Fp4Scheme("nvfp4")),
    "mxfp4": ("compressed-tensors", Fp4Scheme("mxfp4")),
    "nf4": ("bitsandbytes", CodebookScheme("nf4")),
    "nf4, doubly": ("bitsandbytes", CodebookScheme("nf4", double_quant=True)),
    "llm.int8": ("bitsandbytes", VectorwiseScheme()),
    "look-up": ("squeezellm", LookupScheme(4)),
    "trellis": ("exl3", TrellisScheme(3)),
    "e8p": ("quip", E8pScheme(4)),
}


def assert_loads_on_the_card(folder: Path) -> None:
    """Load the model without a large computation of the host."""
    card = Card(host_bytes=MOST_BYTES)
    with pretended_cuda(card), pytest.MonkeyPatch.context() as patched:
        patched.setenv(VARIABLE, "off")
        open_model(
            open_checkpoint(folder), LoadingOptions(torch.device("cuda", 0), torch.bfloat16, 64)
        )
    assert (
        card.launches("load") and [str(entry) for entry in card.log if entry.kind == "host"] == []
    )


def assert_same_weights(checkpoint: Checkpoint) -> None:
    modules = sorted(quantized_modules(checkpoint))[:2]
    expected = [read_quantized(checkpoint, module) for module in modules]
    with pretended_cuda(Card()):
        there = placed_on(torch.device("cuda", 0), checkpoint)
        for module, weight in zip(modules, expected, strict=True):
            got = read_quantized(there, module)
            assert got.scheme == weight.scheme
            for name, part in weight.parts().items():
                moved: Any = got.parts()[name]
                assert moved.device.type == "cuda", name
                assert torch.equal(moved.host, part), name


@pytest.mark.sweep(4)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_are_unpacked_on_the_card(kind: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, random_model(**SHAPE), *KINDS[kind])
    assert_loads_on_the_card(tmp_path)
    assert_same_weights(open_checkpoint(tmp_path))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("type_name", ["Q4_K_M", "Q4_0", "Q6_K", "IQ4_XS"])
def test_blocks_of_a_gguf_file_are_unpacked_on_the_card(type_name: str, tmp_path: Path) -> None:
    """Load the embedding, and rows of queries and keys in another order, too."""
    file = write_model(gguf_model(tmp_path / "plain", "llama"), tmp_path, type_name)
    assert_loads_on_the_card(file)
    assert_same_weights(open_checkpoint(file))


HEADS = ("gptq", "awq", "int4", "int4 with zero points", "int8", "fp8", "Q6_K", "Q8_0")


@pytest.mark.sweep(4)
@pytest.mark.parametrize("kind", HEADS)
def test_a_quantized_head_stays_packed_on_the_card(kind: str, tmp_path: Path) -> None:
    """The LM head is a linear as those of the layers: a decode step reads its codes."""
    pytest.importorskip("triton", reason="Triton is for Linux alone")
    if kind in KINDS:
        model = random_model(**SHAPE, tie_word_embeddings=False)
        write_checkpoint(tmp_path, model, *KINDS[kind], head=True)
        folder, bits = tmp_path, 4 if KINDS[kind][1].bits == 4 else 8
    else:
        folder, bits = write_model(gguf_model(tmp_path / "plain", "llama"), tmp_path, kind), 8
    card = Card()
    with pretended_cuda(card), pytest.MonkeyPatch.context() as patched:
        patched.setenv(VARIABLE, "off")
        options = LoadingOptions(torch.device("cuda", 0), torch.bfloat16, 64)
        loaded: Any = open_model(open_checkpoint(folder), options)[0]
        head, linears = loaded.weights.head, loaded.weights.linears
        linear = linears["layers.0.mlp.down_proj"].projection
        assert type(head.kernel) is type(linear.kernel)
        assert type(head.kernel).__module__.endswith("linear.triton_linear")
        vocab, hidden = loaded.spec.shape.vocab_size, loaded.spec.shape.hidden_size
        # Scales and zero points, of groups of 32 at most.
        assert head.weight_bytes < 1.4 * vocab * hidden * bits / 8
        loaded_until = len(card.log)
        head.in_float32(torch.zeros(1, hidden, dtype=torch.bfloat16, device="cuda"))
    products = [entry.what for entry in card.log[loaded_until:] if entry.kind == "triton"]
    assert products in (["_gemm"], ["_per_token_quant", "_gemm"])


@pytest.mark.parametrize("count", [0, 1, 5, 64, 1000])
def test_memory_is_sent_in_parts(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PinnedStaging, "BUFFER_BYTES", 96)
    card = Card()
    with pretended_cuda(card):
        stage = PinnedStaging(torch.device("cuda", 0))
        for tensor in (torch.arange(count), torch.rand(count, 3).t(), torch.tensor(7.0)):
            moved: Any = stage(tensor)
            assert torch.equal(moved.host, tensor) and moved.dtype is tensor.dtype
    assert card.waits >= (8 * count // 96) - 2
    assert {entry.kind for entry in card.log} <= {"copy", "kernel"}
