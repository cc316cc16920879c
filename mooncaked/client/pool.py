"""The connections of a blocking client: borrowed by one thread at a time, made when needed, bounded."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from mooncaked.api.protocol import REPLIES
from mooncaked.client.connection import Connection, Greeting
from mooncaked.client.direct import Direct
from mooncaked.client.mapping import Mapping
from mooncaked.client.operations import Call, Operation, Post, Send, Step, Work
from mooncaked.client.posting import PostCounts, Posting
from mooncaked.clock import Clock, Deadline
from mooncaked.errors import ConnectionLost, DeadlineExceeded, Refused

CONNECTIONS_MAX = 16
T = TypeVar("T")


class Borrowed:
    """A connection in the hands of one thread, which performs operations on it. `with` gives it back."""

    def __init__(self, pool: ConnectionPool, connection: Connection) -> None:
        self._pool = pool
        self.connection = connection

    def __enter__(self) -> Borrowed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and not issubclass(kind, Exception):
            # A signal may end an operation between any two steps; with the connection ends what it holds.
            self.connection.broken = True
        self._pool.give_back(self.connection)

    def drive(self, operation: Operation[T]) -> T:
        """Perform the steps of `operation` and return its result.

        A first step that finds the connection dead, since the daemon was restarted while it lay idle, is
        performed once more on a new one."""
        try:
            step = next(operation)
            while True:
                try:
                    result = self._perform(step)
                except (
                    Exception
                ) as error:  # the operation gives back what it holds after any, and raises it again
                    step = operation.throw(error)
                else:
                    step = operation.send(result)
        except StopIteration as stop:
            result_of_all: T = stop.value
            return result_of_all

    def _perform(self, step: Step) -> Any:
        connection, timeout_s = self.connection, self._pool.timeout_s
        if isinstance(step, Work):
            return step.run(connection.mapping)
        if isinstance(step, Post):
            return connection.post(step.kind, step.body, timeout_s)
        if isinstance(step, Send):
            return connection.send(step.kind, step.body, step.payload, timeout_s)
        if not isinstance(step, Call):
            return connection.undo(step.kind, step.body, REPLIES.get(step.kind), timeout_s)
        try:
            return connection.call(step.kind, step.body, step.reply, timeout_s)
        except ConnectionLost:
            if connection.fresh or not step.restartable:
                raise
        self._pool.replace(self)
        return self.connection.call(step.kind, step.body, step.reply, timeout_s)


class ConnectionPool:
    """Up to `CONNECTIONS_MAX` connections to one daemon, which share one mapping of its memory.

    `direct` and `posting` are for all threads at once: what can be done without an exchange, on the page of
    one of the connections. None while there is none, or the daemon has no such thing."""

    def __init__(self, path: str, namespace: str, token: str | None, timeout_s: float, clock: Clock) -> None:
        self._path = path
        self._namespace = namespace
        self._token = token
        self.timeout_s = timeout_s
        self._clock = clock
        self._reset()
        _pools.add(self)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()  # borrowed or idle
        self._making = 0  # connections that are being made
        self._mapping: Mapping | None = None
        self._closed = False
        self.direct: Direct | None = None
        self.posting: Posting | None = None

    def forget(self) -> None:
        """In a forked child: close its copies of the parent's sockets, and begin anew."""
        for connection in self._all:
            connection.close()
        self._reset()

    def close(self) -> None:
        """Close idle connections now and borrowed ones when they come back."""
        with self._changed:
            self._closed = True
            self.direct = self.posting = None
            self._changed.notify_all()
        self._close_idle()

    def borrow(self) -> Borrowed:
        """A connection for this thread alone; raises what `Greeting` does, or `DeadlineExceeded`."""
        with self._changed:
            if self._idle and not self._closed:
                return Borrowed(self, self._idle.pop())
        return Borrowed(self, self._take())

    @contextmanager
    def lend(self, connection: Connection) -> Iterator[Connection | None]:
        """This very connection for an exchange, or None while another thread has it."""
        with self._changed:
            lent = connection in self._idle
            if lent:
                self._idle.remove(connection)
        if not lent:
            yield None
            return
        with Borrowed(self, connection):
            yield connection

    def give_back(self, connection: Connection) -> None:
        """Take a connection back from its thread."""
        with self._changed:
            if not connection.broken and not self._closed:
                self._idle.append(connection)
            else:
                self._discard(connection)
            self._changed.notify()

    def replace(self, borrowed: Borrowed) -> None:
        """Put a new connection in the place of a dead one. Idle ones are as old, so they go too."""
        self._close_idle()
        with self._changed:
            self._discard(borrowed.connection)
            self._making += 1
        borrowed.connection = self._make()

    def _close_idle(self) -> None:
        with self._changed:
            while self._idle:
                self._discard(self._idle.pop())

    def _discard(self, connection: Connection) -> None:
        """Close a connection; under the lock."""
        self._all.discard(connection)
        connection.close()
        if connection.direct is self.direct:
            self._choose_direct()

    def _choose_direct(self) -> None:
        """Let one of the connections be that which all threads use; under the lock."""
        self.direct = self.posting = None
        for connection in () if self._closed else self._all:
            direct, shared = connection.direct, connection.mapping.shared
            if direct is None or shared is None:
                continue
            self.direct = direct
            if shared.posted is not None and direct.page.slot is not None:
                self.posting = Posting(
                    self._namespace,
                    connection,
                    direct,
                    PostCounts(shared, shared.posted, direct.page.slot),
                    partial(self.lend, connection),
                    self.timeout_s,
                    self._clock,
                )
            return

    def _take(self) -> Connection:
        """An idle connection, or a new one when there may be one more."""
        deadline = Deadline(self._clock, self.timeout_s)
        with self._changed:
            while not self._closed and not self._idle and len(self._all) + self._making >= CONNECTIONS_MAX:
                if not self._changed.wait(deadline.left()):
                    limit_ms = round(self.timeout_s * 1000)
                    raise DeadlineExceeded(operation="waiting for a free connection", limit_ms=limit_ms)
            if self._closed:
                raise Refused(problem="this client is closed", remedy="Make a new one.")
            if self._idle:
                return self._idle.pop()
            self._making += 1
        return self._make()

    def _make(self) -> Connection:
        """Connect, as `_making` announced."""
        connection: Connection | None = None
        try:
            greeting = Greeting(self._path, self._token, self.timeout_s, self._clock)
            connection = self._adopt(greeting)
        finally:
            with self._changed:
                self._making -= 1
                if connection is not None:
                    self._all.add(connection)
                    if self.direct is None:
                        self._choose_direct()
                self._changed.notify()
        return connection

    def _adopt(self, greeting: Greeting) -> Connection:
        try:
            with self._changed:
                self._mapping = mapping = greeting.map(self._mapping)
            connection = Connection(greeting, mapping)
            connection.open_direct(self._namespace, self.timeout_s)
            return connection
        except BaseException:
            greeting.close()
            raise


# A child made by fork shares its parent's sockets. Were it to use them, both would read each other's replies;
# were it only to keep them open, the daemon would not see the parent die. So the child closes its copies.
_pools: weakref.WeakSet[ConnectionPool] = weakref.WeakSet()


def _forget_in_child() -> None:
    for pool in list(_pools):
        pool.forget()


os.register_at_fork(after_in_child=_forget_in_child)
