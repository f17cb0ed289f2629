"""API keys: the key file, and the clients that keys name, replaced while the server runs."""

from __future__ import annotations

import hashlib
import hmac
import logging
import stat
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ....quant.base.errors import BadInput
from ..protocol.server_options import ServerOptions, is_sendable
from .limits import ConcurrencyLimiter, RateLimits


@dataclass(slots=True, eq=False)
class Principal:
    """One client.

    Attributes:
        number: identifies it while the process lives; prefix cache and stored responses are by it.
        key_name: the name of its API key, never the key; None without keys.
        is_admin: whether it may see metrics and the engine's state.
        usage: requests that have ended, and their tokens of prompt and completion.
        held: what its requests that have not ended take in memory, by kind.
    """

    number: int
    key_name: str | None
    is_admin: bool
    limits: RateLimits
    concurrency: ConcurrencyLimiter
    usage: Counter[str] = field(default_factory=Counter)
    held: Counter[str] = field(default_factory=Counter)


_log = logging.getLogger(__name__)

MAX_FILE_BYTES = 1 << 20
MAX_KEYS = 1000
"""Bounds the labels of the metrics, and the comparisons that a request costs."""

KEY_NAME = r"[A-Za-z0-9_.@-]{1,64}"
Digest = Annotated[str, Field(pattern=r"^[0-9A-Fa-f]{64}$")]


class ApiKey(BaseModel):
    """An entry of the key file: a name, its keys or their SHA-256 digests, and limits.

    `rpm` and `tpm` are requests and tokens per minute. Several keys of one name are the same client, so that
    a key can be replaced without an outage. Only an `admin` sees metrics and other clients' requests.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    name: Annotated[str, Field(pattern=f"^{KEY_NAME}$")]
    key: list[str] = []
    sha256: list[Digest] = []
    rpm: Annotated[int, Field(ge=1)] | None = None
    tpm: Annotated[int, Field(ge=1)] | None = None
    max_concurrency: Annotated[int, Field(ge=1)] | None = None
    admin: bool = False

    @field_validator("key", "sha256", mode="before")
    @classmethod
    def _is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _has_keys(self) -> ApiKey:
        if not self.key and not self.sha256:
            raise ValueError("give a key, or the sha256 of one")
        if not all(map(is_sendable, self.key)):
            raise ValueError("a key is empty or has characters that no header can carry")
        if digest(b"") in self.digests():
            raise ValueError("sha256 is that of an empty key")
        return self

    def digests(self) -> Iterator[bytes]:
        """SHA-256 of each key: keys themselves are not kept."""
        yield from (digest(key.encode()) for key in self.key)
        yield from map(bytes.fromhex, self.sha256)


def digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def read_key_file(path: Path) -> list[ApiKey]:
    """The keys of a YAML file, `keys:` with a list of entries.

    Raises:
        BadInput: it cannot be read, is not of that form, or has a name or a key twice. No message has a
            key in it.
    """
    where = f"--api-key-file {path}"
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise BadInput(f"{where}: {error.strerror}") from error
    if len(text) > MAX_FILE_BYTES:
        raise BadInput(f"{where}: larger than {MAX_FILE_BYTES} bytes")
    try:
        document = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark is not None else ""
        raise BadInput(f"{where}: not YAML{line}") from error
    entries = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(entries, list) or set(document) != {"keys"}:
        raise BadInput(f"{where}: give 'keys:' alone, a list of entries with a name and a key")
    if not 1 <= len(entries) <= MAX_KEYS:
        raise BadInput(f"{where}: {len(entries)} keys; give 1 to {MAX_KEYS}")
    keys = [_entry(where, number, entry) for number, entry in enumerate(entries, 1)]
    check_distinct(keys, where)
    return keys


def check_distinct(keys: Sequence[ApiKey], where: str) -> None:
    """Raises `BadInput` for a name or a key that is there twice."""
    names: set[str] = set()
    owners: dict[bytes, str] = {}
    for key in keys:
        if key.name in names:
            raise BadInput(f"{where}: the name {key.name} is there twice")
        names.add(key.name)
        for value in key.digests():
            if value in owners:
                raise BadInput(f"{where}: {owners[value]} and {key.name} have the same key")
            owners[value] = key.name


def warn_if_readable(path: Path) -> None:
    """Log a warning where every user of the machine can read the file."""
    if path.stat().st_mode & stat.S_IROTH:
        _log.warning("--api-key-file %s can be read by every user of this machine: chmod 600", path)


def _entry(where: str, number: int, entry: Any) -> ApiKey:
    try:
        return ApiKey.model_validate(entry)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        raise BadInput(
            f"{where}, entry {number}: {field + ': ' if field else ''}{message}"
        ) from None


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
            known = Principal(number, name, key.admin, RateLimits(), concurrency)
        known.is_admin, known.concurrency.limit = key.admin, limit
        known.limits.configure(key.rpm or options.rpm_per_key, key.tpm or options.tpm_per_key)
        return known
