"""What the daemon must know of the machine it runs on: its directory and name, its address, its secrets."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import re
import secrets
import socket
from pathlib import Path

from mooncaked.config import Config, endpoint_address
from mooncaked.errors import ConfigError, SocketInUse
from mooncaked.units import split_address

ANY_HOSTS = ("0.0.0.0", "::")


class StateDir:
    """The daemon's directory, locked for as long as the process lives."""

    def __init__(self, path: Path) -> None:
        """Raises `ConfigError` when it cannot be used, `SocketInUse` when another daemon has it."""
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o750)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = os.pread(self._lock, 32, 0).decode(errors="replace").strip() or "unknown"
            self.close()
            raise SocketInUse(pid=pid, path=path, key="node.state_dir") from error
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def node_id(self) -> str:
        """The id kept here; made, and written before it is used, at the first call ever."""
        file = self.path / "node-id"
        try:
            kept = file.read_text().strip() if file.exists() else ""
            if not kept:
                kept = f"{_short_host_name()}-{secrets.token_hex(4)}"
                _write_durably(file, kept + "\n")
        except (OSError, UnicodeDecodeError) as error:
            raise _unusable(file, error) from error
        return kept

    def close(self) -> None:
        """Let another daemon have the directory."""
        os.close(self._lock)


def _unusable(path: Path, error: Exception) -> ConfigError:
    cause = error.strerror if isinstance(error, OSError) else str(error)
    remedy = "Create it, owned by the daemon's user, or set node.state_dir to another directory"
    return ConfigError(file=path, key="node.state_dir", problem=f"cannot be used ({cause})", remedy=remedy)


def _write_durably(file: Path, text: str) -> None:
    partial = file.with_suffix(".tmp")
    with partial.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(file)
    directory = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _short_host_name() -> str:
    name = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname().partition(".")[0]).strip("-")
    return name[:40] or "node"


# --- address and secrets -----------------------------------------------------------------------------------


def advertised_host(config: Config, listen: str) -> str:
    """The host that others reach the listener `listen` ("host:port") by.

    In this order: a loopback address that it is bound to; `node.advertise_host`; any other address that it is
    bound to; the address that this machine uses towards etcd, which the other nodes can reach as well."""
    bound = split_address(listen)[0]
    if bound == "localhost" or _is_loopback(bound):
        return bound
    if config.node.advertise_host or bound not in ANY_HOSTS:
        return config.node.advertise_host or bound
    return _address_towards(config.etcd.endpoints[0]) or socket.gethostname()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _address_towards(endpoint: str) -> str:
    """Our side of the route to `endpoint`; empty when there is none. With UDP, this sends nothing."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            *endpoint_address(endpoint), type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def read_secret(path: Path | None, origin: str, key: str) -> str | None:
    """The text of a secret file without surrounding white space; None without a file."""
    if path is None:
        return None
    try:
        secret = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        remedy = "Let the daemon's user read it"
        raise ConfigError(
            file=origin, key=key, problem=f"{path} cannot be read ({cause})", remedy=remedy
        ) from error
    if not secret:
        raise ConfigError(file=origin, key=key, problem=f"{path} is empty", remedy="Write the secret into it")
    return secret
