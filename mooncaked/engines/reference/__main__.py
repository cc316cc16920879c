"""The command line. The only place where errors become exit codes."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence

import uvloop

from mooncaked import log
from mooncaked.engines.reference.options import Options, parse
from mooncaked.errors import MissingDependency, MooncakeError

logger = logging.getLogger("mooncaked.engines.reference")

UNEXPECTED = 1
INTERRUPTED = 130


async def _serve(options: Options) -> None:
    try:
        from mooncaked.engines.reference.instance import run_instance
    except ModuleNotFoundError as error:  # torch and its company are an extra
        package = error.name or "torch"
        raise MissingDependency(
            feature="The reference engine", package=package, install="mooncaked[engine]"
        ) from error
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await run_instance(options, stop)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code."""
    try:
        options = parse(argv, socket.gethostname().partition(".")[0])
        log.set_up(options.log_level, options.log_format, os.environ)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(options))
    except KeyboardInterrupt:
        return INTERRUPTED
    except MooncakeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except Exception as error:  # the one ladder: whatever gets here ends the program
        logger.critical("unexpected error cause=%s", error, exc_info=error)
        return UNEXPECTED
    return 0


if __name__ == "__main__":
    faulthandler.enable()  # a crash leaves every thread's stack in the log
    sys.exit(main())
