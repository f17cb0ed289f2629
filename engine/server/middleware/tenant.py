"""The tenant of a request: its API key. Prefix cache and running requests are its own."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import Scope

SCOPE_KEY = "llmopt.tenant"


@dataclass(frozen=True, slots=True)
class Tenant:
    """Number of the client whose API key a request came with; all requests are of the first without keys."""

    key: int = 0

    def cache_salt(self, salt: str | None) -> bytes:
        """Salt of the prefix cache's hashes.

        A hit is seen in `cached_tokens` and in the time to first token, so that tenants who shared the cache
        could find out each other's prompts. `salt`, of the request, separates the users of one key likewise.
        """
        if self.key == 0 and salt is None:
            return b""
        return f"{self.key}/{salt or ''}".encode()


def set_tenant(scope: Scope, key: int) -> None:
    scope[SCOPE_KEY] = Tenant(key)


def tenant_of(request: Request) -> Tenant:
    """The tenant that the middleware found."""
    return request.scope.get(SCOPE_KEY, Tenant())
