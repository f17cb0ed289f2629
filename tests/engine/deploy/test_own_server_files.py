"""Dockerfiles, pinned versions, systemd unit and proxy of llmopt's own server."""

from __future__ import annotations

import json
import re
import shlex
import socket
from importlib.metadata import version

import pytest
from llmopt.cli.main import main
from llmopt.engine.deploy.deploy_files import (
    CHECK_SECONDS,
    FAILED_CHECKS,
    PORTS,
    USER_ID,
    deploy_files,
    pinned_requirements,
)
from llmopt.engine.deploy.deployment import STEP_ASIDE_SECONDS
from llmopt.engine.server.protocol.server_options import ServerOptions

from ...support.deployments import OURS, deployment, small
from ...support.live_server import make_engine, running

UNIT = "systemd/big-model@.service"


def settings(unit: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in unit.splitlines() if re.match(r"[A-Z]\w+=", line))


def test_the_requirements_are_pinned_as_they_are_installed_here() -> None:
    pins = dict(pin.split("==") for pin in pinned_requirements("llmopt", "serve"))
    assert {"uvicorn", "pillow", "httpcore"} <= pins.keys() and "matplotlib" not in pins
    assert "uvicorn" not in {pin.split("==")[0] for pin in pinned_requirements("llmopt")}
    assert pins["transformers"] == version("transformers") and pins["starlette"] == version(
        "starlette"
    )
    assert pins["torch"] == version("torch").split("+")[0]
    assert not {"pytest", "ruff", "llmopt"} & set(pins)
    assert pinned_requirements("no-such-distribution") == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_images_are_pinned_not_root_and_healthy_when_ready(device: str) -> None:
    files = deploy_files(small(**OURS))
    text = files[f"docker/Dockerfile.{device}"]
    assert re.search(r"^ARG PYTHON_IMAGE=python:\d+\.\d+\.\d+-", text, re.MULTILINE)
    assert f"\nUSER {USER_ID}:{USER_ID}\n" in text
    assert "--constraint /build/constraints.txt" in text and "/ready" in text
    assert (f"torch=={version('torch').split('+')[0]}+cpu" in text) is (device == "cpu")
    assert ("NVIDIA_VISIBLE_DEVICES" in text) is (device == "cuda")
    words = json.loads(text.rsplit("\nCMD ", 1)[1])
    assert ["llmopt", *words] == list(small(**OURS).command)
    pins = [line for line in files["docker/constraints.txt"].splitlines() if line[0] != "#"]
    assert pins == pinned_requirements("llmopt", "serve")


def test_only_our_own_server_has_them() -> None:
    assert not [name for name in deploy_files(small()) if name.startswith(("docker", "systemd"))]


def test_the_unit_starts_our_server_again_except_for_bad_options() -> None:
    planned = small(**OURS)
    held = settings(deploy_files(planned)[UNIT])
    assert (held["Type"], held["Restart"], held["RestartPreventExitStatus"]) == (
        "notify",
        "on-failure",
        "2",
    )
    assert (held["NoNewPrivileges"], held["ProtectSystem"]) == ("yes", "strict")
    assert int(held["TimeoutStopSec"]) > planned.choices.drain_seconds + STEP_ASIDE_SECONDS
    assert held["PrivateDevices"] == "no"
    on_cpu = deployment(
        {"model": "llama-3.2-1b", "context": "1k", "sequences": 1, "gpus": ("cpu",)}, **OURS
    )
    assert settings(deploy_files(on_cpu)[UNIT])["PrivateDevices"] == "yes"


def test_the_unit_s_command_is_one_that_the_command_line_takes(
    capfd: pytest.CaptureFixture[str],
) -> None:
    planned = small(**{**OURS, "model": '/models/50% $HOME "x"'})
    command = settings(deploy_files(planned)[UNIT])["ExecStart"]
    assert '"/models/50%% $$HOME \\"x\\""' in command and "--port %i" in command
    words = shlex.split(command.replace("%i", "8001").replace("%%", "%").replace("$$", "$"))
    assert words[:3] == ["/opt/llmopt/bin/llmopt", "serve-local", '/models/50% $HOME "x"']
    # As far as an option that is refused before anything is loaded: all before it are known.
    with pytest.raises(SystemExit) as stopped:
        main([*words[1:], "--ray"])
    assert stopped.value.code == 2
    assert "--ray is for another --engine" in capfd.readouterr().err


def test_the_proxy_sees_a_shutdown_before_the_port_is_closed() -> None:
    text = deploy_files(small(**OURS))["systemd/haproxy.cfg"]
    for port in PORTS:
        assert f"127.0.0.1:{port}" in text
    assert CHECK_SECONDS * (FAILED_CHECKS + 1) < STEP_ASIDE_SECONDS
    assert f"fall {FAILED_CHECKS}" in text


def test_the_proxy_s_check_is_answered_by_a_server_on_the_loopback() -> None:
    text = deploy_files(small(**OURS))["systemd/haproxy.cfg"]
    sent = re.search(r"http-check send meth (\w+) uri (\S+) ver (\S+) (.*)", text)
    assert sent is not None
    headers = re.findall(r"hdr (\S+) (\S+)", sent[4])
    lines = [f"{sent[1]} {sent[2]} {sent[3]}", *(f"{name}: {value}" for name, value in headers)]
    options = ServerOptions(host_names=frozenset())  # as serve-local has it on the loopback
    with running(make_engine("stories260K"), options) as server:
        port = int(server.url.rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall("\r\n".join([*lines, "", ""]).encode())
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
