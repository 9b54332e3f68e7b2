"""Members of a group that takes checkpoints, at random: X11 to X18. Whatever happens, state fits position.

At each restore, what the program takes up has each message of the piece that is done once, and no other.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kafka_marshal.engine.effects import Outbox, Warn
from kafka_marshal.engine.groups.checkpoints import answering
from kafka_marshal.engine.groups.checkpoints.answering import Answering
from kafka_marshal.engine.groups.checkpoints.shown import CheckpointFigures
from kafka_marshal.engine.groups.pieces import HeldPiece
from kafka_marshal.engine.settings import CheckpointOptions, GroupOptions
from kafka_marshal.types import Key
from rationalizer import AnswerBarrier, CommitEntry, ConfigureGroup
from rationalizer.groups.checkpoints import Barrier
from tests.engine.groups.counting import CountingMember, Store, begun, of_keys
from tests.engine.groups.test_members import SESSION, net_of
from tests.engine.harness import Member, Net
from tests.engine.replay import Replay, read_lines


class Scene:
    """A group of members that come, go, hang and fail."""

    def __init__(self, seed: int, *, share: bool = False, hold: bool = False) -> None:
        self.chance = chance = Random(seed)
        self.net: Net = net_of(partitions=chance.randint(1, 3), end=chance.randint(5, 30), level=3)
        self.net.rounds = 2
        self.store = Store()
        self.members: list[CountingMember] = []
        self.policy: dict[str, Any] = {
            "every_ms": chance.choice([None, 500.0, 1_500.0]),
            "hold": hold,
            "drain_ms": chance.choice([200.0, 1_000.0]),
            "timeout_ms": chance.choice([1_500, 4_000]),
            "save_all": chance.random() < 0.2,
        }
        self.share = share
        if share:
            for cp in self.net.logs:
                self.net.write(ConfigureGroup("x", "admin", "g", (("accept_range_fetch", ("t",)),)), cp)
        self.join()

    def join(self, client_id: str = "") -> None:
        name = client_id or f"m{len(self.members)}"
        self.members.append(begun(self.net, name, self.store, self.chance, share=self.share, **self.policy))

    @property
    def living(self) -> list[CountingMember]:
        return [member for member in self.members if member in self.net.members]

    def happens(self) -> None:
        """Something happens to some member."""
        living, chance = self.living, self.chance
        member = chance.choice(living) if living else None
        what = chance.random()
        if member is None or what < 0.1:
            if len(living) < 4:
                self.join()
        elif what < 0.2:
            member.kill()
            if chance.random() < 0.5:
                self.join(member.client_id)
        elif what < 0.3:
            member.close_by(self.net.now + chance.choice([0.0, 300.0, 3_000.0]))
        elif what < 0.4:
            member.paused = True
        elif what < 0.5 and not member.paused:
            kept = [each[0] for each in member.source.checkpoints.kept] if member.source.checkpoints else []
            to = chance.choice(kept) if kept and chance.random() < 0.3 else None
            member.engine.take(member.consumers[0].number, checkpoints_of(member).go_back, to, member.clock())
            member.settle()
        elif what < 0.6 and not member.paused:
            member.engine.take(member.consumers[0].number, checkpoints_of(member).take, member.clock())
            member.settle()
        elif what < 0.7:
            member.hold_saves = member.hold_restores = True
        elif what < 0.8:
            member.save_error = OSError("disk full")
        elif what < 0.9:
            member.drop_appends = chance.random() < 0.5
            member.duplicate = not member.drop_appends
        else:
            self.net.pause(chance.choice([500.0, 3_000.0]))

    def heals(self) -> None:
        """All that fails works again."""
        for member in self.living:
            member.paused = member.hold_saves = member.hold_restores = member.drop_appends = member.duplicate = False
            member.save_error = None
            member.answer_saves()
            member.answer_restores()
            member.settle()

    def works(self) -> None:
        """The programs work."""
        for member in self.living:
            if member.consumers[0].closing:
                if member.source.has_left:
                    self.net.members.remove(member)
            elif not member.paused:
                member.take_some()
                member.handle_some()
            assert member.consumers[0].errors == []

    def ends(self) -> None:
        """The storm is over: all is done, once."""
        self.heals()
        self.net.run(5_000, 50)
        if all(member.consumers[0].closing for member in self.living):
            self.join()
        self.net.run_until(self._is_all_done, 120_000)
        found: dict[tuple[str, int], Counter[int]] = {key: Counter() for key in self.net.data}
        for member in self.living:
            for key, assignment in member.consumers[0].assignments.items():
                lo, hi = assignment.piece.lo, assignment.piece.hi
                found[key] += of_keys(member.counts.get(key, Counter()), lo, hi)
        assert found == {key: Counter(range(log.end)) for key, log in self.net.data.items()}

    def _is_all_done(self) -> bool:
        self.works()
        done = Counter[tuple[str, int]]()
        for member in self.living:
            for key, assignment in member.consumers[0].assignments.items():
                is_at_end = assignment.tracker.done.stable >= self.net.data[key].end - 1
                done[key] += assignment.piece.hi - assignment.piece.lo + 1 if is_at_end and assignment.shown else 0
        return all(done[key] == 2**63 for key in self.net.data)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["by piece", "hold", "shares"])
def test_whatever_happens_state_fits_position(kind: str, seed: int) -> None:
    scene = Scene(seed, share=kind == "shares", hold=kind == "hold")
    for _ in range(120):
        if scene.chance.random() < 0.12:
            scene.happens()
        elif scene.chance.random() < 0.1:
            scene.heals()
        scene.works()
        scene.net.run(scene.chance.choice([10.0, 100.0, 500.0]), scene.chance.choice([10.0, 50.0]))
    scene.ends()


@pytest.mark.parametrize("seed", range(3))
def test_joins_leaves_and_a_deploy_repeat_nothing(seed: int) -> None:
    """X6, X14, X16: what members hand over at barriers is handled once; handlers work all the time."""
    scene = Scene(seed)
    scene.net = net_of(partitions=4, end=150, level=3)
    scene.members.clear()
    scene.policy = {"every_ms": 300.0, "drain_ms": 3_000.0, "timeout_ms": 4_000}

    def goes_on(ms: int) -> None:
        for _ in range(ms // 20):
            scene.works()
            scene.net.run(20, 10)

    for name in ("a", "b", "c"):
        scene.join(name)
        goes_on(600)
    for old in list(scene.members):
        old.close_by(scene.net.now + 10_000)
        while old in scene.net.members:
            old.handle_some(most=1)
            goes_on(20)
        scene.join(old.client_id)
        goes_on(600)
    scene.ends()
    handled = sum((member.handled_of for member in scene.members), Counter())
    assert set(handled.values()) == {1}
    assert {why for member in scene.members for why, _ in member.restores} == {"joined", "handed_over"}


def checkpoints_of(member: Any) -> Any:
    return member.checkpoints_of(member.consumers[0].number)


def test_a_run_with_checkpoints_is_the_same_when_it_is_fed_in_again() -> None:
    """All that decides is in the engine."""
    lines: list[str] = []
    net = net_of(partitions=2, end=20, level=3)
    member = Member(net, "a", write=lines.append)
    net.members.append(member)
    policy = CheckpointOptions(every_ms=500.0, has_callback=True)
    member.consumer("t", group=GroupOptions("sticky", SESSION, checkpoints=policy))
    net.run(500)
    for _ in range(4):
        member.work()
        net.run(300)
    member.engine.take(1, checkpoints_of(member).go_back, None, member.clock())
    member.settle()
    net.run(1_000)
    member.engine.take(1, member.consumers[0].close, member.clock(), net.now + 1_000)
    member.settle()
    net.run(2_000)
    assert member.recorder is not None
    member.recorder.state(member.clock())
    assert member.completed
    Replay(read_lines("".join(lines).encode(), "0")).run()


# -- What one member does about an open barrier, part by part (X13, X16) ------------------------------------------


KEY: Key = ("flights", 0)


class Bench:
    """One member that owns some pieces, and the part of it that answers barriers."""

    def __init__(self, keys: list[Key], *, named: bool, leave_by: float | None) -> None:
        self.closes: list[tuple[Key, bool]] = []
        self.outbox = Outbox()
        cutting = SimpleNamespace(
            is_in_doubt=lambda key: False,
            is_in_hand=lambda key: False,
            done_of=lambda key: None,
            take_back=lambda key: None,
            close_gaps=lambda key, is_on: self.closes.append((key, is_on)),
        )
        self.shown = SimpleNamespace(
            barrier=Barrier(7, 0, 60_000, passing=True),
            answer=None,
            owns=True,
            log_time=0,
            checkpoints=SimpleNamespace(hold=False),
            is_revoked=lambda piece, generation: False,
            is_outgrown=lambda piece: False,
        )
        member = SimpleNamespace(
            generation=5,
            interval_ms=1_000.0,
            member_id="g-1",
            settings=SimpleNamespace(ids=("i", "c", "g")),
            send=lambda record, now: 1,
        )
        pieces = {key: HeldPiece(key, 0, 5, 3_000, cast("Any", None)) for key in keys}
        for piece in pieces.values():
            piece.is_restored = True
        cutter = SimpleNamespace(
            can_be_named=lambda piece, done: named,
            entries=lambda piece, done: [CommitEntry("flights", piece.key[1], 0, 2**32 - 1, 0)],
        )
        self.answering = Answering(
            cast("Any", member),
            cast("Any", self.shown),
            pieces,
            cast("Any", SimpleNamespace(number=1, cutting=cutting)),
            self.outbox,
            CheckpointOptions(every_ms=None),
            cast("Any", cutter),
            CheckpointFigures(),
            lambda now: leave_by,
        )

    def answer(self, now: float) -> AnswerBarrier:
        self.answering.step(now)
        assert self.answering.now is not None
        assert self.answering.now.record is not None
        return self.answering.now.record


def test_x16_a_leaver_whose_drain_is_over_begins_nothing_below_a_gap() -> None:
    bench = Bench([KEY], named=False, leave_by=1_000.0)
    bench.answering.step(0.0)
    assert bench.closes == [(KEY, True)]
    bench.answer(950.0)
    assert bench.closes[-1] == (KEY, False)


def test_x13_what_does_not_fit_into_an_answer_is_named_and_comes_first_in_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answering, "MAX_COMMIT_ENTRIES", 8)
    bench = Bench([("flights", partition) for partition in range(10)], named=True, leave_by=None)
    assert [entry.partition for entry in bench.answer(0.0).entries] == list(range(8))
    (warning,) = [effect for effect in bench.outbox.take() if isinstance(effect, Warn)]
    assert warning.message.startswith("flights [8], flights [9]: one answer has no room for these, too (8 entries")
    assert bench.answering.lacking == (1, 0.0, False)
    bench.shown.barrier = Barrier(9, 0, 60_000, passing=True)
    assert [entry.partition for entry in bench.answer(5.0).entries] == [8, 9, *range(6)]
    assert bench.answering.lacking == (2, 0.0, False)
