"""The engine's thread and its bridge to the event loop, with what it counts."""
