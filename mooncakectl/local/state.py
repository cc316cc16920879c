"""cluster.json: which processes the local cluster has, and whether they live."""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from mooncakectl.local.plan import LocalOptions, Part, etcd_address
from mooncaked.errors import Refused
from mooncaked.types import Role

SCHEMA = "mooncake.local/1"
_SOCKET_DIR_BYTES_MAX = 80  # a unix socket's path has at most 107 bytes, and its name follows


class ProcessState(msgspec.Struct, frozen=True, kw_only=True):
    """One process that was started."""

    name: str
    part: Part
    pid: int
    start_ticks: int  # of /proc/<pid>/stat, so that another process with the same pid is not taken for it
    argv: list[str]
    ports: dict[str, int]
    log: str
    node: str | None = None
    role: Role | None = None


class ClusterState(msgspec.Struct, frozen=True, kw_only=True):
    """The content of cluster.json."""

    options: LocalOptions
    etcd: str  # "host:port"
    prefix: str
    socket_dir: str
    processes: list[ProcessState] = []
    schema: str = SCHEMA


def default_directory() -> Path:
    """Where the local cluster's state is: $MOONCAKE_LOCAL, else ~/.local/state/mooncake/local."""
    return Path(os.environ.get("MOONCAKE_LOCAL") or Path.home() / ".local" / "state" / "mooncake" / "local")


def state_path(directory: Path) -> Path:
    """The file cluster.json in `directory`."""
    return directory / "cluster.json"


def read_state(directory: Path) -> ClusterState | None:
    """What cluster.json says; None when there is none, or one that this version cannot read."""
    try:
        state = msgspec.json.decode(state_path(directory).read_bytes(), type=ClusterState)
    except (OSError, msgspec.MsgspecError):
        return None
    return state if state.schema == SCHEMA else None


def write_state(directory: Path, state: ClusterState) -> None:
    """Replace cluster.json in one step."""
    path = state_path(directory)
    partial = path.with_suffix(".tmp")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n")
    partial.replace(path)


def fresh_state(options: LocalOptions, prefix: str, sockets: Path) -> ClusterState:
    """A cluster of which nothing runs yet."""
    return ClusterState(options=options, etcd=etcd_address(options), prefix=prefix, socket_dir=str(sockets))


def with_process(state: ClusterState, process: ProcessState) -> ClusterState:
    """`state` with `process` in place of an earlier one of that name."""
    others = [other for other in state.processes if other.name != process.name]
    return msgspec.structs.replace(state, processes=[*others, process])


def start_ticks(pid: int) -> int | None:
    """When the process `pid` began, in clock ticks since boot; None when it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def alive(process: ProcessState) -> bool:
    """Whether that very process still runs."""
    return start_ticks(process.pid) == process.start_ticks


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keep others from starting or stopping this cluster meanwhile; raises `Refused` when one is at it."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            problem = f"another `mooncakectl up` or `down` works on {directory}"
            raise Refused(problem=problem, remedy="Wait for it to end.") from error
        yield


def socket_directory(directory: Path) -> Path:
    """Where the unix sockets of the cluster in `directory` go: a short path, private to this user."""
    digest = hashlib.sha256(str(directory.absolute()).encode()).hexdigest()[:8]
    name = f"mooncake-{os.getuid()}-{digest}"
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or "/nonexistent")
    usable = runtime.is_dir() and os.access(runtime, os.W_OK)
    path = runtime / name if usable else Path(tempfile.gettempdir()) / name
    return path if len(str(path).encode()) <= _SOCKET_DIR_BYTES_MAX else Path("/tmp") / name


def make_private(path: Path) -> None:
    """Make the directory `path` unless it is there; raises `Refused` when others can write into it."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        problem = f"{path} is not a private directory of this user"
        raise Refused(problem=problem, remedy="Remove it, or set XDG_RUNTIME_DIR to a directory of yours.")
