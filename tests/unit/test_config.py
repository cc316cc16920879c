"""Configuration: what is accepted, what is refused, and that each refusal names file, key and remedy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mooncaked.config import Config, DramConfig, EtcdConfig, load_config
from mooncaked.config_text import effective, reference, sample
from mooncaked.errors import ConfigError
from mooncaked.settings import changes, keys, merge_live

ROOT = Path(__file__).parents[2]


def load(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "mooncaked.toml"
    path.write_text(text)
    return load_config(path)


def refusal(tmp_path: Path, text: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert "\n" not in str(caught.value)
    return {name: str(value) for name, value in caught.value.fields.items()}


def uncommented(text: str) -> str:
    """The lines of the sample that are sections or keys, switched on."""
    return "\n".join(line.removeprefix("#") for line in text.splitlines() if re.match(r"#?\w|\[", line))


# --- one source ------------------------------------------------------------------------------------------


def test_the_sample_file_is_what_the_structs_say() -> None:
    assert (ROOT / "etc/mooncaked.toml").read_text() == sample(), (
        "run: python -m mooncaked --sample-config > etc/mooncaked.toml"
    )


def test_the_reference_page_is_what_the_structs_say() -> None:
    assert (ROOT / "docs/configuration.md").read_text() == reference(), (
        "run: python -m mooncaked --config-reference > docs/configuration.md"
    )


def test_the_sample_is_the_defaults_commented_out_or_not(tmp_path: Path) -> None:
    assert load(tmp_path, sample()) == Config()
    everything = uncommented(sample())
    assert load(tmp_path, everything) == Config()
    assert everything.count(" = ") == len(list(keys(Config)))


def test_every_key_has_a_sentence_that_ends() -> None:
    for named in keys(Config):
        assert named.key.doc.endswith("."), named.dotted


def test_the_effective_configuration_loads_as_itself(tmp_path: Path) -> None:
    text = """
    [node]
    id = "n1"
    labels = { zone = "a b", "rack.row" = "r\\"1" }
    [dram]
    size = "1536MiB"
    low_watermark = 0.5
    [etcd]
    endpoints = ["10.0.0.1:2379", "[::1]:2379"]
    lease_ttl = "1min"
    [conductor]
    slo_tbt = "1500us"
    """
    config = load(tmp_path, text)
    assert config.dram.size == 1536 << 20
    assert config.etcd.lease_ttl == 60.0
    assert config.conductor.slo_tbt == 0.0015
    assert config.node.labels == {"zone": "a b", "rack.row": 'r"1'}
    assert load(tmp_path, effective(config)) == config


# --- sources ---------------------------------------------------------------------------------------------


def test_later_sources_win(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[dram]\nsize = "1GiB"\nprefault_threads = 2\n[log]\nlevel = "debug"')
    environment = {"MOONCAKED_DRAM_SIZE": "2GiB", "MOONCAKED_LOG_LEVEL": "error", "HOME": "/root"}
    config = load_config(path, {"dram.size": "3GiB"}, environment)
    assert (config.dram.size, config.log.level, config.dram.prefault_threads) == (3 << 30, "error", 2)


@pytest.mark.parametrize(
    ("dotted", "text", "value"),
    [
        ("dram.prefault_threads", "8", 8),
        ("dram.high_watermark", "0.99", 0.99),
        ("conductor.enabled", "false", False),
        ("conductor.slo_ttft", "500ms", 0.5),
        ("etcd.endpoints", "a:1, b:2", ["a:1", "b:2"]),
        ("node.labels", "zone=a, rack=r1", {"zone": "a", "rack": "r1"}),
        ("node.labels", "", {}),
        ("node.id", "7", "7"),
        ("listen.token_file", "", None),
    ],
)
def test_overrides_are_text_of_every_kind(dotted: str, text: str, value: object) -> None:
    section, name = dotted.split(".")
    assert getattr(getattr(load_config(None, {dotted: text}), section), name) == value
    variable = f"MOONCAKED_{section}_{name}".upper()
    assert getattr(getattr(load_config(None, {}, {variable: text}), section), name) == value


@pytest.mark.parametrize(
    ("overrides", "environment", "words"),
    [
        ({"dram.size": "4"}, {}, ["--set", "dram.size", "has no unit", '"4GiB"']),
        ({"size": "4GiB"}, {}, ["--set", "names no section", "section.key=value"]),
        ({"dram.sise": "4GiB"}, {}, ["dram.sise", "Did you mean the key size?"]),
        ({"conductor.enabled": "yes"}, {}, ["conductor.enabled", "'yes'", "true or false"]),
        ({"dram.prefault_threads": "many"}, {}, ["whole number"]),
        ({"node.labels": "zone"}, {}, ["node.labels", "no table"]),
        ({}, {"MOONCAKED_DRAM_SISE": "1GiB"}, ["environment", "Did you mean MOONCAKED_DRAM_SIZE?"]),
        ({}, {"MOONCAKED_ETCD_LEASE_TTL": "10"}, ["environment", "etcd.lease_ttl", "has no unit"]),
    ],
)
def test_bad_overrides_are_refused(
    overrides: dict[str, str], environment: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides, environment)
    for word in words:
        assert word in str(caught.value)


# --- refusals --------------------------------------------------------------------------------------------


def test_a_missing_file_names_the_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.toml: file: cannot be read \(No such file or directory\)"):
        load_config(tmp_path / "gone.toml")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_config(tmp_path / "x")


@pytest.mark.parametrize(
    ("text", "key", "problem", "remedy"),
    [
        ("[dram]\nsize = 4GiB", "line 2, column", "no valid TOML", "quotes"),
        ("[dram\n", "line 1, column", "no valid TOML", ""),
        ("[dram]\nsize", "line 2 (end of the file)", "no valid TOML", ""),
        ('[dram]\nsize = "1GiB"\nsize = "2GiB"\n[log]', "line 3, column", "overwrite", ""),
        ("[darm]\n", "darm", "no such section", "Did you mean the section dram?"),
        ("[xyzzy]\n", "xyzzy", "no such section", "Sections are node, listen"),
        ('size = "4GiB"', "size", "no such section", "Put it below [dram]"),
        ("dram = 4", "dram", "it is a section, not a key", "[dram]"),
        ('[dram]\nsiez = "1GiB"', "dram.siez", "no such key", "Did you mean the key size?"),
        ('[dram]\nhigh-watermark = 0.9', "dram.high-watermark", "no such key", "high_watermark"),
        ('[node]\nendpoints = ["a:1"]', "node.endpoints", "no such key", "Did you mean etcd.endpoints?"),
        ("[log]\nxyzzy = 1", "log.xyzzy", "no such key", "level, format"),
        ("[dram]\nsize = 4294967296", "dram.size", "4294967296 has no unit", '"4GiB" (units: B, KiB'),
        ('[dram]\nsize = "4294967296"', "dram.size", "has no unit", '"4GiB"'),
        ('[dram]\nsize = "4GB"', "dram.size", "'GB' in '4GB' is no unit of a size", "units: B, KiB, MiB"),
        ('[dram]\nsize = "4gib"', "dram.size", "no unit", ""),
        ('[dram]\nsize = "ten"', "dram.size", "no size", ""),
        ('[dram]\nsize = "-4GiB"', "dram.size", "no size", ""),
        ('[dram]\nsize = "0.3B"', "dram.size", "whole number of bytes", ""),
        ('[dram]\nsize = "1KiB"', "dram.size", "out of bounds", "at least \"1MiB\""),
        ("[dram]\nsize = true", "dram.size", "true is no text", ""),
        ("[etcd]\nlease_ttl = 10", "etcd.lease_ttl", "10 has no unit", '"10s" (units: us, ms, s, min, h)'),
        ('[etcd]\nlease_ttl = "10GiB"', "etcd.lease_ttl", "no unit of a duration", ""),
        ('[etcd]\nlease_ttl = "10m"', "etcd.lease_ttl", "no unit of a duration", "min"),
        ('[etcd]\nlease_ttl = "1s"', "etcd.lease_ttl", "out of bounds", 'between "2s" and "1h"'),
        ("[dram]\nhigh_watermark = 95", "dram.high_watermark", "95.0 is out of bounds", "between 0.01 and 1"),
        ('[dram]\nhigh_watermark = "95%"', "dram.high_watermark", "'95%' is no number", "a number"),
        ("[dram]\nhigh_watermark = nan", "dram.high_watermark", "no number", ""),
        ("[dram]\nprefault_threads = 0", "dram.prefault_threads", "out of bounds", "between 1 and 256"),
        ("[dram]\nprefault_threads = 2.5", "dram.prefault_threads", "2.5 is no whole number", ""),
        ('[log]\nlevel = "inof"', "log.level", "'inof' is no choice", "Did you mean info?"),
        ('[conductor]\npolicy = "algorithm-1"', "conductor.policy", "no choice", "Did you mean algorithm1?"),
        ("[conductor]\nenabled = 1", "conductor.enabled", "neither true nor false", ""),
        ('[etcd]\nendpoints = "a:1"', "etcd.endpoints", "no list", '["127.0.0.1:2379"]'),
        ("[etcd]\nendpoints = [1]", "etcd.endpoints", "1 is no text", ""),
        ("[node]\nlabels = { a = 1 }", "node.labels", "1 is no text", ""),
        ("[node]\nlabels = 1", "node.labels", "no table", ""),
        ('[node]\nstate_dir = "state"', "node.state_dir", "no absolute path", "/var/lib/mooncaked"),
        ('[node]\nstate_dir = ""', "node.state_dir", "it is empty", "/var/lib/mooncaked"),
        ('[node]\nid = "a\\u0007"', "node.id", "control characters", ""),
    ],
)  # fmt: skip
def test_one_value_that_is_wrong(tmp_path: Path, text: str, key: str, problem: str, remedy: str) -> None:
    fields = refusal(tmp_path, text)
    assert fields["file"] == str(tmp_path / "mooncaked.toml")
    assert fields["key"].startswith(key)
    assert problem in fields["problem"]
    assert remedy in fields["remedy"]
    assert fields["remedy"]


@pytest.mark.parametrize(
    ("text", "key", "problem"),
    [
        ("[dram]\nlow_watermark = 0.95", "dram.low_watermark", "not below high_watermark"),
        ("[dram]\nhigh_watermark = 0.5", "dram.low_watermark", "not below"),
        ('[gpu]\ndevices = ["cuda"]', "gpu.devices", "'cuda' is no name of a device"),
        ('[gpu]\ndevices = ["cuda:1", "cuda:1"]', "gpu.devices", "'cuda:1' comes twice"),
        ('[gpu]\nsize = "1048577B"', "gpu.size", "no multiple of 4 KiB"),
        ('[node]\nid = "a/b"', "node.id", "no usable name"),
        ('[node]\nid = "-a"', "node.id", "no usable name"),
        ('[node]\nlabels = { "" = "x" }', "node.labels", "no name"),
        ('[node]\nadvertise_host = "0.0.0.0"', "node.advertise_host", "no address"),
        ('[listen]\npeer = "7801"', "listen.peer", "no host:port"),
        ('[listen]\npeer = ":7801"', "listen.peer", "no host"),
        ('[listen]\npeer = "::1:7801"', "listen.peer", "no host"),
        ('[listen]\npeer = "0.0.0.0:78010"', "listen.peer", "over 65535"),
        ('[listen]\npeer = "http://h:7801"', "listen.peer", "no host"),
        ('[listen]\nhttp = "127.0.0.1:7801"', "listen.http", "also that of listen.peer"),
        ('[conductor]\nlisten = "0.0.0.0:7802"', "conductor.listen", "also that of listen.http"),
        (f'[listen]\nclient_socket = "/{"x" * 120}"', "listen.client_socket", "at most 107"),
        ('[listen]\ntoken_file = "/nowhere/token"', "listen.token_file", "no file /nowhere/token"),
        ('[etcd]\nlease_ttl = "2500ms"', "etcd.lease_ttl", "no whole number of seconds"),
        ('[conductor]\nlease_ttl = "2500ms"', "conductor.lease_ttl", "no whole number of seconds"),
        ('[etcd]\nlease_ttl = "6s"', "etcd.request_timeout", "too long for a lease_ttl of 6s"),
        ('[etcd]\nrequest_timeout = "5s"', "etcd.request_timeout", "5s is too long"),
        ("[etcd]\nendpoints = []", "etcd.endpoints", "empty"),
        ('[etcd]\nendpoints = ["ftp://a:2379"]', "etcd.endpoints", "no host"),
        ('[etcd]\nendpoints = ["a:0"]', "etcd.endpoints", "port 0"),
        ('[etcd]\nprefix = "mooncake"', "etcd.prefix", "no usable prefix"),
        ('[etcd]\nprefix = "/mooncake/"', "etcd.prefix", "no usable prefix"),
        ('[etcd]\nprefix = "/"', "etcd.prefix", "no usable prefix"),
        ('[etcd]\nuser = "root"', "etcd.user", "needs etcd.password_file"),
    ],
)
def test_values_that_do_not_fit_together(tmp_path: Path, text: str, key: str, problem: str) -> None:
    fields = refusal(tmp_path, text)
    assert fields["key"] == key
    assert problem in fields["problem"]
    assert fields["remedy"]


def test_tls_needs_its_other_half(tmp_path: Path) -> None:
    (tmp_path / "c.pem").touch()
    fields = refusal(tmp_path, f'[etcd]\ncert_file = "{tmp_path}/c.pem"')
    assert fields["problem"] == "it needs etcd.key_file, which is not set"


def test_listeners_may_share_a_port_where_they_cannot_meet(tmp_path: Path) -> None:
    load(
        tmp_path, '[listen]\npeer = "127.0.0.1:0"\nhttp = "127.0.0.1:0"\n[conductor]\nlisten = "127.0.0.1:0"'
    )
    load(tmp_path, '[listen]\npeer = "10.0.0.1:7801"\nhttp = "127.0.0.1:7801"')
    load(tmp_path, '[listen]\nhttp = "127.0.0.1:7803"\n[conductor]\nenabled = false')


# --- reload ----------------------------------------------------------------------------------------------


def test_live_keys_are_merged_and_the_others_named() -> None:
    old = Config()
    new = Config(dram=DramConfig(size=1 << 30, high_watermark=0.99), etcd=EtcdConfig(prefix="/other"))
    assert {named.dotted: named.key.live for named in changes(old, new)} == {
        "dram.size": False,
        "dram.high_watermark": True,
        "etcd.prefix": False,
    }
    merged = merge_live(old, new)
    assert merged == Config(dram=DramConfig(high_watermark=0.99))
    assert changes(old, old) == []
