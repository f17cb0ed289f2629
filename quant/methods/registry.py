"""The methods there are, by name."""

from __future__ import annotations

from .awq import Awq
from .base import Method
from .rtn import RoundToNearest

METHODS: dict[str, Method] = {method.name: method for method in (Awq(), RoundToNearest())}
