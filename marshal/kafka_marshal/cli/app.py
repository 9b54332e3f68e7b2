"""The root of the command: its subcommands, and how each of them ends.

Subcommands are imported when they are called: `replay` loads neither the Kafka client nor rich.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

import click
from click.shell_completion import shell_complete

from kafka_marshal.cli import failures
from kafka_marshal.cli.options import Command, Options, common_options
from kafka_marshal.errors import lacks_cli
from kafka_marshal.instance import release
from kafka_marshal.secret import hide, visible

PROGRAM: Final = "kafka-marshal"
COMPLETION_VARIABLE: Final = "_KAFKA_MARSHAL_COMPLETE"

#: Name → (module beside this one; its line in the list of commands), in the order of that list.
COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "init": ("topic", "Create the coordination topic, or check the one that is there."),
    "topic": ("topic", "How large the coordination log is, and how long it is kept."),
    "upgrade": ("topic", "Raise the coordination topic to the newest level, for good."),
    "status": ("status", "Groups at a glance; who holds what, how far; members; pauses."),
    "check": ("status", "Is all well? Exit status 0, or 1 with the reasons."),
    "lag": ("status", "How far each group is behind, and how fast it goes."),
    "log": ("log", "The coordination log in words: when, who, what, outcome, why."),
    "who": ("log", "Who owned a partition, since when, until when."),
    "ui": ("page", "A live page, with the whole history by a slider."),
    "work": ("work", "Worker processes that call your handler, until SIGTERM."),
    "groups": ("groups", "All groups, of both kinds, one row each."),
    "group": ("groups", "One group: members, pieces, settings, the last rebalances."),
    "checkpoint": ("checkpoints", "Take a checkpoint of a group now."),
    "checkpoints": ("checkpoints", "Checkpoints of a group: list, pin, retire; start, end."),
    "rollback": ("checkpoints", "Put a group back to a checkpoint, with its states."),
    "fork": ("forking", "Let another group begin with a checkpoint's positions and states."),
    "compare": ("forking", "Where two groups are, and whether their states differ."),
    "evict": ("evict", "Release leases in a dead holder's name."),
    "drain": ("evict", "Ask a worker to hand over what it holds, and to claim no more."),
    "forget-group": ("evict", "Drop what the log knows of a group that is gone."),
    "release-group": ("release", "Pause a group, move its positions, resume it."),
    "import-group": ("transfer", "Take over what Kafka's own consumer group has committed."),
    "export-group": ("transfer", "Commit a group's positions to Kafka's own consumer group."),
    "convert-group": ("transfer", "Make a claimed group a coordinated one, or the other way round."),
    "skip": ("release", "Skip what can't be read of a partition."),
    "show": ("show", "One message by its offset: key, headers, value, time."),
    "open-messages": ("open_messages", "Messages set aside, waiting for their next try, or acquired."),
    "redrive": ("open_messages", "Have messages tried again that were set aside."),
    "redo": ("redo", "Have done messages handled again, just these, while the group works on."),
    "discard": ("open_messages", "Count messages as done that were set aside."),
    "park": ("open_messages", "Set a message aside that keeps failing."),
    "dead-letters": ("dead_letters", "Messages that failed for good: why, with which keys, when."),
    "prune": ("topic", "Remove old log and old snapshots, up to a checked one."),
    "archive": ("archive", "Keep the history of the log in files, before it is pruned."),
    "dump": ("archive", "Write the coordination log to a file."),
    "replay": ("archive", "Replay a dump: outcomes, or the state at its end."),
    "what-if": ("what_if", "Replay a dump's members under other settings: what would have been."),
    "audit": ("audit", "Replay a whole history in Spark: does it hold? With a report."),
    "broker": ("local", "A real local Kafka, until Ctrl-C."),
    "demo": ("local", "The whole story on real flights, with a killed worker."),
    "completion": ("local", "Print the script that completes commands in your shell."),
}


class Root(click.Group):
    """A group that imports its commands when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"kafka_marshal.cli.{COMMANDS[cmd_name][0]}")
        command = getattr(module, cmd_name.replace("-", "_"))
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        found = [CompletionItem(name, help=text) for name, (_, text) in COMMANDS.items() if name.startswith(incomplete)]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            from difflib import get_close_matches

            near = get_close_matches(args[0], COMMANDS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            ctx.fail(f"there is no command {visible(args[0])!r}.{hint}")
        return super().resolve_command(ctx, args)

    def main(self, args: Sequence[str] | None = None, *_: Any, **__: Any) -> NoReturn:
        """For click's test runner; `run` is the entry point."""
        sys.exit(run(args))


@click.group(cls=Root, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@common_options(top=True)
@click.version_option(release(), prog_name=PROGRAM)
def root() -> None:
    """Watch and steer workers that share Kafka partitions through the coordination log.

    The options below go before or after the command's name. Exit status: 0 done, 1 the answer is no,
    2 wrong use, 3 Kafka not reachable.
    """


def run(args: Sequence[str] | None = None) -> int:
    """Run the command and report its errors; returns the exit status."""
    _open_streams()
    _be_tolerant()
    instruction = os.environ.get(COMPLETION_VARIABLE)
    if instruction:
        return shell_complete(root, {}, PROGRAM, COMPLETION_VARIABLE, instruction)
    options = Options()
    try:
        status = _invoke(list(sys.argv[1:] if args is None else args), options)
        sys.stdout.flush()
    except BrokenPipeError:
        return _pipe_closed()
    except OSError as error:
        if error.errno == errno.EPIPE:
            return _pipe_closed()
        raise
    return status


def _invoke(args: list[str], options: Options) -> int:
    try:
        with root.make_context(PROGRAM, args, obj=options) as context:
            status = root.invoke(context)
            return status if isinstance(status, int) else failures.DONE
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return failures.DONE
    except click.UsageError as error:
        _say_usage(error)
        return failures.WRONG_USE
    except click.ClickException as error:
        say_error(error.format_message())
        return failures.WRONG_USE
    except (KeyboardInterrupt, click.Abort, EOFError) as error:
        sys.stdout.flush()
        click.echo(f"\ninterrupted. {visible(options.if_interrupted)}", err=True)
        _say_notes(error)
        return failures.INTERRUPTED
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.EPIPE:
            raise
        if isinstance(error, ModuleNotFoundError) and lacks_cli(error):
            raise
        return _failed(error, options)


def _failed(error: Exception, options: Options) -> int:
    """Report an error, with a traceback only if requested."""
    if options.debug:
        for line in hide("".join(traceback.format_exception(error)), options.secrets).splitlines():
            click.echo(visible(line), err=True)
    explained = failures.explain(error)
    if explained is not None:
        status, text = explained
        say_error(hide(text, options.secrets))
        _say_notes(error)
        return status
    text = visible(hide(str(error), options.secrets))
    say_error(
        f"{type(error).__name__}: {text}. This is a fault of kafka-marshal, not of your data. "
        "The same command with --debug shows where; please report it."
    )
    return failures.BUG


def _say_notes(error: BaseException) -> None:
    """The notes that the library added to the error."""
    for note in getattr(error, "__notes__", ()):
        click.echo(visible(str(note)), err=True)


def say_error(text: str) -> None:
    """An error line on standard error."""
    click.echo(f"{paint('error:', fg='red', bold=True)} {text}", err=True)


def paint(text: str, **style: Any) -> str:
    """The text in colour, unless NO_COLOR is set (click removes it outside of terminals)."""
    return text if os.environ.get("NO_COLOR") else click.style(text, **style)


def _say_usage(error: click.UsageError) -> None:
    say_error(visible(" ".join(error.format_message().split())))
    if error.ctx is not None:
        click.echo(f"Try: {error.ctx.command_path} --help", err=True)


def _open_streams() -> None:
    """Open standard streams that the caller closed (``>&-``), or a connection would get their number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            try:
                os.fstat(number)
            except OSError:
                os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
            setattr(sys, name, open(os.devnull, "w" if number else "r", encoding="utf-8"))  # noqa: SIM115


def _be_tolerant() -> None:
    """A character that the terminal's encoding lacks must not end the command."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def _pipe_closed() -> int:
    """The reader of standard output is gone: end quietly, also when the interpreter flushes at its end."""
    try:
        if sys.__stdout__ is not None:  # not sys.stdout: a caller of `run` may have replaced it
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.__stdout__.fileno())
            os.close(nowhere)
    except (OSError, ValueError):  # standard output is no file
        pass
    return failures.PIPE_CLOSED


def command(*args: Any, **kwargs: Any) -> Callable[[Callable[..., Any]], click.Command]:
    """``click.command`` with the class Command and the common options."""
    kwargs.setdefault("cls", Command)
    settings = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
    kwargs["context_settings"] = {**settings, **kwargs.get("context_settings", {})}

    def make(function: Callable[..., Any]) -> click.Command:
        made = click.command(*args, **kwargs)(common_options()(function))
        assert isinstance(made, click.Command)
        return made

    return make
