"""Images in a prompt: what is refused and how, forks, the encoder cache, the adapter, tensor parallelism."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.engine.base.image_input import ImageInput, content_key
from llmopt.engine.base.sampling_params import SamplingParams
from llmopt.engine.core import build
from llmopt.engine.core.llm import LLM
from llmopt.engine.multimodal.encoder import VisionEncoder
from llmopt.engine.multimodal.open import open_images
from llmopt.engine.server.requests.loop import RecoveringSteps
from llmopt.quant.model.checkpoint import Checkpoint

from ...support.image_models import IMAGE_FAMILIES, ImageFamily, picture, save_image_model
from ..model.test_multimodal_checkpoints import save_wrapped

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = "Once upon <image> a time"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("llava")
    save_image_model(made, IMAGE_FAMILIES["llava-1.5"])
    return made


def llm(folder: Path, **options: Any) -> LLM:
    fixed = {"dtype": "float32", "device": "cpu", "num_threads": 1, "block_size": 4}
    sizes = {"num_blocks": 200, "max_model_len": 200, "enforce_eager": True}
    return LLM(folder, **{**fixed, **sizes, **options})


def tokens_of(results) -> list[list[int]]:
    return [list(each.token_ids) for result in results for each in result.completions]


def test_an_image_is_a_path_a_data_url_or_an_object(folder, tmp_path):
    image = picture(1)
    image.save(tmp_path / "a.png")
    data = io.BytesIO()
    image.save(data, "PNG")
    url = "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
    model = llm(folder)
    ids = model.engine.encode(PROMPT)
    prompts = [{"prompt": PROMPT, "images": [each]} for each in (image, tmp_path / "a.png", url)]
    results = model.generate([*prompts, {"prompt_token_ids": ids, "images": [image]}], GREEDY)
    assert len({tuple(tokens) for tokens in tokens_of(results)}) == 1
    assert len({tuple(result.prompt_token_ids) for result in results}) == 1
    assert model.engine.images.encoders.stats.num_queries == 1


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        ({"prompt": "no place", "images": [picture(1)]}, "0 placeholders '<image>' for 1 images"),
        ({"prompt": PROMPT, "images": []}, "1 placeholders '<image>' for 0 images"),
        ({"prompt_token_ids": [5, 512, 512], "images": [picture(1)]}, "2 placeholders"),
        ({"prompt": PROMPT, "images": picture(1)}, "'images' of a prompt is a list"),
        ({"prompt": PROMPT, "images": ["/nowhere.png"]}, "nowhere.png"),
        ({"prompt": PROMPT, "pictures": [picture(1)]}, "no key 'pictures'"),
        ({"images": [picture(1)]}, "either the key 'prompt'"),
    ],
)
def test_a_wrong_prompt_is_refused(folder, prompt, complaint):
    model = llm(folder)
    with pytest.raises(BadInput, match=complaint):
        model.generate([{"prompt": PROMPT, "images": [picture(2)]}, prompt], GREEDY)
    assert not model.engine.has_unfinished()


def test_images_beyond_the_context_are_not_processed(folder, monkeypatch):
    support = llm(folder).engine.images
    process, processed = support.processor._process, []

    def counting(image, index):
        processed.append(index)
        return process(image, index)

    monkeypatch.setattr(support.processor, "_process", counting)
    prompt, images = "<image>" * 5, [picture(seed) for seed in range(5)]
    most = len(support.processor.prepare("<image>", images[:1], add_special_tokens=False).token_ids)
    processed.clear()
    with pytest.raises(BadInput, match=f"2 images take {2 * most} tokens .* at most {most}"):
        support.processor.prepare(prompt, images, max_tokens=most)
    assert processed == [0, 1]


def test_a_model_of_text_alone_takes_no_images():
    with pytest.raises(BadInput, match="is a model of text alone"):
        LLM("stories260K", num_blocks=8).generate({"prompt": "a", "images": [picture(1)]})


def test_a_model_without_its_tower_says_so(folder):
    model = llm(folder, language_model_only=True)
    assert tokens_of(model.generate("Once upon a time", GREEDY))
    with pytest.raises(BadInput, match="language_model_only is set"):
        model.generate({"prompt": PROMPT, "images": [picture(1)]})


@pytest.mark.parametrize("spans", [[(1, 16)], [(4, 2), (0, 2)], [(0, 3), (2, 3)], [(0, 0)]])
def test_spans_outside_the_prompt_are_refused(folder, spans):
    images = tuple(ImageInput(b"a" * 16, offset, count) for offset, count in spans)
    with pytest.raises(BadInput, match="spans are in order"):
        llm(folder).engine.add_request("a", [5] * 8, GREEDY, images=images)


def test_completions_share_the_images_of_their_prompt(folder):
    params = SamplingParams(temperature=1, seed=3, max_tokens=8, ignore_eos=True, n=3)
    prompt = {"prompt": PROMPT, "images": [picture(1)]}
    model = llm(folder)
    together = tokens_of(model.generate(prompt, params))
    tight = llm(folder, num_blocks=12, enable_prefix_caching=False, encoder_cache_bytes=0)
    assert tokens_of(tight.generate(prompt, params)) == together
    assert tight.engine.stats.num_preemptions > 0
    assert model.engine.images.encoders.stats.num_queries == 1


def test_the_encoder_cache_keeps_to_its_budget(folder):
    each = 16 * 64 * 4
    prompts = [{"prompt": PROMPT, "images": [picture(seed)]} for seed in range(4)]
    model = llm(folder, encoder_cache_bytes=2 * each, enable_prefix_caching=False)
    encoders = model.engine.images.encoders
    assert encoders is not None
    for prompt in prompts:
        model.generate(prompt, GREEDY)
        assert encoders.num_bytes <= 2 * each
    assert len(encoders) == 2
    assert encoders.stats.num_evicted == 2
    model.generate(prompts[-1], GREEDY)
    assert encoders.stats.num_hits == 1
    model.generate(prompts[0], GREEDY)
    assert encoders.stats.num_hits == 1
    encoders.reset()
    assert (encoders.num_bytes, len(encoders)) == (0, 0)


def test_images_of_one_shape_are_encoded_together_and_in_order(folder):
    model = llm(folder)
    encoder = model.engine.images.encoders.encoder
    images = [
        model.engine.images.processor.prepare(PROMPT, [picture(seed, 40 + seed, 40)]).images[0]
        for seed in range(3)
    ]
    together = encoder.encode(images)
    for image, encoded in zip(images, together, strict=True):
        alone = encoder.encode([image])[0].embeddings
        torch.testing.assert_close(encoded.embeddings, alone, atol=1e-5, rtol=1e-5)


class Memory:
    """A small GPU of which other processes take half."""

    def free_and_total(self) -> tuple[int, int]:
        return 1 << 23, 1 << 24

    def peak_of(self, work: Callable[[], object]) -> int:
        work()
        return 0


def on_gpu(folder: Path, **options: Any) -> LLM:
    return llm(folder, num_blocks=None, gpu_memory_utilization=0.9, **options)


@pytest.mark.parametrize(("max_tokens", "count"), [(8, 1), (40, 2), (4096, 8)])
def test_a_memory_profile_encodes_the_images_of_the_largest_step(
    folder, monkeypatch, max_tokens, count
):
    passes: list[int] = []
    encode_together = VisionEncoder._encode_together

    def recorded(self, images):
        passes.append(len(images))
        return encode_together(self, images)

    monkeypatch.setattr(VisionEncoder, "_encode_together", recorded)
    monkeypatch.setattr(build, "memory_of", lambda _: Memory())
    on_gpu(folder, max_num_batched_tokens=max_tokens, max_num_seqs=2, encoder_cache_bytes=0)
    assert passes == [count]


def test_the_encoder_cache_is_reserved_beside_other_processes(folder, monkeypatch):
    monkeypatch.setattr(build, "memory_of", lambda _: Memory())
    without, beside = (
        on_gpu(folder, encoder_cache_bytes=size, max_num_seqs=200).engine.memory.kv_cache_bytes
        for size in (0, 1 << 20)
    )
    assert without - beside == pytest.approx(1 << 20, rel=0.01)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_tower_that_fails_on_an_image_ends_its_request_alone(
    folder, async_scheduling, monkeypatch
):
    engine = llm(folder, async_scheduling=async_scheduling).engine
    steps, encoder = RecoveringSteps(engine), engine.images.encoders.encoder
    prompts = {
        f"{kind} {seed}": engine.images.processor.prepare(PROMPT, [picture(seed)])
        for kind, seeds in (("broken", range(2, 6)), ("good", [1, 6]))
        for seed in seeds
    }
    broken = {p.images[0].content_hash for name, p in prompts.items() if "broken" in name}
    encode = encoder._encode_together

    def fails(images):
        if broken & {image.content_hash for image in images}:
            raise RuntimeError("out of luck")
        return encode(images)

    def finish(names):
        tokens, failed = {}, []
        for name in names:
            given = prompts[name]
            engine.add_request(name, given.token_ids, GREEDY, images=given.images)
        while engine.has_unfinished():
            for output in steps.step():
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            failed += steps.failed_requests or []
        return tokens, failed

    expected, _ = finish(["good 1", "good 6"])
    engine.images.encoders.reset()
    engine.reset_prefix_cache()
    monkeypatch.setattr(encoder, "_encode_together", fails)
    tokens, failed = finish(["good 1", *(f"broken {seed}" for seed in range(2, 6)), "good 6"])
    assert sorted(failed) == [f"broken {seed}" for seed in range(2, 6)]
    assert {name: tokens[name] for name in expected} == expected
    engine.scheduler.check_integrity()
    engine.close()


@pytest.mark.parametrize("text", ["stablelm", "olmo"])
def test_a_model_of_transformers_takes_images(tmp_path, text):
    """Text models that the decoder does not have run through transformers' modules."""
    llava = IMAGE_FAMILIES["llava-1.5"]
    family = ImageFamily(
        llava.config, llava.placeholder, llava.tokens, {"model_type": text}, llava.vision, llava.fields,
        processor=llava.processor, image_processor=llava.image_processor,
    )  # fmt: skip
    reference = save_image_model(tmp_path, family)
    model = llm(tmp_path, prefill_chunk_size=7)
    assert type(model.engine.runner.decoder).__name__ == "TransformersModel"
    prompts = [{"prompt": PROMPT, "images": [picture(seed)]} for seed in (1, 2)]
    got = tokens_of(model.generate([*prompts, "Once upon a time"], GREEDY))
    processor = model.engine.images.processor._processor
    for prompt, tokens in zip(prompts, got, strict=False):
        inputs = processor(text=prompt["prompt"], images=prompt["images"], return_tensors="pt")
        with torch.no_grad():
            output = reference.generate(
                **inputs, max_new_tokens=8, do_sample=False, eos_token_id=None
            )
        assert output[0, inputs["input_ids"].shape[1] :].tolist() == tokens


def test_a_processor_that_cannot_be_built_leaves_the_text_model(tmp_path):
    save_image_model(tmp_path, IMAGE_FAMILIES["llava-1.5"])
    path = tmp_path / "processor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "patch_size": "eight"}))
    (tmp_path / "preprocessor_config.json").write_text("{}")
    model = llm(tmp_path)
    assert tokens_of(model.generate("Once", GREEDY))
    with pytest.raises(BadInput, match="image"):
        model.generate({"prompt": PROMPT, "images": [picture(1)]})


def test_images_that_change_masks_are_refused_in_modules_of_transformers(tmp_path):
    save_wrapped(tmp_path, "gemma-3")
    place = torch.device("cpu"), torch.float32

    def reason(*, through_transformers: bool) -> str:
        checkpoint = Checkpoint(tmp_path)
        return open_images(
            checkpoint, None, *place, max_cache_bytes=0, through_transformers=through_transformers
        ).reason

    assert "change masks of attention" in reason(through_transformers=True)
    assert "no preprocessor_config.json" in reason(through_transformers=False)


def test_the_key_of_a_block_is_of_the_images_in_it():
    first = ImageInput(b"a" * 16, 3, 5)
    second = ImageInput(b"b" * 16, 3, 5)
    assert content_key([first], 0, 3) == content_key([first], 8, 12) == b""
    assert content_key([first], 0, 4) != content_key([second], 0, 4)
    assert content_key([first], 4, 8) != content_key([first], 0, 4)


def test_separators_of_a_span_take_no_embedding():
    image = ImageInput(b"", 2, 4, is_embedded=(True, False, True, True))
    assert image.num_embeddings == 3
    assert image.embedded_positions(0, 9) == ([2, 4, 5], 0)
    assert image.embedded_positions(3, 5) == ([4], 1)
    with pytest.raises(ValueError, match="1 flags for 2 tokens"):
        ImageInput(b"", 0, 2, is_embedded=(True,))
