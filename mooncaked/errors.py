"""Every error that a user, a client or a peer can meet.

The message is the class docstring, filled with the fields that the raiser passes; it says what
happened, to what, the limit or cause, and what to do about it. `code` names the error on the wire and
in JSON and never changes; `exit_code` is what a command exits with; `retryable` says whether the same
call may succeed later without anybody changing anything.

Exit codes: 0 ok, 1 unexpected, 2 usage, 3 configuration, 4 not found, 5 unreachable or timed out,
6 not now (retry), 7 refused, 8 partly done, 9 authentication or permission, 10 unhealthy, 130 interrupted.
"""

from __future__ import annotations

import inspect
from typing import ClassVar


class MooncakeError(Exception):
    """Unexpected error: {detail}"""

    code: ClassVar[str] = "internal"
    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False
    http_status: ClassVar[int] = 500

    def __init__(self, **fields: object) -> None:
        self.fields = fields
        super().__init__(inspect.cleandoc(type(self).__doc__ or "").format(**fields))

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.fields))


def _rebuild(cls: type[MooncakeError], fields: dict[str, object]) -> MooncakeError:
    return cls(**fields)


# --- configuration and start -------------------------------------------------------------------------


class ConfigError(MooncakeError):
    """{file}: {key}: {problem}. {remedy}"""

    code = "config_invalid"
    exit_code = 3


class AddressInUse(MooncakeError):
    """Cannot listen on {address}: another process uses it. Stop that process, \
or set {key} to a free address."""

    code = "address_in_use"
    exit_code = 3


class SocketInUse(MooncakeError):
    """Another mooncaked (pid {pid}) already serves {path}. Stop it, or set {key} to another path."""

    code = "socket_in_use"
    exit_code = 3


class NotEnoughMemory(MooncakeError):
    """A memory pool of {size} bytes does not fit here: {cause}. Lower {key}, or give this host or its \
control group more memory."""

    code = "not_enough_memory"
    exit_code = 3


class GpuUnavailable(MooncakeError):
    """The GPU device {device} cannot be used: {cause}. {remedy}"""

    code = "gpu_unavailable"
    exit_code = 3


class NotEnoughGpuMemory(MooncakeError):
    """A GPU pool of {size} bytes does not fit on {device}: of its {total} bytes, {free} are free. \
Lower {key}, or stop what else uses the device."""

    code = "not_enough_gpu_memory"
    exit_code = 3


class GpuFailed(MooncakeError):
    """{device}: {operation} failed: {cause}."""

    code = "gpu_failed"
    exit_code = 10


class ModelInvalid(MooncakeError):
    """{path} cannot be served as a model: {problem}. {remedy}"""

    code = "model_invalid"
    exit_code = 3
    http_status = 400


class MissingDependency(MooncakeError):
    """{feature} needs the Python package {package}, which is not installed. \
Install it with: pip install '{install}'"""

    code = "missing_dependency"
    exit_code = 3


class SetupFailed(MooncakeError):
    """Set-up stopped at: {step}. {cause} {remedy}"""

    code = "setup_failed"
    exit_code = 3


# --- requests ----------------------------------------------------------------------------------------


class InvalidRequest(MooncakeError):
    """{problem}"""

    code = "invalid_request"
    exit_code = 2
    http_status = 400


class InvalidKey(InvalidRequest):
    """Key {key} is not usable: {problem}."""

    code = "invalid_key"


class ValueTooLarge(InvalidRequest):
    """The value for key {key} has {size} bytes; the largest block that this \
node's pool can hold is {limit} bytes."""

    code = "value_too_large"


class BufferTooSmall(InvalidRequest):
    """The value of key {key} has {size} bytes, but the buffers given for it hold {limit} bytes."""

    code = "buffer_too_small"


class ContextLengthExceeded(InvalidRequest):
    """The request needs {tokens} tokens (prompt and answer), but {model} has a context of {limit}. \
Shorten the prompt or lower max_tokens."""

    code = "context_length_exceeded"


class BodyTooLarge(InvalidRequest):
    """The request body is larger than the limit of {limit} bytes. Send less, or raise {key}."""

    code = "body_too_large"
    http_status = 413


class NotFound(MooncakeError):
    """{kind} {name} does not exist. {remedy}"""

    code = "not_found"
    exit_code = 4
    http_status = 404


class ModelNotFound(NotFound):
    """The model {name} does not exist. Models served now: {served}."""

    code = "model_not_found"


# --- reaching others ---------------------------------------------------------------------------------


class Unreachable(MooncakeError):
    """Cannot reach {what} at {address}: {cause}. {remedy}"""

    code = "unreachable"
    exit_code = 5
    retryable = True
    http_status = 502


class DeadlineExceeded(MooncakeError):
    """{operation} did not finish within {limit_ms} ms."""

    code = "deadline_exceeded"
    exit_code = 5
    retryable = True
    http_status = 504


class OutcomeUnknown(MooncakeError):
    """{operation} may or may not have taken effect: {cause}. Read the state again before repeating it."""

    code = "outcome_unknown"
    exit_code = 5
    http_status = 504


class ConnectionLost(MooncakeError):
    """The connection to {what} broke during {operation}: {cause}."""

    code = "connection_lost"
    exit_code = 5
    retryable = True
    http_status = 502


class EngineFailed(MooncakeError):
    """Engine instance {instance} failed: {cause}. Other instances were tried where there were any; retry."""

    code = "engine_failed"
    exit_code = 5
    retryable = True
    http_status = 502


class LeaseLost(MooncakeError):
    """The etcd lease of {what} was lost: {cause}. It registers again by itself."""

    code = "lease_lost"
    exit_code = 5
    retryable = True


# --- not now -----------------------------------------------------------------------------------------


class PoolFull(MooncakeError):
    """No room for {size} bytes: of the pool's {capacity} bytes, {pinned} are pinned by readers or being \
written, and nothing else is left to evict. Retry, or raise {key}."""

    code = "pool_full"
    exit_code = 6
    retryable = True
    http_status = 503


class NoLeader(MooncakeError):
    """No conductor leads at the moment: {detail}. Retry in a few seconds."""

    code = "no_leader"
    exit_code = 6
    retryable = True
    http_status = 503


class NotLeader(MooncakeError):
    """This conductor does not lead; the leader is {leader}."""

    code = "not_leader"
    exit_code = 6
    retryable = True
    http_status = 503


class NoInstance(MooncakeError):
    """No engine instance can serve model {model}: {detail}. Start one, \
or check `mooncakectl instance list`."""

    code = "no_instance"
    exit_code = 6
    retryable = True
    http_status = 503


class Draining(MooncakeError):
    """{what} is draining and takes no new work."""

    code = "draining"
    exit_code = 6
    retryable = True
    http_status = 503


class AdmissionRefused(MooncakeError):
    """Refused to protect the SLO: {reason} (predicted {predicted_ms} ms, limit {limit_ms} ms). \
Retry after {retry_after_s} s."""

    code = "admission_refused"
    exit_code = 6
    retryable = True
    http_status = 429


class Overloaded(MooncakeError):
    """{what} has {limit} requests in hand, its limit. Retry in a few seconds, or ask another gateway."""

    code = "overloaded"
    exit_code = 6
    retryable = True
    http_status = 503


# --- guarantees --------------------------------------------------------------------------------------


class Refused(MooncakeError):
    """Refused: {problem}. {remedy}"""

    code = "refused"
    exit_code = 7
    http_status = 409


class StaleTerm(MooncakeError):
    """Order of term {term} refused: this node has obeyed term {highest}, so its sender leads no longer."""

    code = "stale_term"
    exit_code = 7
    http_status = 409


class PartlyDone(MooncakeError):
    """{done} of {total} done: {detail}"""

    code = "partly_done"
    exit_code = 8


class Unauthenticated(MooncakeError):
    """{what} refused the credentials: {cause}. {remedy}"""

    code = "unauthenticated"
    exit_code = 9
    http_status = 401


class Unhealthy(MooncakeError):
    """{what} is not healthy: {cause}"""

    code = "unhealthy"
    exit_code = 10
    http_status = 503


# --- the wire and memory -----------------------------------------------------------------------------


class ProtocolError(MooncakeError):
    """Malformed message from {peer}: {problem}. The connection is closed."""

    code = "protocol_error"


class VersionMismatch(MooncakeError):
    """{peer} speaks protocol versions {theirs}, this side {ours}; no version is common. \
Upgrade the older side."""

    code = "version_mismatch"


class ChecksumMismatch(MooncakeError):
    """The bytes of block {key} do not match their checksum (read from {source}). \
They are treated as a miss."""

    code = "checksum_mismatch"
    retryable = True


class IntegrityError(MooncakeError):
    """Internal state of {what} is inconsistent: {detail}"""

    code = "integrity"


class RemoteError(MooncakeError):
    """{peer} answered with an error that this version does not know: {code}: {message}"""

    code = "remote"


def from_message(code: str, message: str, peer: str) -> MooncakeError:
    """Rebuild an error that came as code and finished message, as HTTP carries it; see `from_wire`."""
    for cls in _all_subclasses(MooncakeError):
        if cls.code == code:
            error = cls.__new__(cls)
            Exception.__init__(error, message)
            error.fields = {}
            return error
    return RemoteError(peer=peer, code=code, message=message)


def _all_subclasses(cls: type[MooncakeError]) -> list[type[MooncakeError]]:
    return [cls, *(sub for child in cls.__subclasses__() for sub in _all_subclasses(child))]


def from_wire(code: str, fields: dict[str, object], message: str, peer: str) -> MooncakeError:
    """Rebuild an error that a peer sent; one of an unknown code becomes `RemoteError`, never a crash."""
    for cls in _all_subclasses(MooncakeError):
        if cls.code == code:
            try:
                return cls(**fields)
            except (KeyError, IndexError):
                break
    return RemoteError(peer=peer, code=code, message=message)
