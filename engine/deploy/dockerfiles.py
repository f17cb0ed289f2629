"""Dockerfiles of llmopt's server, for CPUs and for NVIDIA GPUs, and the versions that they install.

The build context is the folder they lie in, with the wheel of llmopt in it. Base image and versions are
pinned, the process is not root, and both images have a C compiler: kernels are compiled for the processor
that they meet, once, into `CACHE_FOLDER`. On GPUs the CUDA libraries come with torch, the driver with
NVIDIA's container toolkit.
"""

from __future__ import annotations

import json
from importlib.metadata import version

from .container_command import PORT
from .deployment import Deployment
from .pinned import pinned_requirements

PYTHON_IMAGE = "python:3.12.12-slim-bookworm"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
USER_ID = 10001
CACHE_FOLDER = "/var/cache/llmopt"
_PROBE = "import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=4)"


def docker_files(deployment: Deployment) -> dict[str, str]:
    """Contents by file name."""
    torch = next(pin for pin in pinned_requirements("llmopt") if pin.startswith("torch=="))
    return {
        "Dockerfile.cpu": _dockerfile(
            deployment,
            "a CPU",
            # Under its own name no CUDA build answers, which would be gigabytes larger.
            f"--extra-index-url {CPU_INDEX} {torch}+cpu",
            {},
        ),
        "Dockerfile.cuda": _dockerfile(
            deployment,
            "NVIDIA GPUs",
            torch,
            {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"},
        ),
        "constraints.txt": _constraints(),
        ".dockerignore": "*\n!constraints.txt\n!*.whl\n",
    }


def _constraints() -> str:
    pins = "\n".join(pinned_requirements("llmopt"))
    return (
        f"# What llmopt {version('llmopt')} was installed with where `llmopt deploy` ran.\n{pins}\n"
    )


def _dockerfile(
    deployment: Deployment, device: str, torch: str, environment: dict[str, str]
) -> str:
    variables = {
        "PATH": "/opt/llmopt/bin:$PATH",
        "PYTHONUNBUFFERED": "1",
        "HF_HOME": "/cache",
        "XDG_CACHE_HOME": CACHE_FOLDER,
        "TRITON_CACHE_DIR": f"{CACHE_FOLDER}/triton",
        **environment,
    }
    settings = " \\\n    ".join(f'{name}="{value}"' for name, value in variables.items())
    probe = json.dumps(["python", "-c", _PROBE, f"http://127.0.0.1:{PORT}/ready"])
    return f"""\
# llmopt's server on {device}, with {deployment.choices.model}. Before it is built:
#   pip wheel --no-deps -w THIS_FOLDER CHECKOUT_OF_LLMOPT
ARG PYTHON_IMAGE={PYTHON_IMAGE}

FROM ${{PYTHON_IMAGE}} AS build
COPY constraints.txt llmopt-*.whl /build/
RUN python -m venv /opt/llmopt \\
    && /opt/llmopt/bin/pip install --no-cache-dir --constraint /build/constraints.txt \\
        {torch} /build/llmopt-*.whl

FROM ${{PYTHON_IMAGE}}
# Debian keeps no old versions of a package, so that a pinned one could not be installed next month.
# hadolint ignore=DL3008
RUN apt-get update \\
    && apt-get install --yes --no-install-recommends gcc libc6-dev \\
    && rm -rf /var/lib/apt/lists/* \\
    && groupadd --gid {USER_ID} llmopt \\
    && useradd --uid {USER_ID} --gid llmopt --no-create-home --home-dir {CACHE_FOLDER} llmopt \\
    && install --directory --owner llmopt --group llmopt --mode 0755 /cache {CACHE_FOLDER}
COPY --from=build /opt/llmopt /opt/llmopt
ENV {settings}
USER {USER_ID}:{USER_ID}
WORKDIR {CACHE_FOLDER}
EXPOSE {PORT}
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period={deployment.startup_seconds}s --retries=3 \\
    CMD {probe}
ENTRYPOINT ["llmopt"]
CMD {json.dumps(list(deployment.command)[1:])}
"""
