"""One engine of the soak test, as a process: does everything that a client can do, at random, and checks each
byte that it reads.

    python -m tests.node.soak_client SOCKET SEED SECONDS

A value says by itself which key it belongs to, so that no two processes need to agree on anything. The last
line of output counts what was done; the exit code is 1 if a byte was wrong.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable

from mooncaked.client import Client, PutResult
from mooncaked.errors import ConnectionLost, PoolFull

KEYS = 600
SIZES = (1, 17, 4096, 4096, 30_000, 65_536, 65_536, 262_144)
_NOISE = random.Random(1).randbytes(max(SIZES) + 4096)
NAMESPACES = ("tenant-a/model", "tenant-b/model")


def value(namespace: str, number: int) -> bytes:
    """The one value of a key."""
    size = SIZES[number % len(SIZES)]
    start = (number * 7 + len(namespace)) % 4096
    return (b"%s/%d:" % (namespace.encode(), number) + _NOISE[start:])[:size]


def key(number: int) -> bytes:
    return b"key-%d" % number


class Engine:
    def __init__(self, socket: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.clients = {name: Client(socket, name, verify=seed % 2 == 0) for name in NAMESPACES}
        self.buffer = bytearray(max(SIZES))
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []

    def step(self) -> None:
        namespace = self.random.choice(NAMESPACES)
        actions: list[Callable[[Client, str], None]] = [
            self.put, self.put, self.put_chain, self.get, self.get_into, self.view, self.get_batch,
            self.exists, self.remove,
        ]  # fmt: skip
        self.random.choice(actions)(self.clients[namespace], namespace)

    def pick(self) -> int:
        """Some keys are asked for much more often than others."""
        return min(self.random.randrange(KEYS), self.random.randrange(KEYS))

    def check(self, namespace: str, number: int, got: bytes | memoryview, how: str) -> None:
        self.done[how] += 1
        if bytes(got) != value(namespace, number):
            self.wrong.append(f"{how} {namespace} {number}: {len(got)} bytes, {bytes(got[:40])!r}")

    def put(self, client: Client, namespace: str) -> None:
        number = self.pick()
        try:
            self.done[client.put(key(number), value(namespace, number))] += 1
        except PoolFull:
            self.done[PutResult.FULL] += 1

    def put_chain(self, client: Client, namespace: str) -> None:
        first = self.pick() // 8 * 8
        numbers = range(first, first + 8)
        parents = [None, *[key(number) for number in numbers[:-1]]]
        values = [value(namespace, number) for number in numbers]
        self.done.update(client.put_batch([key(number) for number in numbers], values, parents=parents))

    def get(self, client: Client, namespace: str) -> None:
        number = self.pick()
        if (got := client.get(key(number))) is not None:
            self.check(namespace, number, got, "get")

    def get_into(self, client: Client, namespace: str) -> None:
        number = self.pick()
        if (size := client.get_into(key(number), self.buffer)) is not None:
            self.check(namespace, number, memoryview(self.buffer)[:size], "get_into")

    def view(self, client: Client, namespace: str) -> None:
        number = self.pick()
        with client.get_view(key(number)) as view:
            if view is not None:
                self.check(namespace, number, view, "view")
                time.sleep(self.random.random() * 0.002)
                self.check(namespace, number, view, "view")

    def get_batch(self, client: Client, namespace: str) -> None:
        numbers = [self.pick() for _ in range(8)]
        for number, got in zip(numbers, client.get_batch([key(n) for n in numbers]), strict=True):
            if got is not None:
                self.check(namespace, number, got, "get_batch")

    def exists(self, client: Client, _: str) -> None:
        first = self.pick() // 8 * 8
        keys = [key(number) for number in range(first, first + 8)]
        self.done["exists"] += sum(client.exists_batch(keys))
        self.done["matched"] += client.prefix_match(keys)

    def remove(self, client: Client, _: str) -> None:
        if self.random.random() < 0.2:
            self.done["removed"] += client.remove(key(self.pick()))


def main() -> int:
    socket, seed, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    engine = Engine(socket, seed)
    end = time.monotonic() + seconds
    while time.monotonic() < end and not engine.wrong:
        try:
            engine.step()
        except ConnectionLost:
            engine.done["lost"] += 1
    print(json.dumps({"done": engine.done, "wrong": engine.wrong}))
    return 1 if engine.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
