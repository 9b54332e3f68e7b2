"""The slider's view of a moment equals a replay of the log up to there."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from kafka_marshal.client.view import holdings
from kafka_marshal.observe.rows import STATES
from kafka_marshal.ui import moments
from kafka_marshal.ui.fold import GroupHistory, History
from kafka_marshal.ui.moments import Moment
from rationalizer import Record, SettleOffsets, World, encode
from rationalizer.levels import SHARING_LEVEL
from tests.audit.group_logs import random_group_log
from tests.audit.logs import WholeLog, random_log
from tests.fleet import Fleet, started
from tests.ui.cells import cells

#: (group, topic, partition, lo) → (owner, its run, epoch, state)
Truth = dict[tuple[str, str, int, int], tuple[str, str, int, str]]


def folded(log: WholeLog, worlds: dict[int, World] | None = None, begin: int = 0) -> History:
    history = History(log.partitions, worlds)
    for cp, entries in log.entries.items():
        history.take(cp, entries[begin:])
    return history


def truth(world: World, at: int) -> Iterator[tuple[tuple[str, str, int, int], tuple[str, str, int, str]]]:
    """A replica's owners at that log time."""
    for info, _ in holdings(world):
        key = (info.group_id, info.topic, info.partition, info.lo)
        if info.client_id is None or info.instance_id is None:
            continue
        lease, group = world.lease(*key[:3]), world.group(info.group_id)
        if group is None:
            assert lease is not None
            freshness = lease.freshness(at)
        else:
            member = group.clients[info.client_id]
            silence, half = at - member.last_beat, (member.session_timeout_ms + 1) // 2
            freshness = "stale" if silence > 2 * half else "unknown" if silence > half else "fresh"
        yield key, (info.client_id, info.instance_id, info.epoch, STATES[freshness])


def said(history: History, moment: Moment) -> Truth:
    return {
        (name, cell.topic, cell.partition, cell.lo): (cell.client, cell.instance, cell.epoch, cell.state)
        for name, group in history.groups.items()
        for cell in cells(history, group, moment)
        if cell.client
    }


def merged(found: Truth) -> Truth:
    """Merge neighbours of one owner and epoch: a history may have split a replica's piece."""
    kept: Truth = {}
    last = None
    for key in sorted(found):
        if last is not None and last[:3] == key[:3] and kept[last] == found[key]:
            continue
        kept[key] = found[key]
        last = key
    return kept


LOGS = [(random_log, seed) for seed in (0, 1)] + [(random_group_log, seed) for seed in (3, 4)]


@pytest.mark.parametrize(("write", "seed"), LOGS, ids=lambda value: getattr(value, "__name__", value))
def test_any_moment_is_what_a_replay_gives(write: object, seed: int) -> None:
    log: WholeLog = write(seed, 350)  # type: ignore[operator]
    history = folded(log)
    rng = random.Random(seed)
    for cp, entries in log.entries.items():
        world = World(cp, log.partitions)
        wanted = {rng.randrange(len(entries)) for _ in range(30)}
        for index, entry in enumerate(entries):
            world.apply(*entry)
            if index in wanted:
                moment = Moment(world.log_time, cp, entry[0])
                found = {
                    key: value
                    for key, value in said(history, moment).items()
                    if history.groups[key[0]].keys[key[1:3]].cp == cp
                }
                assert merged(found) == merged(dict(truth(world, world.log_time)))


@pytest.mark.parametrize(("write", "seed"), LOGS, ids=lambda value: getattr(value, "__name__", value))
def test_any_time_is_what_replays_of_all_parts_give(write: object, seed: int) -> None:
    log: WholeLog = write(seed, 350)  # type: ignore[operator]
    history = folded(log)
    stamps = sorted(stamp for entries in log.entries.values() for _, stamp, _ in entries if stamp >= 0)
    rng = random.Random(seed)
    for at in [*rng.choices(stamps, k=6), *(rng.choice(stamps) + rng.randrange(5000) for _ in range(6)), stamps[-1]]:
        wanted: Truth = {}
        for cp, entries in log.entries.items():
            world = World(cp, log.partitions)
            for entry in entries:
                if max(world.log_time, entry[1]) > at:
                    break
                world.apply(*entry)
            wanted.update(truth(world, at))
        assert merged(said(history, Moment(at))) == merged(wanted)
        for group in history.groups.values():
            assert shown(history, group, Moment(at)) == [
                (cell.topic, cell.partition, cell.client, cell.instance, cell.state)
                for cell in cells(history, group, Moment(at))
            ]


def shown(history: History, group: GroupHistory, moment: Moment) -> list[tuple[str, int, str, str, str]]:
    """The map as the page gets it."""
    state = moments.state(history, group, moment)
    names = [(member["client"], member["instance"]) for member in state["members"]] + [("", "")]
    held = [owner for topic in state["topics"] for owner in topic["owners"] if owner >= 0]
    assert [member["held"] for member in state["members"]] == [held.count(at) for at in range(len(names) - 1)]
    return [
        (topic["topic"], partition, *names[owner], state["states"][code])
        for topic in state["topics"]
        for partition, owner, code in zip(topic["partitions"], topic["owners"], topic["states"], strict=True)
    ]


@pytest.mark.parametrize("seed", [1])
@pytest.mark.parametrize("write", [random_log, random_group_log])
def test_a_history_that_begins_at_a_snapshot_agrees_with_the_whole_one(write: object, seed: int) -> None:
    log: WholeLog = write(seed, 400)  # type: ignore[operator]
    whole = folded(log)
    middle = 200
    worlds = {cp: World.restore(log.world(cp, middle).snapshot(), log.partitions) for cp in log.entries}
    rest = folded(log, worlds, middle)
    for cp, entries in log.entries.items():
        for offset, _, _ in entries[middle::67]:
            moment = Moment(log.world(cp, 1 + [entry[0] for entry in entries].index(offset)).log_time, cp, offset)
            ours = {key: value[:3] for key, value in said(rest, moment).items() if _is_of(rest, key, cp)}
            theirs = {key: value[:3] for key, value in said(whole, moment).items() if _is_of(whole, key, cp)}
            assert _owners(ours) == _owners(theirs)


def _is_of(history: History, key: tuple[str, str, int, int], cp: int) -> bool:
    return history.groups[key[0]].keys[key[1:3]].cp == cp


def _owners(found: dict[tuple[str, str, int, int], tuple[str, str, int]]) -> set[tuple[object, ...]]:
    return {(*key[:3], *value) for key, value in found.items()}


def test_a_position_that_a_record_of_open_messages_moves_is_that_of_its_moment() -> None:
    history, now = History(1), [1_000]

    def append(record: Record, cp: int) -> int:
        offset = history.worlds[0].next_offset
        history.take(0, [(offset, now[0], encode(record))])
        return offset

    fleet = Fleet("g", 1, append)
    fleet.upgrade(SHARING_LEVEL)
    generation = fleet.join("a", {"t": 1})
    fleet.commit("a", generation, *started("t", 0, through=9))
    instance, client, group, member_id = fleet.ids("a")
    settles = (instance, client, group, member_id, generation, 2**40, "t", 0)
    append(SettleOffsets(*settles, open=((10, 10, 5, 1),)), 0)
    now[0] = 2_000
    append(SettleOffsets(*settles, done=((10, 10),)), 0)
    found = history.groups["g"].keys["t", 0].samples.at(now[0], history.worlds[0].next_offset)
    assert found is not None
    assert found.low == 10


def test_a_moment_is_a_time_or_an_offset_of_the_log() -> None:
    log = random_log(1, 300)
    history = folded(log)
    assert moments.parse_moment("2026-11-21T04:50:12.5Z", lambda *_: history).time == 1795236612500
    assert moments.parse_moment("2026-11-21T05:50:12.5+01:00", lambda *_: history).time == 1795236612500
    assert moments.parse_moment("17", lambda *_: history) == Moment(17)
    found = moments.parse_moment("1:40", lambda *_: history)
    assert (found.cp, found.offset) == (1, 40)
    assert found.time <= log.world(1, 41).log_time
    for bad in ("", "03:14:15", "2026-11-21T04:50:12", "9:3", "-1", "1:", "yesterday", "1:99999999999999999999"):
        with pytest.raises(ValueError, match=r"no moment|time zone|no partition"):
            moments.parse_moment(bad, lambda *_: history)


def test_events_have_the_words_of_the_log_command() -> None:
    log = random_log(3, 400)
    history = folded(log)
    numbers = range(len(history.events))
    assert len(numbers) > 256, "more than one block"
    rejected = [number for number in numbers if not history.events.columns["accepted"][number]]
    assert len(rejected) == sum(sum(world.rejected.values()) for world in history.worlds.values())
    assert all(history.events.words_of(number)[0] for number in rejected)
