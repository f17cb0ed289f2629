"""Optional packages: an extra of the distribution installs each, and one message says which."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from .errors import BadInput


def is_installed(module: str) -> bool:
    """Look for a module without importing it."""
    try:
        return find_spec(module) is not None
    except ImportError:
        return False


def missing(use: str, package: str, extra: str) -> BadInput:
    """The error that a use of the product lacks a package, with the extra that installs it."""
    package = {"PIL": "pillow"}.get(package, package)
    return BadInput(f"{use} needs the package {package}: pip install 'llmopt[{extra}]'")


def require(use: str, extra: str, *modules: str) -> None:
    """Check that the modules of an extra are there, before any work. Raises BadInput: one is not
    installed."""
    for module in modules:
        if not is_installed(module):
            raise missing(use, module, extra)


def import_extra(use: str, extra: str, module: str) -> Any:
    """Import a module that an extra installs. Raises BadInput: it, or a package that it needs, is not
    installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise missing(use, error.name or module, extra) from error
