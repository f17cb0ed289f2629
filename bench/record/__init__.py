"""The record of a run, `result.json`: its schema, identity and reading."""
