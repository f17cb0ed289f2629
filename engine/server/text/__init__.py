"""Tokenization, chat templates and tool-call parsing."""
