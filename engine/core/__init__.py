"""The engine: its construction, its step interface and the offline API `LLM`."""
