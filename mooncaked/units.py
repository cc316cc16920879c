"""Sizes, durations and addresses as people write them, and back. Every parser raises `ValueError` with a
sentence that says what is wrong, never what to do: the caller knows the remedy."""

from __future__ import annotations

import re

SIZES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}  # bytes
DURATIONS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}  # seconds

_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def _parse(text: str, units: dict[str, int] | dict[str, float], what: str) -> tuple[float, str]:
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no {what}")
    number, unit = match.groups()
    if not unit:
        raise ValueError(f"{text!r} has no unit")
    if unit not in units:
        raise ValueError(f"{unit!r} in {text!r} is no unit of a {what}")
    return float(number), unit


def parse_size(text: str) -> int:
    """Bytes in `text`, for example "4GiB" or "1.5 MiB"."""
    number, unit = _parse(text, SIZES, "size")
    value = number * SIZES[unit]
    if value != int(value):
        raise ValueError(f"{text!r} is no whole number of bytes")
    return int(value)


def parse_duration(text: str) -> float:
    """Seconds in `text`, for example "10s" or "500ms"."""
    number, unit = _parse(text, DURATIONS, "duration")
    return round(number * DURATIONS[unit], 9)


def format_size(size: int) -> str:
    """`size` bytes in the largest unit that keeps it exact, so that `parse_size` gives it back."""
    unit = max((u for u in SIZES if size % SIZES[u] == 0), key=SIZES.__getitem__) if size else "B"
    return f"{size // SIZES[unit]}{unit}"


def format_duration(seconds: float) -> str:
    """`seconds` in the unit that reads best, so that `parse_duration` gives them back."""
    if not seconds:
        return "0s"
    whole = (u for u in ("h", "min") if seconds >= DURATIONS[u] and seconds % DURATIONS[u] == 0)
    parts = (u for u in ("s", "ms") if round(seconds / DURATIONS[u], 9) >= 1)
    unit = next(whole, None) or next(parts, "us")
    return f"{round(seconds / DURATIONS[unit], 9):.9f}".rstrip("0").rstrip(".") + unit


def split_address(text: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[ipv6]:port"; port 0 stands for any free one."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit():
        raise ValueError(f"{text!r} is no host:port")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not bare or (":" in bare and bare == host) or "/" in bare or any(c.isspace() for c in bare):
        raise ValueError(f"{host!r} in {text!r} is no host")
    if int(port) > 65535:
        raise ValueError(f"port {port} is over 65535")
    return bare, int(port)


def join_address(host: str, port: int) -> str:
    """What `split_address` takes apart."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


RANGE_MAX = 1023  # largest number in a list of ranges


def parse_ranges(text: str) -> list[int]:
    """`"0-1,3"` as [0, 1, 3], nothing as []; raises `ValueError`."""
    numbers: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{part!r} is no number or range of numbers")
        if not int(first) <= int(last or first) <= RANGE_MAX:
            raise ValueError(f"{part!r} does not go up, or beyond {RANGE_MAX}")
        numbers.update(range(int(first), int(last or first) + 1))
    return sorted(numbers)
