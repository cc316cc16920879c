"""User and password, tokens that age, and mutual TLS."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from mooncakectl.local.etcd_server import EtcdServer, ServerTls, free_ports
from mooncaked.clock import SystemClock
from mooncaked.cluster.connect import connect
from mooncaked.cluster.etcd import EtcdOptions, EtcdSession
from mooncaked.cluster.kv import Changes, Live, Put, Snapshot
from mooncaked.cluster.registry import ClusterView, Registration
from mooncaked.cluster.watch import watch_prefix
from mooncaked.config import EtcdConfig
from mooncaked.errors import ConfigError, Unauthenticated, Unreachable
from tests.cluster.etcd_admin import EtcdAdmin
from tests.cluster.records import node
from tests.cluster.waiting import eventually


@contextmanager
def etcd_with_users(folder: Path, *extra_args: str) -> Iterator[EtcdServer]:
    """User mooncake may write under /mooncake/, and nothing else."""
    client, peer = free_ports(2)
    server = EtcdServer(folder / "etcd", client, peer, folder / "etcd.log", extra_args=extra_args)
    server.start()
    try:
        server.wait_ready()
        with EtcdAdmin(server.endpoint) as admin:
            admin.add_user("root", "rootpw", "root")
            admin.add_user("mooncake", "secret", "mooncake", "/mooncake/")
            admin.enable_auth()
        yield server
    finally:
        server.kill()


def options(server: EtcdServer, password: str = "secret", user: str = "mooncake") -> EtcdOptions:
    return EtcdOptions(endpoints=[server.endpoint], user=user, password=password, request_timeout_s=1.0)


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[EtcdServer]:
    with etcd_with_users(tmp_path) as server:
        yield server


async def test_a_user_may_do_what_its_role_allows(guarded: EtcdServer) -> None:
    async with EtcdSession(options(guarded)) as etcd:
        await etcd.put("/mooncake/a", b"1")
        assert await etcd.get("/mooncake/a")
        assert (await etcd.range("/mooncake/")).items
        events = etcd.watch("/mooncake/")
        assert isinstance(await anext(aiter(events)), Snapshot)
        with pytest.raises(Unauthenticated, match="permission denied"):
            await etcd.put("/elsewhere", b"1")
        with pytest.raises(Unauthenticated, match="permission denied"):
            await anext(aiter(etcd.watch("/elsewhere/", 1)))


async def test_wrong_or_no_credentials_are_refused_with_the_reason(guarded: EtcdServer) -> None:
    async with EtcdSession(options(guarded, "wrong")) as etcd:
        with pytest.raises(Unauthenticated, match=r"invalid user ID or password \(user mooncake\)"):
            await etcd.get("/mooncake/a")
    async with EtcdSession(EtcdOptions(endpoints=[guarded.endpoint], request_timeout_s=1.0)) as etcd:
        with pytest.raises(Unauthenticated, match="no user is configured"):
            await etcd.get("/mooncake/a")


async def test_a_lease_is_kept_alive_with_a_password(guarded: EtcdServer) -> None:
    async with EtcdSession(options(guarded)) as etcd:
        lease = await etcd.grant(1.0, "test")
        await etcd.put("/mooncake/a", b"1", lease.id)
        await asyncio.sleep(1.7)
        assert lease.valid()
        assert await etcd.get("/mooncake/a")
        await lease.close()
        assert await etcd.get("/mooncake/a") is None


async def test_a_token_that_ran_out_is_renewed(tmp_path: Path) -> None:
    with etcd_with_users(tmp_path, "--auth-token-ttl", "1") as server:
        async with EtcdSession(options(server)) as etcd:
            await etcd.put("/mooncake/a", b"1")
            await asyncio.sleep(2.5)  # etcd looks for old tokens once a second
            assert (await etcd.txn([], [Put("/mooncake/a", b"3")])).succeeded


async def test_a_change_of_users_does_not_shut_a_session_out(guarded: EtcdServer) -> None:
    """Any change of users or roles makes earlier tokens stale: "revision of auth store is old"."""
    async with EtcdSession(options(guarded)) as etcd:
        await etcd.put("/mooncake/a", b"1")
        with EtcdAdmin(guarded.endpoint) as login:
            token = login.login("root", "rootpw")
        with EtcdAdmin(guarded.endpoint, token) as admin:
            admin.change_password("root", "other")
        await etcd.put("/mooncake/a", b"2")
        view = watch_prefix(etcd, "/mooncake/", SystemClock())
        assert (await anext(view)).items["/mooncake/a"].value == b"2"


async def test_a_restart_that_forgets_tokens_is_survived(guarded: EtcdServer) -> None:
    """etcd keeps simple tokens in memory only."""
    async with EtcdSession(options(guarded)) as etcd:
        view = ClusterView(etcd, "/mooncake")
        following = asyncio.create_task(view.run())
        registration = Registration(etcd, 3.0, "/mooncake/nodes/n1", lambda: node("n1"))
        registration.start()
        await view.wait_for(lambda view: "n1" in view.nodes, 5)
        await asyncio.to_thread(guarded.restart)
        await etcd.put("/mooncake/nodes/n2", msgspec.json.encode(node("n2")))
        await view.wait_for(lambda view: set(view.nodes) == {"n1", "n2"}, 10)
        await eventually(lambda: registration.registered, 5)
        await registration.close()
        following.cancel()
        await asyncio.wait([following])


async def test_authentication_switched_on_later_is_followed(own_etcd: EtcdServer) -> None:
    async with EtcdSession(options(own_etcd)) as etcd:
        await etcd.put("/mooncake/a", b"1")
        with EtcdAdmin(own_etcd.endpoint) as admin:
            admin.add_user("root", "rootpw", "root")
            admin.add_user("mooncake", "secret", "mooncake", "/mooncake/")
            admin.enable_auth()
        await etcd.put("/mooncake/a", b"2")


async def test_a_watch_without_rights_heals_when_they_are_given(guarded: EtcdServer) -> None:
    async with EtcdSession(options(guarded)) as etcd:
        view = ClusterView(etcd, "/other")
        following = asyncio.create_task(view.run())
        await eventually(lambda: "permission denied" in view.problem, 5, "it says why, and does not end")
        with EtcdAdmin(guarded.endpoint) as login:
            token = login.login("root", "rootpw")
        with EtcdAdmin(guarded.endpoint, token) as admin:
            admin.allow("mooncake", "/other/")
        await view.wait_for(lambda view: view.connected, 10)
        following.cancel()
        await asyncio.wait([following])


# --- TLS -----------------------------------------------------------------------------------------------


def run_openssl(*words: str, cwd: Path) -> None:
    subprocess.run(["openssl", *words], cwd=cwd, check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ca.pem, server.pem, client.pem and their keys, and stranger.pem of another CA."""
    folder = tmp_path_factory.mktemp("tls")
    (folder / "san").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    for ca, names in (("ca", ("server", "client")), ("otherca", ("stranger",))):
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        root = ["req", "-x509", *key, "-keyout", f"{ca}.key", "-out", f"{ca}.pem", "-subj", f"/CN={ca}"]
        run_openssl(*root, "-days", "2", cwd=folder)
        for name in names:
            request = ["req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}"]
            run_openssl(*request, cwd=folder)
            sign = ["x509", "-req", "-in", f"{name}.csr", "-CA", f"{ca}.pem", "-CAkey", f"{ca}.key"]
            sign += ["-CAcreateserial", "-days", "2", "-extfile", "san", "-out", f"{name}.pem"]
            run_openssl(*sign, cwd=folder)
    return folder


@pytest.fixture
def tls_etcd(certificates: Path, tmp_path: Path) -> Iterator[EtcdServer]:
    client, peer = free_ports(2)
    tls = ServerTls(
        ca_file=certificates / "ca.pem",
        cert_file=certificates / "server.pem",
        key_file=certificates / "server.key",
    )
    server = EtcdServer(tmp_path / "etcd", client, peer, tmp_path / "etcd.log", tls=tls)
    server.start()
    try:
        server.wait_ready()
        yield server
    finally:
        server.kill()


def section(server: EtcdServer, folder: Path, name: str | None, ca: str = "ca") -> EtcdConfig:
    """The [etcd] section of a configuration."""
    return EtcdConfig(
        endpoints=[server.endpoint],
        ca_file=folder / f"{ca}.pem",
        cert_file=folder / f"{name}.pem" if name else None,
        key_file=folder / f"{name}.key" if name else None,
        request_timeout=0.7,
    )


async def test_mutual_tls_with_calls_watch_and_lease(tls_etcd: EtcdServer, certificates: Path) -> None:
    async with connect(section(tls_etcd, certificates, "client")) as etcd:
        lease = await etcd.grant(1.0, "test")
        await etcd.put("/a", b"1", lease.id)
        events = aiter(etcd.watch("/a"))
        assert [type(await anext(events)) for _ in range(2)] == [Snapshot, Live]
        await asyncio.sleep(1.7)
        assert lease.valid()
        await lease.close()
        assert isinstance(await anext(events), Changes)


async def test_https_in_the_endpoint_is_tls_too(tls_etcd: EtcdServer, certificates: Path) -> None:
    config = section(tls_etcd, certificates, "client")
    config = msgspec.structs.replace(config, endpoints=[f"https://{tls_etcd.endpoint}"])
    async with connect(config) as etcd:
        await etcd.put("/a", b"1")


@pytest.mark.parametrize(
    ("name", "ca", "cause"),
    [
        (None, "ca", "demand another client certificate"),
        ("stranger", "ca", "demand another client certificate"),
        ("client", "otherca", r"does not stand the check against etcd\.ca_file"),
    ],
)
async def test_without_the_right_certificates_nothing_works(
    tls_etcd: EtcdServer, certificates: Path, name: str | None, ca: str, cause: str
) -> None:
    async with connect(section(tls_etcd, certificates, name, ca)) as etcd:
        with pytest.raises(Unreachable, match=cause):
            await etcd.get("/a")


async def test_plain_text_to_a_tls_server_is_unreachable_in_time(tls_etcd: EtcdServer) -> None:
    async with EtcdSession(EtcdOptions(endpoints=[tls_etcd.endpoint], request_timeout_s=0.5)) as etcd:
        with pytest.raises(Unreachable, match="does it expect TLS"):
            await etcd.get("/a")


async def test_tls_to_a_plain_text_server_is_unreachable_in_time(
    etcd_server: EtcdServer, certificates: Path
) -> None:
    config = msgspec.structs.replace(section(etcd_server, certificates, "client"), request_timeout=0.5)
    async with connect(config) as etcd:
        with pytest.raises(Unreachable, match="does it expect TLS at all"):
            await etcd.get("/a")


def test_a_missing_certificate_file_is_a_configuration_error(tmp_path: Path) -> None:
    missing = EtcdOptions(endpoints=["localhost:2379"], ca_file=tmp_path / "none.pem")
    with pytest.raises(ConfigError, match=r"etcd\.ca_file: cannot read .*none\.pem"):
        EtcdSession(missing)
    alone = EtcdOptions(endpoints=["localhost:2379"], cert_file=tmp_path / "client.pem")
    with pytest.raises(ConfigError, match="belong together"):
        EtcdSession(alone)


def test_a_password_file_is_read_and_checked(tmp_path: Path) -> None:
    file = tmp_path / "password"
    config = EtcdConfig(user="mooncake", password_file=file)
    with pytest.raises(ConfigError, match=r"etcd\.password_file"):
        connect(config)
    file.write_text("")
    with pytest.raises(ConfigError, match="holds no password"):
        connect(config)
    file.write_text("s3cret \n")
    assert connect(config).options.password == "s3cret "
