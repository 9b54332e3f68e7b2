"""`broker`, `demo` and `completion`: commands without a log."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import get_completion_class

from kafka_marshal.cli.app import COMPLETION_VARIABLE, PROGRAM, command, root
from kafka_marshal.cli.failures import DONE, WRONG_USE, CommandError
from kafka_marshal.cli.output import print_json_line, say
from kafka_marshal.observe.text import span
from kafka_marshal.topic_names import DEFAULT_TOPIC

if TYPE_CHECKING:
    from kafka_marshal.cli.options import Options

#: Beside the package in its source tree, or in the working directory; not installed with it.
EXAMPLES = Path(__file__).parents[3] / "examples", Path("examples").absolute()

SHELLS = ("bash", "zsh", "fish")


@command()
@click.option(
    "--port", type=click.IntRange(1, 65_535), help="Of the first broker, the others follow. Default: free ones."
)
@click.option("--brokers", type=click.Choice(["1", "3"]), default="1", help="How many (1).")
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep the data in this folder; a later broker continues with it. Default: it is removed.",
)
@click.pass_obj
def broker(options: Options, port: int | None, brokers: str, keep: Path | None) -> int:
    """Run a real Kafka on this machine, without containers, until Ctrl-C.

    Its address goes to standard output as the first line, and how the start proceeds to standard error; it listens on
    the loopback interface only. Needs the extra kafka-marshal[broker], which brings what it takes (Java, if there is
    none, and the broker itself).
    """
    from kafka_marshal.files import refuse_url
    from kafka_marshal.testing import RunningKafka, run_broker

    if keep is not None:
        refuse_url(keep)
    if keep is not None and keep.exists() and not keep.is_dir():
        raise click.BadParameter(f"{keep} is no folder", param_hint="--keep")
    kept = f"its data is in {keep}" if keep is not None else "its data is removed"
    options.if_interrupted = f"The broker was not up yet; {kept}."

    def announce(kafka: RunningKafka) -> None:
        address = kafka.bootstrap_servers
        if options.json:
            print_json_line({"bootstrap": address, "brokers": len(kafka.broker_ids)})
        else:
            say(address)
        click.echo(
            f"Kafka is up. To use it: export KAFKA_MARSHAL_BOOTSTRAP={address}\n"
            f"Ctrl-C ends it; {'its data stays in ' + str(keep) if keep is not None else 'its data goes with it'}.",
            err=True,
        )
        sys.stdout.flush()

    begun = time.monotonic()
    timeout_s = options.timeout if "timeout" in options.said else None

    def progress(text: str) -> None:
        click.echo(f"{text} ({span((time.monotonic() - begun) * 1000)})", err=True)

    run_broker(port, int(brokers), keep, announce, progress=progress, start_timeout_s=timeout_s)
    return DONE


for _option in broker.params:
    if isinstance(_option, click.Option) and "--timeout" in _option.opts:
        _option.help = "How long the broker may take to answer (60; more on a busy machine)."


@command()
@click.option("--rows", type=click.IntRange(min=1), help="How many flights. Default: all 336,776.")
@click.option("--plain", is_flag=True, help="Worker processes in plain Python, without Spark; one is added, too.")
@click.option("--workers", type=click.IntRange(1, 11), help="How many at the start (2 Spark drivers, 3 plain workers).")
@click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("out/demo"),
    help="Where report, database and logs go; an earlier run's are replaced (out/demo).",
)
@click.option("--keep", is_flag=True, help="Keep the topics: the broker's data, or what was made on the Kafka named.")
@click.option("--seed", type=click.IntRange(min=0), help="Decides when whom the kill hits. Default: shown at the end.")
@click.option("--no-watchdog", is_flag=True, help="Without watchdogs: who is killed is replaced after 2 s of silence.")
@click.pass_obj
def demo(options: Options, /, directory: Path, no_watchdog: bool, **given: Any) -> int:
    """The whole story on real flights: publish, share out, process, kill a Spark driver, check, audit, report.

    336,776 flights go through a real broker (one is started, unless --bootstrap names a Kafka: there topics of this
    run's own are used, and removed), and some messages that are no flights. Spark drivers claim partitions, parse, join
    with airlines, airports and weather, and add up delays in a database; one is killed with -9 in the middle of a
    round. What they found is compared with a plain computation on the files, and the coordination log is audited.

    Exit status: 0 equal, nothing lost, nothing double, no violation; 1 not.
    """
    from kafka_marshal.files import refuse_url

    if options.topic != DEFAULT_TOPIC:
        raise CommandError(
            "the demo makes topics of its own, the one that coordinates among them, so that it meddles with nobody's "
            "work. Nothing was done. Leave --topic out.",
            WRONG_USE,
        )
    found = next((str(folder) for folder in EXAMPLES if (folder / "flights").is_dir()), None)
    if found is None:
        raise CommandError(
            "the demo is not part of the installed package: it is the folder examples/flights of the source. Nothing "
            "was done. Get the source (a clone, or the source package), and run make demo, or this command, there.",
            WRONG_USE,
        )
    sys.path.insert(0, found)
    try:
        from flights.options import DemoOptions
        from flights.run import run
    except ModuleNotFoundError as error:
        raise CommandError(
            f"the demo needs the package {error.name!r}, which is not installed. Nothing was done. "
            "Install it with: pip install 'kafka-marshal[demo]'",
            WRONG_USE,
        ) from None
    refuse_url(directory)
    options.if_interrupted = f"The demo is not complete, and {directory / 'delays.sqlite'} says so. Nothing runs on."
    bootstrap, properties = options.connection() if options.bootstrap or options.config_file else (None, {})
    return run(
        DemoOptions(
            directory=directory,
            bootstrap=bootstrap,
            config=properties,
            watchdog=not no_watchdog,
            json=options.json,
            **given,
        )
    )


@command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> int:
    r"""Print the script that completes kafka-marshal's commands and options in SHELL.

    \b
    bash: eval "$(kafka-marshal completion bash)"                      in ~/.bashrc
    zsh:  eval "$(kafka-marshal completion zsh)"                       in ~/.zshrc
    fish: kafka-marshal completion fish > ~/.config/fish/completions/kafka-marshal.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    say_script = kind(root, {}, PROGRAM, COMPLETION_VARIABLE).source()
    click.echo(say_script)
    return DONE
