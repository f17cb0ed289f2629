"""HAProxy before two servers of one machine, so that one can be restarted while the other serves.

A server whose `/ready` is not 200 gets no new request, and keeps those that it has. Streams pass as they
come. A request is sent again only where the connection was refused: nothing of it has been seen then.
"""

from __future__ import annotations

from collections.abc import Mapping

CHECK_SECONDS = 1
FAILED_CHECKS = 2
PASSED_CHECKS = 1
CHECK_TIMEOUT_SECONDS = 10
"""Without it a check has as long as their interval, and a server that is merely busy would be taken away."""


def haproxy_config(
    address: str, servers: Mapping[str, str], *, ready_path: str = "/ready", timeout: str = "1h"
) -> str:
    """The configuration of a proxy at `address` before servers, addresses by name.

    Args:
        timeout: silence of a request that is being answered, such as the wait for the first token.
    """
    listed = "\n".join(f"    server {name} {where}" for name, where in servers.items())
    return f"""\
global
    maxconn 4096

defaults
    mode http
    log stdout format raw local0 notice
    option http-no-delay
    option redispatch 1
    retries 3
    retry-on conn-failure
    timeout connect 5s
    timeout check {CHECK_TIMEOUT_SECONDS}s
    timeout queue 30s
    timeout http-request 30s
    timeout client {timeout}
    timeout server {timeout}

frontend llm
    bind {address}
    default_backend servers

backend servers
    balance leastconn
    # A connection that is kept could be closed by its server just when a request is sent on it.
    http-reuse never
    option httpchk
    # Servers on the loopback answer no name that they do not know.
    http-check send meth GET uri {ready_path} ver HTTP/1.1 hdr Host localhost hdr Connection close
    http-check expect status 200
    default-server check inter {CHECK_SECONDS}s fall {FAILED_CHECKS} rise {PASSED_CHECKS}
{listed}
"""
