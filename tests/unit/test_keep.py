"""Where memory is kept: what one life leaves, the next one finds, and nobody else."""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncaked.notify import Notifier, fd_store_size, received_fds
from mooncaked.pools.keep import Nowhere, ShmFiles, SystemdStore


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kept"


def test_files_outlive_their_keeper(folder: Path) -> None:
    first = ShmFiles(folder)
    assert first.names() == []
    fd = first.make("region-0", 8192)
    os.pwrite(fd, b"hello", 100)
    journal = first.make("journal-0", 0)
    assert (os.fstat(fd).st_size, os.fstat(journal).st_size) == (8192, 0)
    assert os.fstat(fd).st_mode & 0o777 == 0o600
    for number in (fd, journal):
        os.close(number)
    first.close()
    second = ShmFiles(folder)
    assert second.names() == ["journal-0", "region-0"]
    taken = second.take("region-0")
    assert taken is not None
    assert os.pread(taken, 5, 100) == b"hello"
    assert (second.take("region-0"), second.names()) == (None, ["journal-0"])
    second.drop("region-0")
    second.drop("region-0")
    assert not (folder / "region-0").exists()
    os.close(taken)
    second.remove()
    assert not folder.exists()


def test_two_daemons_never_share_files(folder: Path) -> None:
    first = ShmFiles(folder)
    with pytest.raises(BlockingIOError):
        ShmFiles(folder)
    first.close()
    ShmFiles(folder).close()


def test_a_directory_that_others_can_write_to_is_refused(folder: Path, tmp_path: Path) -> None:
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="not a private directory"):
        ShmFiles(folder)
    folder.chmod(0o700)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(NotADirectoryError):
        ShmFiles(tmp_path / "link")


def test_a_link_in_the_place_of_a_file_is_not_followed(folder: Path, tmp_path: Path) -> None:
    ShmFiles(folder).close()
    (tmp_path / "victim").write_text("secret")
    (folder / "region-0").symlink_to(tmp_path / "victim")
    files = ShmFiles(folder)
    assert files.take("region-0") is None
    os.close(files.make("region-0", 4096))
    assert (tmp_path / "victim").read_text() == "secret"
    files.close()


def test_what_does_not_fit_is_refused(folder: Path) -> None:
    files = ShmFiles(folder)
    with pytest.raises(OSError, match="has room for"):
        files.make("region-0", files.room() + 4096)
    with pytest.raises(OSError, match="no huge pages"):
        files.make("region-0", 2 << 20, "2MiB")
    assert files.names() == []
    files.remove()


def test_nowhere_keeps_nothing() -> None:
    nowhere = Nowhere()
    fd = nowhere.make("region-0", 4096)
    with pytest.raises(PermissionError):
        os.truncate(fd, 0)
    os.close(fd)
    assert (nowhere.names(), nowhere.take("region-0")) == ([], None)


# --- systemd -----------------------------------------------------------------------------------------------


class Manager:
    """A service manager that keeps descriptors."""

    def __init__(self, folder: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(folder / "notify"))
        self.socket.setblocking(False)
        self.kept: dict[str, int] = {}
        self.environment = {"NOTIFY_SOCKET": str(folder / "notify"), "FDSTORE": "100"}

    def receive(self) -> None:
        """Do what it was told since the last time."""
        while True:
            try:
                data, rights, _, _ = self.socket.recvmsg(4096, socket.CMSG_SPACE(4))
            except BlockingIOError:
                return
            lines = dict(line.split("=", 1) for line in data.decode().splitlines())
            fds = array.array("i")
            for _, _, content in rights:
                fds.frombytes(content)
            if lines.get("FDSTORE") == "1":
                self.kept[lines["FDNAME"]] = fds[0]
            if lines.get("FDSTOREREMOVE") == "1" and lines["FDNAME"] in self.kept:
                os.close(self.kept.pop(lines["FDNAME"]))

    def pass_on(self) -> dict[str, int]:
        """What the next life gets."""
        return {name: os.dup(fd) for name, fd in self.kept.items()}


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(tmp_path)
    yield manager
    manager.socket.close()
    for fd in manager.kept.values():
        os.close(fd)


def test_systemd_keeps_sealed_memory(manager: Manager) -> None:
    first = SystemdStore(Notifier(manager.environment), {})
    fd = first.make("region-3", 8192)
    os.pwrite(fd, b"hello", 0)
    os.close(first.make("journal-0", 0))
    os.close(fd)
    first.close()
    manager.receive()
    assert manager.kept.keys() == {"mooncaked-region-3", "mooncaked-journal-0"}
    second = SystemdStore(Notifier(manager.environment), manager.pass_on() | {"other": os.memfd_create("x")})
    assert second.names() == ["journal-0", "region-3"]
    taken = second.take("region-3")
    assert taken is not None
    assert os.pread(taken, 5, 0) == b"hello"
    with pytest.raises(PermissionError):
        os.truncate(taken, 0)
    os.close(taken)
    second.remove()
    manager.receive()
    assert manager.kept == {}


def test_a_manager_that_is_away_is_an_error_of_storing(tmp_path: Path) -> None:
    store = SystemdStore(Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}), {})
    with pytest.raises(OSError, match="No such file"):
        store.make("region-0", 4096)


def test_what_systemd_says_of_descriptors() -> None:
    mine = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "0", "LISTEN_FDNAMES": ""}
    assert received_fds(mine) == {}
    assert received_fds({}) == {}
    assert received_fds({"LISTEN_PID": "1", "LISTEN_FDS": "3"}) == {}, "meant for another process"
    assert fd_store_size({"FDSTORE": "7", "NOTIFY_SOCKET": "/x"}) == 7
    assert fd_store_size({"FDSTORE": "7"}) == fd_store_size({"NOTIFY_SOCKET": "/x"}) == 0
