"""Two nodes: what one lacks comes from the other, by its id or by what the conductor knows."""

from __future__ import annotations

import signal

from tests.node.daemons import MakeDaemon, until

VALUE = bytes(range(256)) * 1024


def test_blocks_come_from_a_node_that_is_named_by_its_id(make_daemon: MakeDaemon) -> None:
    first, second = make_daemon("a", node__id="a").start(), make_daemon("b", node__id="b").start()
    first.ready(), second.ready()
    with first.client() as writer, second.client(timeout_s=20) as reader:
        writer.put("key", VALUE)
        until(lambda: [peer["node_id"] for peer in second.status()["peers"]] == ["a"], "b seeing a")
        assert reader.get("key") is None
        assert reader.get("key", sources=["nobody", "b"]) is None
        assert reader.get("key", sources=["a"]) == VALUE
        assert reader.get("key") == VALUE
        assert second.metric("mooncaked_fetched_bytes_total") == len(VALUE)
        assert first.metric("mooncaked_peer_sent_bytes_total") == len(VALUE)

        writer.put("later", VALUE)
        first.signal(signal.SIGTERM)
        assert first.wait() == 0
        until(lambda: second.status()["peers"] == [], "b seeing that a has gone")
        assert reader.get("later", sources=["a"]) is None
        first.start().ready()
        until(lambda: [peer["node_id"] for peer in second.status()["peers"]] == ["a"], "b seeing a again")
        writer.put("later", VALUE)
        assert reader.get("later", sources=["a"]) == VALUE


def test_blocks_come_from_wherever_the_conductor_knows_them(make_daemon: MakeDaemon) -> None:
    first = make_daemon("a", node__id="a", conductor__enabled="true").start()
    second = make_daemon("b", node__id="b").start()
    first.ready(), second.ready()
    with first.client() as writer, second.client() as reader:
        writer.put("key", VALUE)
        until(lambda: second.status()["leader"] == "a", "b seeing the leader")
        until(lambda: reader.get("key", locate=True) == VALUE, "the block of a, by the leader's index")
        first.kill()
        assert reader.get("key", locate=True) == VALUE
        assert reader.get("other", locate=True) is None, "without a leader that answers, it is a miss"
