"""Option groups: frozen dataclasses whose fields are Typer options, and how they become commands."""
