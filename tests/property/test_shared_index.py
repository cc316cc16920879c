"""The shared index, written and read by random histories: a reader finds just what a dict has."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mooncaked.api import shm
from mooncaked.api.protocol import DirectInfo, HelloReply, RegionInfo
from mooncaked.block import Block
from mooncaked.client.direct import Direct
from mooncaked.client.mapping import Mapping
from mooncaked.client.shared import Page
from mooncaked.pools.shared_index import SharedIndex

ENTRIES = 32  # so few that keys share places, and runs of full entries wrap around
EPOCH = 7
KEYS = [b"%d" % number for number in range(40)]


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = SharedIndex(ENTRIES, EPOCH, fenced=True)
        self.blocks: dict[bytes, Block] = {}
        self.pool = os.memfd_create("pool")
        os.ftruncate(self.pool, 1 << 20)
        self.page = os.memfd_create("page")
        os.ftruncate(self.page, shm.PAGE_BYTES)
        self.pipe = os.pipe()
        hello = HelloReply(
            version=1,
            node_id="n",
            epoch=EPOCH,
            regions=[RegionInfo(region=3, size=1 << 20)],
            direct=DirectInfo(index_bytes=self.index.size, page_bytes=shm.PAGE_BYTES),
        )
        mapping = Mapping(hello, [self.pool, self.index.fd, self.page])
        assert mapping.shared is not None
        mapping.shared.learn("n", self.index.seeds("n"))
        own = Page(self.page, shm.PAGE_BYTES, None)
        self.direct = Direct(mapping, mapping.shared, own, "n", self.pipe[0])

    def teardown(self) -> None:
        for fd in (self.pool, self.page, *self.pipe):
            os.close(fd)
        self.index.close()

    @rule(
        key=st.sampled_from(KEYS),
        offset=st.integers(0, (1 << 20) - 9),
        checksum=st.none() | st.integers(0, (1 << 64) - 1),
        unverified=st.booleans(),
    )
    def store(self, key: bytes, offset: int, checksum: int | None, unverified: bool) -> None:
        if key not in self.blocks:
            block = Block("n", key, 1 + offset % 8, None, b"", offset, 3)
            block.checksum, block.unverified = checksum, unverified
            self.blocks[key] = block
            self.index.stored(block)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def remove(self, data: Any) -> None:
        block = self.blocks.pop(data.draw(st.sampled_from(sorted(self.blocks))))
        self.index.removed(block)
        self.index.forget(block)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), checksum=st.integers(0, (1 << 64) - 1))
    def verify(self, data: Any, checksum: int) -> None:
        block = self.blocks[data.draw(st.sampled_from(sorted(self.blocks)))]
        block.checksum, block.unverified = checksum, False
        self.index.verified(block)

    @invariant()
    def a_reader_finds_what_is_there(self) -> None:
        complete = not self.index.unlisted
        found = [self.direct.find(key) for key in KEYS]
        for key, at in zip(KEYS, found, strict=True):
            if at >= 0 or complete:
                assert (at >= 0) == (key in self.blocks)
            else:
                assert at == -2, "a miss in an index that is not complete is to be asked for"
            if at >= 0:
                self.check_entry(self.blocks[key])
        if complete:
            assert self.direct.exists(KEYS) == [key in self.blocks for key in KEYS]

    def check_entry(self, block: Block) -> None:
        found = self.direct.look_up(block.key)
        if block.unverified:
            assert not hasattr(found, "view"), "it is not to be read before it is verified"
            return
        os.pwrite(self.pool, b"%08d" % (self.index.id_of(block) % 10**8), block.offset)
        assert found.view == os.pread(self.pool, block.size, block.offset)  # type: ignore[union-attr]
        assert found.checksum == block.checksum  # type: ignore[union-attr]
        assert found.number == self.index.id_of(block)  # type: ignore[union-attr]

    @invariant()
    def it_is_whole(self) -> None:
        self.index.check_integrity()
        assert len(self.index) + self.index.unlisted == len(self.blocks)


IndexMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=60, deadline=None)
TestIndex = IndexMachine.TestCase
