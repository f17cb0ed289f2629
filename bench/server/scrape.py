"""Scraping a server's Prometheus metrics during a pass: at its start, every second, and at its end."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ..client.json_http import RequestFailed
from .exposition import Sample, parse_samples

if TYPE_CHECKING:
    from ..client.address import Address

PATH = "/metrics"
EVERY_SECONDS = 1.0


class Scraper:
    """Reads `/metrics` of one server; a thread scrapes it between `start` and `stop`.

    Attributes:
        url: what is scraped.
        reason: why there is nothing to scrape, in one line; None where the server has metrics.
    """

    def __init__(self, address: Address) -> None:
        self.url = address.url + PATH
        self._address = address
        self._samples: list[dict[str, Sample]] = []
        self._failed = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.reason = self._why_not()

    def start(self) -> None:
        """Scrape now, and every second until `stop`."""
        self._samples, self._failed = [], 0
        if self.reason is not None:
            return
        self._scrape()
        self._stop.clear()
        self._thread = threading.Thread(target=self._keep_scraping, daemon=True)
        self._thread.start()

    def stop(self) -> tuple[list[dict[str, Sample]], int]:
        """(the samples of each scrape in order, how many scrapes failed); the last is of now."""
        if self._thread is None:
            return [], self._failed
        self._stop.set()
        self._thread.join()
        self._thread = None
        self._scrape()
        return self._samples, self._failed

    def _keep_scraping(self) -> None:
        while not self._stop.wait(EVERY_SECONDS):
            self._scrape()

    def _scrape(self) -> None:
        try:
            self._samples.append(parse_samples(self._text()))
        except (RequestFailed, ValueError):
            self._failed += 1

    def _text(self) -> str:
        return self._address.get(PATH).decode("utf-8", "replace")

    def _why_not(self) -> str | None:
        try:
            if parse_samples(self._text()):
                return None
            return f"{self.url} has no Prometheus metrics"
        except RequestFailed as error:
            return f"{self.url} {'does not answer:' if error.is_unreachable else 'answers'} {error}"
        except ValueError:
            return f"{self.url} is not in Prometheus' text format"
