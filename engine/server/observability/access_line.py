"""The access line: one for each request, once its response has ended."""

from __future__ import annotations

from dataclasses import dataclass

from .logs import Event


@dataclass(frozen=True, slots=True)
class AccessLine(Event):
    """The fields of a finished request; as text, uvicorn's access line with seconds, tokens and key."""

    def __str__(self) -> str:
        fields = self.fields
        line = (
            f'{fields.get("client") or "-"} - "{fields["method"]} {fields["path"]}" '
            f"{fields.get('status', '-')} in {fields['seconds']:.3f} s"
        )
        if "prompt_tokens" in fields:
            line += f", {fields['prompt_tokens']} + {fields['completion_tokens']} tokens"
        if "key" in fields:
            line += f", key {fields['key']}"
        return line
