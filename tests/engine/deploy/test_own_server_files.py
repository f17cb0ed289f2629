"""Dockerfiles and pinned versions of llmopt's own server."""

from __future__ import annotations

import json
import re
from importlib.metadata import version

import pytest
from llmopt.engine.deploy.deploy_files import (
    USER_ID,
    deploy_files,
    pinned_requirements,
)

from ...support.deployments import OURS, small


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
    # Without a network: pip takes the wheels of the folder alone, and a base image with gcc needs no Debian mirror.
    assert "\nARG PIP_NO_INDEX\nCOPY constraints.txt *.whl /build/\n" in text
    assert "--find-links /build" in text and "command -v gcc || { apt-get update" in text
    assert (f"torch=={version('torch').split('+')[0]}+cpu" in text) is (device == "cpu")
    assert ("NVIDIA_VISIBLE_DEVICES" in text) is (device == "cuda")
    words = json.loads(text.rsplit("\nCMD ", 1)[1])
    assert ["llmopt", *words] == list(small(**OURS).command)
    pins = [line for line in files["docker/constraints.txt"].splitlines() if line[0] != "#"]
    assert pins == pinned_requirements("llmopt", "serve")


def test_only_our_own_server_has_them() -> None:
    assert not [name for name in deploy_files(small()) if name.startswith("docker")]
