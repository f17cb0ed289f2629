"""Connections of `tools/soak.py` that say too little, or do not listen."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
_LARGE = json.dumps(
    {
        "prompt": "Once upon a time",
        "max_tokens": 60,
        "ignore_eos": True,
        "logprobs": 20,
        "stream": True,
    }
).encode()
_WHOLE = _HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(_LARGE), _LARGE)
SENT = {
    "nothing": b"",
    "half a head": _HEAD + b"X-A",
    "a head and no body": _HEAD + b"Content-Length: 100\r\n\r\n",
    "half a body": _HEAD + b'Content-Length: 100\r\n\r\n{"prompt": "Onc',
    "half a chunk": _HEAD + b"Transfer-Encoding: chunked\r\n\r\n20\r\n{",
    "a request, unread": _WHOLE,
    "a request, half closed": _WHOLE,
}
"""What each kind sends."""
WORKING = ("a request, unread", "a request, half closed")
"""Kinds that make the engine work: one in 25 connections."""
SMALL_BUFFER = 4096


class SilentConnections:
    """`count` open connections; one that the server closes is opened again after a while.

    Attributes:
        closed: connections that the server closed, by kind.
        complete: responses that came whole to one that did not read: too small to be cut off.
        refused: connections that could not be opened, or got 503.
        most: the most connections that were open at once.
    """

    def __init__(self, url: str, count: int, unread_seconds: float, seed: int) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname, parts.port)
        self._unread_seconds = unread_seconds
        self._random = random.Random(seed)
        self.closed: Counter[str] = Counter()
        self.complete = self.refused = self.most = self._num_open = 0
        quiet = [kind for kind in SENT if kind not in WORKING]
        kinds = [
            WORKING[index // 25 % 2] if index % 25 == 0 else quiet[index % len(quiet)]
            for index in range(count)
        ]
        self.kinds = frozenset(kinds)
        self._tasks = [asyncio.ensure_future(self._keep_open(kind)) for kind in kinds]

    def checks(self) -> dict[str, bool]:
        """Whether they were open, none refused, and each kind closed by the server; nothing without any."""
        if not self._tasks:
            return {}
        return {
            "silent connections were open": self.most > 0.9 * len(self._tasks) and not self.refused,
            "every kind of them was closed by the server": self.kinds == set(self.closed),
        }

    def record(self) -> dict[str, Any]:
        """For the soak's result."""
        return {
            "most_open": self.most,
            "closed_by_the_server": dict(sorted(self.closed.items())),
            "complete_though_unread": self.complete,
            "refused": self.refused,
        }

    async def close(self) -> None:
        """Close all."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep_open(self, kind: str) -> None:
        await asyncio.sleep(self._random.uniform(0, self._unread_seconds / 8))
        while True:
            try:
                await self._once(kind)
            except (ConnectionResetError, BrokenPipeError):
                self.closed[kind] += 1
            except OSError:
                self.refused += 1
            longest = self._unread_seconds / (2 if kind in WORKING else 8)
            await asyncio.sleep(self._random.uniform(0, longest))

    async def _once(self, kind: str) -> None:
        """Open one, send its part, and wait until the server closes it."""
        loop = asyncio.get_running_loop()
        with socket.socket() as client:
            client.setblocking(False)
            if kind == "a request, unread":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
            await loop.sock_connect(client, self._address)
            self._num_open += 1
            self.most = max(self.most, self._num_open)
            try:
                await loop.sock_sendall(client, SENT[kind])
                if kind == "a request, half closed":
                    client.shutdown(socket.SHUT_WR)
                if kind == "a request, unread":
                    await asyncio.sleep(self._unread_seconds)
                received = b""
                while piece := await loop.sock_recv(client, 1 << 16):
                    received = (received + piece)[-1000:] if received else piece
                self.refused += received.startswith(b"HTTP/1.1 503")
                self.complete += kind == "a request, unread" and b"[DONE]" in received
                self.closed[kind] += 1
            finally:
                self._num_open -= 1
