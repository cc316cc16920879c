"""What the daemon tells systemd (sd_notify): ready, reloading, stopping, a line of status, signs of life; and
the descriptors that systemd keeps for it from one life to the next.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping

_FIRST_FD = 3  # systemd passes descriptors from this number on
_PATIENCE_S = 5.0  # for a service manager that does not take messages at the moment


def fd_store_size(environment: Mapping[str, str]) -> int:
    """How many descriptors the service manager keeps for us; 0: none, or there is no such manager."""
    size = environment.get("FDSTORE", "")
    return int(size) if size.isdigit() and environment.get("NOTIFY_SOCKET") else 0


def received_fds(environment: Mapping[str, str]) -> dict[str, int]:
    """The descriptors that the service manager kept for us, by name; where a name comes twice, the first.
    They are the caller's, and not inherited by children from now on."""
    count = environment.get("LISTEN_FDS", "")
    if environment.get("LISTEN_PID") != str(os.getpid()) or not count.isdigit():
        return {}
    names = environment.get("LISTEN_FDNAMES", "").split(":")
    found: dict[str, int] = {}
    for index in range(int(count)):
        fd = _FIRST_FD + index
        os.set_inheritable(fd, False)
        name = names[index] if index < len(names) else ""
        if found.setdefault(name, fd) != fd:
            os.close(fd)
    return found


class Notifier:
    """Sends datagrams to `$NOTIFY_SOCKET`; where there is none, every call does nothing."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        watched = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        period = environment.get("WATCHDOG_USEC", "") if watched else ""
        self.watchdog_s = int(period) / 1e6 if period.isdigit() else None  # None: nobody watches
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)

    def ready(self, status: str) -> None:
        self._send("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        """To be followed by `ready`."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, status: str) -> None:
        self._send("STOPPING=1", f"STATUS={status}")

    def status(self, status: str) -> None:
        self._send(f"STATUS={status}")

    def alive(self) -> None:
        """Feed the watchdog, where there is one."""
        if self.watchdog_s is not None:
            self._send("WATCHDOG=1")

    def extend_start(self, seconds: float) -> None:
        """Ask for `seconds` more before the start counts as failed; taking a large pool needs minutes."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def store_fd(self, name: str, fd: int) -> None:
        """Let the service manager keep `fd` for the next life, as `name` (letters, digits, dashes). Raises
        `OSError` when it does not take it."""
        self._pass(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", [fd])

    def forget_fd(self, name: str) -> None:
        """Let the service manager close what it keeps as `name`."""
        with contextlib.suppress(OSError):
            self._pass(f"FDSTOREREMOVE=1\nFDNAME={name}", [])

    def close(self) -> None:
        self._socket.close()

    def _pass(self, message: str, fds: list[int]) -> None:
        """Send what must not get lost: waits for a manager that is slow."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.settimeout(_PATIENCE_S)
            sender.connect(self._path)
            socket.send_fds(sender, [message.encode()], fds)

    @property
    def _path(self) -> str:
        return "\0" + self._address[1:] if self._address.startswith("@") else self._address

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        message = "\n".join(line.replace("\n", " ") for line in lines).encode()
        # A service manager that is away or slow must not stop what we serve.
        with contextlib.suppress(OSError):
            self._socket.sendto(message, self._path)
