"""The judge itself: does it refuse what it must refuse, and does a stored trial come out the same again?

  selftest   judge the known ways to fake a win and honest candidates, here, and say which it got right
  soak       the self-test, many times over
  replay     ask exactly the questions of a stored trial again, in the same order, and compare with the record

Exit status: 0 all is as it should be, 1 it is not, 2 bad input.
"""

from __future__ import annotations

import argparse
import importlib

ACTIONS = {
    "selftest": "judge known cheats and honest candidates on this machine; exit 1 if one gets the wrong verdict",
    "soak": "run the self-test many times, several at once; exit 1 if one of them fails",
    "replay": "repeat a stored trial and compare; exit 1 if it does not come out the same",
}
"""Action -> one line of help. Each is a module of `engine.judge` with `arguments(parser)` and `run(options) -> int`
that imports no torch."""


def arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, summary in ACTIONS.items():
        try:
            module = importlib.import_module(f"engine.judge.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"engine.judge.{name}":
                raise
            continue
        action = actions.add_parser(
            name,
            help=summary,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.arguments(action)
        action.set_defaults(act=module.run)


def run(options: argparse.Namespace) -> int:
    status: int = options.act(options)
    return status
