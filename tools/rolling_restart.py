"""Rolling restarts of two servers behind one proxy, under load: `python tools/rolling_restart.py`.

Two `llmopt serve-local` processes stand behind HAProxy with the configuration that `llmopt deploy` writes.
Clients ask through it without a pause, whole and streamed, completions and chats. One server after the other
gets SIGTERM, drains, ends, is started again and is ready before the other's turn comes.

What must hold: every request is answered in full, those that a server had at SIGTERM too, and each server
ends with 0. That a failure would be seen is shown last: a server is killed with SIGKILL. The
exit code is 1 where one of them does not hold, 2 without HAProxy (`apt-get install haproxy`)."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from llmopt.bench.machine.environment import machine_name
from llmopt.engine.deploy.deploy_files import haproxy_config
from llmopt.engine.deploy.deployment import STEP_ASIDE_SECONDS
from prometheus_client.parser import text_string_to_metric_families
from soak_clients import STARTS, judge_stream, judge_whole

DRAIN_SECONDS = 120
START_SECONDS = 180


@dataclass(slots=True)
class Load:
    """Clients of the proxy, and the outcome of every request: by kind, and of failures the reason."""

    url: str
    max_tokens: int
    random: random.Random
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    answered: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)

    async def client(self, session: aiohttp.ClientSession) -> None:
        while not self.ended.is_set():
            kind, path, body = self._question()
            outcome = await self._ask(session, path, body)
            if outcome == "answered":
                self.answered[kind] += 1
            else:
                self.failed.append(f"{kind}: {outcome}")
                await asyncio.sleep(0.1)

    def _question(self) -> tuple[str, str, dict[str, Any]]:
        body: dict[str, Any] = {
            "max_tokens": self.random.randrange(1, self.max_tokens),
            "n": 1,
            "ignore_eos": True,
            "stream": self.random.random() < 0.7,
        }
        text = self.random.choice(STARTS)
        way = "stream" if body["stream"] else "whole"
        if self.random.random() < 0.5:
            messages = [{"role": "user", "content": text}]
            return f"chat, {way}", "/v1/chat/completions", {**body, "messages": messages}
        return f"completion, {way}", "/v1/completions", {**body, "prompt": text}

    async def _ask(self, session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> str:
        try:
            async with session.post(self.url + path, json=body) as response:
                if body["stream"] and response.status == 200:
                    return judge_stream([line async for line in response.content], body)
                if response.content_type != "application/json":
                    return f"unclean: {response.status}, {response.content_type}"
                return judge_whole(response.status, await response.json(), body)
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            return f"broken: {type(error).__name__}"


class Server:
    """One `serve-local` on a port, which can be started again."""

    def __init__(self, model: str, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._words = [
            *(sys.executable, "-m", "llmopt.cli.main", "serve-local", model, "--json"),
            *("--port", str(port), "--max-num-seqs", "16"),
            *("--shutdown-delay", str(STEP_ASIDE_SECONDS)),
            *("--drain-seconds", str(DRAIN_SECONDS)),
        ]
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it, and wait until it is ready."""
        self.process = await asyncio.create_subprocess_exec(
            *self._words,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), START_SECONDS)
        if not line:
            raise SystemExit(f"error: the server at {self.url} did not start")

    async def stop(self, number: signal.Signals) -> int:
        """Send it a signal, and wait for its end; returns the exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        return await asyncio.wait_for(self.process.wait(), DRAIN_SECONDS + 30)

    async def num_running(self, session: aiohttp.ClientSession) -> int:
        async with session.get(f"{self.url}/metrics") as response:
            families = text_string_to_metric_families(await response.text())
        samples = {sample.name: sample.value for family in families for sample in family.samples}
        return int(samples["llmopt_num_requests_running"])


async def run(
    model: str, num_clients: int, rounds: int, max_tokens: int, seed: int
) -> dict[str, Any]:
    """The whole experiment; returns the record."""
    ports = free_ports(3)
    servers = [Server(model, port) for port in ports[1:]]
    await asyncio.gather(*(server.start() for server in servers))
    with tempfile.TemporaryDirectory() as folder:
        names = {f"server-{port}": f"127.0.0.1:{port}" for port in ports[1:]}
        config = Path(folder) / "haproxy.cfg"
        config.write_text(haproxy_config(f"127.0.0.1:{ports[0]}", names))
        proxy = await asyncio.create_subprocess_exec(
            *("haproxy", "-db", "-f", str(config)),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        load = Load(f"http://127.0.0.1:{ports[0]}", max_tokens, random.Random(seed))
        try:
            return await under_load(servers, load, num_clients, rounds)
        finally:
            load.ended.set()
            for process in (proxy, *(server.process for server in servers)):
                if process is not None and process.returncode is None:
                    process.kill()
                    await process.wait()


async def under_load(
    servers: list[Server], load: Load, num_clients: int, rounds: int
) -> dict[str, Any]:
    limits = {"connector": aiohttp.TCPConnector(limit=0), "timeout": aiohttp.ClientTimeout(600)}
    async with aiohttp.ClientSession(**limits) as session:
        await until_proxied(session, load.url)
        began = time.monotonic()
        clients = [asyncio.ensure_future(load.client(session)) for _ in range(num_clients)]
        await asyncio.sleep(2)
        restarts = [await restart(server, session) for _ in range(rounds) for server in servers]
        seconds, answered, failed = time.monotonic() - began, dict(load.answered), list(load.failed)
        assert servers[0].process is not None
        await servers[0].stop(signal.SIGKILL)
        await asyncio.sleep(2)
        load.ended.set()
        await asyncio.gather(*clients)
    record = {
        "requests": sum(answered.values()) + len(failed),
        "failed": len(failed),
        "failures": failed[:20],
        "answered": dict(sorted(answered.items())),
        "restarts": restarts,
        "failed_when_one_was_killed": len(load.failed) - len(failed),
        "seconds": round(seconds, 1),
        "clients": num_clients,
    }
    return {"checks": checks(record), **record}


def checks(record: dict[str, Any]) -> dict[str, bool]:
    """What must hold of a record."""
    restarts = record["restarts"]
    return {
        "no request failed": not record["failed"],
        "every server ended with 0": all(each["exit_code"] == 0 for each in restarts),
        "every server had requests at SIGTERM": all(
            each["in_flight_at_sigterm"] > 0 for each in restarts
        ),
        "a killed server is seen": record["failed_when_one_was_killed"] > 0,
    }


async def restart(server: Server, session: aiohttp.ClientSession) -> dict[str, Any]:
    """SIGTERM, drain and start; returns what it had to finish, and how long the drain took."""
    in_flight = await server.num_running(session)
    began = time.monotonic()
    stopping = asyncio.ensure_future(server.stop(signal.SIGTERM))
    await asyncio.sleep(STEP_ASIDE_SECONDS - 0.3)
    at_the_end = await server.num_running(session)
    exit_code = await stopping
    seconds = time.monotonic() - began
    await server.start()
    await asyncio.sleep(3)  # the proxy's next check finds it
    return {
        "exit_code": exit_code,
        "in_flight_at_sigterm": in_flight,
        "in_flight_when_the_port_closed": at_the_end,
        "seconds_to_end": round(seconds, 1),
    }


async def until_proxied(session: aiohttp.ClientSession, url: str) -> None:
    """Wait until the proxy finds a server ready."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with suppress(aiohttp.ClientError):
            async with session.get(f"{url}/ready") as response:
                if response.status == 200:
                    return
        await asyncio.sleep(0.2)
    raise SystemExit("error: the proxy finds no server")


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago: the proxy must know them before the servers start."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="stories3M")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3, help="Restarts of each server.")
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="Write the result here, as JSON.")
    chosen = parser.parse_args()
    if shutil.which("haproxy") is None:
        print("error: HAProxy is needed: apt-get install haproxy", file=sys.stderr)
        return 2
    words = (chosen.model, chosen.clients, chosen.rounds, chosen.max_tokens, chosen.seed)
    record = {"machine": machine_name("cpu"), "model": chosen.model} | asyncio.run(run(*words))
    text = json.dumps(record, indent=1)
    print(text)
    if chosen.output:
        chosen.output.write_text(text + "\n")
    return 0 if all(record["checks"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
