"""From the `[etcd]` section of a configuration to a session."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from mooncaked.clock import Clock
from mooncaked.cluster.etcd import EtcdOptions, EtcdSession
from mooncaked.errors import ConfigError


class EtcdSection(Protocol):
    """What is asked of the section; `mooncaked.config.EtcdConfig` has it."""

    @property
    def endpoints(self) -> list[str]: ...
    @property
    def ca_file(self) -> Path | None: ...
    @property
    def cert_file(self) -> Path | None: ...
    @property
    def key_file(self) -> Path | None: ...
    @property
    def user(self) -> str: ...
    @property
    def password_file(self) -> Path | None: ...
    @property
    def request_timeout(self) -> float: ...


def etcd_options(section: EtcdSection) -> EtcdOptions:
    """The options of a session, with the password read from its file, without the newline at its end.
    Raises `ConfigError` when the file cannot be read or holds no password."""
    return EtcdOptions(
        endpoints=section.endpoints,
        ca_file=section.ca_file,
        cert_file=section.cert_file,
        key_file=section.key_file,
        user=section.user,
        password=_password(section.password_file) if section.user and section.password_file else "",
        request_timeout_s=section.request_timeout,
    )


def _password(path: Path) -> str:
    problem = "it holds no password"
    try:
        if password := path.read_text("utf-8").removesuffix("\n"):
            return password
    except (OSError, UnicodeDecodeError) as error:
        problem = str(error)
    remedy = "Write the password of etcd.user into it, readable for this user only."
    raise ConfigError(file=str(path), key="etcd.password_file", problem=problem, remedy=remedy)


def connect(section: EtcdSection, clock: Clock | None = None) -> EtcdSession:
    """A session for the section; `async with` it, or `start` and `close`. Its first use connects.
    Raises `ConfigError` for what cannot work."""
    return EtcdSession(etcd_options(section), clock)
