"""API keys and the clients that they name."""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from dataclasses import dataclass, field

from ..protocol.server_options import ServerOptions


@dataclass(slots=True, eq=False)
class Principal:
    """One client.

    Attributes:
        number: index of the API key, which separates prefix caches and worker threads.
        key_name: name of the API key, never the key; None without keys.
        is_admin: whether the client may see metrics and the engine's state, and load adapters.
        held: memory that its open requests take, by kind.
    """

    number: int
    key_name: str | None
    is_admin: bool
    held: Counter[str] = field(default_factory=Counter)


class KeyRing:
    """The API keys of the options. Without any, all clients are one, an admin."""

    def __init__(self, options: ServerOptions) -> None:
        admin, keys = options.admin_api_key, options.api_keys
        named = {key: f"api-key-{number}" for number, key in enumerate(keys, 1)}
        if admin is not None:
            named.setdefault(admin, "admin")
        self._anyone = None if named else Principal(0, None, True)
        self._digests = [
            (_digest(key.encode()), Principal(number, name, admin in (None, key)))
            for number, (key, name) in enumerate(named.items())
        ]

    def find(self, secret: bytes) -> Principal | None:
        """Whose key this is. Digests are compared in constant time, each with every key's."""
        if self._anyone is not None:
            return self._anyone
        given, match = _digest(secret), None
        for expected, principal in self._digests:
            if hmac.compare_digest(given, expected):
                match = principal
        return match


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
