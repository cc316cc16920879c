"""What an operator does to an etcd, for tests: blocking calls straight to its services."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import grpc

from mooncaked.cluster._etcd3 import rpc, stubs

TIMEOUT_S = 5.0


class EtcdAdmin:
    """Blocking, so that nothing on the event loop runs in between."""

    def __init__(self, endpoint: str, token: str | None = None) -> None:
        self._channel = grpc.insecure_channel(endpoint, options=[("grpc.enable_http_proxy", 0)])
        self._metadata = (("token", token),) if token else ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._channel.close()

    def _call(self, stub: Any, name: str, request: Any) -> Any:
        method = getattr(stub(self._channel), name)
        return method(request, timeout=TIMEOUT_S, metadata=self._metadata, wait_for_ready=True)

    def compact(self, revision: int) -> None:
        """Forget history up to `revision`."""
        self._call(stubs.KVStub, "Compact", rpc.CompactionRequest(revision=revision, physical=True))

    def put(self, key: str, value: bytes) -> int:
        """Write; the revision."""
        reply = self._call(stubs.KVStub, "Put", rpc.PutRequest(key=key.encode(), value=value))
        return int(reply.header.revision)

    def delete(self, key: str) -> None:
        self._call(stubs.KVStub, "DeleteRange", rpc.DeleteRangeRequest(key=key.encode()))

    def revoke(self, lease_id: int) -> None:
        self._call(stubs.LeaseStub, "LeaseRevoke", rpc.LeaseRevokeRequest(ID=lease_id))

    def add_user(self, name: str, password: str, role: str, prefix: str | None = None) -> None:
        """A user with a role that may do anything under `prefix` (none: the role exists, as root does)."""
        self._call(stubs.AuthStub, "UserAdd", rpc.AuthUserAddRequest(name=name, password=password))
        self._call(stubs.AuthStub, "RoleAdd", rpc.AuthRoleAddRequest(name=role))
        if prefix is not None:
            self.allow(role, prefix)
        self._call(stubs.AuthStub, "UserGrantRole", rpc.AuthUserGrantRoleRequest(user=name, role=role))

    def allow(self, role: str, prefix: str) -> None:
        """The role may read and write everything that starts with `prefix`."""
        key = prefix.encode()
        request = rpc.AuthRoleGrantPermissionRequest(name=role)
        request.perm.permType = 2  # read and write
        request.perm.key, request.perm.range_end = key, key[:-1] + bytes([key[-1] + 1])
        self._call(stubs.AuthStub, "RoleGrantPermission", request)

    def enable_auth(self) -> None:
        self._call(stubs.AuthStub, "AuthEnable", rpc.AuthEnableRequest())

    def disable_auth(self) -> None:
        self._call(stubs.AuthStub, "AuthDisable", rpc.AuthDisableRequest())

    def change_password(self, name: str, password: str) -> None:
        """Also raises the revision of the auth store, which makes tokens from before stale."""
        request = rpc.AuthUserChangePasswordRequest(name=name, password=password)
        self._call(stubs.AuthStub, "UserChangePassword", request)

    def login(self, name: str, password: str) -> str:
        request = rpc.AuthenticateRequest(name=name, password=password)
        return str(self._call(stubs.AuthStub, "Authenticate", request).token)
