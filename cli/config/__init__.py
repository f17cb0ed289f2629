"""Options of commands from files."""
