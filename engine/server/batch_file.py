"""OpenAI's batch files: lines of `custom_id`, `method`, `url` and `body`, with the digest of their answers.

Source: https://platform.openai.com/docs/guides/batch and vLLM's `run-batch`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...base.errors import BadInput
from ..config.config import EngineConfig

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A request of a batch file. Its body stays in the file.

    Attributes:
        id: digest of the line and of the model that answers it; 32 hexadecimal digits.
        start, size: place of the line in the file, in bytes.
    """

    id: str
    custom_id: str
    url: str
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class BatchFile:
    """A batch file, read and found to be without fault."""

    path: Path
    requests: tuple[BatchRequest, ...]

    def bodies(self) -> Iterator[tuple[BatchRequest, bytes]]:
        """Each request with its body as JSON, read as they are asked for."""
        with self.path.open("rb") as file:
            for request in self.requests:
                file.seek(request.start)
                line = json.loads(file.read(request.size))
                yield request, json.dumps(line["body"]).encode()


def read_batch(path: Path, models: Collection[str], answered_by: str) -> BatchFile:
    """Read a batch file and check each line.

    Args:
        models: names that a body may give as its `model`.
        answered_by: digest of the model and of the options that change its answers.

    Raises:
        BadInput: no such file, or the first line with a fault.
    """
    requests: list[BatchRequest] = []
    line_of: dict[str, int] = {}
    start = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    try:
                        custom_id, url = _checked(line, models)
                        if custom_id in line_of:
                            raise BadInput(
                                f"custom_id {custom_id!r} is that of line {line_of[custom_id]} too"
                            )
                    except BadInput as error:
                        raise BadInput(f"{path}, line {number}: {error}") from error
                    line_of[custom_id] = number
                    digest = hashlib.sha256(answered_by.encode() + b"\n" + line.strip())
                    requests.append(
                        BatchRequest(digest.hexdigest()[:32], custom_id, url, start, len(line))
                    )
                start += len(line)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from error
    if not requests:
        raise BadInput(f"{path} has no request: write a JSON object with custom_id, url and body")
    return BatchFile(path, tuple(requests))


def _checked(line: bytes, models: Collection[str]) -> tuple[str, str]:
    """`custom_id` and `url` of a line; raises `BadInput` where it is not a request."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise BadInput("need an object with custom_id, method, url and body")
    custom_id, url, body = entry.get("custom_id"), entry.get("url"), entry.get("body")
    if not isinstance(custom_id, str) or not custom_id or not _is_unicode(custom_id):
        raise BadInput("custom_id: need a text that is not empty")
    if entry.get("method", "POST") != "POST":
        raise BadInput(f"method {entry['method']!r}: only POST")
    if url not in URLS:
        raise BadInput(f"url {url!r}: one of {', '.join(URLS)}")
    if not isinstance(body, dict):
        raise BadInput("body: need an object")
    _check_body(body, models)
    return custom_id, url


def _check_body(body: dict[str, Any], models: Collection[str]) -> None:
    if body.get("stream"):
        raise BadInput("body.stream: a batch has no streams")
    model = body.get("model")
    if model is not None and model not in models:
        raise BadInput(
            f"body.model {model!r} is not {' or '.join(map(repr, models))}: give another --model, or "
            "the name with --served-model-name"
        )


def _is_unicode(text: str) -> bool:
    """Whether a text has no unpaired surrogate, which no UTF-8 file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


ANSWER_OPTIONS = (
    "attention_sinks",
    "cpu_activations",
    "dtype",
    "kv_budget",
    "kv_cache_dtype",
    "kv_eviction",
    "max_model_len",
    "seed",
    "window",
)
"""Fields of `EngineConfig` that change answers. The others change speed and memory, so that a run that had
too little of it can be resumed with other ones."""


def digest_of(model: Path, config: EngineConfig, for_app: Mapping[str, Any]) -> str:
    """The digest.

    The checkpoint is told by names, sizes and times of its files: weights of many GiB are not read for it.

    Args:
        model: a folder or a GGUF file.
        for_app: served name, chat template and parsers.
    """
    options = {name: getattr(config, name) for name in ANSWER_OPTIONS}
    loras = {name: _files(Path(folder)) for name, folder in config.loras.items()}
    facts = {"files": _files(model), "loras": loras, "options": options, **for_app}
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def _files(model: Path) -> list[tuple[str, int, int]]:
    """Names, sizes in bytes and times in nanoseconds of a checkpoint's files."""
    paths = sorted(model.iterdir()) if model.is_dir() else [model]
    return [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns)
        for path in paths
        if path.is_file()
    ]
