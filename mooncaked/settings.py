"""How a tree of frozen structs is read from TOML, the environment and `--set`, and written back.

`mooncaked.config` says which keys there are; this module knows nothing of them. A key is a field annotated
with `Key`; its default is the field's default. Whatever is wrong becomes a `ConfigError` that names file, key
and remedy.
"""

from __future__ import annotations

import difflib
import json
import tomllib
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from mooncaked.errors import ConfigError
from mooncaked.units import DURATIONS, SIZES, format_duration, format_size, parse_duration, parse_size

Kind = Literal["text", "path", "flag", "count", "number", "size", "duration", "texts", "table"]
Raw = Mapping[str, object]  # section -> {key -> value}, as TOML gives it


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """What people need to know about one key, beside its type and default."""

    doc: str
    kind: Kind
    live: bool = False  # applies on SIGHUP; otherwise on restart
    low: float | None = None  # smallest value
    high: float | None = None  # largest value
    choices: tuple[str, ...] = ()


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the sections of the file."""


S = TypeVar("S", bound=msgspec.Struct)

EXPECTED: dict[Kind, str] = {
    "text": "text in quotes",
    "path": "a path in quotes",
    "flag": "true or false",
    "count": "a whole number",
    "number": "a number",
    "size": "a size in quotes, with its unit",
    "duration": "a duration in quotes, with its unit",
    "texts": "a list of texts",
    "table": "a table of texts",
}


class Named(msgspec.Struct, frozen=True):
    """A key with its place and its default."""

    section: str
    name: str
    key: Key
    default: object

    @property
    def dotted(self) -> str:
        return f"{self.section}.{self.name}"


def sections(cls: type[msgspec.Struct]) -> dict[str, type[Section]]:
    """The sections of a tree, by name, in order."""
    return typing.get_type_hints(cls)


def keys(cls: type[msgspec.Struct]) -> Iterator[Named]:
    """Every key of a tree, in order."""
    for section, section_cls in sections(cls).items():
        hints = typing.get_type_hints(section_cls, include_extras=True)
        empty = section_cls()
        for name, hint in hints.items():
            yield Named(section, name, hint.__metadata__[0], getattr(empty, name))


# --- out -------------------------------------------------------------------------------------------------


def to_toml(kind: Kind, value: object) -> str:
    """`value` as TOML text that reads back as the same value."""
    match value:
        case None:
            return '""'
        case bool():
            return "true" if value else "false"
        case int() if kind == "size":
            return f'"{format_size(value)}"'
        case int() | float() if kind == "duration":
            return f'"{format_duration(float(value))}"'
        case list():
            return "[" + ", ".join(_quoted(str(item)) for item in value) + "]"
        case dict():
            return (
                "{ " + ", ".join(f"{_quoted(k)} = {_quoted(v)}" for k, v in value.items()) + " }"
                if value
                else "{}"
            )
        case int() | float():
            return repr(value)
        case _:
            return _quoted(str(value))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


# --- in --------------------------------------------------------------------------------------------------


def read_toml(path: Path) -> Raw:
    """The file's sections. A file that cannot be read, or is no TOML, raises `ConfigError` with the line."""
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
        raise ConfigError(
            file=path, key="file", problem=problem, remedy="Check the path and its permissions"
        ) from error
    except UnicodeDecodeError as error:
        problem = f"byte {error.start} is no UTF-8"
        raise ConfigError(file=path, key="file", problem=problem, remedy="Save the file as UTF-8") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        what, _, where = str(error).rpartition(" (at ")
        line = where.rstrip(")")
        if not line.startswith("line "):
            line = f"line {len(text.splitlines())} (end of the file)"
        remedy = 'Every line is a [section], a # comment, or key = value with texts in "quotes"'
        raise ConfigError(
            file=path, key=line, problem=f"no valid TOML: {what or error}", remedy=remedy
        ) from error


def build(cls: type[S], layers: Iterable[tuple[str, Raw]]) -> S:
    """The tree of the defaults and `layers` (each with its origin's name), later ones over earlier ones."""
    known: dict[str, dict[str, Named]] = {}
    for named in keys(cls):
        known.setdefault(named.section, {})[named.name] = named
    values: dict[str, dict[str, object]] = {section: {} for section in known}
    for origin, raw in layers:
        for section, content in raw.items():
            for name, value in _section(known, origin, section, content).items():
                values[section][name] = convert(origin, _find(known, origin, section, name), value)
    types = sections(cls)
    return cls(**{section: types[section](**given) for section, given in values.items()})


def _section(known: Mapping[str, Mapping[str, Named]], origin: str, section: str, content: object) -> Raw:
    if section not in known:
        remedy = _suggest(section, known, "section") or f"Sections are {', '.join(known)}"
        homes = [home for home, names in known.items() if section in names]
        if homes and not isinstance(content, Mapping):
            remedy = f"Put it below [{homes[0]}]"
        raise ConfigError(file=origin, key=section, problem="there is no such section", remedy=remedy)
    if not isinstance(content, Mapping):
        remedy = f"Write [{section}] on a line of its own, with its keys below"
        raise ConfigError(file=origin, key=section, problem="it is a section, not a key", remedy=remedy)
    return content


def _find(known: Mapping[str, Mapping[str, Named]], origin: str, section: str, name: str) -> Named:
    if name in known[section]:
        return known[section][name]
    remedy = _suggest(name, known[section], "key")
    if not remedy:
        homes = [f"{home}.{name}" for home, names in known.items() if name in names]
        remedy = (
            f"Did you mean {homes[0]}?" if homes else f"Keys of [{section}] are {', '.join(known[section])}"
        )
    raise ConfigError(file=origin, key=f"{section}.{name}", problem="there is no such key", remedy=remedy)


def _suggest(name: str, candidates: Iterable[str], what: str) -> str:
    near = difflib.get_close_matches(name.lower().replace("-", "_"), list(candidates), n=1)
    return f"Did you mean the {what} {near[0]}?" if near else ""


def convert(origin: str, named: Named, value: object) -> object:
    """`value` from TOML as the key's type, within its bounds; raises `ConfigError`."""
    key, example = named.key, f"for example {named.name} = {_example(named)}"
    try:
        result = _READERS[key.kind](value)
    except ValueError as error:
        remedy = f"Write {EXPECTED[key.kind]}, {example}{_unit_list(key.kind)}"
        raise ConfigError(file=origin, key=named.dotted, problem=str(error), remedy=remedy) from error
    if result is None and named.default is not None:
        raise ConfigError(
            file=origin, key=named.dotted, problem="it is empty", remedy=f"Write a path, {example}"
        )
    if key.choices and result not in key.choices:
        near = difflib.get_close_matches(str(result), key.choices, n=1)
        remedy = (f"Did you mean {near[0]}? " if near else "") + f"Choices are {', '.join(key.choices)}"
        raise ConfigError(file=origin, key=named.dotted, problem=f"{result!r} is no choice", remedy=remedy)
    if isinstance(result, int | float) and not (key.low or 0) <= result <= (key.high or float("inf")):
        bounds = [_bound(key.kind, bound) for bound in (key.low or 0, key.high) if bound is not None]
        limit = f"between {bounds[0]} and {bounds[1]}" if len(bounds) == 2 else f"at least {bounds[0]}"
        problem = f"{to_toml(key.kind, result)} is out of bounds"
        raise ConfigError(file=origin, key=named.dotted, problem=problem, remedy=f"It must be {limit}")
    return result


def _bound(kind: Kind, bound: float) -> str:
    return to_toml(kind, int(bound) if bound == int(bound) and kind != "duration" else bound)


def _example(named: Named) -> str:
    if named.default in (None, "", {}):
        return {"path": '"/etc/mooncaked/file"', "table": '{ zone = "a" }'}.get(named.key.kind, '"text"')
    return to_toml(named.key.kind, named.default)


def _unit_list(kind: Kind) -> str:
    units: dict[Kind, list[str]] = {"size": list(SIZES), "duration": list(DURATIONS)}
    return f" (units: {', '.join(units[kind])})" if kind in units else ""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read_text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{_show(value)} is no text")
    if not value.isprintable():
        raise ValueError(f"{value!r} holds control characters")
    return value


def _read_path(value: object) -> Path | None:
    text = _read_text(value)
    if text and not text.startswith("/"):
        raise ValueError(f"{text!r} is no absolute path")
    return Path(text) if text else None


def _read_flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{_show(value)} is neither true nor false")
    return value


def _read_count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{_show(value)} is no whole number")
    return value


def _read_number(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or value != value:
        raise ValueError(f"{_show(value)} is no number")
    return float(value)


def _read_size(value: object) -> int:
    if _is_number(value):
        raise ValueError(f"{value} has no unit")
    return parse_size(_read_text(value))


def _read_duration(value: object) -> float:
    if _is_number(value):
        raise ValueError(f"{value} has no unit")
    return parse_duration(_read_text(value))


def _read_texts(value: object) -> list[str]:
    if not isinstance(value, list):
        raise ValueError(f"{_show(value)} is no list")
    return [_read_text(item) for item in value]


def _read_table(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{_show(value)} is no table")
    return {_read_text(name): _read_text(item) for name, item in value.items()}


_READERS: dict[Kind, Callable[[object], object]] = {
    "text": _read_text,
    "path": _read_path,
    "flag": _read_flag,
    "count": _read_count,
    "number": _read_number,
    "size": _read_size,
    "duration": _read_duration,
    "texts": _read_texts,
    "table": _read_table,
}


def _show(value: object) -> str:
    text = "true" if value is True else "false" if value is False else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# --- values that come as text: --set and the environment ---------------------------------------------------


def parse_text(kind: Kind, text: str) -> object:
    """`text` of `--set` or the environment as TOML would have given it; what does not fit stays text, so that
    `convert` refuses it. Lists are "a,b", tables "name=value,name=value"."""
    if kind in ("flag", "count", "number"):
        try:
            return tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            return text
    if kind == "texts":
        return [item.strip() for item in text.split(",") if item.strip()]
    if kind == "table":
        pairs = [item.partition("=") for item in text.split(",") if item.strip()]
        return (
            {name.strip(): value.strip() for name, sep, value in pairs} if all(p[1] for p in pairs) else text
        )
    return text


def from_overrides(cls: type[msgspec.Struct], origin: str, overrides: Mapping[str, str]) -> Raw:
    """`{"dram.size": "1GiB"}` as sections; a key without a dot raises `ConfigError`."""
    kinds = {named.dotted: named.key.kind for named in keys(cls)}
    raw: dict[str, dict[str, object]] = {}
    for dotted, text in overrides.items():
        section, dot, name = dotted.partition(".")
        if not dot or not section or not name:
            near = _suggest(dotted, [d.partition(".")[2] for d in kinds], "key")
            remedy = f"Write section.key=value, for example dram.size=1GiB. {near}".rstrip()
            raise ConfigError(
                file=origin, key=dotted or "(empty)", problem="it names no section", remedy=remedy
            )
        raw.setdefault(section, {})[name] = parse_text(kinds.get(dotted, "text"), text)
    return raw


def from_environment(cls: type[msgspec.Struct], prefix: str, environment: Mapping[str, str]) -> Raw:
    """`<prefix><SECTION>_<KEY>` variables as sections; an unknown one of them raises `ConfigError`."""
    known = {f"{prefix}{named.section}_{named.name}".upper(): named for named in keys(cls)}
    raw: dict[str, dict[str, object]] = {}
    for variable, text in environment.items():
        if not variable.startswith(prefix):
            continue
        if variable not in known:
            near = difflib.get_close_matches(variable, known, n=1)
            remedy = f"Did you mean {near[0]}?" if near else f"Unset it, or use {prefix}<SECTION>_<KEY>"
            raise ConfigError(file="environment", key=variable, problem="there is no such key", remedy=remedy)
        named = known[variable]
        raw.setdefault(named.section, {})[named.name] = parse_text(named.key.kind, text)
    return raw


def changes(old: msgspec.Struct, new: msgspec.Struct) -> list[Named]:
    """The keys whose values differ between two trees of one class."""
    return [
        named
        for named in keys(type(old))
        if getattr(getattr(old, named.section), named.name)
        != getattr(getattr(new, named.section), named.name)
    ]


def merge_live(old: S, new: S) -> S:
    """`old` with the values that `new` has for the keys that apply live."""
    fresh: dict[str, Section] = {name: getattr(old, name) for name in sections(type(old))}
    for named in changes(old, new):
        if named.key.live:
            value = getattr(getattr(new, named.section), named.name)
            fresh[named.section] = msgspec.structs.replace(fresh[named.section], **{named.name: value})
    return msgspec.structs.replace(old, **fresh)
