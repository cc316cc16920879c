"""Block keys: how a prompt's tokens become the chain of keys under which its KV blocks are stored.

key(i) = XXH3-128(key(i-1) || tokens of block i as little-endian u32), key(-1) = XXH3-128(salt || namespace).
So equal keys mean equal tokens from the start of the prompt, within one namespace (tenant and model).
The last, partly filled block gets a key by the same rule over the tokens that it has.
XXH3 is fast but no cryptographic hash: it keeps honest prompts apart, and a tenant who constructs a
collision can only harm prompts in its own namespace.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from mooncaked.errors import InvalidKey

HASH_NAME = "mooncake_xxh3"
KEY_BYTES_MAX = 512
NAMESPACE_BYTES_MAX = 128
_SALT = b"mooncake/1\0"


def chain_root(namespace: str) -> bytes:
    """The 16 bytes that take the place of a parent for the first block of a prompt in `namespace`."""
    return xxhash.xxh3_128_digest(_SALT + namespace.encode())


def chain_keys(namespace: str, tokens: Sequence[int], block_tokens: int) -> list[bytes]:
    """Keys (16 bytes each) of all full blocks of `tokens`, root first."""
    return extend_chain(chain_root(namespace), tokens, block_tokens)


def extend_chain(parent: bytes, tokens: Sequence[int], block_tokens: int) -> list[bytes]:
    """Keys of the full blocks of `tokens`, after the block of key `parent` (or the root)."""
    data = np.asarray(tokens, dtype="<u4").tobytes()
    step = block_tokens * 4
    digest = xxhash.xxh3_128_digest
    keys = []
    for start in range(0, len(data) - step + 1, step):
        parent = digest(parent + data[start : start + step])
        keys.append(parent)
    return keys


def tail_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Key of a last block that `tokens` fill only partly; `parent` as in `extend_chain`."""
    return xxhash.xxh3_128_digest(parent + np.asarray(tokens, dtype="<u4").tobytes())


def check_namespace(namespace: str) -> str:
    """Return `namespace`; raise `InvalidKey` when it is empty, too long, or holds control characters."""
    if not namespace or len(namespace.encode()) > NAMESPACE_BYTES_MAX or not namespace.isprintable():
        problem = f"a namespace is 1 to {NAMESPACE_BYTES_MAX} bytes of printable text"
        raise InvalidKey(key=repr(namespace), problem=problem)
    return namespace


def as_key(key: object) -> bytes:
    """The key as bytes (text as UTF-8); raises `InvalidKey` when it is empty, over `KEY_BYTES_MAX`, or
    neither text nor bytes."""
    if isinstance(key, str):
        raw = key.encode()
    elif isinstance(key, bytes | bytearray | memoryview):
        raw = bytes(key)
    else:
        raise InvalidKey(key=repr(key), problem=f"it is {type(key).__name__}; a key is bytes or text")
    if not 1 <= len(raw) <= KEY_BYTES_MAX:
        problem = f"it has {len(raw)} bytes, a key has 1 to {KEY_BYTES_MAX}"
        raise InvalidKey(key=show_key(raw[:32]), problem=problem)
    return raw


def show_key(key: bytes) -> str:
    """The key as people read and type it: printable ASCII as it is, anything else as 0x and hex."""
    if key.isascii() and (text := key.decode("ascii")).isprintable() and not text.startswith("0x"):
        return text
    return "0x" + key.hex()


def parse_key(text: str) -> bytes:
    """What `show_key` printed, back to bytes; raises `InvalidKey` on broken hex."""
    if not text.startswith("0x"):
        return as_key(text)
    try:
        return as_key(bytes.fromhex(text[2:]))
    except ValueError as error:
        raise InvalidKey(key=text, problem="after 0x, only pairs of hexadecimal digits may follow") from error
