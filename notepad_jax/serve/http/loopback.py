"""Loopback addresses: where a server may listen without a key."""

from __future__ import annotations

import contextlib
import ipaddress


def is_local(name: str) -> bool:
    """Says whether a host, with or without a port, is this machine's loopback."""
    host = name[1 : name.find("]")] if name.startswith("[") else name
    host = host.rpartition(":")[0] if host.count(":") == 1 else host
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
