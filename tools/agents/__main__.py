"""Drive the newest agents and clients, as they come, against serve-local with a scripted model.

    make agents
    python -m tools.agents [--only NAME ...] [--kinds KIND ...] [--output FILE.json] [--no-install]

Installs the clients into `build/agents` from PyPI and npm, then runs a turn of each kind (a tool's round
trip, a picture, a PDF, a web search, cut-off arguments of a call, a prompt of 20,000 tokens) in a network
of its own that has no host but 127.0.0.1, and prints a table; --output keeps it, each turn as it ends,
beside what the file has of others. What a client cannot send is a dash; a client that cannot be installed or
started says so. Ends with 1 where a turn fails.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fcntl
import json
import os
import re
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .clients import CLIENTS, HERE, KINDS, Client, filled, final

ROOT = HERE.parents[1]
FOLDER = ROOT / "build" / "agents"
TURN_SECONDS = 240
EXTRA_NPM = ("@ai-sdk/openai-compatible",)
REFUSALS = re.compile(r"images are not taken|is not supported|are not supported")
OF_DOCS = re.compile(r"\| client \| version \|.*?\n\n", re.DOTALL)
"""The table in the document."""
QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "IS_SANDBOX": "1",  # Claude Code's word for a root user who means it
    "NO_COLOR": "1",
    "CI": "1",
}


def install(clients: Sequence[Client]) -> None:
    """The newest of each package; one that does not install is missing later, and says so there."""
    python = FOLDER / "python" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", FOLDER / "python"], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", "uv"], check=True)
    add = [python.with_name("uv"), "pip", "install", "--quiet", "--upgrade", "--python", python]
    for client in clients:
        if not client.is_npm:
            subprocess.run([*add, client.package], check=False)
    (FOLDER / "node").mkdir(exist_ok=True)
    npm = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(FOLDER / "node")]
    for package in (*(client.package for client in clients if client.is_npm), *EXTRA_NPM):
        subprocess.run([*npm, f"{package}@latest"], check=False)


def version_of(client: Client) -> str:
    """The installed version, or none."""
    if client.is_npm:
        path = FOLDER / "node" / "node_modules" / client.package / "package.json"
        return json.loads(path.read_text())["version"] if path.exists() else ""
    name = client.package.partition("[")[0]
    asked = f"from importlib.metadata import version; print(version({name!r}))"
    python = str(FOLDER / "python" / "bin" / "python")
    return subprocess.run([python, "-c", asked], capture_output=True, text=True).stdout.strip()


@contextlib.contextmanager
def served(clients: Sequence[Client]) -> Iterator[str]:
    """The address of a server of the scripted model."""
    from .world import script, write_files, write_model

    model = FOLDER / "model"
    if not (model / "config.json").exists():
        write_model(model, (path.read_text() for path in sorted(ROOT.glob("docs/*.md"))))
    for client in clients:
        home = FOLDER / "homes" / client.name
        home.mkdir(parents=True, exist_ok=True)
        write_files(home)
    entries = [
        {name: filled(text, {"{homes}": str(FOLDER / "homes")}) for name, text in entry.items()}
        for entry in script(clients)
    ]
    (FOLDER / "script.json").write_text(json.dumps(entries))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = (
        f"-m llmopt serve-local {model} --port {port} --served-model-name agent --dtype float32"
        f" --kv-cache-memory-bytes 256MiB --scripted-output {FOLDER / 'script.json'}"
    )
    with (FOLDER / "server.log").open("w") as log:
        server = subprocess.Popen([sys.executable, *command.split()], stdout=log, stderr=log)
        try:
            wait_for(f"http://127.0.0.1:{port}/health", server)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(60)


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    for _ in range(1200):
        with contextlib.suppress(OSError):
            urllib.request.urlopen(url, timeout=5)
            return
        if server.poll() is not None:
            break
        time.sleep(0.25)
    raise SystemExit(f"error: the server did not start: see {FOLDER / 'server.log'}")


def turn(client: Client, kind: str, url: str) -> str:
    """Run one turn; the verdict in words."""
    if kind in client.none:
        return f"– {client.none[kind]}"
    home = FOLDER / "homes" / client.name
    places = {
        "{url}": url,
        "{home}": str(home),
        "{node}": str(FOLDER / "node"),
        "{python}": str(FOLDER / "python" / "bin" / "python"),
    }
    for path, text in client.files.items():
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(filled(text, places))
    own = {name: filled(value, places) for name, value in client.environment.items()}
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), **QUIET, **own}
    try:
        ran = subprocess.run(
            client.arguments(kind, places),
            cwd=home,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TURN_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"failed: not within {TURN_SECONDS} s"
    except OSError as error:
        return f"failed: {error.strerror}"
    output = ran.stdout + ran.stderr
    (home / f"{kind}.log").write_text(output)
    return verdict(client, kind, ran.returncode, ran.stdout, output)


def verdict(client: Client, kind: str, code: int, answer: str, output: str) -> str:
    if final(kind) in answer:
        return "ok"
    if kind == "cut" and client.is_agent and code == 0:
        return "ok: taken as text"
    if REFUSALS.search(output):
        return "refused by name"
    lines = [line for line in output.splitlines() if line.strip()]
    return f"failed: {lines[-1][:90] if lines else f'exit code {code}'}"


def table(record: Mapping[str, Any]) -> str:
    """The record as a Markdown table."""
    lines = [f"| client | version | {' | '.join(KINDS)} |", "|---" * (len(KINDS) + 2) + "|"]
    for name, row in record["clients"].items():
        cells = (
            [row["turns"].get(kind, "not run") for kind in KINDS]
            if row["version"]
            else ["not installed"]
        )
        lines.append(f"| {name} | {row['version']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write_record(path: Path, clients: Mapping[str, Any]) -> None:
    """Write the rows in the order of the clients."""
    names = [client.name for client in CLIENTS if client.name in clients]
    record = {"clients": {name: clients[name] for name in names}}
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def open_loopback() -> None:
    """Bring up 127.0.0.1 in a new network, which has no other interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        up = struct.pack("16sh14s", b"lo", 1, b"")
        fcntl.ioctl(any_socket, 0x8914, up)  # SIOCSIFFLAGS, IFF_UP


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--only", nargs="+", help="of these clients")
    arguments.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    arguments.add_argument("--output", type=Path, help="the record as JSON")
    arguments.add_argument("--docs", action="store_true", help="put the table into docs/api.md")
    arguments.add_argument("--no-install", action="store_true")
    arguments.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = arguments.parse_args()
    clients = [client for client in CLIENTS if not given.only or client.name in given.only]
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not given.inside:
        if not given.no_install:
            install(clients)
        again = [sys.executable, "-m", "tools.agents", "--inside", *sys.argv[1:]]
        return subprocess.run(["unshare", "--net", "--map-root-user", *again], cwd=ROOT).returncode
    open_loopback()
    (FOLDER / "node").mkdir(exist_ok=True)
    (FOLDER / "node" / "vercel.mjs").write_text((HERE / "vercel.mjs").read_text())
    found: dict[str, Any] = {}
    if given.output is not None and given.output.exists():
        found = json.loads(given.output.read_text())["clients"]
    with served(clients) as url:
        for client in clients:
            version = version_of(client)
            row = found.get(client.name)
            if row is None or row["version"] != version:
                row = found[client.name] = {"version": version, "turns": {}}
            for kind in given.kinds if version else ():
                row["turns"][kind] = turn(client, kind, url)
                row["date"] = datetime.date.today().isoformat()
                print(f"{client.name} {kind}: {row['turns'][kind]}", file=sys.stderr, flush=True)
                if given.output is not None:
                    write_record(given.output, found)
    print(table({"clients": found}))
    if given.docs:
        page = ROOT / "docs" / "api.md"
        page.write_text(OF_DOCS.sub(lambda _: table({"clients": found}) + "\n\n", page.read_text()))
    turns = [verdict for row in found.values() for verdict in row["turns"].values()]
    return int(any(verdict.startswith("failed") for verdict in turns))


if __name__ == "__main__":
    sys.exit(main())
