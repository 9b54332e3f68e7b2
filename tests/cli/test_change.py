"""The frame of commands that change something: what it plans, shows, asks, does, and says."""

from __future__ import annotations

from collections.abc import Callable

import click
import pytest

from kafka_marshal.cli import change
from kafka_marshal.cli.change import carry_out
from kafka_marshal.cli.failures import DONE, NO
from kafka_marshal.cli.options import Options, PartitionTarget, parsed
from kafka_marshal.cli.output import fields_of


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, list[str]]]:
    """Runs the frame; its exit status, and its steps."""

    def run(
        options: Options, *, answer: bool = True, shows: bool = True, question: str = "sure?"
    ) -> tuple[int, list[str]]:
        done: list[str] = []

        def step(name: str, value: str) -> str:
            done.append(name)
            return value

        monkeypatch.setattr(change, "ask", lambda question, yes: yes or bool(step(question, "1" if answer else "")))
        status = carry_out(
            options,
            lambda: step("plan", "planned"),
            show=(lambda planned: done.append(f"show {planned}")) if shows else None,
            question=question,
            do=lambda: step(options.if_interrupted, "done"),
            if_interrupted="do",
            say=lambda found, is_done: done.append(f"say {found} {is_done}"),
            json=lambda found, is_done: done.append(f"json {found} {is_done}"),
            status=lambda found: DONE if found == "done" else 7,
        )
        return status, done

    return run


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (Options(), ["plan", "show planned", "sure?", "do", "say done True"]),
        (Options(yes=True), ["do", "say done True"]),
        (Options(yes=True, json=True), ["do", "json done True"]),
        (Options(json=True), ["plan", "sure?", "do", "json done True"]),
    ],
)
def test_it_shows_the_plan_and_asks_unless_yes_is_said(
    steps: Callable[..., tuple[int, list[str]]], options: Options, wanted: list[str]
) -> None:
    assert steps(options) == (DONE, wanted)


@pytest.mark.parametrize("yes", [False, True])
def test_a_dry_run_ends_before_the_question(steps: Callable[..., tuple[int, list[str]]], yes: bool) -> None:
    assert steps(Options(dry_run=True, yes=yes)) == (7, ["plan", "show planned", "say planned False"])
    assert steps(Options(dry_run=True, json=True, yes=yes)) == (7, ["plan", "json planned False"])


def test_no_is_an_answer(steps: Callable[..., tuple[int, list[str]]], capsys: pytest.CaptureFixture[str]) -> None:
    assert steps(Options(), answer=False) == (NO, ["plan", "show planned", "sure?"])
    assert capsys.readouterr().err == "Nothing was changed.\n"


def test_without_a_question_it_is_done_at_once(steps: Callable[..., tuple[int, list[str]]]) -> None:
    assert steps(Options(), shows=False, question="") == (DONE, ["do", "say done True"])


def test_fields_have_their_order_and_names() -> None:
    each = PartitionTarget("t", 3, None)
    found = fields_of(each, "partition from=topic position")
    assert list(found.items()) == [("partition", 3), ("from", "t"), ("position", None)]


def test_an_option_that_cannot_be_parsed_says_why_and_what_else_it_may_be() -> None:
    def parse(_: Options, option: str, text: str) -> int:
        return int(text) if text.isdigit() else int(f"{option} {text}")

    context = click.Context(click.Command("c"), obj=Options())
    callback = parsed(parse, ", or never")
    parameter = click.Option(["--at"])
    assert callback(context, parameter, None) is None
    assert callback(context, parameter, "7") == 7
    with pytest.raises(click.BadParameter, match=r"'--at x', or never$"):
        callback(context, parameter, "x")
