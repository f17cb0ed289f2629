"""`/v1/embeddings`: batched by the scheduler, equal to transformers', in every encoding."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.engine.execution.pooling import read_pooling
from llmopt.engine.server.protocol.server_options import ServerOptions
from llmopt.quant.gguf.container import GgufFile, TensorToWrite, write_gguf
from llmopt.recipes import MODELS
from openai.types import CreateEmbeddingResponse

from ...support.embedding_models import HIDDEN, expected_vector, token_ids, write_modules
from ...support.gguf_support import write_model
from ...support.live_server import RunningServer, make_engine, running, slow_steps

TEXTS = ["Lily had a cat.", "A dog barked. " * 20, "Tom", *(f"Day {n} was warm." for n in range(9))]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = write_modules(tmp_path_factory.mktemp("embedder") / "model", "mean")
    with running(make_engine(str(folder), prefill_chunk_size=64)) as it:
        yield it


def post(server: RunningServer, body: dict[str, Any], status: int = 200) -> Any:
    with server.http() as http:
        response = http.post("/v1/embeddings", json=body)
    assert response.status_code == status, response.text
    return response.json() if status == 200 else response.json()["error"]["message"]


def vectors(server: RunningServer, given: Any, **fields: Any) -> np.ndarray:
    answer = post(server, {"input": given, **fields})
    assert [entry["index"] for entry in answer["data"]] == list(range(len(answer["data"])))
    return np.array([entry["embedding"] for entry in answer["data"]], dtype=np.float32)


def test_embeddings_are_those_of_transformers(embedder: RunningServer) -> None:
    answer = post(embedder, {"model": "tiny", "input": TEXTS[:3]})
    CreateEmbeddingResponse.model_validate(answer, strict=True)
    ids = [token_ids(text) for text in TEXTS[:3]]
    for entry, prompt in zip(answer["data"], ids, strict=True):
        vector = torch.tensor(entry["embedding"])
        torch.testing.assert_close(vector, expected_vector(prompt, "mean"), atol=1e-5, rtol=1e-4)
    count = sum(map(len, ids))
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == count


def test_the_sdk_reads_them_from_base64_and_sends_token_ids(embedder: RunningServer) -> None:
    client = embedder.openai()  # it asks for base64
    ids = [token_ids(text) for text in TEXTS[:2]]
    by_ids = client.embeddings.create(model="tiny", input=ids)
    as_floats = client.embeddings.create(model="tiny", input=TEXTS[:2], encoding_format="float")
    for left, right in zip(by_ids.data, as_floats.data, strict=True):
        expected = np.array(right.embedding, dtype=np.float32)
        np.testing.assert_array_equal(np.array(left.embedding, dtype=np.float32), expected)
    assert isinstance(post(embedder, {"input": ids[0], "encoding_format": "base64"})["data"][0]["embedding"], str)  # fmt: skip
    small = client.embeddings.create(model="tiny", input="Lily", dimensions=16)
    assert len(small.data[0].embedding) == 16


def test_ollamas_newer_endpoint_has_unit_vectors_of_every_model(tmp_path: Path) -> None:
    """The older one does not normalize: `EmbeddingsHandler` and `EmbedHandler` of Ollama's server/routes.go."""
    folder = write_modules(tmp_path / "model", "mean")
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps(modules[:2]))
    with running(make_engine(str(folder))) as server, server.http() as http:
        texts = {"model": "tiny", "input": "Lily", "prompt": "Lily"}
        (unit,) = http.post("/api/embed", json={**texts, "prompt": None}).json()["embeddings"]
        raw = http.post("/api/embeddings", json={**texts, "input": None}).json()["embedding"]
    assert np.linalg.norm(unit) == pytest.approx(1) and np.linalg.norm(raw) != pytest.approx(1)
    np.testing.assert_allclose(np.array(raw) / np.linalg.norm(raw), unit, rtol=1e-5)


def test_ollama_s_shapes(embedder: RunningServer) -> None:
    texts = ["One text", "another"]
    expected = vectors(embedder, texts)
    with embedder.http() as http:
        several = http.post("/api/embed", json={"model": "tiny", "input": texts}).json()
        one = http.post("/api/embeddings", json={"model": "tiny", "prompt": texts[0]}).json()
        empty = http.post("/api/embed", json={"model": "tiny", "input": []}).json()
        missing = http.post("/api/embed", json={"model": "tiny"})
        unknown = http.post("/api/embed", json={"model": "other", "input": "a"})
    assert np.allclose(several["embeddings"], expected, atol=1e-6)
    assert np.allclose(one["embedding"], expected[0], atol=1e-6)
    assert several["prompt_eval_count"] > 0 and several["total_duration"] > 0
    assert empty["embeddings"] == []
    assert (missing.status_code, unknown.status_code) == (400, 404)
    assert set(unknown.json()) == {"error"}


def test_a_batch_is_one_step_and_equals_each_text_alone(embedder: RunningServer) -> None:
    short = [text for text in TEXTS if len(text) < 30]
    before = embedder.on_engine(lambda engine: engine.stats.num_steps)
    batch = vectors(embedder, short)
    steps = embedder.on_engine(lambda engine: engine.stats.num_steps) - before
    assert steps <= 2 < len(short)
    for text, vector in zip(short, batch, strict=True):
        np.testing.assert_allclose(vectors(embedder, text)[0], vector, atol=1e-6)


def test_texts_are_embedded_beside_a_stream(embedder: RunningServer) -> None:
    body = {"prompt": "Once", "max_tokens": 120, "temperature": 0, "ignore_eos": True}
    with embedder.http() as http:
        alone = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    texts: list[str] = []

    def generate() -> None:
        with embedder.http() as http:
            texts.append(http.post("/v1/completions", json=body).json()["choices"][0]["text"])

    expected = vectors(embedder, TEXTS)
    thread = threading.Thread(target=generate)
    with slow_steps(embedder):
        thread.start()
        embedder.wait_for(lambda engine: engine.stats.num_running == 1)
        found = vectors(embedder, TEXTS)
        assert (
            thread.is_alive() and embedder.on_engine(lambda engine: engine.stats.num_running) == 1
        )
        thread.join()
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert texts == [alone]
    assert embedder.wait_until_idle().kv_blocks_used == 0


def test_fewer_dimensions_are_cut_and_normalized(embedder: RunningServer, tmp_path: Path) -> None:
    (whole,) = vectors(embedder, "Lily")
    (cut,) = vectors(embedder, "Lily", dimensions=32)
    np.testing.assert_allclose(cut, whole[:32] / np.linalg.norm(whole[:32]), atol=1e-6)
    message = post(embedder, {"input": "Lily", "dimensions": HIDDEN + 1}, 400)
    assert message == f"dimensions = {HIDDEN + 1}: this model has {HIDDEN}"
    assert "dimensions" in post(embedder, {"input": "Lily", "dimensions": 0}, 400)
    trained = read_pooling(write_modules(tmp_path / "m", "mean", matryoshka_dimensions=[32, 64]))
    assert trained is not None and len(trained.embedding([1.0] * HIDDEN, 64)) == 64
    with pytest.raises(BadInput, match="trained for 32, 64"):
        trained.embedding([1.0] * HIDDEN, 33)


def test_a_request_chooses_whether_vectors_are_normalized(embedder: RunningServer) -> None:
    (unit,) = vectors(embedder, "Lily")
    (raw,) = vectors(embedder, "Lily", normalize=False)
    assert abs(np.linalg.norm(raw) - 1) > 0.01
    np.testing.assert_allclose(raw / np.linalg.norm(raw), unit, atol=1e-6)
    np.testing.assert_array_equal(vectors(embedder, "Lily", normalize=True)[0], unit)
    (cut,) = vectors(embedder, "Lily", normalize=False, dimensions=32)
    np.testing.assert_array_equal(cut, raw[:32])


def test_fields_without_an_effect_are_named(embedder: RunningServer) -> None:
    with embedder.http() as http:
        bodies = {
            "/v1/embeddings": {"input": "a", "input_type": "query"},
            "/v1/score": {"text_1": "a", "text_2": "b", "late_chunking": True},
            "/v1/rerank": {"query": "a", "documents": ["b"], "normalize": False},
        }
        answers = {path: http.post(path, json=body) for path, body in bodies.items()}
        cut = http.post("/v1/rerank", json={**bodies["/v1/rerank"], "max_tokens_per_doc": 1})
    named = [answer.headers.get("x-ignored-fields") for answer in answers.values()]
    assert named == ["input_type", "late_chunking", "normalize"]
    assert cut.status_code == 400 and "max_tokens_per_doc" in cut.text


def test_long_texts_are_refused_or_truncated(embedder: RunningServer) -> None:
    long = "a b " * 600
    assert "exceed the context length" in post(embedder, {"input": long}, 400)
    ids = token_ids(long)
    (cut,) = vectors(embedder, long, truncate_prompt_tokens=7)
    np.testing.assert_allclose(cut, vectors(embedder, ids[:7])[0], atol=1e-6)
    assert (
        post(embedder, {"input": ids, "truncate_prompt_tokens": 7})["usage"]["prompt_tokens"] == 7
    )
    answer = post(embedder, {"input": long, "truncate_prompt_tokens": -1})
    assert answer["usage"]["prompt_tokens"] == embedder.engine.max_model_len
    assert embedder.wait_until_idle().kv_blocks_used == 0


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, None),
        ({"input": [[10**6]]}, "vocabulary"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "model": "gpt"}, "no model 'gpt'"),
        (
            {"input": "a", "messages": [{"role": "user", "content": "a"}]},
            "messages is not supported",
        ),
        ({}, "input"),
    ],
)
def test_what_cannot_be_embedded(
    embedder: RunningServer, body: dict[str, Any], named: str | None
) -> None:
    if named is None:  # this tokenizer begins every text with a token
        assert len(vectors(embedder, body["input"])) == 1
        return
    status = 404 if "model" in body else 400
    assert named in post(embedder, body, status)


def test_a_client_that_leaves_frees_its_blocks(embedder: RunningServer) -> None:
    body = json.dumps({"input": [TEXTS[1]] * 64})
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
    address = urlsplit(embedder.url)
    with slow_steps(embedder, 0.05):
        with socket.create_connection((address.hostname, address.port)) as client:
            client.sendall(f"{head}\r\nContent-Type: application/json\r\n\r\n{body}".encode())
            embedder.wait_for(lambda engine: engine.has_unfinished())
        embedder.wait_for(lambda engine: not engine.has_unfinished())
    assert embedder.wait_until_idle().kv_blocks_used == 0


def test_more_inputs_than_may_wait_are_told_to_come_later(tmp_path: Path) -> None:
    folder = write_modules(tmp_path / "model", "mean")
    options = ServerOptions(max_waiting=4)
    with running(make_engine(str(folder), max_num_seqs=2), options) as server:
        assert "sequences" in post(server, {"input": ["a"] * 7}, 429)
        assert len(vectors(server, ["a"] * 6)) == 6


def test_poolings(tmp_path: Path, server: RunningServer) -> None:
    last = read_pooling(write_modules(tmp_path / "last", "lasttoken"))
    assert last is not None
    ids = [1, 5, 9, 300]
    states = server.on_engine(lambda engine: engine.hidden_states(ids))
    vector = torch.from_numpy(last.embedding(states[-1].tolist()))
    torch.testing.assert_close(vector, expected_vector(ids, "last"), atol=1e-5, rtol=1e-4)
    with pytest.raises(BadInput, match="weightedmean_tokens"):
        read_pooling(write_modules(tmp_path / "weighted", "weightedmean_tokens"))
    with pytest.raises(BadInput, match="'Dense' is not supported"):
        read_pooling(write_modules(tmp_path / "dense", "mean", "Dense"))
    (tmp_path / "last" / "modules.json").write_text(json.dumps([{"path": "x"}]))
    with pytest.raises(BadInput, match="not a list of modules"):
        read_pooling(tmp_path / "last")


def test_a_gguf_file_of_an_embedding_model_is_pooled_by_its_key(tmp_path: Path) -> None:
    """Qwen3-Embedding's own files normalize too, as llama.cpp's server does."""
    file = GgufFile(write_model(MODELS / "stories3M", tmp_path / "plain", "Q8_0"))
    plain = read_pooling(file.path)
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "cls"}))
    (tmp_path / "config.json").write_text("{}")

    def with_key(kind: int) -> Path:
        tensors = [
            TensorToWrite(t.name, t.shape, t.type, lambda t=t: [file.bytes_of(t).tobytes()])
            for t in file.tensors.values()
        ]
        write_gguf(tmp_path / "m.gguf", {**file.metadata, "llama.pooling_type": kind}, tensors)
        return tmp_path / "m.gguf"

    poolings = [pooling for kind in range(4) if (pooling := read_pooling(with_key(kind)))]
    assert plain is None
    assert [pooling.params.mode for pooling in poolings] == ["cls", "mean", "cls", "last"]
    assert [pooling.normalize for pooling in poolings] == [False, True, True, True]
    with pytest.raises(BadInput, match="pooling_type 4 is not supported"):
        read_pooling(with_key(4))
    (tmp_path / "config.json").unlink()
    with running(make_engine(str(with_key(3)))) as chosen:
        (vector,) = vectors(chosen, "Lily")
    assert float(expected_vector(token_ids("Lily"), "last") @ torch.tensor(vector)) > 0.99


def test_a_model_without_pooling_says_how_to_choose_one(server: RunningServer) -> None:
    assert post(server, {"input": "a"}, 400) == (
        "tiny gives no embeddings: the checkpoint has no pooling (1_Pooling/config.json); --pooling-type "
        "chooses one: last, mean, cls, max"
    )
    with running(make_engine("stories260K"), pooling_type="LAST") as chosen:
        (vector,) = vectors(chosen, "Lily")
        assert abs(np.linalg.norm(vector) - 1) < 1e-5
