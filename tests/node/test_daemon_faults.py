"""A node that runs: what it does when etcd, an operator or a signal interferes, and when it ends."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import suppress

import psutil

from mooncakectl.local.etcd_server import EtcdServer
from mooncaked.client import PutResult
from mooncaked.errors import ConnectionLost
from mooncaked.types import NodePhase
from tests.node.daemons import Daemon, MakeDaemon, node_records, until

SMALL, LARGE = b"x" * 1024, b"y" * (64 << 10)


def registered_again(daemon: Daemon, etcd: EtcdServer, prefix: str) -> bool:
    records = node_records(etcd.endpoint, prefix)
    return [record.pid for record in records.values()] == [daemon.process.pid] and daemon.http("/readyz")[
        0
    ] == 200


# --- etcd ------------------------------------------------------------------------------------------------


def test_etcd_goes_and_comes_back_with_or_without_its_data(
    make_daemon: MakeDaemon, own_etcd: EtcdServer, etcd_prefix: str
) -> None:
    own_etcd.start()
    own_etcd.wait_ready()
    daemon = make_daemon(etcd=own_etcd.endpoint).start().ready()
    with daemon.client() as client:
        client.put("key", SMALL)
        own_etcd.kill()
        until(lambda: daemon.http("/readyz")[0] == 503, "not ready, its lease being over")
        assert client.get("key") == SMALL
        assert client.put("more", SMALL) is PutResult.STORED
        own_etcd.start()
        own_etcd.wait_ready()
        until(lambda: registered_again(daemon, own_etcd, etcd_prefix), "registered after a restart of etcd")

        own_etcd.kill()
        own_etcd.data_dir = own_etcd.data_dir.with_name("empty")
        own_etcd.start()
        own_etcd.wait_ready()
        until(lambda: registered_again(daemon, own_etcd, etcd_prefix), "registered in an etcd that is new")
        assert client.get("key") == SMALL


# --- SIGHUP ----------------------------------------------------------------------------------------------


def reloaded(daemon: Daemon, text: str, times: int) -> None:
    """Change the file, reload, and wait until the daemon has said READY for the `times`-th time."""
    daemon.config_path.write_text(text)
    daemon.signal(signal.SIGHUP)
    until(lambda: daemon.notifications().count("READY=1") == times, f"READY after a reload\n{daemon.log}")


def test_a_reload_applies_what_is_live_and_refuses_what_is_bad(
    make_daemon: MakeDaemon, etcd_endpoint: str, etcd_prefix: str
) -> None:
    daemon = make_daemon().start().ready()
    reloaded(
        daemon, '[log]\nlevel = "debug"\n[node]\nlabels = { zone = "z2" }\n[dram]\nprefault_threads = 2', 2
    )
    assert "RELOADING=1\nMONOTONIC_USEC=" in daemon.notifications()
    assert (
        "reloaded: applied node.labels,log.level, needs restart dram.prefault_threads"
        in daemon.notifications()
    )
    with daemon.client() as client:
        client.put("key", SMALL)
    until(lambda: "DEBUG mooncaked" in daemon.log, "lines of the new level")
    labels = {"zone": "z2"}
    until(
        lambda: [record.labels for record in node_records(etcd_endpoint, etcd_prefix).values()] == [labels],
        "new labels in the record",
    )
    for count, bad in enumerate(("[dram\n", "[dram]\nhigh_watermark = 0.5", "[log]\nlevle = 'info'"), 3):
        reloaded(daemon, bad, count)
        assert "reload refused" in daemon.notifications().splitlines()[-1]
    assert "Did you mean the key level?" in daemon.log
    assert daemon.log.count("the configuration in force stays") == 3
    assert daemon.status()["node"]["labels"] == labels
    assert daemon.http("/readyz")[0] == 200
    with daemon.client() as client:
        for number in range(200):  # 12.5 of 16 MiB
            client.put(f"key{number}", LARGE)
        assert daemon.metric("mooncaked_evicted_blocks_total") == 0
        reloaded(daemon, "[dram]\nhigh_watermark = 0.5\nlow_watermark = 0.25", 6)
        until(lambda: daemon.metric("mooncaked_pool_used_bytes") <= 4 << 20, "eviction to the low watermark")
        assert client.get("key199") == LARGE


# --- ending ----------------------------------------------------------------------------------------------


def test_sigterm_ends_an_idle_node_at_once_and_removes_its_record(
    make_daemon: MakeDaemon, etcd_endpoint: str, etcd_prefix: str
) -> None:
    daemon = make_daemon().start().ready()
    with daemon.client() as client:
        client.put("key", SMALL)
        daemon.signal(signal.SIGTERM)
        assert daemon.wait(within_s=10) == 0, daemon.log
    assert node_records(etcd_endpoint, etcd_prefix) == {}
    assert "STOPPING=1" in daemon.notifications()
    assert not daemon.socket_path.exists()
    assert "Traceback" not in daemon.log


def test_sigterm_waits_for_a_reader(make_daemon: MakeDaemon, etcd_endpoint: str, etcd_prefix: str) -> None:
    daemon = make_daemon(node__drain_timeout="30s").start().ready()
    with daemon.client() as client:
        client.put("key", SMALL)
        with client.get_view("key") as view:
            daemon.signal(signal.SIGTERM)
            until(
                lambda: (
                    [r.phase for r in node_records(etcd_endpoint, etcd_prefix).values()]
                    == [NodePhase.DRAINING]
                ),
                "a record that says draining",
            )
            code, body = daemon.http("/readyz?verbose")
            assert (code, "draining" in body) == (503, True)
            assert view is not None
            assert bytes(view) == SMALL
            assert daemon.process.poll() is None
        assert daemon.wait(within_s=10) == 0, daemon.log
    assert "drain cut short" not in daemon.log


def test_a_second_signal_and_the_timeout_cut_the_drain_short(make_daemon: MakeDaemon) -> None:
    for timeout, hurry in (("60s", True), ("200ms", False)):
        daemon = make_daemon(timeout, node__drain_timeout=timeout).start().ready()
        with daemon.client() as client:
            client.put("key", SMALL)
            with suppress(ConnectionLost), client.get_view("key"):  # ending the view finds no daemon
                daemon.signal(signal.SIGTERM)
                if hurry:
                    until(lambda: "STOPPING=1" in daemon.notifications(), "STOPPING")  # noqa: B023 - same turn
                    daemon.signal(signal.SIGINT)
                assert daemon.wait(within_s=10) == 0, daemon.log
        assert "drain cut short pinned=1" in daemon.log


def test_sigterm_without_etcd_still_ends_soon(make_daemon: MakeDaemon, own_etcd: EtcdServer) -> None:
    own_etcd.start()
    own_etcd.wait_ready()
    daemon = make_daemon(etcd=own_etcd.endpoint).start().ready()
    own_etcd.kill()
    daemon.signal(signal.SIGTERM)
    assert daemon.wait(within_s=15) == 0, daemon.log


# --- life ------------------------------------------------------------------------------------------------


def test_the_watchdog_is_fed_while_the_loop_works_and_only_then(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon()
    daemon.environment["WATCHDOG_USEC"] = "2000000"
    daemon.start().ready()
    fed = daemon.notifications().count("WATCHDOG=1")
    until(lambda: daemon.notifications().count("WATCHDOG=1") > fed + 2, "signs of life")
    daemon.signal(signal.SIGSTOP)
    fed = daemon.notifications().count("WATCHDOG=1")
    threading.Event().wait(1.2)  # longer than two beats of half a second
    assert daemon.notifications().count("WATCHDOG=1") <= fed + 1
    daemon.signal(signal.SIGCONT)
    until(lambda: daemon.notifications().count("WATCHDOG=1") > fed + 2, "signs of life again")
    daemon.signal(signal.SIGABRT)  # what systemd sends when it was not fed
    assert daemon.wait() == -signal.SIGABRT
    assert "most recent call first" in daemon.log, "every thread's stack is in the log"


def test_taking_the_pool_holds_up_neither_the_loop_nor_the_lease(
    make_daemon: MakeDaemon, etcd_endpoint: str, etcd_prefix: str
) -> None:
    daemon = make_daemon(dram__size="1GiB", dram__prefault_threads="1").start()
    phases = set()
    begin = time.monotonic()
    while "READY=1" not in daemon.notifications():
        phases |= {record.phase for record in node_records(etcd_endpoint, etcd_prefix).values()}
        assert time.monotonic() - begin < 60, daemon.log
    assert NodePhase.STARTING in phases, "it registers while it still takes memory"
    daemon.ready()
    assert "EXTEND_TIMEOUT_USEC=" in daemon.notifications()
    assert daemon.metric("mooncaked_loop_lag_max_seconds") < 0.5
    assert "lease lost" not in daemon.log
    resident = psutil.Process(daemon.process.pid).memory_info().shared
    assert resident >= 1 << 30, "all of the pool's memory is in place"


def test_sigterm_while_the_pool_is_taken_ends_at_once(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(dram__size="1GiB", dram__prefault_threads="1").start()
    until(lambda: "EXTEND_TIMEOUT_USEC=" in daemon.notifications(), "memory being taken")
    daemon.signal(signal.SIGTERM)
    assert daemon.wait(within_s=10) == 0, daemon.log
    assert "phase=ready" not in daemon.log
