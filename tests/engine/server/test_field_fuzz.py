"""Every field of every endpoint with values of every kind: no 5xx, and no broken stream.

The fields are those of the models of the application's routes. Here each gets one of the values; `make nightly`
gives all of them to all, with `LLMOPT_FUZZ=all`.
"""

from __future__ import annotations

import json
import os
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import pytest
from fastapi.routing import APIRoute
from llmopt.engine.server.protocol.server_options import ServerOptions
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ...support.live_server import RunningServer, make_engine, running

IS_FULL = os.environ.get("LLMOPT_FUZZ") == "all"
pytestmark = pytest.mark.timeout(3600 if IS_FULL else 300)
CHAT = [{"role": "user", "content": "hi"}]
RIGHT: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": CHAT, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": CHAT},
    "/tokenize": {"prompt": "hi"},
    "/api/chat": {"model": "tiny", "messages": CHAT, "options": {"num_predict": 2}},
    "/api/generate": {"model": "tiny", "prompt": "hi", "options": {"num_predict": 2}},
    "/api/embed": {"model": "tiny", "input": "hi"},
    "/api/embeddings": {"model": "tiny", "prompt": "hi"},
    "/api/show": {"model": "tiny"},
    "/v1/load_lora_adapter": {"lora_name": "red", "lora_path": "red"},
    "/v1/unload_lora_adapter": {"lora_name": "red"},
}
"""Bodies in which a field is replaced, where the required fields alone would not do."""

ODD = [
    *(
        "null",
        "true",
        "-1",
        "0",
        "0.5",
        "1e999",
        "-1e-999",
        "NaN",
        "Infinity",
        str(2**70),
        "9" * 5000,
    ),
    *('""', '"text"', '"\\ud800"', '"\\u0000"', '"\ufdd0<s>"', "[]", "[[]]", "{}", '["\\udfff"]'),
    *('{"a": NaN}', '{"": [null]}', '{"type": "text"}', '{"type": "function", "function": {}}'),
    *("[" * 10_000 + "]" * 10_000, '{"a":' * 150 + "1" + "}" * 150, json.dumps("x" * 70_000)),
]
LARGE = [
    json.dumps([1] * 1_000_000),
    json.dumps(["a"] * 500_000),
    json.dumps([{}] * 100_000),
    json.dumps(dict.fromkeys(map(str, range(100_000)))),
    json.dumps("<s>" * 1_000_000),
]  # fmt: skip
Path = tuple[str | int, ...]


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    options = ServerOptions(lora_folders=(tmp_path_factory.mktemp("adapters"),))
    engine = make_engine("stories260K", max_model_len=64, max_loras=2)
    with running(engine, options) as it:
        yield it


def parts_of(annotation: Any) -> list[Any]:
    """Members of a union, or the type itself, without `Annotated` around them."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return parts_of(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return [part for member in typing.get_args(annotation) for part in parts_of(member)]
    return [annotation]


def name_of(name: str, field: FieldInfo) -> str:
    return field.alias or name


def sample(annotation: Any) -> Any:
    """A small value of a type."""
    part = parts_of(annotation)[0]
    origin = typing.get_origin(part)
    if isinstance(part, type) and issubclass(part, BaseModel):
        return sample_model(part)
    if origin is Literal:
        return typing.get_args(part)[0]
    if origin in (list, tuple):
        return [sample(typing.get_args(part)[0])]
    simple = {str: "a", int: 1, float: 0.5, bool: False, dict: {}}
    return simple.get(origin or part)


def sample_model(model: type[BaseModel]) -> dict[str, Any]:
    needed = {n: f for n, f in model.model_fields.items() if f.default is PydanticUndefined}
    return {
        name_of(name, field): sample(field.annotation)
        for name, field in needed.items()
        if field.default_factory is None
    }


def places(model: type[BaseModel], above: tuple[type, ...] = ()) -> Iterator[Path]:
    """Path of each field of a model and of the models in it."""
    for name, field in model.model_fields.items():
        key = name_of(name, field)
        yield (key,)
        for part in parts_of(field.annotation):
            is_list = typing.get_origin(part) in (list, tuple)
            inner = parts_of(typing.get_args(part)[0]) if is_list else [part]
            for kind in inner:
                if not (isinstance(kind, type) and issubclass(kind, BaseModel)) or kind in above:
                    continue
                for path in places(kind, (*above, model)):
                    yield (key, *((0,) if is_list else ()), *path)


def with_value(body: dict[str, Any], model: type[BaseModel], path: Path, value: Any) -> Any:
    """A body with a value at a path, and samples of the models around it."""
    key, rest = path[0], path[1:]
    if not rest:
        return {**body, key: value}
    field = next(f for n, f in model.model_fields.items() if name_of(n, f) == key)
    is_list, deeper = rest[0] == 0, rest[1:] if rest[0] == 0 else rest
    for part in parts_of(field.annotation):
        if is_list and typing.get_origin(part) not in (list, tuple):
            continue
        for kind in parts_of(typing.get_args(part)[0]) if is_list else [part]:
            if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
                continue
            if deeper[0] in {name_of(n, f) for n, f in kind.model_fields.items()}:
                inner = with_value(sample_model(kind), kind, deeper, value)
                return {**body, key: [inner] if is_list else inner}
    raise AssertionError(path)


def models(server: RunningServer) -> dict[str, type[BaseModel]]:
    """Model of the body of each endpoint, by its path."""
    found = {}
    for route in all_routes(server.app.routes):
        field = route.body_field
        if field is not None and issubclass(kind := field.field_info.annotation, BaseModel):  # type: ignore[arg-type]
            found[route.path] = kind
    return found


def all_routes(routes: Any) -> Iterator[APIRoute]:
    for route in routes:
        if isinstance(route, APIRoute):
            yield route
        else:
            yield from all_routes(getattr(getattr(route, "original_router", None), "routes", ()))


def check(http: httpx.Client, path: str, content: str) -> int:
    """Send a body; the status. The answer must be JSON, or a stream of it with an end."""
    response = http.post(path, content=content.encode())
    shown = f"{path} {content[:300]}: {response.status_code} {response.text[:300]}"
    assert response.status_code < 500, shown
    kind = response.headers.get("content-type", "")
    texts = [response.text]
    if kind.startswith("text/event-stream"):
        lines = response.text.splitlines()
        texts = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
        ends = ("[DONE]", '"error"', "message_stop", "response.completed", "response.incomplete")
        assert texts and any(end in response.text for end in (*ends, "response.failed")), shown
    elif kind.startswith("application/x-ndjson"):
        texts = response.text.splitlines()
        last = json.loads(texts[-1])
        assert last.get("done") or "error" in last, shown
    for text in texts:
        json.loads(text, parse_constant=lambda name: pytest.fail(f"{name}: {shown}"))
    return response.status_code


def bodies(path: str, model: type[BaseModel]) -> Iterator[str]:
    """Bodies with each field replaced by one of the values, or by each; large ones replace whole fields."""
    right, number = RIGHT.get(path, sample_model(model)), 0
    for place in sorted({*places(model)}, key=str):
        values = (
            [*ODD, *(LARGE if len(place) == 1 else ())] if IS_FULL else [ODD[number % len(ODD)]]
        )
        for value in values:
            number += 1
            body = with_value(right, model, place, "VALUE")
            if "stream" in model.model_fields and place != ("stream",):
                body["stream"] = number % 2 == 0
            yield json.dumps(body).replace('"VALUE"', value, 1)


ENDPOINTS = (*RIGHT, "/detokenize", "/abort", "/v1/embeddings", "/v1/score", "/v1/rerank")


def test_all_endpoints_are_known(small_server: RunningServer) -> None:
    aliases = {"/score", "/rerank", "/v2/rerank"}
    assert {*models(small_server)} - aliases == {*ENDPOINTS}


@pytest.mark.parametrize("path", ENDPOINTS)
def test_fields_of_every_kind(small_server: RunningServer, path: str) -> None:
    model = models(small_server)[path]
    with small_server.http(headers={"Content-Type": "application/json"}) as http:
        statuses = {check(http, path, content) for content in bodies(path, model)}
    assert 400 in statuses
    assert small_server.wait_until_idle().kv_blocks_used == 0


@pytest.mark.parametrize("value", LARGE, ids=["ids", "texts", "objects", "keys", "characters"])
def test_large_values(small_server: RunningServer, value: str) -> None:
    """One field of each endpoint with each of them; which, depends on the value."""
    with small_server.http(headers={"Content-Type": "application/json"}) as http:
        for index, (path, model) in enumerate(models(small_server).items()):
            if not IS_FULL and index % 2 != LARGE.index(value) % 2:
                continue
            names = [name_of(name, field) for name, field in model.model_fields.items()]
            name = names[(index + LARGE.index(value)) % len(names)]
            body = json.dumps({**RIGHT.get(path, sample_model(model)), name: "VALUE"})
            check(http, path, body.replace('"VALUE"', value, 1))
