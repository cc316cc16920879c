"""The command line of an instance."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec

from mooncaked.config import EtcdConfig
from mooncaked.errors import ConfigError
from mooncaked.types import Role
from mooncaked.units import parse_duration, parse_size, split_address

NONE = "none"  # in place of a socket or of endpoints: do without
CHUNK_TOKENS = 64


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What one instance is to be."""

    model: Path
    model_name: str  # that requests use
    role: Role = Role.BOTH
    listen: str = "127.0.0.1:8000"  # port 0: any free one
    advertise_host: str = ""  # that others reach it by; "": as it listens
    store: Path | None = None  # the daemon's socket
    store_token_file: Path | None = None
    etcd: EtcdConfig | None = None  # None: it registers nowhere
    instance_id: str
    node_id: str | None = None  # None: what the daemon says
    threads: int = 0  # 0: torch decides
    kv_memory: int = 1 << 30  # bytes
    block_tokens: int = 32
    chunk_tokens: int = CHUNK_TOKENS
    batch_max: int = 16  # requests that run at the same time
    dtype: str = "float32"
    device: str = "cpu"
    body_max: int = 16 << 20  # bytes
    drain_s: float = 10.0
    log_level: str = "info"
    log_format: str = "text"


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    result = argparse.ArgumentParser(
        prog="python -m mooncaked.engines.reference",
        description="Serves a Llama model over OpenAI's HTTP API; KV from and to this node's block pool.",
        epilog="Exit codes: 0 ended as asked, 1 unexpected error, 2 usage, "
        "3 model, configuration or address, 5 the daemon does not answer, 130 interrupted.",
    )
    add = result.add_argument
    add(
        "--model", required=True, type=Path, metavar="DIR_OR_GGUF", help="directory of safetensors, or a file"
    )
    add("--model-name", metavar="NAME", help="that requests use; default: the file's name")
    add("--role", type=Role, choices=list(Role), default=Role.BOTH, help="what the conductor uses it for")
    add("--listen", default="127.0.0.1:8000", metavar="HOST:PORT", help="port 0: any free one")
    add("--advertise-host", default="", metavar="HOST", help="that others reach it by")
    add("--store", default=NONE, metavar="SOCKET|none", help="client socket of this node's mooncaked")
    add("--store-token-file", type=Path, metavar="FILE", help="the daemon's listen.token_file")
    add("--instance-id", metavar="ID", help="in the cluster; default: made of host and port")
    add("--node-id", metavar="ID", help="of this node; default: asked of the daemon")
    add("--threads", type=int, default=0, metavar="N", help="for computing; 0: one per core")
    add("--kv-memory", type=parse_size, default="1GiB", metavar="SIZE", help="for the KV cache, e.g. 1GiB")
    add("--block-tokens", type=int, default=32, metavar="N", help="equal on all instances of a model")
    add("--batch-max", type=int, default=16, metavar="N", help="requests that run at the same time")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="to compute in")
    add("--device", default="cpu", metavar="DEVICE", help="cpu, cuda or cuda:N")
    add("--body-max", type=parse_size, default="16MiB", metavar="SIZE", help="largest request body")
    add("--drain-timeout", type=parse_duration, default="10s", metavar="TIME", help="at SIGTERM")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    add("--log-format", choices=("text", "json"), default="text")
    etcd = result.add_argument_group("etcd")
    etcd.add_argument("--etcd", default=NONE, metavar="HOST:PORT,...|none", help="where to register")
    etcd.add_argument("--prefix", default="/mooncake", help="of the cluster in etcd")
    etcd.add_argument("--lease-ttl", type=parse_duration, default="10s", metavar="TIME")
    etcd.add_argument("--etcd-ca-file", type=Path, metavar="FILE")
    etcd.add_argument("--etcd-cert-file", type=Path, metavar="FILE")
    etcd.add_argument("--etcd-key-file", type=Path, metavar="FILE")
    etcd.add_argument("--etcd-user", default="", metavar="USER")
    etcd.add_argument("--etcd-password-file", type=Path, metavar="FILE")
    return result


def parse(argv: Sequence[str] | None, host: str) -> Options:
    """The options in `argv`; `host` is this machine's name. Raises `ConfigError`; exits 2 on wrong usage."""
    given = parser().parse_args(argv)
    try:
        _, port = split_address(given.listen)
    except ValueError as error:
        raise _wrong("--listen", str(error), "Write host:port, for example 127.0.0.1:8000") from error
    for name, low in (("threads", 0), ("block_tokens", 1), ("batch_max", 1)):
        if getattr(given, name) < low:
            key = "--" + name.replace("_", "-")
            raise _wrong(key, f"{getattr(given, name)} is too small", f"Give at least {low}")
    return Options(
        model=given.model,
        model_name=given.model_name or given.model.name.removesuffix(".gguf"),
        role=given.role,
        listen=given.listen,
        advertise_host=given.advertise_host,
        store=None if given.store == NONE else Path(given.store),
        store_token_file=given.store_token_file,
        etcd=None if given.etcd == NONE else _etcd(given),
        instance_id=given.instance_id or f"{host}-{port}",
        node_id=given.node_id,
        threads=given.threads,
        kv_memory=given.kv_memory,
        block_tokens=given.block_tokens,
        chunk_tokens=chunk_for(given.block_tokens),
        batch_max=given.batch_max,
        dtype=given.dtype,
        device=given.device,
        body_max=given.body_max,
        drain_s=given.drain_timeout,
        log_level=given.log_level,
        log_format=given.log_format,
    )


def chunk_for(block_tokens: int) -> int:
    """Rows of a prefill step: about `CHUNK_TOKENS`, in whole blocks. More would be a little faster, but
    others wait for it between two of their tokens."""
    return block_tokens * max(1, CHUNK_TOKENS // block_tokens)


def _etcd(given: argparse.Namespace) -> EtcdConfig:
    return EtcdConfig(
        endpoints=[part for part in given.etcd.split(",") if part],
        prefix=given.prefix,
        ca_file=given.etcd_ca_file,
        cert_file=given.etcd_cert_file,
        key_file=given.etcd_key_file,
        user=given.etcd_user,
        password_file=given.etcd_password_file,
        lease_ttl=given.lease_ttl,
    )


def _wrong(key: str, problem: str, remedy: str) -> ConfigError:
    return ConfigError(file="command line", key=key, problem=problem, remedy=remedy)
