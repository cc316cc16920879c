"""Binding the daemon's listeners, with errors that say who is in the way and what to change."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import struct
from pathlib import Path

from mooncaked.errors import AddressInUse, ConfigError, SocketInUse
from mooncaked.units import join_address, split_address

SOCKET_MODE = 0o660
_KEY = "listen.client_socket"
_PATH_BYTES_MAX = 107  # of sockaddr_un.sun_path, without its end
_BACKLOG = 128
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def peer_pid(sock: socket.socket) -> int:
    """Process id of the other side of a unix socket, as of when it connected or listened."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid: int = _CREDENTIALS.unpack(data)[0]
    return pid


class UnixListener:
    """A listening unix socket that this process alone owns, through a lock file beside it.

    The lock, and not the socket file, says whether a daemon lives: it goes with the process however that
    ends, and two daemons that start at once cannot both take a stale file for theirs."""

    def __init__(self, path: Path) -> None:
        """Bind; raises `SocketInUse`, or `ConfigError` for a path that cannot be used."""
        self.path = path
        _check_path(path)
        self._lock = self._take_lock()
        try:
            self._remove_stale()
            self.socket = self._bind()
        except BaseException:
            os.close(self._lock)
            raise

    def _take_lock(self) -> int:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unusable(self.path, error.strerror or str(error)) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            pid = os.pread(lock, 20, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(lock)
            raise SocketInUse(pid=pid, path=self.path, key=_KEY) from error
        os.ftruncate(lock, 0)
        os.pwrite(lock, b"%d\n" % os.getpid(), 0)
        return lock

    def _remove_stale(self) -> None:
        try:
            mode = self.path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise _unusable(self.path, "it exists and is no socket")
        if (pid := _listener(self.path)) is not None:
            raise SocketInUse(pid=pid, path=self.path, key=_KEY)
        self.path.unlink(missing_ok=True)

    def _bind(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.bind(str(self.path))
            self.path.chmod(SOCKET_MODE)  # before anybody can connect
            sock.listen(_BACKLOG)
            sock.setblocking(False)
        except OSError as error:
            sock.close()
            raise _unusable(self.path, error.strerror or str(error)) from error
        return sock

    def close(self) -> None:
        """Remove the socket file and give up the lock. The lock file stays: its removal would be a race."""
        self.path.unlink(missing_ok=True)
        self.socket.close()
        os.close(self._lock)


def _unusable(path: Path, problem: str) -> ConfigError:
    remedy = "Choose a short path in a directory that mooncaked may write, e.g. /run/mooncaked/client.sock."
    return ConfigError(file="the configuration", key=_KEY, problem=f"{path}: {problem}", remedy=remedy)


def _check_path(path: Path) -> None:
    length = len(os.fsencode(path))
    if length > _PATH_BYTES_MAX:
        problem = f"the path has {length} bytes; the system's limit for a socket is {_PATH_BYTES_MAX}"
        raise _unusable(path, problem)


def _listener(path: Path) -> str | None:
    """Process id, or "unknown", of whoever accepts connections at `path`; None if nobody does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
            return str(peer_pid(probe) or "unknown")  # 0 stands for a process outside of this container
        except (ConnectionRefusedError, FileNotFoundError):
            return None
        except OSError:  # e.g. its queue of new connections is full, so somebody has one
            return "unknown"


def bind_tcp(address: str, key: str) -> socket.socket:
    """A listening TCP socket at `host:port`; raises `AddressInUse`, or `ConfigError` for a bad address.

    `key` is the setting that the error names."""
    try:
        host, port = split_address(address)
        family, kind, proto, _, target = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (ValueError, OSError) as error:
        remedy = "Give an address of this machine and a port, e.g. 0.0.0.0:7801."
        raise ConfigError(file="the configuration", key=key, problem=str(error), remedy=remedy) from error
    sock = socket.socket(family, kind | socket.SOCK_CLOEXEC, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(target)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(address=address, key=key) from error
        remedy = "Give an address of this machine and a port that this user may bind."
        problem = f"cannot listen on {address}: {error.strerror}"
        raise ConfigError(file="the configuration", key=key, problem=problem, remedy=remedy) from error
    return sock


def bound_address(sock: socket.socket) -> str:
    """`host:port` that a TCP socket is bound to, with the port that the system chose for port 0."""
    host, port = sock.getsockname()[:2]
    return join_address(host, port)
