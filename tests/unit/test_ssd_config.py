"""The disks in the configuration: what is refused, and with which remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncaked.config import load_config, ssd_devices
from mooncaked.errors import ConfigError


def test_devices_are_directories_with_sizes() -> None:
    config = load_config(None, {"ssd.devices": "/mnt/a=1TiB,/mnt/b=512GiB"})
    assert ssd_devices(config) == {Path("/mnt/a"): 1 << 40, Path("/mnt/b"): 1 << 39}
    assert ssd_devices(load_config(None)) == {}


@pytest.mark.parametrize(
    ("key", "text", "problem"),
    [
        ("ssd.devices", "/mnt/a=much", "no size"),
        ("ssd.devices", "mnt/a=1TiB", "no absolute path"),
        ("ssd.devices", "/mnt/a=1TiB,/mnt//a=1TiB", "comes twice"),
        ("ssd.devices", "/mnt/a=512MiB", "room for less than 4 segments"),
        ("ssd.segment_size", "65537B", "no whole pages"),
        ("ssd.segment_size", "4KiB", "65536|64KiB"),
        ("ssd.admission", "some", "reused"),
    ],
)
def test_what_cannot_be_is_refused(key: str, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        load_config(None, {key: text})
    assert key in str(caught.value)
