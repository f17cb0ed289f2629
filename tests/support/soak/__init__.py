"""A soak of the server: `python -m tests.support.soak --help`."""
