"""Batch files: what is read, and which line is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llmopt.base.errors import BadInput
from llmopt.engine.config.config import EngineConfig
from llmopt.engine.server.batch import ANSWER_OPTIONS, digest_of, read_batch

GOOD: dict[str, Any] = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"prompt": "Köln"},
}


def written(path: Path, *lines: Any) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts), encoding="utf-8")
    return path


def test_requests_are_read_in_order_and_blank_lines_passed_over(tmp_path: Path) -> None:
    second = {**GOOD, "custom_id": "b", "body": {"model": "tiny"}}
    path = written(tmp_path / "in.jsonl", GOOD, "", second, "  ")
    batch = read_batch(path, ["tiny"], "model")
    assert [request.custom_id for request in batch.requests] == ["a", "b"]
    assert [json.loads(body) for _, body in batch.bodies()] == [GOOD["body"], second["body"]]


def test_an_id_depends_on_the_line_and_on_the_model(tmp_path: Path) -> None:
    path = written(tmp_path / "in.jsonl", GOOD)
    other = written(tmp_path / "other.jsonl", {**GOOD, "body": {"prompt": "Bonn"}})
    ids = [
        read_batch(file, [], model).requests[0].id
        for file, model in ((path, "one"), (path, "one"), (path, "two"), (other, "one"))
    ]
    assert ids[0] == ids[1] and len(set(ids)) == 3


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON"),
        ("3", "need an object"),
        ({**GOOD, "custom_id": ""}, "custom_id"),
        ({**GOOD, "custom_id": 3}, "custom_id"),
        ('{"custom_id": "\\ud800", "url": "/v1/completions", "body": {}}', "custom_id"),
        (GOOD, "custom_id 'a' is that of line 1 too"),
        ({**GOOD, "custom_id": "b", "method": "GET"}, "method 'GET': only POST"),
        ({**GOOD, "custom_id": "b", "url": "/v1/files"}, "url '/v1/files': one of /v1/chat"),
        ({**GOOD, "custom_id": "b", "url": ["/v1/files"]}, "url"),
        ({**GOOD, "custom_id": "b", "body": "text"}, "body: need an object"),
        ({**GOOD, "custom_id": "b", "body": {"stream": True}}, "no streams"),
        ({**GOOD, "custom_id": "b", "body": {"model": "gpt-9"}}, "--served-model-name"),
        ({**GOOD, "custom_id": "b", "body": {"model": []}}, "body.model"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: Any, words: str) -> None:
    path = written(tmp_path / "in.jsonl", GOOD, line)
    with pytest.raises(BadInput, match=r"in\.jsonl, line 2: ") as refused:
        read_batch(path, ["tiny"], "")
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n\xff\xfe\n")
    with pytest.raises(BadInput, match="line 2: not JSON"):
        read_batch(path, [], "")


def test_no_file_and_an_empty_one_say_so(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        read_batch(tmp_path / "none", [], "")
    with pytest.raises(BadInput, match="has no request"):
        read_batch(written(tmp_path / "empty.jsonl", "", ""), [], "")


def test_the_model_is_told_by_its_files_and_options(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = EngineConfig()
    first = digest_of(tmp_path, config, {})
    assert first == digest_of(tmp_path, EngineConfig(max_num_seqs=2, num_threads=1), {})
    assert first != digest_of(tmp_path, EngineConfig(dtype="float32"), {})
    assert first != digest_of(tmp_path, config, {"chat_template": "x"})
    (tmp_path / "config.json").write_text("{ }")
    assert first != digest_of(tmp_path, config, {})
    assert set(ANSWER_OPTIONS) <= set(EngineConfig.__dataclass_fields__)
