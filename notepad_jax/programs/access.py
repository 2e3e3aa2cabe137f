"""Network access of a server: its address, API key, allowed origins and connection limits."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import re
import socket
import types
from collections.abc import Sequence
from typing import Any

from notepad_jax.serve.http.loopback import is_local
from notepad_jax.setup.config.whole import Config
from notepad_jax.telemetry.screen import Screen

KEY, CONTROL_KEY = "NOTEPAD_API_KEY", "NOTEPAD_CONTROL_KEY"
_ORIGIN = re.compile(r"https?://[a-z0-9.\-_]+(:\d{1,5})?|https?://\[[0-9a-f:]+\](:\d{1,5})?")


@dataclasses.dataclass(frozen=True)
class Address:
    """Where a server listens, which variable has its key, and what it serves from."""

    host: str
    port: int  # 0: a free one
    key_variable: str
    trainers: bool = False  # whether they may pause the server and change its weights
    files: str | None = None  # the folder of documents and readings; None: one that ends with it
    runs: str | None = None  # the folder of runs that browsers are shown; None: none are
    documents: tuple[str, ...] = ()  # folders and buckets below which clients may name documents
    adapters: tuple[str, ...] = ()  # NAME=POLICY, of others on the policy's base


def web() -> tuple[types.ModuleType, ...]:
    rooms = (
        "app", "completions.admission", "documents.store", "documents.roots", "http.connections",
        "http.log",
    )  # fmt: skip
    try:
        return tuple(importlib.import_module(f"notepad_jax.serve.{name}") for name in rooms)
    except ImportError as error:
        raise ValueError(
            f"the server needs {error.name}, which is not installed; "
            f"pip install 'notepad-jax[serve]'"
        ) from None


def bounded(config: Config, connections: types.ModuleType, screen: Screen) -> Any:
    """Returns the connection limits of all clients together, as far as this machine goes."""
    asked = connections.ConnectionLimits
    wanted = asked(**{name: getattr(config.serve, name) for name in asked.__annotations__})
    limits = connections.within_descriptors(wanted)
    if limits.connections < wanted.connections:
        screen.warn(
            f"this process may open so few files (ulimit -Hn) that {limits.connections:,} "
            f"connections are taken in at a time, and not {wanted.connections:,}"
        )
    return limits


def key_of(address: Address, variable: str) -> str | None:
    """Returns the key that clients need; ValueError where there must be one and is none."""
    key = os.environ.get(variable, "").strip()
    if key and not (key.isascii() and key.isprintable()):
        raise ValueError(f"the key in {variable} must be printable ASCII, in one line")
    if not key and not is_local(address.host):
        whose = "a key of the trainers' own (--rl)" if variable == CONTROL_KEY else "a key"
        raise ValueError(
            f"without {whose} a server only listens on this machine, and {address.host} is reached "
            f"from others; put a key into {variable}, or leave --host out"
        )
    return key or None


def pages_of(cors: Sequence[str], key: str | None) -> tuple[str, ...]:
    """Returns the origins of CORS; ValueError for what is no origin."""
    for origin in cors:
        if origin == "*" and key is None:
            raise ValueError(
                f"serve.cors is *, and without a key every web page could ask; put a key into "
                f"{KEY}, or name the origins"
            )
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ValueError(
                f"serve.cors has {origin!r}; an origin is a scheme and a host, with a port if it "
                f"is not the usual one, and nothing behind it: https://chat.example.org"
            )
    return tuple(cors)


def taken(address: Address) -> socket.socket:
    """Returns a socket bound to the address, not listening yet."""
    if not 0 <= address.port < 65536:
        raise ValueError(f"--port is {address.port}; a port is a number up to 65535")
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, there = found[0]  # asyncio sends at once where it is TCP's
        place = socket.socket(family, kind, protocol)
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(there)
    except OSError as error:
        raise ValueError(
            f"cannot listen at {address.host}:{address.port} ({error.strerror}); "
            f"choose another --port or --host"
        ) from None
    return place


def bracketed(host: str) -> str:
    """Returns a host as a URL has it before a port: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host
