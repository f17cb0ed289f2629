"""Formats of tool calls and of reasoning by model family, as data, and the events of a parsed output: pieces
of reasoning, text and tool calls, in the order in which they come."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic_core import from_json

from ....base.errors import BadInput

_NAME = r"(?P<name>[A-Za-z0-9_.\-]+)"
SEPARATORS = " \t\r\n,;]"
"""Characters allowed after a call; before one, also `[`."""


@dataclass(frozen=True, slots=True)
class Tags:
    """Markers of calls whose arguments are elements, not JSON.

    Attributes:
        name_open, name_ends: around the function's name; the name ends before any of `name_ends`.
        key_open, key_close: around the name of an argument.
        value_open: text before an argument's value, after whitespace.
        value_close: text after the value.
        call_close: text after the last argument.
        strips_newlines: a newline on either side of a value is markup.
        typed: the key's tag ends with `string="true` or `string="false`.
    """

    name_open: str
    name_ends: tuple[str, ...]
    key_open: str
    key_close: str
    value_close: str
    call_close: str
    value_open: str = ""
    strips_newlines: bool = False
    typed: bool = False


Piece = str | re.Pattern[str] | tuple["Piece", ...]
"""Part of what stands around arguments: a text or a pattern, in which `NAME` is the function's name; a tuple
may be left out."""


@dataclass(frozen=True, slots=True)
class CallShape:
    """Form of the calls of a section, for the grammar of a tool choice of `auto`.

    Attributes:
        before, after: text around a call's arguments.
        between: separator of two calls; None: a section has one.
        begin, end: patterns around all calls of a section.
    """

    before: tuple[Piece, ...]
    after: tuple[Piece, ...] = ()
    between: str | None = None
    begin: str = ""
    end: str = ""


_OBJECT = re.compile(r'\{ ?"name" ?: ?"NAME" ?, ?"(?:arguments|parameters)" ?: ?')
_CLOSED = re.compile(r" ?\}")
_LIST = CallShape((_OBJECT,), (_CLOSED,), ", ", r" ?\[ ?", r" ?\]")
_PYTHON = CallShape(("NAME(",), (")",), ", ", r"\[ ?", r" ?\]")
_IN_LINES = CallShape((_OBJECT,), (_CLOSED,), begin=r"[ \n]{0,2}", end=r"[ \n]{0,2}")
_SPACED = CallShape((_OBJECT,), (_CLOSED,), begin=" ?")
_SEMICOLONS = CallShape((_OBJECT,), (_CLOSED,), "; ")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Form of a model family's tool calls.

    Attributes:
        name: value of `--tool-call-parser`, as in vLLM.
        style: `json`: objects with name and arguments; `named`: a header with the name, then an object of
            arguments; `tags`: elements; `python`: a list of calls with keywords.
        start: marker before the first call; empty if calls have none.
        end: marker after the last call, if text may follow.
        fillers: markers between and around calls.
        bare: characters that begin calls without `start`, at the beginning of the text.
        header: pattern of a named call's header, with the groups `name` and perhaps `id`.
        special: True if markers are special tokens, decoded only with `skip_special_tokens=False`.
        shapes: forms of calls with a JSON object, of which a section has one.
    """

    name: str
    style: Literal["json", "named", "tags", "python", "harmony"]
    start: str
    end: str | None = None
    fillers: tuple[str, ...] = ()
    bare: str = ""
    header: re.Pattern[str] = field(default_factory=lambda: re.compile(_NAME))
    tags: Tags | None = None
    special: bool = True
    shapes: tuple[CallShape, ...] = ()


HERMES = ToolFormat(
    "hermes", "json", "<tool_call>", "</tool_call>", special=False, shapes=(_IN_LINES,)
)
GRANITE = ToolFormat("granite", "json", "<|tool_call|>", shapes=(_LIST, _SPACED))
LLAMA3_JSON = ToolFormat("llama3_json", "json", "<|python_tag|>", bare="{", shapes=(_SEMICOLONS,))
LLAMA4_PYTHONIC = ToolFormat(
    *("llama4_pythonic", "python", "<|python_start|>", "<|python_end|>"),
    bare="[",
    shapes=(_PYTHON,),
)
LFM2 = ToolFormat("lfm2", "python", "<|tool_call_start|>", "<|tool_call_end|>", shapes=(_PYTHON,))
_MARKED = CallShape(
    ("NAME", ("[CALL_ID]", re.compile("[A-Za-z0-9]{9}")), ("[ARGS]",)), between="[TOOL_CALLS]"
)
MISTRAL = ToolFormat(
    *("mistral", "named", "[TOOL_CALLS]"),
    header=re.compile(_NAME + r"(?:\[CALL_ID\](?P<id>\w+))?(?:\[ARGS\])?\s*"),
    shapes=(_LIST, _MARKED),
)
_DEEPSEEK_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_V3 = CallShape(
    ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",),
    ("\n```<｜tool▁call▁end｜>", ("\n",)),
    between="",
)
DEEPSEEK_V3 = ToolFormat(
    *("deepseek_v3", "named", *_DEEPSEEK_CALLS),
    ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "```"),
    header=re.compile(rf"function<｜tool▁sep｜>{_NAME}\s*```(?:json)?\s*"),
    shapes=(_DEEPSEEK_V3,),
)
_DEEPSEEK_V31 = CallShape(
    ("<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",), ("<｜tool▁call▁end｜>", ("\n",)), between=""
)
DEEPSEEK_V31 = ToolFormat(
    *("deepseek_v31", "named", *_DEEPSEEK_CALLS),
    ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    header=re.compile(rf"{_NAME}<｜tool▁sep｜>\s*"),
    shapes=(_DEEPSEEK_V31,),
)
_KIMI_ARGUMENT = "<|tool_call_argument_begin|>"
_KIMI = CallShape(
    ("<|tool_call_begin|>functions.NAME:", re.compile("[0-9]{1,3}"), _KIMI_ARGUMENT),
    ("<|tool_call_end|>", ("\n",)),
    between="",
)
KIMI_K2 = ToolFormat(
    *("kimi_k2", "named", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ("<|tool_call_begin|>", "<|tool_call_end|>"),
    header=re.compile(
        r"(?P<id>(?:functions\.)?(?P<name>[\w.\-]+):\d+)\s*<\|tool_call_argument_begin\|>\s*"
    ),
    shapes=(_KIMI,),
)
_QWEN = Tags("<function=", (">",), "<parameter=", ">", "</parameter>", "</function>", "", True)
QWEN3_CODER = ToolFormat(
    "qwen3_coder", "tags", "<tool_call>", "</tool_call>", tags=_QWEN, special=False
)
_GLM = Tags(
    *("", ("\n", "<arg_key>", "</tool_call>"), "<arg_key>", "</arg_key>"),
    *("</arg_value>", "</tool_call>", "<arg_value>"),
)
GLM45 = ToolFormat("glm45", "tags", "<tool_call>", "</tool_call>", tags=_GLM)
_MINIMAX = Tags('<invoke name="', ('">',), '<parameter name="', '">', "</parameter>", "</invoke>")
MINIMAX_M2 = ToolFormat(
    "minimax_m2", "tags", "<minimax:tool_call>", "</minimax:tool_call>", tags=_MINIMAX
)
_DSML = Tags(
    *('<｜DSML｜invoke name="', ('">',), '<｜DSML｜parameter name="', '">'),
    *("</｜DSML｜parameter>", "</｜DSML｜invoke>"),
    typed=True,
)
DEEPSEEK_V32 = ToolFormat(
    "deepseek_v32", "tags", "<｜DSML｜function_calls>", "</｜DSML｜function_calls>", tags=_DSML
)
HARMONY = ToolFormat("openai", "harmony", "<|channel|>")

FORCED = ToolFormat("forced", "json", "", bare="[", special=False)
"""Output of a forced tool call, constrained by the JSON schema, whatever the model."""

_KNOWN = (HERMES, LLAMA3_JSON, MISTRAL, QWEN3_CODER, GLM45, DEEPSEEK_V3, DEEPSEEK_V31, DEEPSEEK_V32)
_KNOWN += (KIMI_K2, MINIMAX_M2, LLAMA4_PYTHONIC, GRANITE, LFM2, HARMONY)
FORMATS = {form.name: form for form in _KNOWN}


def format_of_template(template: str) -> ToolFormat | None:
    """Detect the tool-call format from a chat template; None if it is not a supported one."""
    # Some formats begin alike: the second marker tells them apart.
    for form, marker in (
        (HARMONY, "functions"),
        *((DEEPSEEK_V32, ""), (DEEPSEEK_V3, "```json"), (DEEPSEEK_V31, "")),
        *((KIMI_K2, ""), (MINIMAX_M2, ""), (GLM45, "<arg_key>"), (QWEN3_CODER, "<function=")),
        *((HERMES, ""), (MISTRAL, ""), (GRANITE, ""), (LFM2, "")),
        *((LLAMA4_PYTHONIC, ""), (LLAMA3_JSON, "")),
    ):
        if form.start in template and marker in template:
            return form
    return LLAMA3_JSON if '"parameters"' in template and "ipython" in template else None


def tool_format(name: str) -> ToolFormat:
    if name not in FORMATS:
        raise BadInput(f"--tool-call-parser {name}: need one of {', '.join(FORMATS)}")
    return FORMATS[name]


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Reasoning between two markers, at the beginning of an output.

    Attributes:
        name: value of `--reasoning-parser`.
        start, end: markers; a prompt that ends with `start` has begun the reasoning itself.
        special: True if the markers are special tokens.
    """

    name: str
    start: str
    end: str
    special: bool = False

    def is_begun_by(self, prompt_end: str) -> bool:
        return prompt_end.rstrip().endswith(self.start)

    def is_open_in(self, text: str) -> bool:
        return text.rfind(self.start) > text.rfind(self.end)


THINK = ReasoningFormat("think", "<think>", "</think>")
MISTRAL_THINK = ReasoningFormat("mistral", "[THINK]", "[/THINK]", special=True)
SEED_THINK = ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>", special=True)
GEMMA4_THINK = ReasoningFormat("gemma4", "<|channel>thought", "<channel|>", special=True)
REASONING_FORMATS = {f.name: f for f in (THINK, MISTRAL_THINK, SEED_THINK, GEMMA4_THINK)}


def reasoning_of_template(template: str) -> ReasoningFormat | None:
    return next((form for form in REASONING_FORMATS.values() if form.end in template), None)


_VLLM_NAMES = {"qwen3": "think", "deepseek_r1": "think"}
"""vLLM's names of parsers with the same tags, docs.vllm.ai/en/stable/features/reasoning_outputs.html."""


def reasoning_format(name: str) -> ReasoningFormat:
    """Raises `BadInput`: an unknown name."""
    known = _VLLM_NAMES.get(name, name)
    if known not in REASONING_FORMATS:
        names = ", ".join([*REASONING_FORMATS, *_VLLM_NAMES])
        raise BadInput(f"--reasoning-parser {name}: need one of {names}")
    return REASONING_FORMATS[known]


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The beginning of the tool call `index`, counted from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of a call's arguments; all of them together are a JSON object."""

    index: int
    text: str


Event = Text | Reasoning | CallStart | Arguments


def call_id(seed: str, number: int) -> str:
    """Id of an output's tool call: nine letters and digits, as Mistral's templates require. By a hash of what
    it belongs to, so that the same output of the same prompt is the same response."""
    return hashlib.sha256(f"{seed}/{number}".encode()).hexdigest()[:9]


def json_value(text: str) -> Any:
    """The value of a JSON text. Raises `ValueError`: it is not JSON, or no response could contain it: half a
    surrogate pair, a number beyond float64, hundreds of levels."""
    value = from_json(text, allow_inf_nan=False)
    json.dumps(value, allow_nan=False)  # 1e999 is infinite
    return value


@dataclass(slots=True)
class ParsedCall:
    """A whole tool call; `arguments` is a JSON object, as text."""

    id: str
    name: str
    arguments: str = ""

    @property
    def value(self) -> Any:
        """The arguments' value; an empty object where they were cut off."""
        try:
            return json_value(self.arguments)
        except ValueError:
            return {}


class Parsed:
    """The whole of a parsed output, joined from its events."""

    def __init__(self) -> None:
        self.text = self.reasoning = ""
        self.calls: list[ParsedCall] = []

    def add(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Text(text):
                    self.text += text
                case Reasoning(text):
                    self.reasoning += text
                case CallStart(_, call_id, name):
                    self.calls.append(ParsedCall(call_id, name))
                case Arguments(index, text):
                    self.calls[index].arguments += text
