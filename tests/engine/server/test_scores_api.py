"""`/v1/score` and `/v1/rerank`: cosines of embeddings, classification heads, and logits of yes and no."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llmopt.base.errors import BadInput
from llmopt.engine.execution.pooling import QWEN3_RERANKER_TEMPLATE, read_scorer
from llmopt.quant.model.checkpoint import read_json
from llmopt.recipes import MODELS
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from ...support.embedding_models import (
    add_to_config,
    expected_vector,
    token_ids,
    write_classifier,
    write_logit_scorer,
    write_modules,
)
from ...support.live_server import RunningServer, make_engine, running

QUERY = "Who had a cat?"
DOCUMENTS = ["Lily had a cat.", "A dog barked.", "The sun was warm and the sky was blue."]
PAIRS = '{% for m in messages %}{% if m.role == "query" %}Q: {{ m.content }}{% elif m.role == "document" %} D: {{ m.content }} A:{% endif %}{% endfor %}'


def post(server: RunningServer, path: str, body: dict[str, Any], status: int = 200) -> Any:
    with server.http() as http:
        response = http.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json() if status == 200 else response.json()["error"]["message"]


def scores(server: RunningServer, **fields: Any) -> list[float]:
    body = {"text_1": QUERY, "text_2": DOCUMENTS, **fields}
    return [entry["score"] for entry in post(server, "/v1/score", body)["data"]]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = write_modules(tmp_path_factory.mktemp("embedder") / "model", "lasttoken")
    with running(make_engine(str(folder))) as it:
        yield it


def test_scores_are_cosines_of_embeddings(embedder: RunningServer) -> None:
    query = expected_vector(token_ids(QUERY), "last")
    expected = [float(query @ expected_vector(token_ids(text), "last")) for text in DOCUMENTS]
    answer = post(embedder, "/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS})
    assert [entry["object"] for entry in answer["data"]] == ["score"] * 3
    np.testing.assert_allclose([e["score"] for e in answer["data"]], expected, atol=1e-5)
    texts = [QUERY, *DOCUMENTS]  # the query is computed once
    assert answer["usage"]["prompt_tokens"] == sum(len(token_ids(text)) for text in texts)
    np.testing.assert_allclose(scores(embedder, text_1=[QUERY] * 3), expected, atol=1e-5)
    (single,) = scores(embedder, text_2=DOCUMENTS[1])
    assert single == pytest.approx(expected[1], abs=1e-5)
    newer = post(embedder, "/score", {"queries": QUERY, "documents": DOCUMENTS})
    np.testing.assert_allclose([e["score"] for e in newer["data"]], expected, atol=1e-5)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_come_in_the_order_of_their_scores(embedder: RunningServer, path: str) -> None:
    by_index = scores(embedder)
    body = {"model": "tiny", "query": QUERY, "documents": [{"text": DOCUMENTS[0]}, *DOCUMENTS[1:]]}
    results = post(embedder, path, body)["results"]
    order = sorted(range(3), key=lambda index: -by_index[index])
    assert [entry["index"] for entry in results] == order
    for entry in results:
        assert entry["relevance_score"] == pytest.approx(by_index[entry["index"]], abs=1e-6)
        assert entry["document"] == {"text": DOCUMENTS[entry["index"]]}
    top = post(embedder, path, {**body, "top_n": 1, "return_documents": False})["results"]
    assert [entry["index"] for entry in top] == order[:1] and "document" not in top[0]
    assert len(post(embedder, path, {**body, "top_n": 9})["results"]) == 3


def test_a_sequence_classifier_scores_by_its_head(tmp_path: Path) -> None:
    folder = write_classifier(tmp_path / "classifier")
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = [float(model(torch.tensor([token_ids(QUERY, text)])).logits) for text in DOCUMENTS]
    with running(make_engine(str(folder))) as server:
        np.testing.assert_allclose(scores(server, use_activation=False), logits, atol=1e-4)
        expected = [1 / (1 + math.exp(-logit)) for logit in logits]
        np.testing.assert_allclose(scores(server), expected, atol=1e-5)
        message = post(server, "/v1/completions", {"prompt": "Once"}, 400)
        assert "is a sequence classifier and generates no text" in message
        assert server.wait_until_idle().kv_blocks_used == 0


def test_a_reranker_scores_by_the_logits_of_yes_and_no(tmp_path: Path) -> None:
    folder = write_logit_scorer(tmp_path / "reranker", 300, 17, PAIRS)
    model = AutoModelForCausalLM.from_pretrained(MODELS / "stories3M", dtype=torch.float32).eval()
    expected = []
    for text in DOCUMENTS:
        # The template writes the whole prompt, without the token that begins a text.
        ids = token_ids(f"Q: {QUERY} D: {text} A:")[1:]
        with torch.no_grad():
            last = model(torch.tensor([ids])).logits[0, -1]
        expected.append(float(last[[17, 300]].softmax(-1)[1]))
    with running(make_engine(str(folder))) as server:
        np.testing.assert_allclose(scores(server), expected, atol=1e-5)
        answer = post(server, "/v1/rerank", {"query": QUERY, "documents": DOCUMENTS})
        assert answer["results"][0]["relevance_score"] == pytest.approx(max(expected), abs=1e-5)
        assert post(server, "/v1/completions", {"prompt": "Once", "max_tokens": 2})
        flood = {"query": "a" * 9000, "documents": ["b"] * 2000}
        assert "characters, at most" in post(server, "/v1/rerank", flood, 400)


def test_scorers_of_checkpoints(tmp_path: Path) -> None:
    class Tokenizer:
        def convert_tokens_to_ids(self, word: str) -> int | None:
            return {"yes": 5, "no": 6}.get(word)

    qwen = write_modules(tmp_path / "qwen", "mean", classifier_from_token=["no", "yes"])
    add_to_config(qwen, model_type="qwen3")
    scorer = read_scorer(qwen, read_json(qwen / "config.json"), Tokenizer())
    assert scorer is not None and scorer.pooling.token_ids == (5, 6)
    assert scorer.template == QWEN3_RERANKER_TEMPLATE
    assert scorer.score([2.0, 2.0]) == 0.5 and scorer.score([2.0, 1.0], False) == 1.0
    add_to_config(qwen, sentence_transformers={"activation_fn": "torch.nn.Identity"})
    raw = read_scorer(qwen, read_json(qwen / "config.json"), Tokenizer())
    assert raw is not None and raw.score([1.0, 3.0]) == -2.0
    add_to_config(qwen, classifier_from_token=["no", "maybe"])
    with pytest.raises(BadInput, match="are not two tokens"):
        read_scorer(qwen, read_json(qwen / "config.json"), Tokenizer())
    three = write_classifier(tmp_path / "three", 3)
    with pytest.raises(BadInput, match="by 3 labels"):
        read_scorer(three, read_json(three / "config.json"), Tokenizer())
    stories = MODELS / "stories3M"
    assert read_scorer(stories, read_json(stories / "config.json"), Tokenizer()) is None


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "2 and 3 texts"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_1": [], "text_2": "a"}, "text_1"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": [{"image": "x"}]}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "max_chunks_per_doc": 9}, "max_chunks"),
    ],
)
def test_what_cannot_be_scored(
    embedder: RunningServer, path: str, body: dict[str, Any], named: str
) -> None:
    assert named in post(embedder, path, body, 400)


def test_a_model_of_neither_kind_is_refused(server: RunningServer) -> None:
    message = post(server, "/v1/score", {"text_1": "a", "text_2": "b"}, 400)
    assert message.startswith("tiny gives no scores: it is no reranker, and the checkpoint has no")
