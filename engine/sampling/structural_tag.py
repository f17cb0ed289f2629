"""Structural tags: free text with parts that a grammar shapes, as a Lark grammar for llguidance.

The formats and their meaning are XGrammar's, which vLLM takes
(https://xgrammar.mlc.ai/docs/tutorials/structural_tag): strings, schemas, patterns and free text, joined by
sequences, choices and tags.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from llguidance.gbnf_to_lark import gbnf_to_lark

from ...base.errors import BadInput
from .schema_limits import enforceable

MAX_DEPTH = 32
Format = Mapping[str, Any]
Ends = tuple[str, ...]

_ANY = "/(?s:.*)/"
_QUANTIFIERS = {"optional": "?", "plus": "+", "star": "*"}


def structural_tag(
    tag: Mapping[str, Any], whitespace: str, special: Mapping[str, int] | None = None
) -> str:
    """Grammar of a structural tag, `{"format": ...}` or the older `{"structures": ..., "triggers": ...}`.

    `whitespace` may stand between the tokens of a JSON text. `special` maps special tokens' texts to ids:
    they are tokens in a grammar, and never part of a text. Two additions to XGrammar's formats, for internal
    use: a `rule` stands for the format of its name in the tag's `rules`, and free text between triggered tags
    has no match of a pattern in `begins_unlike`. Raises BadInput: a format that contradicts itself, with its
    place.
    """
    lark = _Lark(whitespace, special or {}, tag.get("rules") or {})
    if "format" in tag:
        form, path = tag["format"], "format"
    else:
        tags = [
            {
                "type": "tag",
                "begin": structure["begin"],
                "content": {"type": "json_schema", "json_schema": structure["schema"]},
                "end": structure["end"],
            }
            for structure in tag["structures"]
        ]
        form = {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}
        path = "structures"
    for name in tag.get("rules") or {}:  # a rule refers to the ones before it
        lark.of_name(name)
    return lark.grammar(lark.node(form, (), path))


_LARK_LINE = re.compile(r"\s*(?:%llguidance\b|start\s*:)")


def as_lark(text: str, path: str) -> str:
    """A grammar in llguidance's Lark dialect, which may be given in GBNF or EBNF (`root ::= ...`). BadInput:
    it does not parse, or has a JSON schema in it that would have to be checked."""
    if "%json" in text and ("multipleOf" in text or "\\u" in text):
        raise BadInput(f"{path}: multipleOf in %json is not supported: ask for a JSON schema")
    # By lines: llguidance's own `any_to_lark` takes quadratic time for blank lines.
    if any(map(_LARK_LINE.match, text.split("\n"))):
        return text
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # of nested brackets a RecursionError
        raise BadInput(f"{path}: {' '.join(str(error).split())[:400]}") from error


class _Lark:
    """Rules of a grammar in llguidance's Lark dialect.

    Free text and the first of its `ends` are one lazy lexeme; free text without `ends` may end the output.
    The lexer takes the longest match, so text must exclude what may follow it.
    """

    def __init__(
        self, whitespace: str, special: Mapping[str, int], formats: Mapping[str, Format]
    ) -> None:
        self._json_options = {"whitespace_flexible": True, "whitespace_pattern": whitespace}
        self._token_ids = special
        self._special = sorted(special, key=len, reverse=True)
        self._rules: list[str] = []
        self._others: list[dict[str, str]] = []
        self._formats, self._named = formats, dict[str, str]()

    def grammar(self, start: str) -> str:
        lark = "\n".join(["%llguidance {}", f"start: {start}", *self._rules, ""])
        first = {"name": "structural_tag", "lark_grammar": lark}
        return json.dumps({"grammars": [first, *self._others]})

    def node(self, form: Format, ends: Ends, path: str, depth: int = 0) -> str:
        """Expression of a format, followed by one of the `ends` if there are any."""
        if depth > MAX_DEPTH:
            raise BadInput(f"{path}: nested more than {MAX_DEPTH} deep")
        rules: Mapping[str, Callable[[Format, Ends, str, int], str]] = {
            "any_text": lambda form, ends, *_: self._up_to(
                self._terminal(_without([*(form.get("excludes") or ()), *ends])), ends
            ),
            "regex": self._regex,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered,
        }
        compile_rule = rules.get(form["type"])
        if compile_rule is not None:
            return compile_rule(form, ends, path, depth)
        return self._joined(self._limited(form, path, depth), self._literals(ends))

    def _limited(self, form: Format, path: str, depth: int) -> str:
        """Expression of a format that determines where it ends."""
        match form["type"]:
            case "const_string":
                return self._literal(form["value"])
            case "json_schema":
                schema = enforceable(form["json_schema"], f"{path}.json_schema")
                schema = {**schema, "x-guidance": self._json_options}
                return self._rule(f"%json {json.dumps(schema)}")
            case "grammar":
                name, lark = (
                    f"grammar_{len(self._others)}",
                    as_lark(form["grammar"], f"{path}.grammar"),
                )
                self._others.append({"name": name, "lark_grammar": lark})
                return f"@{name}"
            case "rule":
                return self.of_name(form["name"])
            case "tags_with_separator":
                return self._separated(form, path, depth)
        content = self._rule(_either([self._bounded(form["content"], f"{path}.content", depth)]))
        if (quantifier := _QUANTIFIERS.get(form["type"])) is not None:
            return self._rule(content + quantifier)
        low, high = form["min"], form.get("max")
        if high is not None and high < low:
            raise BadInput(f"{path}: max {high} is less than min {low}")
        return self._rule(f"{content}{{{low},{'' if high is None else high}}}")

    def _bounded(self, form: Format, path: str, depth: int) -> str:
        """Expression of a format that must not end in free text, which would swallow what follows."""
        if _is_unlimited(form):
            raise BadInput(f"{path}: free text may only come last, or before the end of a tag")
        return self.node(form, (), path, depth + 1)

    def of_name(self, name: str) -> str:
        """The rule of a format that has a name, written once."""
        if name not in self._named:
            expression = self.node(self._formats[name], (), f"rules.{name}")
            self._named[name] = self._rule(_either([expression]))
        return self._named[name]

    def _up_to(self, text: str, ends: Ends) -> str:
        """Free text from a terminal that excludes `ends`, and the first of `ends`."""
        if not ends:
            return self._rule(text)
        if any(map(self._special_in, ends)):  # a token that no text has in it
            return self._joined(text, self._literals(ends))
        return self._rule(f"{text} {_alternatives(map(_quoted, ends))}", lazy=True)

    def _regex(self, form: Format, ends: Ends, path: str, depth: int) -> str:
        pattern = f"/{_escaped(form['pattern'])}/"
        if form.get("excludes"):
            pattern = f"{pattern} & {_without(form['excludes'])}"
        text = self._terminal(pattern)
        if ends and not any(map(self._special_in, ends)):
            return self._rule(f"{text} {_alternatives(map(_quoted, ends))}", lazy=True)
        return self._joined(self._rule(text), self._literals(ends))

    def _sequence(self, form: Format, ends: Ends, path: str, depth: int) -> str:
        elements, last = form["elements"], len(form["elements"]) - 1
        parts = [
            self._bounded(element, f"{path}.elements.{index}", depth)
            for index, element in enumerate(elements[:last])
        ]
        parts.append(self.node(elements[last], ends, f"{path}.elements.{last}", depth + 1))
        return self._joined(*parts)

    def _or(self, form: Format, ends: Ends, path: str, depth: int) -> str:
        elements = enumerate(form["elements"])
        parts = [self.node(e, ends, f"{path}.elements.{i}", depth + 1) for i, e in elements]
        return self._rule(_either(parts))

    def _tag(self, form: Format, ends: Ends, path: str, depth: int, skip: int = 0) -> str:
        """Expression of a tag, without the first `skip` characters of its begin, which are a trigger."""
        begin, own = self._literal(form["begin"][skip:]), _ends_of(form)
        content = self.node(form["content"], own or ends, f"{path}.content", depth + 1)
        return self._joined(begin, content, self._literals(ends) if own else "")

    def _triggered(self, form: Format, ends: Ends, path: str, depth: int) -> str:
        """Free text in which each of the triggers begins one of its tags."""
        triggers, tags = form["triggers"], form["tags"]
        by_trigger: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for index, tag in enumerate(tags):
            where = f"{path}.tags.{index}" if path != "structures" else f"{path}.{index}"
            trigger = next((t for t in triggers if tag["begin"].startswith(t)), None)
            if trigger is None:
                raise BadInput(f"{where}.begin: {tag['begin']!r} begins with none of the triggers")
            by_trigger[trigger].append(self._tag(tag, (), where, depth + 1, len(trigger)))
        outside = _without([*triggers, *ends, *(form.get("excludes") or ())])
        for pattern in form.get("begins_unlike") or ():
            outside += f" & ~/{_escaped(pattern)}(?s:.*)/"
        text = self._terminal(outside)
        rests = {t: self._rule(_either(rest)) for t, rest in by_trigger.items() if rest}
        heads = {
            t: self._joined(text, self._literal(t))
            if self._special_in(t)
            else self._rule(f"{text} {_quoted(t)}", lazy=True)
            for t in rests
        }
        part = self._rule(" | ".join(f"{heads[t]} {rest}" for t, rest in rests.items()))
        tail = self._up_to(text, ends)
        once = form.get("stop_after_first")
        if not form.get("at_least_one"):
            if not once:
                return self._joined(f"{part}*", tail)
            return self._rule(f"{self._joined(part, self._literals(ends))} | {tail}")
        # The output begins with a tag, and not with text.
        first = self._rule(" | ".join(f"{self._literal(t)} {rest}" for t, rest in rests.items()))
        if once:
            return self._joined(first, self._literals(ends))
        return self._joined(first, f"{part}*", tail)

    def _separated(self, form: Format, path: str, depth: int) -> str:
        tags = enumerate(form["tags"])
        tag = self._rule(" | ".join(self._bounded(t, f"{path}.tags.{i}", depth) for i, t in tags))
        once, at_least_one = form.get("stop_after_first"), form.get("at_least_one")
        more = "" if once else f"({self._joined(self._literal(form['separator']), tag)})*"
        tags_rule = self._rule(self._joined(tag, more))
        return tags_rule if at_least_one else f"{tags_rule}?"

    def _rule(self, body: str, *, lazy: bool = False) -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def _terminal(self, body: str) -> str:
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _joined(self, *parts: str) -> str:
        return " ".join(part for part in parts if part)

    def _literals(self, texts: Sequence[str]) -> str:
        return _alternatives(self._literal(text) for text in texts) if texts else ""

    def _literal(self, text: str) -> str:
        """Text as a literal, with special tokens in it as tokens."""
        token = self._special_in(text)
        if token is None:
            return _quoted(text) if text else ""
        before, _, after = text.partition(token)
        number = f"<[{self._token_ids[token]}]>"
        return self._joined(self._literal(before), number, self._literal(after))

    def _special_in(self, text: str) -> str | None:
        return next((token for token in self._special if token in text), None)


def _is_unlimited(form: Format) -> bool:
    """True if a format ends in free text, which goes on until something ends it."""
    match form["type"]:
        case "any_text" | "triggered_tags":
            return not (form.get("stop_after_first") and form.get("at_least_one"))
        case "tag":
            return not _ends_of(form) and _is_unlimited(form["content"])
        case "sequence":
            return _is_unlimited(form["elements"][-1])
        case "or":
            return any(map(_is_unlimited, form["elements"]))
    return False


def _ends_of(form: Format) -> Ends:
    ends = [form["end"]] if isinstance(form["end"], str) else form["end"]
    return tuple(end for end in ends if end)


def _without(texts: Sequence[str]) -> str:
    """Terminal of any text that contains none of `texts`."""
    if not texts:
        return _ANY
    return f"{_ANY} & ~({_ANY} {_alternatives(map(_quoted, texts))} {_ANY})"


def _either(parts: Sequence[str]) -> str:
    return " | ".join(part or '""' for part in parts)


def _alternatives(texts: Iterable[str]) -> str:
    return f"({' | '.join(texts)})"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(pattern: str) -> str:
    """Pattern between slashes: escapes slashes and line ends."""
    written = re.sub(r"(?s)(\\.)|/", lambda match: match[1] or r"\/", pattern)
    return written.replace("\n", r"\n").replace("\r", r"\r")
