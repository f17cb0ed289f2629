"""A systemd unit of llmopt's server, one instance a port, without rights that it does not need.

`systemctl restart` returns once the instance is ready (`Type=notify`), so that restarting two after each
other behind a proxy is a rolling restart. An engine that cannot go on ends with 3 and is started again; bad
options end with 2 and are not. A step that hangs starves the watchdog.
"""

from __future__ import annotations

from .deployment import STEP_ASIDE_SECONDS, Deployment
from .proxy import haproxy_config

PROGRAM = "/opt/llmopt/bin/llmopt"
PORTS = (8001, 8002)
WATCHDOG_SECONDS = 180
"""More than the 120 s that a step may take, and the half of itself after which it is fed."""
_HARDENING = """\
# One user for all instances, which share what they download.
User=llmopt
DynamicUser=yes
UMask=0077
NoNewPrivileges=yes
CapabilityBoundingSet=
AmbientCapabilities=
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
ProtectClock=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectControlGroups=yes
ProtectProc=invisible
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
RemoveIPC=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
# Not MemoryDenyWriteExecute: oneDNN and Triton compile kernels at run time.
"""
_DEVICES = {True: "# The GPUs are devices.\nPrivateDevices=no", False: "PrivateDevices=yes"}


def systemd_files(deployment: Deployment) -> dict[str, str]:
    """Contents by file name: the unit and the proxy before its instances."""
    name = deployment.choices.name
    servers = {f"{name}-{port}": f"127.0.0.1:{port}" for port in PORTS}
    return {
        f"{name}@.service": _unit(deployment),
        "haproxy.cfg": haproxy_config(
            "127.0.0.1:8000", servers, ready_path=deployment.served.ready_path
        ),
    }


def _unit(deployment: Deployment) -> str:
    choices = deployment.choices
    name = choices.name
    return f"""\
# /etc/systemd/system/{name}@.service; the instance is the port: systemctl enable --now {name}@{PORTS[0]}
[Unit]
Description=llmopt serving {_escaped(choices.model)} on port %i
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=1h
StartLimitBurst=5

[Service]
Type=notify
ExecStart={_command(deployment)}
# LLMOPT_API_KEY=..., and CUDA_VISIBLE_DEVICES=... of an instance.
EnvironmentFile=-/etc/{name}/server.env
EnvironmentFile=-/etc/{name}/%i.env
Environment=HF_HOME=%S/{name} XDG_CACHE_HOME=%C/{name} TRITON_CACHE_DIR=%C/{name}/triton
WorkingDirectory=%S/{name}
StateDirectory={name}
CacheDirectory={name}
Restart=on-failure
RestartSec=5
# Bad options and a missing model end with 2: starting again does not help.
RestartPreventExitStatus=2
TimeoutStartSec={deployment.startup_seconds}
TimeoutStopSec={deployment.stop_seconds}
WatchdogSec={WATCHDOG_SECONDS}
# Workers of tensor parallelism are ended by the server once it has drained.
KillMode=mixed
LimitNOFILE=65536

{_HARDENING}{_DEVICES[bool(deployment.gpus)]}

[Install]
WantedBy=multi-user.target
"""


def _command(deployment: Deployment) -> str:
    """The container's command on the loopback and the instance's port, with time for the proxy."""
    words = [PROGRAM, *deployment.command[1:]]
    words[words.index("--host") + 1] = "127.0.0.1"
    quoted = [_quoted(word) for word in words]
    quoted[words.index("--port") + 1] = "%i"
    return " ".join([*quoted, "--shutdown-delay", str(STEP_ASIDE_SECONDS)])


def _quoted(word: str) -> str:
    """A word of `ExecStart=`, in which % $ and quotes mean something."""
    text = _escaped(word).replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return f'"{text}"' if any(letter in word for letter in " \t;'\"\\") or not word else text


def _escaped(text: str) -> str:
    return text.replace("%", "%%")
