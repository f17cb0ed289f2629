"""`llmopt serve-local` as an operator runs it: one file of options, TLS, keys with limits, JSON log, SIGHUP."""

from __future__ import annotations

import json
import os
import signal
import ssl
from pathlib import Path

import httpx

from ...support.certificates import self_signed
from ...support.cli_process import LlmoptProcess
from ...support.live_server import HANG_SECONDS, eventually

KEYS = "keys: [{name: team, key: k-team, rpm: 2}]"


def test_a_config_file_has_all_of_it(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path, "localhost")
    keys, config = tmp_path / "keys.yaml", tmp_path / "serve.yaml"
    keys.write_text(KEYS)
    keys.chmod(0o644)
    options = {
        "model": "stories260K",
        "port": 0,
        "api-key-file": str(keys),
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
            answers = [http.post("/v1/completions", json=body) for _ in range(3)]
            assert [answer.status_code for answer in answers] == [200, 200, 429]
            assert answers[1].headers["x-ratelimit-remaining-requests"] == "0"
            keys.write_text(KEYS.replace("k-team", "k-next").replace("rpm: 2", "rpm: 9"))
            process.send_signal(signal.SIGHUP)
            http.headers["Authorization"] = "Bearer k-next"
            eventually(lambda: http.get("/v1/models").status_code == 200)
            assert http.post("/v1/completions", json=body).status_code == 200
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=HANG_SECONDS)
    assert (process.returncode, out) == (0, "")
    entries = [json.loads(line) for line in err.splitlines()]
    messages = [entry["message"] for entry in entries]
    assert messages[0] == "loading" and messages[-1] == "stopped" and "ready" in messages
    assert any("chmod 600" in message for message in messages)
    assert f"--api-key-file {keys}: read again" in messages
    completions = [entry for entry in entries if entry.get("path") == "/v1/completions"]
    assert [entry["status"] for entry in completions] == [200, 200, 429, 200]
    assert {(entry["key"], entry["request_id"]) for entry in completions} == {("team", "abc")}
    assert "k-team" not in err and "k-next" not in err
