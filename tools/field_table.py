"""Write the table of requests' fields into docs/measured/fields.md: `python tools/field_table.py`.

Each field is given to each endpoint's model with a value. It is refused, or taken where the model has it, or
it is ignored and named in the header `x-ignored-fields`. `--check` compares and writes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from typing import Any

from document_part import put_part
from llmopt.engine.server.endpoints.messages import MessagesRequest
from llmopt.engine.server.protocol import generation_protocol
from llmopt.engine.server.protocol.chat_protocol import ChatRequest
from llmopt.engine.server.protocol.errors import ApiError
from llmopt.engine.server.protocol.generation_protocol import (
    CompletionRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
)
from llmopt.engine.server.protocol.ollama_protocol import OllamaChat, OllamaGenerate
from llmopt.engine.server.protocol.responses_protocol import ResponsesRequest
from pydantic import BaseModel, ValidationError

MESSAGES = [{"role": "user", "content": "a"}]
ENDPOINTS: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "a"}),
    "/v1/chat/completions": (ChatRequest, {"messages": MESSAGES}),
    "/v1/responses": (ResponsesRequest, {"input": "a"}),
    "/v1/messages": (MessagesRequest, {"model": "a", "messages": MESSAGES, "max_tokens": 1}),
    "/api/chat": (OllamaChat, {"model": "a", "messages": MESSAGES}),
    "/api/generate": (OllamaGenerate, {"model": "a", "prompt": "a"}),
    "/v1/embeddings": (EmbeddingRequest, {"input": "a"}),
    "/v1/score": (ScoreRequest, {"text_1": "a", "text_2": "a"}),
    "/v1/rerank": (RerankRequest, {"query": "a", "documents": ["a"]}),
}
"""Model of an endpoint's body, and the least body."""
MARKS = {"taken": "yes", "refused": "400", "ignored": ""}


def treatment(endpoint: str, field: str) -> str:
    """Taken, refused or ignored, by the endpoint's own model."""
    model, least = ENDPOINTS[endpoint]
    with suppress(ValidationError):  # a field of another type
        body: Any = model.model_validate({**least, field: "a value"})
        try:
            getattr(body, "refuse_unsupported", lambda: None)()
        except ApiError as error:
            if error.param == field:
                return "refused"
    return "taken" if field in model.model_fields else "ignored"


def known_fields() -> list[str]:
    """Fields of all models, and those that are refused."""
    names = {name for model, _ in ENDPOINTS.values() for name in model.model_fields}
    tables = (generation_protocol._UNSUPPORTED, generation_protocol._UNPOOLED)
    return sorted(names.union(*tables, generation_protocol._ALWAYS_TRUE))


def table() -> str:
    """Rows of fields that all endpoints treat alike."""
    rows: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for field in known_fields():
        rows[tuple(treatment(endpoint, field) for endpoint in ENDPOINTS)].append(f"`{field}`")
    lines = [
        "| field | " + " | ".join(f"`{endpoint}`" for endpoint in ENDPOINTS) + " |",
        "|---|" + "---|" * len(ENDPOINTS),
    ]
    for treatments, fields in sorted(rows.items(), key=lambda row: -len(row[1])):
        marks = " | ".join(MARKS[treatment] for treatment in treatments)
        lines.append(f"| {', '.join(fields)} | {marks} |")
    return "\n".join(lines)


if __name__ == "__main__":
    put_part("docs/measured/fields.md", "field_table.py", __doc__, table)
