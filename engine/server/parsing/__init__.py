"""Incremental parsers of what models write: reasoning, text and tool calls."""
