"""Entry point of `mooncakectl`: runs a command and turns what it raises into one line and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

import typer

from mooncakectl.app import app
from mooncaked.errors import MooncakeError

EXIT_UNEXPECTED = 1
EXIT_INTERRUPTED = 130
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # typer keeps click's class to itself


def prepare(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """The arguments for typer, and whether --debug was among them, before or after the command.

    A bare `--watch` gets its default interval; typer knows no options whose value may be left out."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    mine, rest = list(arguments[:end]), list(arguments[end:])
    debug = "--debug" in mine
    mine = [argument for argument in mine if argument != "--debug"]
    for index, argument in enumerate(mine):
        following = mine[index + 1] if index + 1 < len(mine) else ""
        if argument in ("--watch", "-w") and not following.replace(".", "", 1).isdigit():
            mine[index] = "--watch=2"
    return mine + rest, debug


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; see mooncaked.errors for the codes."""
    argv, debug = prepare(arguments)
    debug = debug or bool(os.environ.get("MOONCAKE_DEBUG"))
    try:
        result = typer.main.get_command(app).main(argv, prog_name="mooncakectl", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except MooncakeError as error:
        return fail(str(error), error.exit_code, debug)
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except (BrokenPipeError, SystemExit):  # typer exits by itself only when nobody reads any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # keeps the exit from failing again
        return 0
    except _UsageError as error:
        error.show()  # type: ignore[attr-defined]
        return 2
    except Exception as error:  # the one place that may: a bug, told as one line unless asked for more
        told = f"Unexpected error: {type(error).__name__}: {error} (a bug; --debug shows where)"
        return fail(told, EXIT_UNEXPECTED, debug)


def fail(message: str, code: int, debug: bool) -> int:
    """Tell the error on standard error; returns `code`."""
    if debug:
        traceback.print_exc()
    print(f"error: {message}", file=sys.stderr)
    return code


def main() -> None:
    """Console script."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
