"""mooncaked: the daemon's command line. The only place where errors become exit codes."""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import logging
import os
import sys
from collections.abc import Coroutine, Sequence
from importlib.metadata import version
from pathlib import Path

import uvloop

from mooncaked import log
from mooncaked.config import Config, load_config
from mooncaked.config_text import effective, reference, sample
from mooncaked.errors import ConfigError, MooncakeError
from mooncaked.failpoints import arm_from_environment
from mooncaked.lifecycle import Launch, die_with_parent
from mooncaked.notify import Notifier

logger = logging.getLogger("mooncaked")

UNEXPECTED = 1
INTERRUPTED = 130
_ORPHAN_GRACE_S = 5.0  # beyond node.drain_timeout


def parser() -> argparse.ArgumentParser:
    """The arguments. `--parent` is how a node starts its conductor, and not for people."""
    result = argparse.ArgumentParser(
        prog="mooncaked",
        description="Serves this node's block pool, and stands as a conductor.",
        epilog="Exit codes: 0 ended as asked, 1 unexpected error, 2 usage, 3 configuration, address or "
        "memory, 130 interrupted before it served.",
    )
    result.add_argument(
        "--config", metavar="FILE", type=Path, help="TOML file; without it, the defaults count"
    )
    result.add_argument(
        "--set", metavar="SECTION.KEY=VALUE", action="append", default=[], help="override one key; repeatable"
    )
    result.add_argument(
        "--role", choices=("node", "conductor"), default="node", help="conductor: no pool, scheduling only"
    )
    result.add_argument(
        "--cold",
        action="store_true",
        help="start with an empty pool in memory: forget what was kept of the last one (disks keep theirs)",
    )
    result.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    action = result.add_mutually_exclusive_group()
    action.add_argument("--check-config", action="store_true", help="say whether the configuration is good")
    action.add_argument("--print-config", action="store_true", help="print the configuration in force")
    action.add_argument(
        "--sample-config", action="store_true", help="print a file with every key and default"
    )
    action.add_argument("--config-reference", action="store_true", help="print docs/configuration.md")
    result.add_argument("--version", action="version", version=f"mooncaked {version('mooncaked')}")
    return result


def overrides(items: Sequence[str]) -> dict[str, str]:
    """`["dram.size=1GiB"]` as a mapping; raises `ConfigError` for one without "="."""
    pairs = [item.partition("=") for item in items]
    for name, equals, _ in pairs:
        if not equals:
            remedy = "Write section.key=value, for example dram.size=1GiB"
            raise ConfigError(file="--set", key=name, problem="it gives no value", remedy=remedy)
    return {name.strip(): value for name, _, value in pairs}


def run(arguments: argparse.Namespace) -> None:
    """Do what the arguments ask; returns when the daemon has ended as asked. Raises `MooncakeError`."""
    if arguments.sample_config or arguments.config_reference:
        sys.stdout.write(sample() if arguments.sample_config else reference())
        return
    given = overrides(arguments.set)

    def load() -> Config:
        return load_config(arguments.config, given, os.environ)

    config = load()
    if arguments.print_config:
        sys.stdout.write(effective(config))
    elif arguments.check_config:
        print(f"{arguments.config or 'the default configuration'} is good")
    else:
        log.set_up(config.log.level, config.log.format, os.environ)
        faulthandler.enable()  # a watchdog's SIGABRT, or a crash, leaves every thread's stack in the log
        if arguments.parent is not None:
            die_with_parent(arguments.parent, config.node.drain_timeout + _ORPHAN_GRACE_S)
        origin = str(arguments.config or "configuration")
        arm_from_environment(os.environ)
        launch = Launch(
            config=config,
            origin=origin,
            reread=load,
            environment=dict(os.environ),
            cold=arguments.cold,
        )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_role(arguments.role, launch))


def _role(role: str, launch: Launch) -> Coroutine[None, None, None]:
    """The daemon in `role`. Imported here, so that a conductor loads no pool, and a node no gateway."""
    if role == "conductor":
        from mooncaked.conductor_role import run_conductor_role

        return run_conductor_role(launch)
    from mooncaked.daemon import run_node

    return run_node(launch)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    arguments = parser().parse_args(argv)
    try:
        run(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # the one ladder: whatever gets here ends the program, with the code that fits
        return _fail(error)
    return 0


def _fail(error: Exception) -> int:
    known = _known(error)
    text = str(known) if known else f"unexpected {type(error).__name__}: {error}. Please report it"
    Notifier(os.environ).status(text)
    if not logging.getLogger().handlers:
        print(f"mooncaked: {text}", file=sys.stderr)
    else:
        logger.critical("%s", text, exc_info=None if known else error)
    return known.exit_code if known else UNEXPECTED


def _known(error: BaseException) -> MooncakeError | None:
    """The error that we have a sentence for: `error`, or the first in a group of only such ones."""
    if isinstance(error, BaseExceptionGroup):
        found = [_known(inner) for inner in error.exceptions]
        return None if None in found else found[0]
    return error if isinstance(error, MooncakeError) else None


if __name__ == "__main__":
    sys.exit(main())
