"""The clients of the soak: requests, misbehaviour, and verdicts on responses."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from contextlib import suppress
from typing import Any

import aiohttp

MODEL = "stories3M"
ADAPTERS = ("poet", "clerk")
STARTS = ("Once upon a time", "Tom saw a big dog", "The sun was hot", "Lily had a red ball")
SHARED = "There was a small house by the sea, and in it lived a fox who could not sleep at night. "
NONSENSE: tuple[dict[str, Any], ...] = (
    {"prompt": []},
    {"prompt": "x", "max_tokens": 10**9},
    {"prompt": "x", "temperature": -1},
    {"prompt": "x", "model": "nobody"},
    {"prompt": [10**7]},
)


class Soak:
    """The load, and the outcome of every request."""

    def __init__(self, url: str, seed: int, pause_seconds: float = 0.0) -> None:
        self.url = url
        self.pause_seconds = pause_seconds
        self.random = random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.unclean: list[str] = []
        self.ended = asyncio.Event()

    async def client(self, session: aiohttp.ClientSession) -> None:
        """Send one request after another, until the end."""
        while not self.ended.is_set():
            kind = self.random.choices(
                (self.whole, self.stream, self.abort, self.leave, self.hang_up, self.nonsense),
                (4, 6, 2, 2, 2, 1),
            )[0]
            try:
                outcome = await kind(session)
            except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
                outcome = f"broken: {type(error).__name__}"
            if outcome.startswith(("broken", "unclean")):
                self.unclean.append(f"{kind.__name__}: {outcome}")
                await asyncio.sleep(0.05)
            self.outcomes[outcome.split(":")[0]] += 1
            if self.pause_seconds:
                pause = self.random.expovariate(1 / self.pause_seconds)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.ended.wait(), pause)

    def question(self, **fields: Any) -> tuple[str, dict[str, Any]]:
        """A path and a body."""
        pick = self.random
        text = SHARED * pick.randrange(3) + pick.choice(STARTS)
        body: dict[str, Any] = {
            "model": pick.choice((MODEL, MODEL, *ADAPTERS)),
            "max_tokens": pick.randrange(1, 120),
            "n": pick.choice((1, 1, 1, 2, 3)),
            "temperature": pick.choice((0.0, 0.8)),
            "ignore_eos": pick.random() < 0.7,
            **fields,
        }
        if pick.random() < 0.3:
            return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]}
        prompt = [text, "And then"] if pick.random() < 0.2 else text
        return "/v1/completions", {**body, "prompt": prompt}

    async def whole(self, session: aiohttp.ClientSession) -> str:
        path, body = self.question()
        async with session.post(self.url + path, json=body) as response:
            return judge_whole(response.status, await response.json(), body)

    async def stream(self, session: aiohttp.ClientSession) -> str:
        path, body = self.question(stream=True)
        async with session.post(self.url + path, json=body) as response:
            if response.status != 200:
                return judge_whole(response.status, await response.json(), body)
            return judge_stream([line async for line in response.content], body)

    async def abort(self, session: aiohttp.ClientSession) -> str:
        """End a stream from another connection, and read it on to its end."""
        path, body = self.question(stream=True)
        async with session.post(self.url + path, json=body) as response:
            if response.status != 200:
                return judge_whole(response.status, await response.json(), body)
            lines = [await response.content.readline()]
            name = json.loads(lines[0].removeprefix(b"data: ")).get("id")
            async with session.post(f"{self.url}/abort", json={"id": name}) as ended:
                is_known = (await ended.json()).get("aborted")
            lines += [line async for line in response.content]
            outcome = judge_stream(lines, body)
            return "aborted" if is_known and outcome == "told" else outcome

    async def leave(self, session: aiohttp.ClientSession) -> str:
        """Hang up after some events."""
        path, body = self.question(stream=True, max_tokens=120, ignore_eos=True)
        num_events = self.random.randrange(40)
        async with session.post(self.url + path, json=body) as response:
            if response.status != 200:
                return judge_whole(response.status, await response.json(), body)
            async for line in response.content:
                num_events -= line.startswith(b"data:")
                if num_events < 0:
                    response.close()
                    return "left in the stream"
        return "answered"

    async def hang_up(self, session: aiohttp.ClientSession) -> str:
        """Hang up before a complete response."""
        path, body = self.question(max_tokens=120)
        limit = aiohttp.ClientTimeout(total=self.random.uniform(0.001, 0.5))
        with suppress(TimeoutError):
            async with session.post(self.url + path, json=body, timeout=limit) as response:
                return judge_whole(response.status, await response.json(), body)
        return "left while waiting"

    async def nonsense(self, session: aiohttp.ClientSession) -> str:
        body = self.random.choice(NONSENSE)
        async with session.post(self.url + "/v1/completions", json=body) as response:
            found = await response.json()
            is_clean = 400 <= response.status < 500 and "error" in found
            return "refused" if is_clean else f"unclean: {response.status} to nonsense"


def judge_whole(status: int, found: Any, body: dict[str, Any]) -> str:
    """Verdict on a complete response."""
    if status == 200:
        num_prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
        reasons = [choice["finish_reason"] for choice in found["choices"]]
        is_whole = len(reasons) == num_prompts * body["n"] and set(reasons) <= {"stop", "length"}
        return "answered" if is_whole else f"unclean: ends {reasons}"
    if status == 500 and found.get("error", {}).get("code") == "step_failed":
        return "failed with a step"
    if status in (429, 503, 504) and "message" in found.get("error", {}):
        return "told"
    return f"unclean: {status} {str(found)[:200]}"


def judge_stream(lines: list[bytes], body: dict[str, Any]) -> str:
    """Verdict on a stream that ran to its end."""
    events = [line[6:].strip() for line in lines if line.startswith(b"data: ")]
    if events and events[-1] == b"[DONE]":
        documents = [json.loads(event) for event in events[:-1]]
        choices = [choice for document in documents for choice in document["choices"]]
        reasons = [one["finish_reason"] for one in choices if one["finish_reason"]]
        return judge_whole(200, {"choices": [{"finish_reason": r} for r in reasons]}, body)
    if events and (error := json.loads(events[-1]).get("error")):
        return "failed with a step" if error.get("code") == "step_failed" else "told"
    return f"unclean: a stream of {len(events)} events without an end"
