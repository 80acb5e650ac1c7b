"""The command line: `python -m engine COMMAND`.

Exit status: 0 done, 1 done with a negative answer (no bundle, claim does not hold) or a measuring process failed,
2 bad input told in one sentence on standard error, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from engine import __version__
from engine.errors import ChildError, UserError

PROGRAM = "python -m engine"
INTERRUPTED = 130

COMMANDS: dict[str, str] = {
    "search": "search for the fastest lossless plan of a deployment; writes a bundle",
    "generate": "decode one prompt with a bundle or a plan; prints text, tokens/s and accept length",
    "verify": "measure and token-force a bundle again on this machine; says whether its claim holds here",
    "judge": "the judge's self-test against known cheats, and the replay of a stored trial",
    "probe": "measure this device: read bandwidth and matrix rate",
    "bench": "time our autoregressive decoding against transformers, side by side, with the byte floor",
    "widen": "write a wider checkpoint that computes the same: real text at a larger model's memory traffic",
    "levers": "list the levers of a plan, with their legal values for a deployment",
    "plan": "print a plan as JSON: a bundle's, or the initial one with changed levers",
}
"""Command -> one line of help. Each is a module of this package with `arguments(parser)` and `run(options) -> int`."""


class _Parser(argparse.ArgumentParser):
    """Bad usage in one line, as all bad input."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parser(only: str | None) -> argparse.ArgumentParser:
    """The parser; with `only`, no other command's module is imported, so that each starts fast."""
    parser = _Parser(
        prog=PROGRAM,
        description="Tune a language model's speculative decoding to this machine, losing nothing.",
        epilog="Start with the demo, which needs no checkpoint of yours:  python -m engine search",
    )
    parser.add_argument("--version", action="version", version=f"SpecPilot {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        if only is not None and name != only:
            commands.add_parser(name, help=summary)
            continue
        module = importlib.import_module(f"engine.cli.{name}")
        command = commands.add_parser(
            name,
            help=summary,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status and raises nothing that a user would see as a traceback, other
    than for a bug of ours."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    only = arguments[0] if arguments and arguments[0] in COMMANDS else None
    options = _parser(only).parse_args(arguments)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except UserError as error:
        print(f"{PROGRAM} {options.command}: {' '.join(error.sentence.split())}", file=sys.stderr)
        return 2
    except ChildError as error:
        print(f"{PROGRAM} {options.command}: a measuring process failed: {error.reason}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (`... | head`); keep Python from complaining about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
