"""From what the user typed to what the local cluster will be: defaults that suit this machine, and checks."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import msgspec

from mooncakectl.local.model import MODEL_NAME, default_model_path, ensure_model
from mooncakectl.local.plan import BASE_PORT, LocalOptions, check_options
from mooncakectl.local.progress import Progress
from mooncakectl.local.state import ClusterState, alive
from mooncakectl.local.tools import run_command
from mooncaked.errors import InvalidRequest, MissingDependency, ModelInvalid, Refused
from mooncaked.units import format_size, parse_size

_POOL_DEFAULT = 1 << 30
_POOL_SMALL = 128 << 20
_MEMORY_SHARE = 4  # all pools together take at most a quarter of the memory that is available


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `mooncakectl up` as typed; None is "not given"."""

    model: Path | None = None
    nodes: int | None = None
    prefill: int | None = None
    decode: int | None = None
    pool: str | None = None
    base_port: int | None = None
    threads: int | None = None


def resolve(asked: Asked, running: ClusterState | None, progress: Progress) -> LocalOptions:
    """Complete `asked`. A cluster that runs keeps its options: asking for others raises `Refused`."""
    if running is not None and any(alive(process) for process in running.processes):
        return _keep(asked, running.options)
    if importlib.util.find_spec("torch") is None:
        raise MissingDependency(feature="The reference engine", package="torch", install="mooncaked[engine]")
    model, name = resolve_model(asked.model, progress)
    nodes = _given(asked.nodes, 3)
    options = LocalOptions(
        model=str(model),
        model_name=name,
        nodes=nodes,
        prefill=_given(asked.prefill, 2),
        decode=_given(asked.decode, 1),
        pool_bytes=_pool(asked.pool) if asked.pool else default_pool(available_memory(), nodes),
        base_port=_given(asked.base_port, BASE_PORT),
        threads=_given(asked.threads, len(os.sched_getaffinity(0))),
    )
    check_options(options)
    return options


def resolve_model(path: Path | None, progress: Progress) -> tuple[Path, str]:
    """The model's path and the name that requests use; fetches the default one when it is not there yet."""
    if path is None or path.absolute() == default_model_path().absolute():
        return ensure_model(run_command, Path(sys.executable), progress).absolute(), MODEL_NAME
    if path.is_dir() and (path / "config.json").is_file():
        return path.absolute(), path.absolute().name
    if path.is_file() and path.suffix == ".gguf":
        return path.absolute(), path.stem
    problem = (
        "it is neither a GGUF file nor a directory with a config.json" if path.exists() else "it is not there"
    )
    remedy = "Name a GGUF file or a Hugging Face directory of a Llama-architecture model."
    raise ModelInvalid(path=path, problem=problem, remedy=remedy)


def default_pool(available_bytes: int, nodes: int) -> int:
    """Bytes of each node's pool: 1 GiB, less on a machine that is short of memory (whole MiB)."""
    share = available_bytes // _MEMORY_SHARE // nodes >> 20 << 20
    return max(_POOL_SMALL, min(_POOL_DEFAULT, share))


def available_memory(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes that programs can still take without swapping, as the kernel estimates."""
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _given(value: int | None, default: int) -> int:
    return default if value is None else value


def _pool(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise InvalidRequest(problem=f"--pool: {error}. Write a size with its unit, e.g. 1GiB.") from error


def _keep(asked: Asked, options: LocalOptions) -> LocalOptions:
    typed: dict[str, object] = {
        "--model": str(asked.model.absolute()) if asked.model else None,
        "--nodes": asked.nodes,
        "--prefill": asked.prefill,
        "--decode": asked.decode,
        "--pool": _pool(asked.pool) if asked.pool else None,
        "--base-port": asked.base_port,
        "--threads": asked.threads,
    }
    current: dict[str, object] = {
        "--model": options.model,
        "--nodes": options.nodes,
        "--prefill": options.prefill,
        "--decode": options.decode,
        "--pool": options.pool_bytes,
        "--base-port": options.base_port,
        "--threads": options.threads,
    }
    for option, value in typed.items():
        if value is not None and value != current[option]:
            have = format_size(options.pool_bytes) if option == "--pool" else current[option]
            problem = f"the local cluster already runs, with {option} {have}"
            raise Refused(problem=problem, remedy="Stop it first: mooncakectl down")
    return options
