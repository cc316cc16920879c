"""Clients and daemons that die, hang or come back: real processes, killed for real."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncaked.api.protocol import Kind, PutAbort, PutBeginReply, PutItem, PutSlot
from mooncaked.client import AsyncClient, Client, PutResult, operations
from mooncaked.client.operations import Source, Undo, put
from mooncaked.errors import ConnectionLost, DeadlineExceeded, MooncakeError, Unreachable
from tests.node.running import NodeProcess, line_of, node_process, node_thread, script, until
from tests.node.small_node import SmallNode


@pytest.fixture
def node(tmp_path: Path) -> Iterator[SmallNode]:
    with node_thread(tmp_path / "c.sock", size=16 << 20) as node:
        yield node
        until(lambda: node.store.stats().owners == 0, "every connection's holdings are given back")


@pytest.fixture
def process(tmp_path: Path) -> Iterator[NodeProcess]:
    with node_process(tmp_path / "c.sock") as process:
        yield process


# --- a client dies -----------------------------------------------------------------------------------

WRITER = """
import sys
from mooncaked.client import Client, buffers, operations
def copy_in(target, views):          # the daemon has given room; die before the value is complete
    target[:10] = b"x" * 10
    print("copying", flush=True)
    sys.stdin.read()
operations.copy_in = copy_in
Client(sys.argv[1]).put("k", bytes(1 << 20))
"""

READER = """
import sys
from mooncaked.client import Client
with Client(sys.argv[1]).get_view("k") as view:
    print(bytes(view[:5]).decode(), flush=True)
    sys.stdin.read()
"""


def test_a_writer_killed_in_the_middle_leaves_nothing(node: SmallNode) -> None:
    with Client(node.socket) as client:
        with script(WRITER, node.socket) as writer:
            assert line_of(writer) == "copying"
            assert node.store.stats().filling == 1
            assert client.put("k", b"another") is PutResult.BUSY
            assert client.get("k") is None
            writer.kill()
            until(lambda: node.store.stats().filling == 0, "its write is aborted", 2)
        assert client.get("k") is None
        assert client.put("k", b"another") is PutResult.STORED


def test_a_reader_killed_in_the_middle_pins_nothing(node: SmallNode) -> None:
    with Client(node.socket) as client:
        client.put("k", b"value")
        with script(READER, node.socket) as reader:
            assert line_of(reader) == "value"
            assert client.remove("k") is False  # it is being read
            assert node.store.stats().hidden == 1
            reader.kill()
            until(lambda: node.store.stats().hidden == 0, "its pin ends", 2)
        assert node.store.stats().used_bytes == 0


FORKED = """
import os, sys
from mooncaked.client import Client
client = Client(sys.argv[1])
client.put("k", b"value")
with client.get_view("k"):
    if os.fork() == 0:
        assert client.get("k") == b"value"      # by a connection of its own
        print("child", flush=True)
        sys.stdin.read()
        os._exit(0)
    assert client.get("k") == b"value"
    os.wait()
"""


def test_a_forked_child_has_connections_of_its_own(node: SmallNode) -> None:
    with script(FORKED, node.socket) as parent:
        assert line_of(parent) == "child"
        assert (node.store.stats().owners, node.pages.viewing()) == (2, 1)
        parent.kill()  # the child lives on, and does not keep its parent's pin alive
        until(lambda: node.pages.viewing() == 0, "the parent's pin ends", 2)
        until(lambda: node.store.stats().owners == 1, "the parent's connection ends", 2)


# --- the daemon dies ---------------------------------------------------------------------------------


def test_a_daemon_that_dies_and_comes_back(process: NodeProcess) -> None:
    with Client(process.socket) as client:
        client.put("k", b"value")
        epoch = client.hello().epoch
        process.kill()
        begin = time.monotonic()
        for _ in range(3):
            with pytest.raises(Unreachable, match="Is mooncaked running"):
                client.get("k")
        assert time.monotonic() - begin < 1
        process.start()  # over the socket file that the killed one left
        assert client.get("k") is None
        assert client.put("k", b"new") is PutResult.STORED
        assert client.get("k") == b"new"
        assert client.hello().epoch != epoch


def test_an_idle_client_does_not_notice_a_restart(process: NodeProcess) -> None:
    with Client(process.socket) as client:
        client.put("k", b"value")
        process.kill()
        process.start()
        assert client.exists_batch(["k"]) == [False]
        assert client.put("k", b"new") is PutResult.STORED


async def test_an_asyncio_client_over_a_restart(process: NodeProcess) -> None:
    async with AsyncClient(process.socket) as client:
        await client.put("k", b"value")
        process.kill()
        with pytest.raises((Unreachable, ConnectionLost)):
            await client.get("k")
        with pytest.raises(Unreachable):
            await client.get("k")
        await asyncio.to_thread(process.start)
        assert await client.get("k") is None
        assert await client.put("k", b"new") is PutResult.STORED
        assert await client.get("k") == b"new"


def test_a_view_when_the_daemon_dies_is_readable_and_ends_with_an_error(process: NodeProcess) -> None:
    with Client(process.socket) as client:
        client.put("k", b"value")
        seen = []

        def look() -> None:
            with client.get_view("k") as view:
                process.kill()
                seen.append(bytes(view or b""))

        with pytest.raises(ConnectionLost):
            look()
        assert seen == [b"value"]


def test_a_restart_in_the_middle_of_a_write(process: NodeProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old mapping must not be taken for the new one: the value is no value, its place unharmed."""
    real = operations.copy_in
    with Client(process.socket) as client, Client(process.socket) as fresh:

        def slow_copy(target: memoryview, views: list[memoryview]) -> int:
            monkeypatch.setattr(operations, "copy_in", real)
            process.kill()
            process.start()
            fresh.put("new", b"B" * 4096)  # lands where the old daemon had given room
            return real(target, views)

        monkeypatch.setattr(operations, "copy_in", slow_copy)
        with pytest.raises(ConnectionLost):
            client.put("k", b"A" * 4096)
        assert client.get("k") is None
        assert client.get("new") == b"B" * 4096
        assert client.put("k", b"A" * 4096) is PutResult.STORED


def test_a_daemon_that_hangs_is_late_and_not_waited_for_long(process: NodeProcess) -> None:
    with Client(process.socket, timeout_s=0.3) as client:
        client.put("k", b"value")
        process.signal(signal.SIGSTOP)
        assert client.get("k") == b"value"  # which needs no daemon
        begin = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="300 ms"):
            client.remove("other")
        with pytest.raises(DeadlineExceeded):  # also the greeting of a new connection
            client.get("k")
        assert time.monotonic() - begin < 2
        process.signal(signal.SIGCONT)
        until(lambda: client.get("k") == b"value", "it works again")


async def test_an_asyncio_call_that_hangs(process: NodeProcess) -> None:
    async with AsyncClient(process.socket, timeout_s=0.3) as client:
        await client.put("k", b"value")
        process.signal(signal.SIGSTOP)
        assert await client.get("k") == b"value"  # which needs no daemon
        with pytest.raises(DeadlineExceeded, match="300 ms"):
            await client.remove("other")
        process.signal(signal.SIGCONT)
        assert await client.get("k") == b"value"


STORM = """
import sys, time
from mooncaked.client import Client
from mooncaked.errors import MooncakeError
client, i, errors = Client(sys.argv[1], timeout_s=2), 0, []
print("ready", flush=True)
end = time.monotonic() + 30
while time.monotonic() < end and not errors[3:]:
    i += 1
    value = b"%d" % i * 500
    try:
        client.put(f"k{i}", value)
        got = client.get(f"k{i}")
        assert got is None or got == value, "partial data"
    except MooncakeError as error:
        errors.append(error.code)
        time.sleep(0.02)
print(*set(errors), flush=True)
"""


def test_killing_the_daemon_under_load_gives_typed_errors_only(process: NodeProcess) -> None:
    with script(STORM, process.socket) as storm:
        assert line_of(storm) == "ready"
        for _ in range(2):
            time.sleep(0.1)  # no event to wait for: the load just has to be on
            process.kill()
            process.start()
        process.kill()
        assert set(line_of(storm).split()) <= {"unreachable", "connection_lost"}


# --- failures inside a client ------------------------------------------------------------------------------


def test_an_exception_in_the_middle_of_a_write_gives_the_room_back(
    node: SmallNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> int:
        raise MemoryError("no")

    with Client(node.socket) as client:
        client.put("a", b"1")
        owners = node.store.stats().owners
        with monkeypatch.context() as patch:
            patch.setattr("mooncaked.client.operations.copy_in", fail)
            with pytest.raises(MemoryError):
                client.put_batch(["k1", "k2"], [b"1", b"22"])
        assert node.store.stats().filling == 0
        assert client.put_batch(["k1", "k2"], [b"1", b"2"]) == [PutResult.STORED] * 2
        assert node.store.stats().owners == owners  # over the same connection


def test_an_interrupt_in_the_middle_of_a_write_gives_the_room_back(
    node: SmallNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> int:
        raise KeyboardInterrupt

    with Client(node.socket) as client:
        with monkeypatch.context() as patch:
            patch.setattr("mooncaked.client.operations.copy_in", interrupt)
            with pytest.raises(KeyboardInterrupt):
                client.put("k", b"1")
        until(lambda: node.store.stats().filling == 0, "aborted", 2)
        assert client.put("k", b"1") is PutResult.STORED


async def test_a_cancelled_write_gives_the_room_back_after_the_copy(
    node: SmallNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    copying, go_on = threading.Event(), threading.Event()

    def slow_copy(*_: Any) -> int:
        copying.set()
        go_on.wait(10)
        return 0

    monkeypatch.setattr("mooncaked.client.operations.copy_in", slow_copy)
    async with AsyncClient(node.socket) as client:
        task = asyncio.create_task(client.put("k", bytes(1 << 20)))
        await asyncio.to_thread(copying.wait, 10)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        assert node.store.stats().filling == 1  # the thread still copies
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await client.remove("k") is False
        assert node.store.stats().filling == 0


async def test_a_reply_that_nobody_waits_for_is_given_back(node: SmallNode) -> None:
    async with AsyncClient(node.socket) as client:
        await client.put("k", b"value")
        for kind in ("get", "put"):
            task = asyncio.create_task(client.get_tensor("k") if kind == "get" else client.put("new", b"1"))
            await asyncio.sleep(0)  # its first turn sends the request; the reply can come in a later one only
            assert (await client.connect())._waiters
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        stats = node.store.stats
        await asyncio.to_thread(until, lambda: not (stats().pinned or stats().filling), "all given back")
        assert await client.exists("new") is False


def test_an_operation_that_is_thrown_an_error_undoes_what_it_had_begun() -> None:
    """Each step of a put, interrupted: what was begun is given back, and the error goes on."""
    source = Source(PutItem(key=b"k", size=1), [memoryview(b"1")])
    replies = [PutBeginReply(slots=[PutSlot(status="ok", token=5)]), [1]]
    error = ConnectionLost(what="x", operation="y", cause="z")
    for steps_before in range(3):
        operation = put("n", [source])
        next(operation)
        for reply in replies[:steps_before]:
            operation.send(reply)
        if steps_before:
            undo = operation.throw(error)
            assert isinstance(undo, Undo)
            assert (undo.kind, undo.body) == (Kind.PUT_ABORT, PutAbort(tokens=[5]))
        with pytest.raises(ConnectionLost):
            operation.send(None) if steps_before else operation.throw(error)


def test_threads_share_a_client(node: SmallNode) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for i in range(50):
                key, value = f"{number}/{i}", f"{number}/{i}".encode() * 100
                assert client.put(key, value) is PutResult.STORED
                assert client.get(key) == value
                with client.get_view(key) as view:
                    assert view == value
        except (AssertionError, MooncakeError) as error:
            failures.append(error)

    with Client(node.socket) as client:
        threads = [threading.Thread(target=work, args=[number]) for number in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert node.store.stats().owners <= 16


def test_importing_the_client_is_light() -> None:
    source = """
import sys, time, numpy, msgspec, xxhash, socket, logging   # what any engine has loaded already, or must
begin = time.process_time()
import mooncaked.client
took = time.process_time() - begin
heavy = {"torch", "aiohttp", "grpc", "asyncio", "mooncaked.store", "mooncaked.daemon"} & set(sys.modules)
print(took, heavy or "none", flush=True)
"""
    with script(source) as process:
        took, heavy = line_of(process).split(maxsplit=1)
        assert heavy == "none"
        assert float(took) < 0.2


def test_the_daemon_closes_descriptors_and_the_client_too(node: SmallNode) -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    with Client(node.socket) as client:
        client.get("k")
    until(lambda: node.store.stats().owners == 0, "the connection ends")
    before = open_files()
    for _ in range(20):
        with Client(node.socket) as client:
            client.get("k")
    until(lambda: node.store.stats().owners == 0, "the connections end")
    assert open_files() <= before
