"""Workloads with images: vLLM's random-mm and a file's own, and how they are sent and measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.bench.load.address import CHAT, COMPLETIONS
from llmopt.bench.load.driver import Body
from llmopt.bench.load.exchange import MARK
from llmopt.bench.load.inprocess import InProcessTarget, images_part
from llmopt.bench.load.load import drive
from llmopt.bench.options.options import BenchOptions
from llmopt.bench.report.parts import remarks
from llmopt.bench.session.run_sessions import run_bench
from llmopt.bench.workloads.datasets import build_workload, write_frozen
from llmopt.bench.workloads.workload import Workload
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.core.engine import Engine
from llmopt.engine.multimodal.media import load_image

from ...support.image_models import IMAGE_FAMILIES, save_image_model
from ...support.pictures import encoded, picture
from ...support.releases import skip_without_torchvision

SMALL = "{(24, 32, 1): 0.5, (48, 16, 1): 0.5, (720, 1280, 16): 0.0}"


class Words:
    """A tokenizer of 50 ids; a text has one for each word."""

    all_special_ids = (0, 1)

    def __len__(self) -> int:
        return 50

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]:
        return [2 + len(word) for word in text.split()]


def _built(**fields: Any) -> Workload:
    options: dict[str, Any] = {
        "dataset": "random-mm",
        "num_prompts": 12,
        "random_input_len": 9,
        "random_output_len": 4,
        "random_mm_bucket_config": SMALL,
        **fields,
    }
    return build_workload(BenchOptions(**options), Words(), 200)


def test_random_images_are_behind_the_texts_of_random() -> None:
    workload = _built(random_mm_base_items_per_request=2, random_mm_num_mm_items_range_ratio=0.5)
    texts = _built(dataset="random")
    assert [i.prompt_token_ids for i in workload.items] == [i.prompt_token_ids for i in texts.items]
    counts = {len(item.images) for item in workload.items}
    assert counts == {1, 2, 3}
    images = [load_image(url) for item in workload.items for url in item.images]
    assert {image.size for image in images} == {(32, 24), (16, 48)}
    assert len({image.tobytes() for image in images}) == len(images) == workload.num_images
    assert any("on top" in note for note in workload.notes)


def test_the_seed_and_the_options_are_the_hash() -> None:
    first = _built()
    assert first.sha256 == _built().sha256
    others = [
        _built(seed=1),
        _built(random_mm_bucket_config="{(24, 32, 1): 1}"),
        _built(dataset="random"),
    ]
    assert len({first.sha256, *(other.sha256 for other in others)}) == 4


def test_the_limit_cuts_the_number_of_images() -> None:
    limited = _built(
        random_mm_base_items_per_request=5, random_mm_limit_mm_per_prompt='{"image": 2, "video": 0}'
    )
    assert {len(item.images) for item in limited.items} == {2}
    assert _built(random_mm_base_items_per_request=0).num_images == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"random_mm_bucket_config": "{(256, 256): 1}"},
        {"random_mm_bucket_config": "{(256, 256, 16): 1}"},
        {"random_mm_bucket_config": "{(0, 256, 1): 1}"},
        {"random_mm_bucket_config": "{(8, 8, 1): -1}"},
        {"random_mm_bucket_config": "{(8, 8, 1): 0}"},
        {"random_mm_bucket_config": "open('x')"},
        {"random_mm_limit_mm_per_prompt": "three"},
        {"random_mm_limit_mm_per_prompt": '{"image": -1}'},
    ],
)
def test_options_of_images_that_are_none(fields: dict[str, str]) -> None:
    with pytest.raises(BadInput, match="--random-mm-"):
        _built(**fields)


@pytest.fixture
def custom(tmp_path: Path) -> Path:
    (tmp_path / "fox.png").write_bytes(encoded(picture()))
    lines = [
        {"prompt": "what is it", "image_files": ["fox.png", "https://pictures.test/a.png"]},
        {"prompt": "who is it", "output_len": 3},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_files_images_are_sent_as_data_urls(custom: Path) -> None:
    workload = _built(
        dataset="custom_image", dataset_path=custom, num_prompts=4, disable_shuffle=True
    )
    first, second = workload.items[:2]
    assert load_image(first.images[0]).tobytes() == picture().tobytes()
    assert first.images[1] == "https://pictures.test/a.png"
    assert second.images == () and second.output_len == 3
    assert {len(item.images) for item in workload.items[2:]} <= {0, 2}
    with pytest.raises(BadInput, match="no images"):
        write_frozen(workload, custom.parent / "frozen.jsonl", model="x")
    for line in (
        '{"prompt": "a", "image_files": "x"}',
        '{"prompt": "a", "image_files": ["no.png"]}',
    ):
        custom.write_text(line)
        with pytest.raises(BadInput, match="image"):
            _built(dataset="custom_image", dataset_path=custom)


def test_images_are_sent_to_chats_behind_the_text() -> None:
    item = _built().items[0]
    body = Body("m", CHAT, lambda ids: " ".join(map(str, ids))).encode(item).body
    (message,) = json.loads(body.replace(MARK, b"x"))["messages"]
    text, image = message["content"]
    assert text["type"] == "text"
    assert image == {"type": "image_url", "image_url": {"url": item.images[0]}}
    with pytest.raises(BadInput, match="openai-chat"):
        Body("m", COMPLETIONS, str).encode(item)


def test_the_engine_gets_them_and_the_parts_of_ttft_add_up(tmp_path: Path) -> None:
    skip_without_torchvision("smolvlm")
    save_image_model(tmp_path, IMAGE_FAMILIES["smolvlm"])
    engine = Engine(EngineConfig(model=str(tmp_path), dtype="float32", num_threads=1))
    target = InProcessTarget(engine)
    load = drive(target, _built(num_prompts=3), 2)
    assert all(trace.success and trace.output_len == 4 for trace in load.traces)
    part = images_part(target.images, engine.images.encoders, load.traces)
    assert part is not None
    assert (part["num_requests"], part["num_images"]) == (3, 3)
    assert part["image_tokens"] > 3 * 4 and part["encode_seconds"] > 0
    parts = part["mean_ttft_parts_ms"]
    ttfts = [1e3 * trace.ttft for trace in load.traces]
    assert sum(parts.values()) == pytest.approx(sum(ttfts) / 3)
    text = Engine(EngineConfig(model="stories260K", dtype="float32", num_threads=1))
    refused = drive(InProcessTarget(text), _built(num_prompts=1), 1)
    assert "images are not taken" in refused.traces[0].error


def test_a_run_records_what_images_cost(tmp_path: Path) -> None:
    model = tmp_path / "model"
    skip_without_torchvision("smolvlm")
    save_image_model(model, IMAGE_FAMILIES["smolvlm"])
    options = BenchOptions(
        model=str(model),
        dataset="random-mm",
        num_prompts=4,
        num_runs=1,
        num_warmups=0,
        random_input_len=9,
        random_output_len=4,
        random_mm_bucket_config=SMALL,
        quality=False,
        report=False,
        dtype="float32",
    )
    result = run_bench(options).result
    images = result["llmopt"]["images"]
    assert (images["num_requests"], images["num_images"]) == (4, 4)
    assert any(note.startswith("4 images in 4 requests") for note in remarks(result))
