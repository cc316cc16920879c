"""sd_notify: what reaches the service manager's socket, and that its absence harms nothing."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from mooncaked.notify import Notifier


@pytest.mark.parametrize("abstract", [False, True])
def test_states_reach_the_socket(tmp_path: Path, abstract: bool) -> None:
    name = f"@mooncaked-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(name.replace("@", "\0"))
        manager.settimeout(5)
        notifier = Notifier({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "30000000"})
        notifier.ready("serving\nforged=1")
        notifier.reloading()
        notifier.status("busy")
        notifier.alive()
        notifier.extend_start(30)
        notifier.stopping("bye")
        seen = [manager.recv(4096).decode() for _ in range(6)]
        notifier.close()
    assert seen[0] == "READY=1\nSTATUS=serving forged=1"
    assert seen[1].startswith("RELOADING=1\nMONOTONIC_USEC=")
    assert seen[2:] == ["STATUS=busy", "WATCHDOG=1", "EXTEND_TIMEOUT_USEC=30000000", "STOPPING=1\nSTATUS=bye"]
    assert notifier.watchdog_s == 30.0


def test_nobody_listens(tmp_path: Path) -> None:
    for environment in ({}, {"NOTIFY_SOCKET": str(tmp_path / "gone")}, {"NOTIFY_SOCKET": ""}):
        notifier = Notifier(environment)
        notifier.ready("serving")
        notifier.alive()
        notifier.close()


def test_a_watchdog_of_another_process_is_not_ours() -> None:
    assert Notifier({"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}).watchdog_s is None
    assert Notifier({"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": str(os.getpid())}).watchdog_s == 1.0
    assert Notifier({"WATCHDOG_USEC": "soon"}).watchdog_s is None
