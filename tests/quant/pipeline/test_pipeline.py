from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from llmopt.base import atomic_io
from llmopt.base.errors import BadInput
from llmopt.quant.formats.registry import quantized_modules, read_quantized, tensor_names
from llmopt.quant.methods.options import MethodOptions
from llmopt.quant.model.architecture import architecture_of
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.pipeline import pipeline, prepare
from llmopt.quant.pipeline.pipeline import QuantizeResult, quantize
from llmopt.quant.plan.manifest import MANIFEST_NAME
from llmopt.quant.plan.request import QuantizeRequest, work_folder
from llmopt.quant.source.load_processor import load_tokenizer
from llmopt.quant.stream.layer_stream import LayerStream
from llmopt.recipes import MODELS
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from ...support.releases import skip_before

STORIES = MODELS / "stories3M"
Quantized = Callable[..., QuantizeResult]

OPTIONS = [
    {"method": "awq"},
    pytest.param({"method": "awq", "format": "compressed-tensors"}, marks=pytest.mark.whole),
    pytest.param(
        {"method": "awq", "format": "compressed-tensors", "bits": 8, "group_size": -1},
        marks=pytest.mark.whole,
    ),
    {"method": "rtn"},
]


def ids(options: dict[str, object]) -> str:
    return "-".join(str(value) for value in options.values())


@pytest.mark.parametrize("options", OPTIONS, ids=ids)
def test_no_linear_of_the_trained_model_is_worse_than_rounding(
    quantized: Quantized, options: dict[str, object]
) -> None:
    modules = quantized(**options).manifest["modules"]
    assert len(modules) == 35
    for module in modules:
        assert 0 < module["error"] <= module["rtn_error"]
    if options["method"] == "awq" and "bits" not in options:
        better = [module for module in modules if module["error"] < 0.98 * module["rtn_error"]]
        assert len(better) > 20


def plain_twin(folder: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """The source model in float32 with the weights of a quantized folder, dequantized to `dtype` first."""
    checkpoint = Checkpoint(folder)
    model = AutoModelForCausalLM.from_pretrained(STORIES, dtype=torch.float32)
    modules = quantized_modules(checkpoint)
    stored_by_modules = set().union(*(tensor_names(checkpoint, module) for module in modules))
    state = {f"{m}.weight": read_quantized(checkpoint, m).dequantize(dtype) for m in modules}
    state |= {
        name: checkpoint.tensor(name).float()
        for name in checkpoint.names
        if name not in stored_by_modules
    }
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    return model


@pytest.mark.parametrize("options", OPTIONS[1:], ids=ids)
def test_transformers_loads_what_we_wrote(quantized: Quantized, options: dict[str, object]) -> None:
    folder = quantized(**options).output
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = torch.tensor([[1, 403, 407, 261, 378, 31, 91, 300]])
    with torch.inference_mode():
        expected = plain_twin(folder)(prompt).logits
        assert (theirs(prompt).logits - expected).abs().max() < 1e-5


def test_asymmetric_compressed_tensors_load_with_dequantize(quantized: Quantized) -> None:
    from transformers import CompressedTensorsConfig

    skip_before("5.23", "it dequantizes to the dtype of the model, not to bfloat16")
    result = quantized(method="rtn", symmetric=False)
    assert any("dequantize=True" in note for note in result.notes)
    theirs = AutoModelForCausalLM.from_pretrained(
        result.output,
        dtype=torch.float32,
        quantization_config=CompressedTensorsConfig(dequantize=True),
    )
    prompt = torch.tensor([[1, 403, 407, 261, 378, 31, 91, 300]])
    with torch.inference_mode():
        expected = plain_twin(result.output, torch.bfloat16)(prompt).logits
        assert (theirs(prompt).logits - expected).abs().max() < 1e-5


def test_quantized_model_stays_close_to_the_original(quantized: Quantized) -> None:
    """The folded scales cancel: the whole AWQ model errs like its roundings, not like a broken fold."""
    from llmopt.quant.stream.calibration import load_calibration
    from llmopt.recipes import DATA
    from transformers import AutoTokenizer

    held_out = load_calibration(
        str(DATA / "evaluation.txt"),
        AutoTokenizer.from_pretrained(STORIES),
        num_samples=4,
        seq_len=128,
        seed=0,
    ).token_ids
    original = AutoModelForCausalLM.from_pretrained(STORIES, dtype=torch.float32)

    def loss(model: torch.nn.Module) -> float:
        with torch.inference_mode():
            return float(model(held_out, labels=held_out).loss)

    base, folded = loss(original), loss(plain_twin(quantized(method="awq").output))
    assert base < 2.5  # trained: a random model sits at ln 512 = 6.2
    assert abs(folded - base) < 0.1


def test_default_of_awq_is_the_awq_format(quantized: Quantized) -> None:
    config = json.loads((quantized(method="awq").output / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["lm_head", "model.embed_tokens"],
    }


def test_output_is_a_whole_model_folder(quantized: Quantized) -> None:
    folder = quantized(method="awq").output
    names = {path.name for path in folder.iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "LICENSE",
        "README.md",
        "llmopt_quantization.json",
        "model.safetensors.index.json",
        "model-layer-00004.safetensors",
        "model-other.safetensors",
    } <= names
    assert not [name for name in names if name.endswith(atomic_io.TEMPORARY_SUFFIX)]
    checkpoint, source = Checkpoint(folder), Checkpoint(STORIES)
    name = "model.embed_tokens.weight"
    assert torch.equal(checkpoint.tensor(name), source.tensor(name))
    assert checkpoint.tensor("model.layers.1.input_layernorm.weight").dtype == torch.bfloat16
    assert not work_folder(folder).exists()


def test_ignored_linears_stay_and_are_recorded(tmp_path: Path) -> None:
    result = quantize(
        QuantizeRequest(
            STORIES, tmp_path / "out", ignore=(r"layers\.0\.", "o_proj$"), num_samples=2, seq_len=16
        )
    )
    checkpoint, source = Checkpoint(result.output), Checkpoint(STORIES)
    modules = quantized_modules(checkpoint)
    assert len(modules) == 35 - 7 - 4
    for name in ("model.layers.0.mlp.up_proj", "model.layers.3.self_attn.o_proj"):
        assert name not in modules
        assert torch.equal(checkpoint.tensor(f"{name}.weight"), source.tensor(f"{name}.weight"))
        config = checkpoint.quantization_config or {}
        assert name in config["modules_to_not_convert"]


SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
CONFIGS = {
    "llama-mha-biased": LlamaConfig(
        **SIZES, num_key_value_heads=4, attention_bias=True, mlp_bias=True
    ),
    "mistral-window": MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=8),
    "qwen2-biases": Qwen2Config(**SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3-norms": Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=24),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_streams_like_transformers_and_survives_quantization(
    name: str, tmp_path: Path
) -> None:
    """8-bit weights change a random model by almost nothing, unless a bias, norm or mask went astray."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += torch.randn_like(parameter) * 0.1
    source = tmp_path / "source"
    model.save_pretrained(source)
    for path in STORIES.glob("*token*"):
        shutil.copy(path, source)

    token_ids = torch.randint(0, 512, (3, 24))
    checkpoint = Checkpoint(source)
    stream = LayerStream(checkpoint, architecture_of(checkpoint))
    stream.prepare(token_ids)
    states = stream.embed(token_ids)
    for index in range(stream.num_layers):
        stream.load(index, stream.tensors(index))
        states = stream.run(index, states)
        stream.unload(index)
    with torch.inference_mode():
        expected = model.model(token_ids).last_hidden_state
        assert (torch.cat(list(stream.head_inputs(states))) - expected).abs().max() < 1e-5

    output = quantize(
        QuantizeRequest(
            source,
            tmp_path / "out",
            method="awq",
            bits=8,
            group_size=32,
            num_samples=4,
            seq_len=24,
        )
    ).output
    theirs = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    with torch.inference_mode():
        logits, reference = theirs(token_ids).logits, model(token_ids).logits
    assert (logits - reference).norm() < 0.02 * reference.norm()


class Crash(BaseException):
    """What `kill -9` does, where a test wants it."""


class Steps:
    def __init__(self) -> None:
        self.count = 0
        self.crash_at = -1


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Count every write to disk of a run, and crash before the given one."""
    counter = Steps()

    def counted(function: Callable[..., object]) -> Callable[..., object]:
        def wrapper(*arguments: object, **keywords: object) -> object:
            if counter.count == counter.crash_at:
                raise Crash
            counter.count += 1
            return function(*arguments, **keywords)

        return wrapper

    for name in ("rename", "replace", "unlink", "rmdir", "mkdir"):
        monkeypatch.setattr(Path, name, counted(getattr(Path, name)))
    monkeypatch.setattr(os, "fsync", counted(os.fsync))
    return counter


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def small_request(output: Path, **options: object) -> QuantizeRequest:
    settings = {
        "method": "rtn",
        "bits": 8,
        "group_size": -1,
        "num_samples": 2,
        "seq_len": 8,
        "model_name": "tiny",
    }
    return QuantizeRequest(
        MODELS / "stories260K",
        output,
        **(settings | options),  # pyright: ignore[reportArgumentType]
    )


@pytest.mark.parametrize(
    ("first", "every", "last"),
    [(5, 25, 0), *(pytest.param(n, 9, 8, marks=pytest.mark.whole) for n in (0, 3, 6))],
)
def test_a_crash_before_any_durable_step_changes_no_byte(
    tmp_path: Path, steps: Steps, monkeypatch: pytest.MonkeyPatch, first: int, every: int, last: int
) -> None:
    """The steps that touch the disk: every so many, and each of the last ones, which tidy up."""
    tokenizer = load_tokenizer(MODELS / "stories260K")
    monkeypatch.setattr(prepare, "load_tokenizer", lambda *_, **__: tokenizer)
    whole = quantize(small_request(tmp_path / "whole")).output
    expected = contents(whole)
    total = steps.count
    assert total > 60
    output = tmp_path / "out"
    for step in sorted({*range(first, total, every), *range(total - last, total)}):
        steps.count, steps.crash_at = 0, step
        with pytest.raises(Crash):
            quantize(small_request(output))
        steps.crash_at = -1
        quantize(small_request(output))
        assert contents(output) == expected, f"crash before step {step}"
        assert not work_folder(output).exists()
        shutil.rmtree(output)


FP4 = {"bits": None, "group_size": None, "ignore": ("down_proj",)}  # 172 inputs are no whole blocks
NEW_FORMATS: dict[str, dict[str, object]] = {
    "nvfp4": {"method": "nvfp4", **FP4},
    "w4a4": {"method": "nvfp4", "activations": "static", **FP4},
    "mxfp4": {"method": "mxfp4", **FP4},
    "modelopt-nvfp4": {"method": "nvfp4", "format": "modelopt", "kv_cache": "fp8", **FP4},
    "modelopt-fp8": {
        "method": "fp8",
        "format": "modelopt",
        "granularity": "tensor",
        "activations": "static",
        "bits": None,
        "group_size": None,
    },
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", NEW_FORMATS)
def test_a_crash_in_the_middle_changes_no_byte_of_4_bit_floats(
    tmp_path: Path, steps: Steps, name: str
) -> None:
    options = NEW_FORMATS[name]
    expected = contents(quantize(small_request(tmp_path / "whole", **options)).output)
    total, output = steps.count, tmp_path / "out"
    for step in (total // 3, total - 4):
        steps.count, steps.crash_at = 0, step
        with pytest.raises(Crash):
            quantize(small_request(output, **options))
        steps.crash_at = -1
        quantize(small_request(output, **options))
        assert contents(output) == expected, f"crash before step {step}"
        shutil.rmtree(output)


def interrupted(output: Path, steps: Steps, at: int) -> Path:
    steps.count, steps.crash_at = 0, at
    with pytest.raises(Crash):
        quantize(small_request(output))
    steps.crash_at = -1
    return work_folder(output)


def test_half_a_journal_line_is_forgotten(tmp_path: Path, steps: Steps) -> None:
    expected = contents(quantize(small_request(tmp_path / "whole")).output)
    output = tmp_path / "out"
    folder = interrupted(output, steps, 40)
    with (folder / "journal.jsonl").open("ab") as file:
        file.write(b'{"layer": 3, "sha')
    result = quantize(small_request(output))
    assert result.resumed_layers > 0
    assert contents(output) == expected


def test_asymmetric_calibration_carries_the_float_states_through_a_crash(
    tmp_path: Path, steps: Steps
) -> None:
    options = {"method": "gptq", "format": "compressed-tensors", "bits": 4, "seq_len": 32}
    asymmetric = options | {"options": MethodOptions(asymmetric=True)}
    plain = quantize(small_request(tmp_path / "plain", **options)).manifest["modules"]
    steps.count = 0
    whole = quantize(small_request(tmp_path / "whole", **asymmetric))
    total = steps.count
    changed = [
        first["sha256"] != second["sha256"]
        for first, second in zip(plain, whole.manifest["modules"], strict=True)
    ]
    # The first linears read the embeddings, which are those of the float model.
    assert changed[:3] == [False] * 3 and sum(changed) > len(changed) / 2
    output = tmp_path / "out"
    steps.count, steps.crash_at = 0, total // 2
    with pytest.raises(Crash):
        quantize(small_request(output, **asymmetric))
    steps.crash_at = -1
    assert quantize(small_request(output, **asymmetric)).resumed_layers > 0
    assert contents(output) == contents(whole.output)


def test_work_of_another_run_is_not_touched(tmp_path: Path, steps: Steps) -> None:
    output = tmp_path / "out"
    folder = interrupted(output, steps, 40)
    before = sorted(folder.rglob("*"))
    with pytest.raises(BadInput, match="--restart"):
        quantize(small_request(output, seed=1))
    assert sorted(folder.rglob("*")) == before
    result = quantize(small_request(output, seed=1, restart=True))
    assert result.resumed_layers == 0


def test_a_foreign_folder_in_the_way_is_not_touched(tmp_path: Path) -> None:
    folder = work_folder(tmp_path / "out")
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    for restart in (False, True):
        with pytest.raises(BadInput, match="in the way"):
            quantize(small_request(tmp_path / "out", restart=restart))
    assert (folder / "thesis.tex").read_text() == "years of work"


def test_a_changed_shard_is_noticed_on_resume(tmp_path: Path, steps: Steps) -> None:
    folder = interrupted(tmp_path / "out", steps, 40)
    shard = folder / "checkpoint" / "model-layer-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x55")
    with pytest.raises(BadInput, match="--restart"):
        quantize(small_request(tmp_path / "out"))


def test_a_second_process_is_kept_out(tmp_path: Path, steps: Steps) -> None:
    import fcntl

    folder = interrupted(tmp_path / "out", steps, 40)
    with (folder / "journal.jsonl").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BadInput, match="another process"):
            quantize(small_request(tmp_path / "out"))


def test_a_full_disk_in_the_middle_keeps_the_finished_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = contents(quantize(small_request(tmp_path / "whole")).output)
    real = atomic_io.os.fsync
    calls = iter(range(1000))

    def full(descriptor: int) -> None:
        if next(calls) >= 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    output = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(atomic_io.os, "fsync", full)
        with pytest.raises(BadInput, match="no space left while writing"):
            quantize(small_request(output))
    folder = work_folder(output)
    assert len((folder / "journal.jsonl").read_bytes().splitlines()) > 1
    assert not list(folder.rglob("*" + atomic_io.TEMPORARY_SUFFIX))
    assert quantize(small_request(output)).resumed_layers > 0
    assert contents(output) == expected


def test_too_small_a_disk_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage(NamedTuple):
        free: int = 1000

    monkeypatch.setattr(pipeline.shutil, "disk_usage", lambda _: Usage())
    with pytest.raises(BadInput, match="no space for the result"):
        quantize(small_request(tmp_path / "out"))
    assert not list(tmp_path.iterdir())


def test_the_dtype_of_the_passes_is_recorded(tmp_path: Path) -> None:
    found = {}
    for compute in ("float32", "bfloat16"):
        output = tmp_path / compute
        quantize(small_request(output, method="rtn", compute=compute))
        found[compute] = json.loads((output / MANIFEST_NAME).read_text())
        assert found[compute]["calibration"]["compute"] == compute
    signatures = [manifest["signature"] for manifest in found.values()]
    assert signatures[0] != signatures[1]


def test_two_runs_write_the_same_bytes(tmp_path: Path) -> None:
    first, second = (
        quantize(small_request(tmp_path / name, method="awq", format="compressed-tensors")).output
        for name in ("first", "second")
    )
    assert contents(first) == contents(second)


def test_work_of_another_run_is_refused_with_what_differs(tmp_path: Path, steps: Steps) -> None:
    interrupted(tmp_path / "out", steps, 40)
    with pytest.raises(BadInput, match=r"of another run \(other calibration, seed\): --restart"):
        quantize(small_request(tmp_path / "out", seed=7))
