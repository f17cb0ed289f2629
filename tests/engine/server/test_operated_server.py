"""`llmopt serve-local` as an operator runs it: one file of options, TLS, a key, JSON log."""

from __future__ import annotations

import json
import os
import signal
import ssl
from pathlib import Path

import httpx

from ...support.certificates import self_signed
from ...support.cli_process import LlmoptProcess
from ...support.live_server import HANG_SECONDS


def test_a_config_file_has_all_of_it(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path, "localhost")
    config = tmp_path / "serve.yaml"
    options = {
        "model": "stories260K",
        "port": 0,
        "api-key": ["k-first", "k-team"],
        "log-format": "json",
        "ssl-certfile": str(certificate),
        "ssl-keyfile": str(key),
        "max-model-len": 128,
    }
    config.write_text(json.dumps(options))  # JSON is YAML
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    words = ("serve-local", "--config", str(config), "--max-model-len", "64")
    with LlmoptProcess(*words, env=environment) as process:
        ready = process.stdout.readline()
        assert ready.startswith("ready: stories260K at https://") and "context 64 tokens" in ready
        url = ready.split()[3].removesuffix("/v1")
        trusted = ssl.create_default_context(cafile=str(certificate))
        headers = {"Authorization": "Bearer k-team", "X-Request-Id": "abc"}
        with httpx.Client(
            base_url=url, verify=trusted, headers=headers, trust_env=False, timeout=HANG_SECONDS
        ) as http:
            body = {"prompt": "Once", "max_tokens": 3, "ignore_eos": True}
            assert http.post("/v1/completions", json=body).status_code == 200
            http.headers["Authorization"] = "Bearer k-other"
            assert http.post("/v1/completions", json=body).status_code == 401
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=HANG_SECONDS)
    assert (process.returncode, out) == (0, "")
    entries = [json.loads(line) for line in err.splitlines()]
    messages = [entry["message"] for entry in entries]
    assert messages[0] == "loading" and messages[-1] == "stopped" and "ready" in messages
    completions = [entry for entry in entries if entry.get("path") == "/v1/completions"]
    assert [entry["status"] for entry in completions] == [200, 401]
    assert [entry.get("key") for entry in completions] == ["api-key-2", None]
    assert {entry["request_id"] for entry in completions} == {"abc"}
    assert "k-team" not in err and "k-other" not in err
