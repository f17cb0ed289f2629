"""`llmopt check owner/name`: the headers of a hub's model, over the hub's own protocol."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "strangers" / "checkpoints" / "ct-w8a8-0.20.0"
SHA = "a" * 40
WEIGHTS = "model.safetensors"


class Hub(BaseHTTPRequestHandler):
    """A hub with one model: its list of files, whole files, and parts of them."""

    gives_parts = True
    sent = 0
    url = ""

    def do_GET(self) -> None:
        self._answer(True)

    def do_HEAD(self) -> None:
        self._answer(False)

    def _answer(self, has_body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/owner/model"):
            files = [{"rfilename": f.name, "size": f.stat().st_size} for f in FOLDER.iterdir()]
            body = json.dumps({"id": "owner/model", "sha": SHA, "siblings": files}).encode()
            return self._send(200, body, has_body)
        file = FOLDER / path.rpartition("/")[2]
        if not path.startswith("/owner/model/resolve/") or not file.is_file():
            return self._send(404, b"", has_body)
        content, status = file.read_bytes(), 200
        wanted = self.headers.get("Range")
        if wanted and type(self).gives_parts:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            content, status = content[int(first) : int(last) + 1], 206
        if has_body and file.name == WEIGHTS:
            type(self).sent += len(content)
        return self._send(status, content, has_body)

    def _send(self, status: int, body: bytes, has_body: bool) -> None:
        self.send_response(status)
        for name, value in {
            "ETag": '"1"',
            "X-Repo-Commit": SHA,
            "Content-Length": len(body),
        }.items():
            self.send_header(name, str(value))
        self.end_headers()
        if has_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[type[Hub]]:
    class Fresh(Hub):
        pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Fresh)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Fresh.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield Fresh
    server.shutdown()


def ask(hub: type[Hub], name: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    own = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "llmopt", "check", name, "--engine", "vllm", "--json"]
    return subprocess.run(
        command, env=os.environ | own, capture_output=True, text=True, check=False
    )


def test_a_hub_id_costs_its_headers_and_small_files(hub: type[Hub], tmp_path: Path) -> None:
    answered = ask(hub, "owner/model", tmp_path)
    assert answered.returncode == 0, answered.stderr
    assert json.loads(answered.stdout)["method"] == "compressed-tensors"
    header = int.from_bytes((FOLDER / WEIGHTS).read_bytes()[:8], "little")
    assert hub.sent == 8 + header < (FOLDER / WEIGHTS).stat().st_size


def test_a_hub_without_parts_or_model_is_one_line(hub: type[Hub], tmp_path: Path) -> None:
    hub.gives_parts = False
    for name, reason in (("owner/model", "sends no parts of"), ("owner/other", "did not give it")):
        answered = ask(hub, name, tmp_path)
        assert answered.returncode == 2 and answered.stderr.count("\n") == 1
        assert reason in answered.stderr
