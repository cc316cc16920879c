"""The configuration as text: the sample file, the effective one, and the reference page in docs/."""

from __future__ import annotations

import inspect
import textwrap

from mooncaked.config import ENVIRONMENT_PREFIX, Config
from mooncaked.settings import EXPECTED, Named, keys, sections, to_toml

_WIDTH = 100

_HEAD = f"""\
# Configuration of mooncaked. Made by `mooncaked --sample-config`; every key is here, commented out, with its
# default. Check a changed file with `mooncaked --check-config --config FILE`.
#
# Sizes and durations are texts with a unit: "4GiB" (B KiB MiB GiB TiB), "500ms" (us ms s min h).
# [live]     the key applies on SIGHUP (systemctl reload mooncaked)
# [restart]  the key applies when the daemon starts
# The environment ({ENVIRONMENT_PREFIX}<SECTION>_<KEY>) and --set section.key=value win over this file.
"""


def sample() -> str:
    """A file with every key, commented out, at its default."""
    return _HEAD + _sections(Config(), sample=True)


def effective(config: Config) -> str:
    """`config` as a file that loads as the same configuration."""
    return _sections(config, sample=False).lstrip("\n")


def _sections(config: Config, *, sample: bool) -> str:
    lines: list[str] = []
    section = ""
    for named in keys(Config):
        if named.section != section:
            section = named.section
            about = f" # {_about(section)}" if sample else ""
            lines += ["", f"[{section}]{about}"]
        value = to_toml(named.key.kind, getattr(getattr(config, section), named.name))
        if sample:
            lines += [
                "",
                *textwrap.wrap(_sentence(named), _WIDTH, initial_indent="# ", subsequent_indent="# "),
            ]
        lines.append(f"{'#' if sample else ''}{named.name} = {value}")
    return "\n".join(lines) + "\n"


def _sentence(named: Named) -> str:
    key = named.key
    parts = [key.doc]
    if key.choices:
        parts.append(f"One of: {', '.join(key.choices)}.")
    if bounds := _bounds(named):
        parts.append(f"{bounds}.")
    parts.append("[live]" if key.live else "[restart]")
    return " ".join(parts)


def _bounds(named: Named) -> str:
    """The limits of a number as a person says them; empty where there are none."""
    key = named.key
    if key.kind not in ("count", "number", "size", "duration"):
        return ""
    low, high = (
        to_toml(key.kind, _whole(b)).strip('"') if b is not None else "" for b in (key.low, key.high)
    )
    if low and high:
        return f"{low} to {high}"
    return f"At least {low}" if low else ""


def _whole(bound: float) -> float:
    return int(bound) if bound == int(bound) else bound


def _about(section: str) -> str:
    return (inspect.getdoc(sections(Config)[section]) or "").splitlines()[0]


def reference() -> str:
    """docs/configuration.md: the rules, then a table of keys for each section."""
    lines = [_REFERENCE_HEAD.rstrip()]
    section = ""
    for named in keys(Config):
        if named.section != section:
            section = named.section
            lines += ["", f"## `[{section}]`", "", _about(section), ""]
            lines += ["| key | type | default | limits | applies | meaning |", "|---|---|---|---|---|---|"]
        key = named.key
        limits = ", ".join(f"`{choice}`" for choice in key.choices) or _bounds(named)
        applies = "live" if key.live else "restart"
        kind, default = (
            EXPECTED[key.kind].partition(",")[0].removesuffix(" in quotes"),
            to_toml(key.kind, named.default),
        )
        lines.append(f"| `{named.name}` | {kind} | `{default}` | {limits} | {applies} | {key.doc} |")
    return "\n".join(lines) + "\n"


_REFERENCE_HEAD = f"""\
# Configuration

<!-- Made by `mooncaked --config-reference` from mooncaked/config.py. Change it there. -->

`mooncaked --config FILE` reads one TOML file. `mooncaked --sample-config` prints one with every key,
commented out, at its default; it is also [etc/mooncaked.toml](../etc/mooncaked.toml).
`mooncaked --check-config` says whether a file is good, and `mooncaked --print-config` prints what is in force
after all sources are merged.

Later sources win over earlier ones:

1. the defaults below
2. the file
3. the environment: `{ENVIRONMENT_PREFIX}<SECTION>_<KEY>`, for example `{ENVIRONMENT_PREFIX}DRAM_SIZE=8GiB`
4. `--set section.key=value`, for example `--set dram.size=8GiB`

In 3 and 4, texts need no quotes, lists are `a,b`, tables `name=value,name=value`.

A size or a duration is text with a unit, `"4GiB"` or `"500ms"`; a bare number is refused. So are unknown
sections and keys, values of the wrong type or out of bounds, and values that do not fit together. The daemon
then exits with code 3 and one line that names file, key and remedy, before it touches anything.

**Reload.** On SIGHUP (`systemctl reload mooncaked`) the file is read again. Keys marked *live* apply at once;
the log names those that need a restart. When the new file is not good, the old configuration stays in force
and the log says why.

**Leases.** Of a lease's `lease_ttl`, a keepalive is sent every third, may take a sixth at one etcd member
before the next is asked, and the holder stops to rely on the lease a fifth (the margin, for clock drift and
pauses) before etcd may end it. It counts from the time at which the last keepalive or grant that was
acknowledged was *sent*. So two etcd members that died in a row cost no lease:

    lease_ttl / 3 + 2 * lease_ttl / 6 + lease_ttl / 5 = 13/15 lease_ttl < lease_ttl

And a lease whose grant was slow must leave time for two keepalives as well. For `[etcd]`, the daemon refuses
to start unless

    request_timeout + 2 * lease_ttl / 6 + lease_ttl / 5 < lease_ttl, or: request_timeout < 7/15 lease_ttl

The conductor's lease is shorter, so that another one takes over quickly; where its grant came too late, the
candidate does not lead by it and asks for another.

**Secrets** are in files, never in the configuration or on the command line. A file must be readable by the
daemon's user, and its text is taken without surrounding white space.
"""
