"""The version of llmopt, also in `pyproject.toml`.

A constant: a checkout on the path has no metadata of an installed package.
"""

VERSION = "0.1.0"
