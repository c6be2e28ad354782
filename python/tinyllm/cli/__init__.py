# SPDX-License-Identifier: MIT
"""The command ``tinyllm``, which is also ``python -m tinyllm``.

A command is a module with ``NAME``, ``HELP`` (one line), ``add_arguments(parser)`` and ``run(args)
-> int``, and, where there is more to say, ``EXAMPLES``, which ends its ``--help``. ``COMMANDS``
lists them.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
from collections.abc import Sequence
from typing import Final, NoReturn, Protocol

import tinyllm
from tinyllm.cli import bench, demo, diff, info, look, selftest
from tinyllm.cli.common import CliError

__all__ = ["COMMANDS", "CliError", "main"]


class Command(Protocol):
    """What ``main`` asks of a command's module.

    ``run`` returns 0, or 1 for a finding. It prints its answer to stdout and raises ``CliError``,
    one line, for what it cannot do.
    """

    NAME: str
    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


COMMANDS: Final[tuple[Command, ...]] = (info, selftest, bench, demo, look, diff)

DONE, FINDING, FAILED = 0, 1, 2
INTERRUPTED, PIPE_CLOSED = 130, 141  # what a shell reports after SIGINT and SIGPIPE

_EPILOG: Final = """\
begin here:
  tinyllm info              is the library found, and what machine is this?
  tinyllm selftest          has it the right bits, on every instruction set?
  tinyllm bench             how fast is it here?
  tinyllm demo              what is it for?
  tinyllm COMMAND --help    what a command answers, with examples

exit status:
  0  done, nothing amiss
  1  done, with a finding: bits that differ, blocks with wrong references
  2  not done: bad arguments, no library, too little memory
  130, 141  interrupted; the reader of the output has gone

Answers go to stdout, problems and progress to stderr. With --json the answer is
one JSON object. Colour is for terminals only, and NO_COLOR turns it off.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status; ``argv`` is what follows the program's name."""
    prog = "tinyllm"
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal without some letter still gets an answer.
        sys.stdout.reconfigure(errors="replace")
    try:
        args, unknown = _parser().parse_known_args(argv)
        prog = f"tinyllm {args.command.NAME}"
        if unknown:
            raise UsageError(f"{prog}: unknown arguments: {' '.join(unknown)} ({prog} --help)")
        status = int(args.command.run(args))
        print(end="", flush=True)
        return status
    except BrokenPipeError:
        _drop_stdout()
        return PIPE_CLOSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except UsageError as error:
        return _say(str(error))
    except MemoryError:
        return _say(f"{prog}: the system has not enough memory for this")
    except (CliError, tinyllm.TlError, tinyllm.AbiMismatch, tinyllm.OutOfBlocks, OSError) as error:
        return _say(f"{prog}: {error}")
    except RuntimeError as error:
        if _was_interrupted(error):
            return INTERRUPTED
        raise


def _was_interrupted(error: BaseException | None) -> bool:
    """Whether ``error`` came up in cleaning up after an interrupt, such as of a call it left half
    done."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _say(problem: str) -> int:
    try:
        print(end="", flush=True)
    except OSError:
        _drop_stdout()
    print(" ".join(problem.split()), file=sys.stderr)
    return FAILED


def _drop_stdout() -> None:
    """The reader has gone: what is left of the output must not fail the flush at exit either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class UsageError(Exception):
    """The arguments are wrong; begins with the name of the program."""


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line and help as it was written."""

    def __init__(self, **options: object) -> None:
        options = {
            "formatter_class": argparse.RawDescriptionHelpFormatter,
            "allow_abbrev": False,
            **options,
        }
        super().__init__(**options)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"argument COMMAND: invalid choice: ('.*?')", message)
        if unknown:
            message = f"no command {unknown[1]}; there are {', '.join(c.NAME for c in COMMANDS)}"
        message = re.sub(r"^argument (\S+): ", r"\1 ", message)
        raise UsageError(f"{self.prog}: {message} ({self.prog} --help)")


def _parser() -> Parser:
    parser = Parser(
        prog="tinyllm",
        description="Attention over a paged KV cache on CPUs, with the same bits on every machine.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"tinyllm {tinyllm.__version__}")
    commands = parser.add_subparsers(
        required=True, metavar="COMMAND", title="commands", parser_class=Parser
    )
    for command in COMMANDS:
        examples = getattr(command, "EXAMPLES", None)
        sub = commands.add_parser(
            command.NAME,
            help=command.HELP,
            description=command.HELP[0].upper() + command.HELP[1:],
            epilog=examples and f"examples:\n{examples}",
        )
        command.add_arguments(sub)
        sub.set_defaults(command=command)
    return parser
