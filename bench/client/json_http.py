"""Plain JSON requests over HTTP, for what is not timed: model lists, prompt logprobs, task answers."""

from __future__ import annotations

import http.client
import json
import ssl
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from .answer import refusal

# A server that is full for a moment says one of these; so does a proxy before it.
RETRIED = (429, 502, 503)
RETRY_SECONDS = (0.5, 2.0, 8.0)


class RequestFailed(Exception):
    """A request without a usable response: refused, unreachable, or not JSON.

    Attributes:
        status: of the HTTP response; None where there was none, or one of success.
        is_unreachable: whether no connection carried a response.
    """

    def __init__(
        self, message: str, status: int | None = None, *, is_unreachable: bool = False
    ) -> None:
        super().__init__(message)
        self.status = status
        self.is_unreachable = is_unreachable


@dataclass(frozen=True, slots=True)
class JsonClient:
    """Requests to one server, with the headers of its address."""

    headers: Mapping[str, str]
    verify_tls: bool = True
    timeout: float = 600.0

    def get(self, url: str) -> Any:
        """The JSON document at a URL.

        Raises:
            RequestFailed: there is none.
        """
        return self._send(urllib.request.Request(url, headers=self._fields()))

    def post(self, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON object that answers `body`.

        Raises:
            RequestFailed: refused, unreachable, or not an object.
        """
        data = json.dumps(body, separators=(",", ":")).encode()
        answer = self._send(urllib.request.Request(url, data, self._fields()))
        if not isinstance(answer, dict):
            raise RequestFailed(f"{url} answers no JSON object")
        return answer

    def post_again(self, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """`post`, which asks again where a server is full."""
        for wait in RETRY_SECONDS:
            try:
                return self.post(url, body)
            except RequestFailed as error:
                if error.status not in RETRIED:
                    raise
                time.sleep(wait)
        return self.post(url, body)

    def post_each(
        self, url: str, bodies: Iterable[Mapping[str, Any]], concurrency: int
    ) -> Iterator[dict[str, Any]]:
        """The answers in the order of the bodies, with up to `concurrency` requests in flight. The first
        failure, and an interrupt, drop what was not sent."""
        pool = ThreadPoolExecutor(concurrency, thread_name_prefix="llmopt-scores")
        sent: deque[Future[dict[str, Any]]] = deque()
        try:
            for body in bodies:
                # A slow request must not idle the others: twice as many are queued as run.
                if len(sent) >= 2 * concurrency:
                    yield sent.popleft().result()
                sent.append(pool.submit(self.post_again, url, body))
            while sent:
                yield sent.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _fields(self) -> dict[str, str]:
        # urllib writes the Host of the URL.
        return {name: value for name, value in self.headers.items() if name != "Host"}

    def read(self, url: str) -> bytes:
        """The bytes at a URL.

        Raises:
            RequestFailed: there are none.
        """
        return self._open(urllib.request.Request(url, headers=self._fields()))

    def _send(self, request: urllib.request.Request) -> Any:
        try:
            return json.loads(self._open(request))
        except ValueError as error:
            raise RequestFailed(f"{request.full_url} answers no JSON") from error

    def _open(self, request: urllib.request.Request) -> bytes:
        context = ssl.create_default_context()
        if not self.verify_tls:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        # Ignore proxies of the environment: the measurement must reach the server directly.
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        try:
            with opener.open(request, timeout=self.timeout) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            message = refusal(error.code, [(0.0, error.read())])
            raise RequestFailed(message, error.code) from error
        except urllib.error.URLError as error:
            raise RequestFailed(_reason(error.reason), is_unreachable=True) from error
        except OSError as error:
            raise RequestFailed(_reason(error), is_unreachable=True) from error
        except http.client.HTTPException as error:
            raise RequestFailed(f"{request.full_url} answers no HTTP") from error


def _reason(error: object) -> str:
    return getattr(error, "strerror", None) or str(error)
