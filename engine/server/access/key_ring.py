"""The accepted API keys: constant-time lookup, and replacement while the server runs."""

from __future__ import annotations

import hmac
from collections.abc import Collection, Sequence

from ..protocol.server_options import ServerOptions
from .api_key import ApiKey, check_distinct, digest, read_key_file
from .concurrency import ConcurrencyLimiter
from .principal import KeyUsage, Principal
from .rate_limit import RateLimits


class KeyRing:
    """The keys of the options and of the key file. Without any, all clients are one.

    A client is known by its name: its number, limits and usage outlast the replacement of its key, and
    names that were never seen get new numbers, so that nobody inherits another's prefix cache.
    """

    def __init__(self, options: ServerOptions) -> None:
        """Raises `BadInput` where the key file is not one."""
        self._options = options
        self._numbers: dict[str, int] = {}
        self._principals: dict[str, Principal] = {}
        self._digests: list[tuple[bytes, Principal]] = []
        self._anyone: Principal | None = None
        if options.requires_key:
            self.replace(self.read())
        else:
            self._anyone = self._principal(None, ApiKey(name="anyone", key=["-"], admin=True))

    def read(self) -> list[ApiKey]:
        """The keys of options and file as they are now; safe to call from any thread.

        Raises:
            BadInput: the file is not one, or repeats a key of the options.
        """
        admin = self._options.admin_api_key
        keys = [
            ApiKey(name=f"api-key-{number}", key=[key], admin=admin in (None, key))
            for number, key in enumerate(self._options.api_keys, 1)
        ]
        if admin is not None and admin not in self._options.api_keys:
            keys.append(ApiKey(name="admin", key=[admin], admin=True))
        if (path := self._options.api_key_file) is not None:
            keys += read_key_file(path)
            check_distinct(keys, f"--api-key-file {path} beside --api-key")
        return keys

    def replace(self, keys: Sequence[ApiKey]) -> None:
        """Accept these keys, and no others. Requests in flight go on."""
        principals = {key.name: self._principal(key.name, key) for key in keys}
        self._digests = [(value, principals[key.name]) for key in keys for value in key.digests()]
        self._principals = principals

    def find(self, secret: bytes) -> Principal | None:
        """Whose key this is. Digests are compared in constant time, each with every key's."""
        if self._anyone is not None:
            return self._anyone
        given, match = digest(secret), None
        for expected, principal in self._digests:
            if hmac.compare_digest(given, expected):
                match = principal
        return match

    @property
    def named(self) -> Collection[Principal]:
        """The clients that have a key."""
        return self._principals.values()

    def _principal(self, name: str | None, key: ApiKey) -> Principal:
        """The client of an entry, known or new, with the entry's limits."""
        options, known = self._options, self._principals.get(key.name)
        limit = key.max_concurrency or options.max_concurrency_per_key
        if known is None:
            number = self._numbers.setdefault(key.name, len(self._numbers))
            concurrency = ConcurrencyLimiter(limit, options.max_queue_per_key)
            known = Principal(number, name, key.admin, RateLimits(), concurrency, KeyUsage())
        known.is_admin, known.concurrency.limit = key.admin, limit
        known.limits.configure(key.rpm or options.rpm_per_key, key.tpm or options.tpm_per_key)
        return known
