"""How the time of each tool-call parser grows: `python tools/parser_time.py`.

A call whose argument has n characters comes in tokens of four, then one ten times as long. Prints the
seconds of both, the best of three, and their ratio: 10 for a parser that is linear, 100 for one that reads
everything again with each token.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from llmopt.engine.server.parsing.events import Parsed
from llmopt.engine.server.parsing.formats import FORMATS, tool_format
from llmopt.engine.server.parsing.parser import OutputFormat, OutputParser

TOKEN_CHARACTERS = 4
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}}
D = "｜DSML｜"
NAMED = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
WHOLE = '{"name": "f", "arguments": %s}'
CALLS = {
    "hermes": f"<tool_call>{WHOLE}</tool_call>",
    "granite": f"<|tool_call|>[{WHOLE}]",
    "llama3_json": f"<|python_tag|>{WHOLE}",
    "mistral": "[TOOL_CALLS]f[ARGS]%s",
    "deepseek_v3": f"{NAMED}function<｜tool▁sep｜>f\n```json\n%s\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": f"{NAMED}f<｜tool▁sep｜>%s<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi_k2": f"{KIMI}%s<|tool_call_end|><|tool_calls_section_end|>",
    "openai": "<|channel|>commentary to=functions.f <|constrain|>json<|message|>%s<|call|>",
    "llama4_pythonic": "[f(text='%s')]",
    "lfm2": "<|tool_call_start|>[f(text='%s')]<|tool_call_end|>",
    "qwen3_coder": "<tool_call><function=f><parameter=text>%s</parameter></function></tool_call>",
    "glm45": "<tool_call>f\n<arg_key>text</arg_key><arg_value>%s</arg_value></tool_call>",
    "minimax_m2": '<minimax:tool_call><invoke name="f"><parameter name="text">%s</parameter></invoke>'
    "</minimax:tool_call>",
    "deepseek_v32": f'<{D}function_calls><{D}invoke name="f"><{D}parameter name="text" string="true">%s'
    f"</{D}parameter></{D}invoke></{D}function_calls>",
}
"""A call of each format; the argument is JSON, but for those that write plain values."""
PLAIN = ("llama4_pythonic", "lfm2", "qwen3_coder", "glm45", "minimax_m2", "deepseek_v32")


def seconds(name: str, num_characters: int) -> float:
    """Time of one output whose argument is that long; it must be parsed as the call that it is."""
    text = ("x{[<" * (num_characters // 4 + 1))[:num_characters]
    written = CALLS[name] % (text if name in PLAIN else json.dumps({"text": text}))
    pieces = [
        written[at : at + TOKEN_CHARACTERS] for at in range(0, len(written), TOKEN_CHARACTERS)
    ]
    parser = OutputParser(OutputFormat(tool_format(name), schemas={"f": SCHEMA}))
    events, begin = [], time.process_time()
    for piece in pieces:
        events += parser.feed(piece)
    events += parser.feed("", is_last=True)
    elapsed = time.process_time() - begin
    whole = Parsed()
    whole.add(events)
    assert [json.loads(call.arguments) for call in whole.calls] == [{"text": text}], name
    return elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--characters", type=int, default=10_000)
    parser.add_argument("--json", type=Path, help="write the numbers here")
    asked = parser.parse_args()
    record = {}
    for name in FORMATS:
        short, long = (
            min(seconds(name, asked.characters * times) for _ in range(3)) for times in (1, 10)
        )
        record[name] = {"seconds": short, "seconds_tenfold": long, "ratio": long / short}
        print(f"{name:16} {short:.3f} s, ten times as long {long:.3f} s: {long / short:.1f} times")
    if asked.json:
        found = {"characters": asked.characters, "formats": record}
        asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
