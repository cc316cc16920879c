"""What the daemon tells systemd (sd_notify): ready, reloading, stopping, a line of status, signs of life."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping


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

    def close(self) -> None:
        self._socket.close()

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        path = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        message = "\n".join(line.replace("\n", " ") for line in lines).encode()
        # A service manager that is away or slow must not stop what we serve.
        with contextlib.suppress(OSError):
            self._socket.sendto(message, path)
