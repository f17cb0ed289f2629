"""Option groups: frozen dataclasses whose fields are Typer options, and what builds commands of them."""
