"""How a command changes something: it plans, shows the plan, asks, does it, and says what was done.

A command is its options, and one call of :func:`carry_out` with what is its own (``evict`` has examples).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from kafka_marshal.cli.connection import id_argument, note
from kafka_marshal.cli.failures import DONE, NO
from kafka_marshal.cli.options import Options, complete_client, complete_group, keep, span_option
from kafka_marshal.cli.output import ask, print_json
from kafka_marshal.types import F, T

NOT_DONE = "Nothing was changed."


def carry_out(
    options: Options,
    plan: Callable[[], T] | None = None,
    *,
    do: Callable[[], T],
    say: Callable[[T, bool], None],
    json: Callable[[T, bool], object],
    show: Callable[[T], None] | None = None,
    question: str = "",
    if_interrupted: str = "",
    not_done: str = NOT_DONE,
    status: Callable[[T], int] = lambda _: DONE,
) -> int:
    """Plan, show, ask, do, and say what was done; the exit status. A dry run ends before the question.

    ``plan``: what would be done, for a dry run, and for ``show``, which prints it for people, unless they say --yes.
    ``question``: without one, it is done at once. ``say`` and ``json``: what was done, or (False) would be, for people
    and for --json. ``if_interrupted``: what an interrupt may have left; ``not_done``: what the answer no means.
    """
    planned: T | None = None
    if plan is not None and (options.dry_run or (show is not None and not options.yes)):
        planned = plan()
        if show is not None and not options.json:
            show(planned)
    if options.dry_run:
        assert planned is not None, "a command with --dry-run has a plan"
        found = planned
    elif question and not ask(question, options.yes):
        note(options, not_done)
        return NO
    else:
        options.if_interrupted = if_interrupted or options.if_interrupted
        found = do()
    if options.json:
        print_json(json(found, not options.dry_run))
    else:
        say(found, not options.dry_run)
    return status(found)


def place_json(place: tuple[str, int, int]) -> dict[str, object]:
    """A message's place, for --json."""
    return dict(zip(("topic", "partition", "offset"), place, strict=True))


# -- options of several commands -----------------------------------------------------------------------------------


def group_argument(function: F) -> F:
    """The argument GROUP."""
    return click.argument("group", callback=id_argument, shell_complete=complete_group)(function)


def yes_option(text: str = "Don't ask.") -> Callable[[F], F]:
    """--yes, as ``options.yes``."""
    return click.option("--yes", is_flag=True, help=text, expose_value=False, callback=keep)


def dry_run_option(text: str = "Say what would be done; change nothing.") -> Callable[[F], F]:
    """--dry-run, as ``options.dry_run``."""
    return click.option("--dry-run", is_flag=True, help=text, expose_value=False, callback=keep)


def within_option(text: str, default: str = "30s") -> Callable[[F], F]:
    """--within: how long members may take (ms)."""
    return click.option("--within", callback=span_option, default=default, metavar="SPAN", help=f"{text} ({default}).")


def client_option(text: str, name: str = "--client-id", **more: Any) -> Callable[[F], F]:
    """--client-id, or another option that names a client."""
    return click.option(name, callback=id_argument, help=text, shell_complete=complete_client, **more)
