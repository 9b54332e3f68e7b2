"""`release-group` and `skip`: pause a group, move its positions, end the pause."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from kafka_marshal.cli.app import command
from kafka_marshal.cli.change import (
    NOT_DONE,
    carry_out,
    client_option,
    dry_run_option,
    group_argument,
    within_option,
    yes_option,
)
from kafka_marshal.cli.connection import admin_of, connected, note, paused
from kafka_marshal.cli.failures import DONE, NO, CommandError
from kafka_marshal.cli.open_messages import open_text
from kafka_marshal.cli.options import (
    Options,
    PartitionTarget,
    complete_place,
    read_names,
    refuse_unknown,
    say_times,
    span_option,
    targets_in_file,
    targets_option,
    times_json,
    to_option,
)
from kafka_marshal.cli.output import Column, ask, fields_of, print_json, print_table, say, say_warning
from kafka_marshal.observe.text import count, near, span, time_text
from kafka_marshal.topic_names import is_lock

if TYPE_CHECKING:
    from kafka_marshal.admin import Admin, InHand, Move, MovePlan, Pause, PausedPartition, Target

_MOVES = (
    Column("topic", fold=True),
    Column("partition", right=True),
    Column("now", right=True),
    Column("to", right=True),
    Column("means"),
)

#: With --wait: longer than the longest possible lease (2 · 600 s).
_LONG_S = 3_600.0

_FILE = click.Path(dir_okay=False)

_WAIT = click.option(
    "--wait",
    is_flag=True,
    help="Wait for members without a limit, and continue even if messages in flight are repeated (they are named).",
)
_WITHIN = within_option("How long to wait for members")

#: A pause whose admin died ends after this long.
_SKIP_PAUSE_MS = 300_000


@dataclass(slots=True)
class ReleaseOptions:
    """The options of release-group."""

    group: str
    to: Target | None
    partitions: list[PartitionTarget]
    expires: int
    within: int
    wait: bool
    force: bool = False
    keep_done: bool = False
    from_file: str | None = None
    #: The positions before an earlier move.
    undo: MovePlan | None = None
    #: The file for the present positions; None: one with a new name.
    plan: Path | None = None
    resume: bool = False
    client_id: str | None = None


@dataclass(slots=True)
class ReleaseResult:
    """What was moved, or would be."""

    moves: list[Move]
    #: Messages in flight that are repeated.
    in_hand: Sequence[InHand] = ()
    client_id: str | None = None
    is_moved: bool = False
    file: Path | None = None


@command()
@group_argument
@click.option(
    "--to",
    callback=to_option,
    metavar="earliest|latest|readable|TIME|OFFSET",
    help="The next message to be read. TIME: 03:14, yesterday 03:14, 2026-11-21T04:50Z, 10m (ago). readable: see skip.",
)
@click.option(
    "--partition",
    "partitions",
    callback=targets_option,
    multiple=True,
    metavar="T:P=OFFSET",
    shell_complete=complete_place,
    help="Move this partition only (repeatable). T:P or T alone take --to; earliest, latest and times do, too.",
)
@click.option(
    "--expires", callback=span_option, default="5m", metavar="SPAN", help="A dead admin's pause ends then (5m)."
)
@_WITHIN
@dry_run_option("Say what would be moved, or paused; change nothing.")
@yes_option()
@_WAIT
@click.option("--force", is_flag=True, help="Take offsets outside the partition's log, too.")
@click.option(
    "--keep-done", is_flag=True, help="What is done above the new positions, out of order, stays done (claimed groups)."
)
@click.option(
    "--from-file",
    type=_FILE,
    metavar="FILE",
    help="Positions from a file: CSV (topic,partition,offset, as kafka-consumer-groups has it) or JSON.",
)
@click.option(
    "--undo",
    type=_FILE,
    metavar="FILE",
    help="Put back what an earlier release-group moved: it named this file. What was done since stays done.",
)
@click.option(
    "--plan",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Save the positions as they were here (a new file in the working directory).",
)
@click.option("--resume", is_flag=True, help="End a dead admin's pause instead.")
@client_option("Carry on as this admin.")
@click.pass_obj
def release_group(options: Options, /, undo: str | None, **given: Any) -> int:
    r"""Pause GROUP while it runs, move its positions, and resume it. No process restarts.

    Members see the pause in the log, finish their messages in flight and release with their offsets; then all positions
    are moved, and the pause ends. Before the last step, a failure or Ctrl-C changes nothing. Without --to and
    --partition the group is only paused: until Ctrl-C, or for --expires.

    Messages in flight for longer than two heartbeat intervals are repeated. If there are any, the command names the
    partitions and ends with status 1, nothing moved; with --wait it names them and continues.

    The present positions are first saved to a file, which is named: --undo FILE restores them.

    \b
    Exit status: 0 done; 1 not done, nothing moved, or what moved is named; 2 wrong use; 3 Kafka was not reachable.
    """
    wanted = ReleaseOptions(**given)
    is_named = bool(wanted.to is not None or wanted.partitions)
    ways = is_named + (wanted.from_file is not None) + (undo is not None)
    if ways > 1:
        raise click.UsageError("--to and --partition, --from-file, and --undo are three ways to say where to: use one.")
    if wanted.keep_done and (undo is not None or not ways):
        raise click.UsageError("--keep-done goes with new positions (--to, --partition, --from-file).")
    if wanted.plan is not None and wanted.plan.exists():
        raise click.UsageError(f"--plan {wanted.plan} is there already: an earlier move could not be undone by it.")
    if wanted.resume:
        if ways:
            raise click.UsageError("--resume only ends a pause: it goes with --client-id, --yes and --dry-run alone.")
        return _resume(options, wanted)
    incomplete = [each for each in wanted.partitions if each.position is None]
    if wanted.from_file is not None:
        wanted.partitions = targets_in_file(options, wanted.from_file, wanted.group)
        say_times(options)
    if undo is not None:
        wanted.undo = _to_undo(options, wanted.group, undo)
    if incomplete and wanted.to is None:
        raise click.UsageError(f"where to move {incomplete[0].topic!r}? Say --to, or =POSITION after the partition.")
    with admin_of(options, wanted.client_id) as admin:
        if not ways:
            refuse_unknown(options, wanted.group, effect=NOT_DONE)
            return _would_pause(options, admin, wanted) if options.dry_run else _only_pause(options, admin, wanted)
        targets: dict[tuple[str, int], Target] = {}
        targets.update(_targets(options, admin, wanted) if wanted.undo is None else wanted.undo.targets)
        moves = admin.plan(wanted.group, wanted.undo or targets, force=wanted.force, keep_done=wanted.keep_done)
        if all(move.before is None for move in moves):
            _say_if_mistyped(options, wanted.group)
        return _move(options, admin, wanted, targets, moves)


def _to_undo(options: Options, group: str, path: str) -> MovePlan:
    from kafka_marshal.admin import MovePlan

    found = MovePlan.read(path)
    found.check(group, options.topic)
    if found.left_out:
        named = ", ".join(f"{topic} [{partition}]" for topic, partition in found.left_out[:5])
        say_warning(
            f"{count(len(found.left_out), 'partition')} had no position before that move ({named}"
            f"{' …' * (len(found.left_out) > 5)}): left where they are"
        )
    if not found.targets:
        raise CommandError("nothing of that move can be undone. Nothing was changed.", NO)
    return found


@command()
@group_argument
@click.argument(
    "partition",
    callback=lambda c, p, v: targets_option(c, p, (v,))[0],
    metavar="TOPIC:PARTITION",
    shell_complete=complete_place,
)
@click.option("--to", callback=to_option, metavar="OFFSET", help="Continue there. Default: the first readable offset.")
@_WITHIN
@dry_run_option("Say what would be left out; change nothing.")
@yes_option()
@_WAIT
@click.pass_obj
def skip(
    options: Options,
    group: str,
    partition: PartitionTarget,
    to: Target | None,
    within: int,
    wait: bool,
) -> int:
    r"""Skip what can't be read of a partition: GROUP continues behind it.

    A corrupt batch stops every reader of its partition for ever. A record with a timestamp beyond the year 9999 stops
    Spark. The command searches from the group's position for the first readable offset, says how many offsets are
    skipped, and moves the group there as release-group does. Check first whether another replica has the batch
    undamaged: skipped messages are never delivered.

    \b
    Exit status: 0 done; 1 not done, or the next message can be read; 2 wrong use; 3 Kafka was not reachable.
    """
    if partition.partition is None or partition.position is not None:
        raise click.UsageError("name one partition, as TOPIC:PARTITION, such as flights:3; where to is for --to.")
    targets: dict[tuple[str, int], Target] = {(partition.topic, partition.partition): "readable" if to is None else to}
    with admin_of(options, None) as admin:
        _partition_counts(options, [partition.topic])
        (move,) = plan = admin.plan(group, targets)
        if move.before is None:
            refuse_unknown(options, group, partition.topic, NOT_DONE)
        if to is None and move.before is not None and move.after <= move.before:
            after = _behind_wrong_stamps(options, move)
            targets = {move.key: after}
            (move,) = plan = admin.plan(group, targets)
        if move.before is None or move.after <= move.before:
            raise CommandError(_nothing_to_skip(group, move, to), NO)
        wanted = ReleaseOptions(group, None, [partition], _SKIP_PAUSE_MS, within, wait)
        return _move(options, admin, wanted, targets, plan)


def _nothing_to_skip(group: str, move: Move, to: Target | None) -> str:
    where, before = f"{move.topic} [{move.partition}]", move.before or 0
    if to is not None:
        return (
            f"{where}: the next offset of {group} is {before}, and --to {move.after} leaves out nothing of what comes. "
            f"Nothing was changed. skip goes forward; to go back: kafka-marshal release-group {quote(group)} "
            f"--partition {quote(f'{move.topic}:{move.partition}={move.after}')}"
        )
    return (
        f"{where}: nothing stands in the way at offset {before}, the next one of {group}. Nothing was changed. If "
        "members report a record that is too large, raise their receive.message.max.bytes, or leave it out with --to "
        f"{before + 1}."
    )


def _behind_wrong_stamps(options: Options, move: Move) -> int:
    """The first offset behind records whose timestamps Spark's connector can't represent."""
    from kafka_marshal.admin.positions import first_with_a_moment

    with connected(options) as cluster:
        _, end = cluster.watermarks([move.key], options.timeout)[move.key]
        after, wrong = first_with_a_moment(cluster, move.key, move.after, end)
    if wrong:
        note(
            options,
            f"{move.topic} [{move.partition}]: offset {move.after} has the timestamp {wrong[0]} ms, which Spark's "
            "connector can't represent. (Workers without Spark, and the stream source, can read it.)",
        )
    return after


def _targets(options: Options, admin: Admin, wanted: ReleaseOptions) -> dict[tuple[str, int], Target]:
    """Partition → target. Without --partition: all partitions of all topics that the group ever read."""
    partitions = wanted.partitions
    if not partitions:
        topics = sorted({lease.topic for lease in admin.progress(wanted.group) if not is_lock(lease.topic)})
        if not topics:
            effect = "Nothing was changed. To set where a new group begins, name its partitions with --partition."
            refuse_unknown(options, wanted.group, effect=effect)
            raise CommandError(f"group {wanted.group!r} has no positions yet. {effect}", NO)
        partitions = [PartitionTarget(topic, None, None) for topic in topics]
    counts = _partition_counts(options, sorted({each.topic for each in partitions}))
    targets: dict[tuple[str, int], Target] = {}
    for each in sorted(partitions, key=lambda each: each.partition is not None):  # a partition prevails over its topic
        position = wanted.to if each.position is None else each.position
        assert position is not None
        numbers: Iterable[int] = range(counts[each.topic]) if each.partition is None else [each.partition]
        targets.update({(each.topic, number): position for number in numbers})
    return targets


def _say_if_mistyped(options: Options, group: str) -> None:
    """Warn about an unknown group: it may get positions before its first member starts, or its name is mistyped."""
    known = read_names(options, options.timeout)
    if group not in known:
        say_warning(f"no group {group!r} so far{near(group, known) or '.'}")


def _partition_counts(options: Options, topics: list[str]) -> dict[str, int]:
    with connected(options) as cluster:
        infos = cluster.topic_info(topics, options.timeout)
        missing = [topic for topic in topics if topic not in infos]
        hint = near(missing[0], cluster.topics(options.timeout)) if missing else ""
    if missing:
        raise CommandError(
            f"{', '.join(map(repr, missing))}: not on this cluster{hint or ' (any more).'} Nothing was changed. "
            "--partition names what is to be moved.",
            NO,
        )
    return {topic: info.partitions for topic, info in infos.items()}


def _offer_to_keep(moves: list[Move]) -> None:
    ahead = sum(move.done_ahead for move in moves)
    if ahead:
        say_warning(
            f"{count(ahead, 'message')} from there on, done out of order, will be handled again. In a claimed group "
            "--keep-done leaves them done"
        )


def _warn_of_states(group: str, moves: list[Move]) -> None:
    if any(move.keeps_state and move.before not in (None, move.after) for move in moves):
        say_warning(
            f"group {group} takes checkpoints, and the states of its members stay as they are: what comes again counts "
            f"twice in them, what is skipped is missing. kafka-marshal rollback {quote(group)} takes the states along"
        )


def _move(
    options: Options, admin: Admin, wanted: ReleaseOptions, targets: dict[tuple[str, int], Target], plan: list[Move]
) -> int:
    group = wanted.group
    if not options.json and (options.dry_run or not options.yes):
        _print_moves(plan)
        _offer_to_keep(plan)
    _warn_of_states(group, plan)

    def move() -> ReleaseResult:
        with paused(admin, group, wanted.expires, options) as pause:
            note(options, f"paused by {pause.client_id}, for {span(wanted.expires)} at most")
            in_hand = _wait_released(options, pause, wanted, list(targets))
            if any(each.state != "slow" for each in in_hand) and not wanted.wait:
                if options.json:
                    print_json(_moved_json(options, group, ReleaseResult(plan, in_hand, pause.client_id)))
                raise CommandError(
                    "nothing was moved, and the group is resumed: messages in flight there would be repeated. See that "
                    "they get done and try again, or accept that with --wait."
                )
            file = _save(options, pause, wanted, targets)
            options.if_interrupted = (
                "What had been moved was put back, and the group is resumed; where that was interrupted too, "
                f"kafka-marshal lag --group {quote(group)}{options.reach()} shows the positions."
            )
            lost = {move.key: move.lost for move in plan}
            moves = [replace(move, lost=lost.get(move.key, "")) for move in _reposition(pause, wanted, targets)]
            options.if_interrupted = "All positions were moved, and the group is resumed."
        return ReleaseResult(moves, in_hand, admin.client_id, True, file)

    def say_moved(found: ReleaseResult, done: bool) -> None:
        if done:
            _print_moves(found.moves)  # again: positions may have moved until the last member released
            note(options, f"moved {count(len(found.moves), 'partition')}; group {group} is resumed")
            undo = f"kafka-marshal release-group {quote(group)} --undo {quote(str(found.file))}{options.reach()}"
            note(options, f"as it was: {found.file}. To put it back: {undo}")

    return carry_out(
        options,
        lambda: ReleaseResult(plan),
        question=f"Pause group {group}, move {count(len(plan), 'partition')} as shown, and resume it?",
        do=move,
        say=say_moved,
        json=lambda found, _: _moved_json(options, group, found),
    )


def _reposition(
    pause: Pause, wanted: ReleaseOptions, targets: dict[tuple[str, int], Target], *, dry_run: bool = False
) -> list[Move]:
    if wanted.undo is not None:
        return pause.undo(wanted.undo, dry_run=dry_run, force=wanted.force)
    return pause.reposition(targets, dry_run=dry_run, force=wanted.force, keep_done=wanted.keep_done)


def _save(options: Options, pause: Pause, wanted: ReleaseOptions, targets: dict[tuple[str, int], Target]) -> Path:
    """Save the present positions, while no member works."""
    from kafka_marshal.admin.positions import MovePlan, plan_path

    path = plan_path(wanted.group) if wanted.plan is None else wanted.plan
    MovePlan.of(wanted.group, options.topic, _reposition(pause, wanted, targets, dry_run=True)).write(path)
    return path


def _wait_released(
    options: Options, pause: Pause, wanted: ReleaseOptions, partitions: list[tuple[str, int]] | None
) -> list[InHand]:
    """Wait until members have released; name partitions whose messages in flight are, or may be, repeated."""
    note(options, "waiting for its members to hand in what they have …")
    timeout_s = _LONG_S if wanted.wait else wanted.within / 1000
    in_hand = pause.wait_released(timeout_s, partitions)
    for each in in_hand:
        done = "nothing" if each.stable is None else f"what lies below offset {each.stable + 1}"
        rest = "and not in time what it had in hand: that is repeated"
        if each.state == "slow":
            rest = "late: if more was in flight, that is repeated"
        say_warning(f"{each.topic} partition {each.partition}: {each.client_id} handed in {done}, {rest}")
    return in_hand


def _only_pause(options: Options, admin: Admin, wanted: ReleaseOptions) -> int:
    """Keep the group paused until Ctrl-C, or until the pause runs out."""
    if not ask(f"Pause group {wanted.group} for {span(wanted.expires)}, or until Ctrl-C?", options.yes):
        note(options, NOT_DONE)
        return NO
    with paused(admin, wanted.group, wanted.expires, options) as pause:
        if options.json:
            print_json({"group": wanted.group, "client_id": pause.client_id, "seconds": pause.seconds_left})
        note(options, f"paused by {pause.client_id} for {span(wanted.expires)}. Ctrl-C resumes the group")
        try:
            _wait_released(options, pause, wanted, None)
            note(options, "no member is at work any more")
            while (left := pause.seconds_left) > 0:
                time.sleep(min(left, 0.2))
        except KeyboardInterrupt:
            note(options, "")
    note(options, f"group {wanted.group} is resumed")
    return DONE


def _would_pause(options: Options, admin: Admin, wanted: ReleaseOptions) -> int:
    """The dry run of a pause: the members that would release, and what."""
    held = [lease for lease in admin.progress(wanted.group) if lease.client_id is not None]
    clients = sorted({lease.client_id or "" for lease in held})
    if options.json:
        print_json({"group": wanted.group, "paused": False, "held": len(held), "members": clients})
    else:
        say(
            f"group {wanted.group} would be paused for {span(wanted.expires)} at most: "
            f"{count(len(clients), 'member')} would finish their messages in flight and release "
            f"{count(len(held), 'partition')}; nothing is delivered meanwhile."
        )
    return DONE


def _resume(options: Options, wanted: ReleaseOptions) -> int:
    group = wanted.group

    def say_resumed(found: list[PausedPartition], done: bool) -> None:
        by = ", ".join(sorted({each.client_id for each in found}))
        if not found:
            say(f"group {group} is not paused")
        elif done:
            say(f"group {group} is resumed: its pause by {by} ended")
        else:
            until = time_text(max(each.expires for each in found))
            say(f"the pause of group {group} by {by} would end; otherwise it ends at {until}")

    def resumed_json(found: list[PausedPartition], done: bool) -> dict[str, object]:
        if done:
            return {"group": group, "ended": [fields_of(each, "partition client=client_id expires") for each in found]}
        ends = sorted({(each.client_id, each.expires) for each in found})
        return {"group": group, "ended": [], "pauses": [{"client": by, "expires": until} for by, until in ends]}

    def known(found: list[PausedPartition]) -> list[PausedPartition]:
        if not found:
            refuse_unknown(options, group, effect=NOT_DONE)
        return found

    with admin_of(options) as admin:
        pauses = admin.pauses(group)
        question = ""
        if pauses:
            by = ", ".join(sorted({pause.client_id for pause in pauses}))
            until = time_text(max(pause.expires for pause in pauses))
            question = f"End the pause of group {group} by {by} (until {until})?"
        return carry_out(
            options,
            lambda: known(pauses),
            question=question,
            do=lambda: known(admin.resume(group, wanted.client_id)),
            if_interrupted="The pause may have ended in a part of the log: run the command again.",
            say=say_resumed,
            json=resumed_json,
        )


def _means(move: Move) -> str:
    if move.before is None:
        text = "never claimed"
    elif move.lost:
        return move.lost + open_text(move)
    elif move.after < move.before:
        text = f"{count(move.before - move.after, 'offset')} repeated"
    elif move.after > move.before:
        text = f"{count(move.after - move.before, 'offset')} skipped"
    else:
        text = "as it is"
    if move.done_ahead:
        text += f"; {move.done_ahead:,} done out of order count as not done"
    if move.kept:
        text += f"; {sum(last - first + 1 for first, last in move.kept):,} above stay done"
    return text + open_text(move)


def _print_moves(moves: list[Move]) -> None:
    is_done = any(move.epoch is not None for move in moves)
    rows = [
        [
            move.topic,
            str(move.partition),
            "-" if move.before is None else str(move.before),
            str(move.after),
            *([str(move.epoch)] if is_done else []),
            _means(move),
        ]
        for move in moves
    ]
    print_table((*_MOVES[:-1], Column("epoch", right=True), _MOVES[-1]) if is_done else _MOVES, rows)
    for move in moves:
        if move.parked:
            more = f" and {len(move.parked) - 20:,} more (--json)" if len(move.parked) > 20 else ""
            say(f"stay set aside of {move.topic} [{move.partition}]: {', '.join(map(str, move.parked[:20]))}{more}")


def _moved_json(options: Options, group: str, found: ReleaseResult) -> dict[str, object]:
    return {
        "group": group,
        "client_id": found.client_id,
        "moved": found.is_moved,
        "plan": None if found.file is None else str(found.file),
        "times": times_json(options),
        "moves": [
            {
                **fields_of(move, "topic partition before after done_ahead kept closed parked"),
                "position_lost": bool(move.lost),
                "epoch": move.epoch,
            }
            for move in found.moves
        ],
        "in_hand": [
            {
                **fields_of(each, "topic partition client=client_id epoch state"),
                "next": 0 if each.stable is None else each.stable + 1,
            }
            for each in found.in_hand
        ],
    }
