"""Prompts, chat templates and tool calls, between text and tokens."""
