"""A conversation of any API: its prompt and parameters for the engine, and its output read as events."""

from __future__ import annotations

import hashlib
import logging
import time
from abc import abstractmethod
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import Request, Response

from ....base.errors import BadInput
from ...base.image_input import NO_IMAGES
from ...base.sampling_params import SamplingParams
from ...base.turns import nearest_effort
from ...multimodal.processor import PreparedPrompt
from ...sampling.schema_limits import without_lacking
from ...scheduling.outputs import Completion, RequestOutput
from ..parsing.call_grammar import calls_in_text, shaped_answer
from ..parsing.formats import FORCED, HARMONY, Event, Parsed, Reasoning, ReasoningFormat, ToolFormat
from ..parsing.parser import OutputFormat, OutputParser
from ..protocol.chat_protocol import ChatMessage, ChatRequest, Tool
from ..protocol.errors import ApiError, bad_field
from ..protocol.generation_protocol import StreamOptions
from ..protocol.server_options import scripted_text
from ..protocol.structure import Constraint
from ..requests.request_record import record_of
from .service import Asked, Generation, ResponseContext, Service, Usage
from .tokenization import Tokenization

_log = logging.getLogger(__name__)

PROMPT_END = 16
"""Tokens at the end of a prompt that may begin the reasoning."""


async def render(
    service: Service,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] = (),
    template_options: Mapping[str, Any] | None = None,
) -> PreparedPrompt:
    """The prompt of a conversation, with the placeholder tokens of its images. Raises `ApiError` or
    `BadInput`: what the model's template refuses, or images that cannot be taken."""
    text, urls = service.text, [url for message in messages for url in message.image_urls]
    options = {"add_generation_prompt": True, **(template_options or {})}
    if not urls:
        return PreparedPrompt(await text.encode_chat(messages, tools, options), NO_IMAGES)
    service.images.check(len(urls))
    return await service.images.prepare(await text.render_chat(messages, tools, options), urls)


def with_effort(body: ChatRequest, text: Tokenization) -> ChatRequest:
    """The request with the nearest reasoning effort that the model's template takes."""
    if body.reasoning_effort in (None, *text.efforts):
        return body
    effort = nearest_effort(body.reasoning_effort, text.efforts)
    return body.model_copy(update={"reasoning_effort": effort})


async def prepare(
    service: Service, request: Request, body: ChatRequest, id_prefix: str
) -> tuple[Asked, OutputFormat]:
    """Render the prompt and find out how the output is parsed. Raises `ApiError` or `BadInput`: as
    `Service.check`, or tools or fields that do not go with the model."""
    arrival_seconds = time.perf_counter()
    service.check(body)
    text = service.text
    effort, body = body.reasoning_effort, with_effort(body, text)
    if effort == "none" != body.reasoning_effort:
        record_of(request).ignored += ("reasoning_effort",)
    tools = _tool_format(body, text)
    prompt = await render(service, body.messages, body.usable_tools, body.template_options)
    token_ids = prompt.token_ids
    prompt_end = text.decode(token_ids[-PROMPT_END:], skip_special_tokens=False)
    reasoning = _reasoning(body, text, prompt_end)
    begun = body.messages[-1].content or "" if body.continue_final_message else ""
    in_reasoning = reasoning is not None and (
        reasoning.is_begun_by(prompt_end) or reasoning.is_open_in(begun)
    )
    constraint = whole = body.constraint()
    in_message = tools is HARMONY and body.continue_final_message
    if constraint is not None and constraint.kind == "choice":  # refuses texts that end the output
        await service.params(request, body, constraint)
    if constraint and constraint.is_form and not in_message and (reasoning or tools is HARMONY):
        tag = shaped_answer(constraint.form, reasoning, in_reasoning=in_reasoning)
        whole = Constraint("structural_tag", tag, constraint.field, constraint.value)
    try:
        params = await service.params(request, body, whole)
    except ApiError:  # of the client's own schema the error names the place
        await service.params(request, body, constraint)
        raise
    form = OutputFormat(
        tools,
        reasoning,
        in_reasoning,
        {tool.function.name: tool.function.parameters for tool in body.usable_tools},
        1 if body.parallel_tool_calls is False else None,
        text.stop_texts,
        hashlib.sha256(array("q", token_ids)).hexdigest(),
    )
    if form.needs_special_tokens(text.special_texts):
        params = replace(params, skip_special_tokens=False)
    if service.script and params.token_mask is None:
        whole = text.decode(token_ids, skip_special_tokens=False)
        if (output := scripted_text(service.script, whole)) is not None:
            script = Constraint("choice", [output], "--scripted-output")
            mask = await service.constrainer.mask(script, params.num_sequences)
            params = replace(params, token_mask=mask)
    if params.token_mask is None and body.usable_tools:
        params = await _declared_calls(service, request, form, params)
    prepared = Asked(request, body, params, [token_ids], id_prefix, arrival_seconds, prompt.images)
    return prepared, form


def _reasoning(body: ChatRequest, text: Tokenization, prompt_end: str) -> ReasoningFormat | None:
    """Format of the reasoning; None where there is none before an output by a grammar: that is a forced call,
    or the client or the template switched it off."""
    form, constraint = text.reasoning_format, body.constraint()
    if form is None or constraint is None or not constraint.is_form:
        return form
    is_off = False in map(body.template_options.get, ("enable_thinking", "thinking"))
    is_closed = prompt_end.rstrip().endswith(form.end)
    return None if body.is_forced_json or is_off or is_closed else form


async def converse(
    service: Service,
    request: Request,
    body: ChatRequest,
    id_prefix: str,
    generation: Callable[[ResponseContext, OutputFormat], Generation],
) -> Response:
    """Generate the next message of a conversation. Raises `ApiError` or `BadInput`: as `prepare` and
    `Service.respond`."""
    prepared, form = await prepare(service, request, body, id_prefix)
    return await service.respond(prepared, lambda context: generation(context, form))


class ConversationResponse(Generation):
    """The only output of a request as events of text, reasoning and calls, which an API writes in its shapes;
    without `has_reasoning` the client did not ask for the reasoning, and it is left out."""

    def __init__(
        self, context: ResponseContext, form: OutputFormat, *, has_reasoning: bool = True
    ) -> None:
        self.context, self.parser = context, OutputParser(form)
        self.usage, self.completion = Usage(context.stream.jobs), Completion(0)
        self._has_reasoning = has_reasoning

    async def events(self, options: StreamOptions) -> AsyncIterator[bytes]:
        for sent in self.opening():
            yield sent
        try:
            async for output, events in self.read():
                for sent in self.sent(output, events):
                    yield sent
            for sent in self.ending():
                yield sent
        except ApiError as error:
            yield self.failed(error)

    async def read(self) -> AsyncIterator[tuple[RequestOutput, list[Event]]]:
        """Each output of the engine with its events; `usage` and `completion` grow with them."""
        async for output in self.context.stream:
            self.completion.extend(output)
            self.usage.take(output)
            events = self.parser.feed(output.new_text, is_last=output.finish_reason is not None)
            yield output, [e for e in events if self._has_reasoning or not isinstance(e, Reasoning)]

    async def parsed(self) -> Parsed:
        parsed = Parsed()
        async for _, events in self.read():
            parsed.add(events)
        return parsed

    def opening(self) -> Iterator[bytes]:
        yield from ()

    @abstractmethod
    def sent(self, output: RequestOutput, events: Sequence[Event]) -> Iterator[bytes]:
        """Bytes sent for an output of the engine."""

    @abstractmethod
    def ending(self) -> Iterator[bytes]:
        """Bytes sent after the last output."""

    @abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """Bytes sent in place of the rest."""


async def _declared_calls(
    service: Service, request: Request, form: OutputFormat, params: SamplingParams
) -> SamplingParams:
    """The parameters under which a call, once it has begun, names a declared tool and has valid arguments.
    Keywords of its schema that no grammar enforces are named in the response."""
    tools = form.tools
    assert tools is not None

    def write() -> tuple[dict[str, Any], set[str]]:
        schemas = {name: without_lacking(schema or {}) for name, schema in form.schemas.items()}
        declared = {name: schema for name, (schema, _) in schemas.items()}
        how: dict[str, Any] = {"in_reasoning": form.in_reasoning}
        removed = set().union(*(keys for _, keys in schemas.values()))
        return calls_in_text(tools, declared, form.reasoning, **how), removed

    tenant = record_of(request).tenant
    try:
        tag, removed = await service.off_loop(request, write)
        constraint = Constraint("structural_tag", tag, "tools", sent=form.schemas)
        mask = await service.constrainer.mask(constraint, params.num_sequences, tenant)
    except (ApiError, BadInput) as error:  # a schema that only the model reads may hold anything
        _log.info("calls of the tools are not constrained: %s", error)
        return params
    record_of(request).ignored += tuple(f"tools.{key}" for key in sorted(removed))
    return replace(params, token_mask=mask)


def _tool_format(body: ChatRequest, text: Tokenization) -> ToolFormat | None:
    """Format of the tool calls in the output; None for a request without usable tools."""
    if not body.usable_tools:
        # Harmony has channels with and without tools.
        constraint = body.constraint()
        is_harmony = text.tool_format is HARMONY and (constraint is None or constraint.is_form)
        return HARMONY if is_harmony else None
    if not text.takes_tools:
        problem = "the model's chat template does not support them; give one with --chat-template"
        raise bad_field("tools", problem, "unsupported_parameter")
    if body.is_forced_json:
        return FORCED
    if text.tool_format is None:
        remedy = "give --tool-call-parser, or a tool_choice that forces one"
        problem = f"the tool-call format of the chat template is unknown; {remedy}"
        raise bad_field("tools", problem, "unsupported_parameter")
    return text.tool_format
