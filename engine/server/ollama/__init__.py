"""Ollama's API: its requests, answers and model facts, over the conversations of the chat endpoint."""
