"""What the user may call a model or a device, and sizes as people write them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.engine.base.units import format_gib, format_tokens, parse_bytes, parse_tokens
from llmopt.engine.planner.catalog import facts_of, find_model
from llmopt.engine.planner.devices import DEFAULT_DEVICES, choose_devices, devices, find_device
from llmopt.engine.planner.weights import BF16, lighter_recipes, weight_bytes_per_rank
from llmopt.quant.formats.registry import quantized_modules
from llmopt.quant.model.checkpoint import HF_QUANT_CONFIG, Checkpoint
from llmopt.quant.source.models import refuse_plain
from llmopt.recipes import MODELS
from safetensors.torch import save_file


def test_an_alias_says_what_it_means() -> None:
    model = find_model("llama-70b")
    assert model.name == "llama-3.1-70b"
    assert model.note is not None
    assert "4,096" in model.note
    assert find_model("llama-3.1-70b").note is None


def test_a_folder_a_file_and_a_bundled_name_are_the_same_model(tmp_path: Path) -> None:
    folder = MODELS / "stories3M"
    bare = tmp_path / "tiny.json"
    bare.write_text((folder / "config.json").read_text())
    shapes = [find_model(str(name)).shape for name in (folder, folder / "config.json", bare)]
    assert [find_model("stories3M").shape] * 3 == shapes
    assert find_model(str(bare)).name == "tiny"
    assert find_model(str(folder / "config.json")).name == "stories3M"


def test_an_unknown_name_suggests_near_ones() -> None:
    with pytest.raises(BadInput, match=r"close: .*llama-70b"):
        find_model("lama-70b")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("qwen3-235b", "qwen3-235b-a22b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3.1-70B", "llama-3.1-70b"),
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("openai/gpt-oss-120b", "gpt-oss-120b"),
        ("deepseek-ai/DeepSeek-V3", "deepseek-v3"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b-v0.1"),
    ],
)
def test_names_as_people_type_them(name: str, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither network nor hub cache is asked."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = find_model(name)
    assert model.shape == find_model(key).shape
    assert model.note == f"{name} means {key}, as the table has it"


@pytest.mark.parametrize("name", ["someone/Llama-3.1-8B", "qwen3-v", "llama-3.1"])
def test_a_name_of_another_owner_or_of_several_models_is_not_guessed(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(BadInput, match="no model"):
        find_model(name)


def test_a_hub_id_is_fetched_only_when_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Offline, the local cache is asked, and near names of the table are given."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(BadInput, match=r"close: .*qwen3-8b.*local hub cache"):
        find_model("Qwen/Qwen3-8B-Base")


def test_a_fetched_config_is_planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    asked: list[tuple[str, str]] = []

    def fetch(repo: str, name: str, **_: object) -> str:
        asked.append((repo, name))
        return str(MODELS / "stories3M" / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    model = find_model("someone/Some-Model")
    assert [name for _, name in asked] == ["config.json", HF_QUANT_CONFIG]
    assert (model.name, model.shape) == ("someone/Some-Model", find_model("stories3M").shape)
    assert model.stored_bytes is None


@pytest.mark.parametrize("bits", [3, 6])
def test_bytes_of_files_say_what_an_unknown_method_stores(
    bits: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Files of a method of tomorrow, here and on the hub, have the mean bits of their linears."""
    import huggingface_hub

    shape = find_model("stories3M").shape
    linears = sum(t.num_elements * t.count for t in shape.tensors() if t.role == "linear")
    size = 2 * shape.num_parameters - linears * (16 - bits) // 8
    config = json.loads((MODELS / "stories3M" / "config.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | {"quantization_config": {"quant_method": "of tomorrow"}}))
    save_file({"codes": torch.zeros(size, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    headers = huggingface_hub.utils.SafetensorsFileMetadata(
        {}, {"codes": huggingface_hub.utils.TensorInfo("U8", [size], (0, size))}
    )
    files = SimpleNamespace(files_metadata={"model.safetensors": headers})
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: str(path))
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", lambda _: files)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    for name in (str(tmp_path), "someone/Some-Model"):
        recipe = find_model(name).as_stored()
        assert (recipe.label, recipe.bits, recipe.stored_bytes) == ("of tomorrow", bits, size)
        assert weight_bytes_per_rank(shape, recipe, 1) == size
        lighter = lighter_recipes(recipe, shape, 2)
        assert [other.name for other in lighter] == (["int4"] if bits == 6 else [])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(BadInput, match="'of tomorrow' is not known here"):
        find_model("someone/Some-Model").as_stored()


def test_modelopts_own_file_alone_says_how_weights_are_stored(tmp_path: Path) -> None:
    """ModelOpt's older exports say nothing in `config.json` (nvidia/Llama-3.1-8B-Instruct-FP8)."""
    (tmp_path / "config.json").write_text((MODELS / "stories3M" / "config.json").read_text())
    assert find_model(str(tmp_path)).as_stored() == BF16
    stored = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    modelopt = {"producer": {"name": "modelopt", "version": "0.33.0"}, "quantization": stored}
    (tmp_path / HF_QUANT_CONFIG).write_text(json.dumps(modelopt))
    model = find_model(str(tmp_path))
    assert model.as_stored().name == "fp8" and facts_of(tmp_path).weights == "modelopt fp8"
    assert model.shape == find_model("stories3M").shape


def test_older_names_of_a_quantization_config_are_read(tmp_path: Path) -> None:
    shutil.copytree(MODELS / "stories3M", tmp_path, dirs_exist_ok=True)
    path = tmp_path / "config.json"
    plain = json.loads(path.read_text())
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
    groups = {"group_0": {"targets": ["Linear"], "weights": {"symmetric": True, **weights}}}
    stored = {"format": "pack-quantized", "config_groups": groups, "ignore": ["lm_head"]}
    path.write_text(json.dumps({**plain, "compression_config": stored}))
    expected = {"quant_method": "compressed-tensors", **stored}
    assert Checkpoint(tmp_path).config == {**plain, "quantization_config": expected}
    assert find_model(str(tmp_path)).as_stored().name == "int4"
    refuse_plain(tmp_path)
    path.write_text(json.dumps({**plain, "quantization": {"group_size": 64, "bits": 4}}))
    with pytest.raises(BadInput, match="quant_method 'mlx' is not supported"):
        quantized_modules(Checkpoint(tmp_path))
    assert find_model(str(tmp_path)).as_stored().name == "mlx"  # by the bytes of its files
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(BadInput, match="quant_method 'mlx' is not known here"):
        find_model(str(tmp_path)).as_stored()


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"config\.json is missing"):
        find_model(str(tmp_path))
    with pytest.raises(BadInput, match=r"no model at \./nowhere"):
        find_model("./nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadInput, match="not valid JSON"):
        find_model(str(tmp_path))


def test_every_model_of_the_table_has_a_source() -> None:
    table = json.loads((Path(find_model.__code__.co_filename).parent / "models.json").read_text())
    assert all(entry["source"] for entry in table["models"].values())
    assert {alias["means"] for alias in table["aliases"].values()} <= set(table["models"])


def test_devices_are_found_whatever_the_spelling() -> None:
    h100 = find_device("h100")
    assert h100 == find_device("H100-SXM") == find_device("h100_sxm")
    assert h100.memory_bytes == int(79.18 * 2**30)
    assert h100.bandwidth == 3350e9
    assert h100.link_bytes_per_second == 450e9  # one direction
    with pytest.raises(BadInput, match="H100 SXM"):
        find_device("h1000")


def test_the_device_table_is_dense_and_consistent() -> None:
    table = json.loads((Path(find_device.__code__.co_filename).parent / "devices.json").read_text())
    for row in table:
        peaks = row["peaks"]
        assert all(
            peak["dense"] and peak["source"] and peak["accumulate"] for peak in peaks.values()
        )
        assert row["bandwidth_gb_s"]["source"]
        if "fp8" in peaks:  # half the width, twice the rate
            assert peaks["fp8"]["value"] / peaks["bf16"]["value"] == pytest.approx(2, abs=0.03)
    assert len({device.name for device in devices()}) == len(table)


@pytest.mark.parametrize("device", devices(), ids=lambda device: device.name)
def test_ridges_are_plausible(device) -> None:
    """A wrong unit, or a sparse figure, leaves this range; Apple's M2 to M4 and the H20 are its low end."""
    peak = device.peak_flops(16, "bf16")
    assert 20 < peak / device.bandwidth < 430


def test_devices_can_be_named_all_or_left_out() -> None:
    assert [device.name for device in choose_devices([], None)] == list(DEFAULT_DEVICES)
    assert choose_devices(["all"], None) == list(devices())
    own, h200 = choose_devices(["h200"], 96 * 2**30)
    assert (own.name, own.bandwidth, h200.name) == ("96 GiB", None, "H200 SXM")


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("4096", 4096), ("4k", 4096), ("128K", 131072), ("1M", 2**20), ("0.5k", 512)],
)
def test_tokens_are_read(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "k", "-1", "0", "128kb", "1.3", "many"])
def test_nonsense_tokens_are_refused(text: str) -> None:
    with pytest.raises(BadInput, match="number of tokens"):
        parse_tokens(text)


def test_bytes_need_their_unit() -> None:
    assert parse_bytes("80GiB") == 80 * 2**30
    assert parse_bytes("80 gb") == 80 * 10**9
    assert parse_bytes("24564MiB") == 24564 * 2**20
    for text in ("80", "0GiB", "GiB", "80G"):
        with pytest.raises(BadInput, match="unit"):
            parse_bytes(text)


def test_sizes_are_written_in_binary_units() -> None:
    assert format_gib(40 * 2**30) == "40.00 GiB"
    assert format_gib(2560) == "2.5 KiB"
    assert (format_tokens(131072), format_tokens(2**20), format_tokens(1000)) == (
        "128k",
        "1M",
        "1,000",
    )
