"""The commands of scripts about members: real engines on virtual time, with a log in memory (tests/engine/harness.py).

What happens around them:

    cluster [cps=2] [z=z/1]         a new one, at time 0; z appends records and is no member, or not this one: z=a/1
    z claims flights:0              a record, in the words of `records.py`
    topic flights [partitions=2] [end=50] [start=9] [missing=5-7] [id=new]     made, or changed; all members hear of it
    wait 300, wait until 1900       time passes (ms), in steps of 10
    clock +3000                     the broker's clock runs ahead of all others by this much
    kafka away, kafka back          no record arrives at any member
    again @3 [cp=1]                 a producer's retry writes the record at offset 3 of the CP once more

What a member does:

    a starts flights [at-most-once] [ahead] [raises] [start=latest] [batch=5] [hi=1000] [acks=late] [revoke=5000]
                     [transactions] [shares] [hang=3000]
                                    again: its next instance
    a takes [3]                     what the user gets at once, at most that number; at most once, it is claimed first
    a loops 3, a leaves its loop    the same in `for message in consumer`: each is done when the next one is asked for
    a works 500                     the user takes whatever there is, and all of it is done at once
    a done flights:0 0-2 5          the user has done these
    a parks flights:0 5 3 Bad       the user has set aside offset 5 after 3 tries
    a gives back flights:0 5        what is not done of the batch with offset 5
    a closes, a dies                at once, or kill -9
    a freezes, a goes on            SIGSTOP, SIGCONT
    a loses claims                  these never arrive: beats, commits, grants, releases, settles, all, nothing
    a hears nothing, a hears all    of the log
    a acks late, a acks arrive      how the broker acknowledges: now, late, lost, blank (without an offset)
    a asks in vain, a is answered   look-ups of where a partition's log begins
    a takes a batch of 3            for a transaction
    a commits flights:0@2           the transaction of its batch that begins with offset 2; or: a aborts
    a loses track of flights:0      it does not know whether its commit succeeded; or: the producer of
    producers hang, producers answer    a takes a partition over: what it asks of Kafka
    a callbacks run, a callbacks return

    Of groups that take checkpoints: the commands at the top of `checkpoint_members.py`.

    offset flights:0=7 [by=mirror]  another program commits an offset in Kafka for the group; flights:0 gone: it expires

What is to be seen:

    offset flights:0                Kafka's committed offset
    state                           of each member's partitions
    lease flights:0                 as a replica of the whole log has it
    log                             all records

Each event has its time (ms). A record is a line when it is in the log, with its offset (and CP, where there are
several) and what a replica makes of it. Whatever is drawn at random is drawn in the middle: beats go out every 0.3 HI.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby, islice
from random import Random
from typing import Any

from kafka_marshal.engine.claims.leases import HeldLease
from kafka_marshal.engine.effects import (
    Append,
    Call,
    CheckpointCompleted,
    CloseProducer,
    Effect,
    LookUp,
    Note,
    RestoredPiece,
    RestoreState,
    SavedPiece,
    SaveState,
    StartFetch,
    StopFetch,
    TakeOver,
    TakeOverStep,
    Warn,
)
from kafka_marshal.engine.settings import SharingOptions, Why
from kafka_marshal.engine.shares.consumer import BatchRun, SharedConsumer
from kafka_marshal.engine.work.assignment import Run
from kafka_marshal.engine.work.open_messages import hash_of
from kafka_marshal.engine.work.topic_mark import NO_ID
from rationalizer import (
    ClaimingMessages,
    ClaimingPartition,
    CommitRanges,
    Heartbeat,
    HeartbeatBatch,
    Record,
    ReleasingPartition,
    SettlingMessages,
    Upgrade,
    World,
    decode,
    encode,
    route_lease,
)
from rationalizer.levels import SUPPORTED_LEVEL
from rationalizer.limits import MAX_KEY_HASH
from tests.engine.harness import DataLog, FakeMessage, Member, Net
from tests.scripts.checkpoint_members import GROUP_FLAGS, group_of, groups_of, plays
from tests.scripts.records import lease_name, lease_words, options_of, record_of, spans, words_of

KINDS: dict[str, tuple[type[Record], ...]] = {
    "claims": (ClaimingPartition,),
    "beats": (Heartbeat, HeartbeatBatch),
    "commits": (CommitRanges,),
    "grants": (ClaimingMessages,),
    "releases": (ReleasingPartition,),
    "settles": (SettlingMessages,),
    "nothing": (),
}


def names_of(pieces: Iterable[SavedPiece | RestoredPiece]) -> str:
    """Pieces, and where they continue."""
    found = []
    for piece in pieces:
        name = f"{piece.key[0]}:{piece.key[1]}"
        if (piece.lo, piece.hi) != (0, MAX_KEY_HASH):
            name += f"({piece.lo / 2**63:.2f}-{piece.hi / 2**63:.2f})"
        if isinstance(piece, RestoredPiece):
            name += f" at {piece.position}" + "".join(f" {first}-{last}" for first, last in piece.ranges)
            states = [str(state) for _, _, state in piece.states if state]
            name += f" state {','.join(states)}" if states else ""
        found.append(name)
    return "; ".join(found)


class Middle(Random):
    """Draws the middle of whatever there is to draw from."""

    def random(self) -> float:
        return 0.5


@dataclass
class TracedNet(Net):
    """A log whose records are written down as they come, with what a replica concludes."""

    trace: list[str] = field(default_factory=list)
    in_log: list[str] = field(default_factory=list)
    is_away: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.began = self.now
        self.judges = {cp: World(cp, self.cps) for cp in self.logs}
        self.groups = groups_of(self.judges, self.cps)

    def time(self, at: float) -> int:
        return round(at - self.began)

    def say(self, text: str) -> None:
        self.trace.append(f"{self.time(self.now):>5} {text}")

    def append(self, cp: int, value: bytes) -> int:
        offset = super().append(cp, value)
        words = self.words(decode(value, SUPPORTED_LEVEL))
        outcome = self.judges[cp].apply(offset, *self.logs[cp][offset])
        entries = "" if outcome.entries is None or outcome.code == "OK" else f": {' '.join(outcome.entries)}"
        self.say(f"{'' if self.cps == 1 else cp}@{offset} {words} -> {outcome.code}{entries}")
        self.in_log.append(self.trace[-1])
        return offset

    def words(self, record: Record) -> str:
        return f"{record.client_id} {words_of(record, self.epoch, int(self.began), self.groups)}"

    def epoch(self, key: tuple[str, str, int]) -> int:
        lease = self.judges[route_lease(key[1], key[2], self.cps)].lease(*key)
        return 0 if lease is None else lease.epoch


class TracedMember(Member):
    """A member whose effects are written down as they are carried out."""

    net: TracedNet

    def __init__(self, net: TracedNet, client_id: str, instance_id: str, hi: int) -> None:
        super().__init__(net, client_id, instance_id, hi=hi, rng=Middle())
        #: What the user was handed, by partition and offset.
        self.in_hand: dict[tuple[str, int], dict[int, FakeMessage]] = {}
        self.loop: Run | None = None
        #: Batches by topic, partition and first offset.
        self.batches: dict[tuple[str, int, int], Run] = {}

    def carry_out(self, effect: Effect) -> None:
        if text := self.what(effect):
            self.net.say(f"{self.client_id} {text}")
        super().carry_out(effect)

    def what(self, effect: Effect) -> str:
        match effect:
            case StartFetch(key=(topic, partition), offset=offset):
                return f"reads {topic}:{partition} from {offset}"
            case StopFetch(key=(topic, partition)):
                return f"stops reading {topic}:{partition}"
            case LookUp(key=(topic, partition), start=start):
                return f"asks where {topic}:{partition} is, start={start}"
            case Call(callback=callback, pieces=pieces):
                return f"{callback} {' '.join(f'{piece.key[0]}:{piece.key[1]}' for piece in pieces)}"
            case Note(event="claimed", key=(topic, partition)):
                return f"holds {topic}:{partition}"
            case Note(event="lost", key=(topic, partition), reason=reason):
                return f"lost {topic}:{partition}: {reason}"
            case Warn(message=message):
                return f"{'errs' if effect.is_error else 'warns'}: {message}"
            case TakeOver(key=(topic, partition), step=step):
                name = f"{topic}:{partition}"
                return {
                    TakeOverStep.OPEN: f"makes the producer of {name}",
                    TakeOverStep.READ: f"reads Kafka's offset of {name}",
                    TakeOverStep.SET: f"sets Kafka's offset of {name} to {effect.offset}",
                }[step]
            case CloseProducer(key=(topic, partition)):
                return f"closes the producer of {topic}:{partition}"
            case SaveState(barrier=barrier, pieces=pieces, leaving=leaving):
                return f"saves {barrier}: {names_of(pieces)}{', leaving' if leaving else ''}"
            case RestoreState(checkpoint=checkpoint, why=why, pieces=pieces):
                return f"restores {checkpoint}, {why}: {names_of(pieces)}"
            case CheckpointCompleted(checkpoint=checkpoint):
                return f"sees {checkpoint} complete"
            case Append() | Note():
                return ""  # a record says it when it is in the log

    def send(self, append: Append) -> None:
        if self.drop_appends or self.drop_if(append.record):
            self.net.say(f"- {self.net.words(append.record)} -> never arrives")
        super().send(append)

    def gets(self, messages: Iterable[FakeMessage]) -> None:
        for (topic, partition), some in groupby(messages, lambda message: message.of):
            got = {message.at: message for message in some}
            self.in_hand.setdefault((topic, partition), {}).update(got)
            self.net.say(f"{self.client_id} is handed {topic}:{partition} {spans(list(got))}")

    def fetch(self, limit: int = 5) -> int:
        return 0 if self.net.is_away else super().fetch(limit)


class Members:
    """A cluster and the members that a script names."""

    def __init__(self) -> None:
        self._cluster([], {})

    def play(self, line: str) -> Iterator[str]:
        """One command: what happens by it."""
        subject, *rest = line.split()
        words, options = options_of(rest)
        if (command := COMMANDS.get(subject)) is not None:
            command(self, words, options)
        elif subject in self.writers:
            record = record_of(self.writers[subject], words, options, int(self.net.now), self.net.epoch)
            self._write(record, options)
        elif words[:1] == ["starts"]:
            self._starts(subject, words[1:], options)
        else:
            self._does(self.members[subject], *words)
        if options:
            raise ValueError(f"{', '.join(options)} means nothing here")
        for member in self.net.members:
            self._what_is_raised(member)
        yield from self.net.trace
        self.net.trace.clear()

    # -- around the members ------------------------------------------------------------------------------

    def _cluster(self, words: list[str], options: dict[str, str]) -> None:
        self.net = TracedNet(int(options.pop("cps", "1")))
        if level := int(options.pop("level", "0")):
            for cp in self.net.logs:
                self.net.append(cp, encode(Upgrade("z", "z", "z", level)))
            self.net.trace.clear()
        #: Who writes records and is no member: (instance, client) by name.
        self.writers: dict[str, tuple[str, str]] = {}
        self.members: dict[str, TracedMember] = {}
        self.starts: dict[str, int] = {}
        self.raised: set[Exception] = set()
        for name in list(options):
            client, instance = options.pop(name).split("/")
            self.writers[name] = (instance, client)

    def _topic(self, words: list[str], options: dict[str, str]) -> None:
        [name] = words
        before = self.net.data.get((name, 0), DataLog())
        count = int(options.pop("partitions", sum(key[0] == name for key in self.net.data) or 1))
        first, _, last = options.pop("missing", "0").partition("-")
        missing = frozenset(range(int(first), int(last) + 1)) if last else before.missing
        made = (int(options.pop("start", before.start)), int(options.pop("end", before.end)), missing)
        for key in [key for key in self.net.data if key[0] == name]:
            del self.net.data[key]
        for partition in range(count):
            self.net.data[name, partition] = DataLog(*made)
        self.net.topic_ids[name] = options.pop("id", self.net.topic_ids.get(name, NO_ID))
        self.net.tell_topics()

    def _wait(self, words: list[str], options: dict[str, str]) -> None:
        ms = int(words[1]) - self.net.time(self.net.now) if words[0] == "until" else int(words[0])
        self._pass(ms, lambda: None)

    def _pass(self, ms: int, between: Callable[[], object]) -> None:
        until = self.net.now + ms
        while self.net.now < until:
            self.net.tick(min(self.net.step_ms, until - self.net.now))
            between()

    def _clock(self, words: list[str], options: dict[str, str]) -> None:
        self.net.stamp_shift = float(words[0])

    def _kafka(self, words: list[str], options: dict[str, str]) -> None:
        self.net.is_away = {"away": True, "back": False}[words[0]]
        for member in self.net.members:
            member.stalled = member.drop_appends = self.net.is_away

    def _again(self, words: list[str], options: dict[str, str]) -> None:
        cp = int(options.pop("cp", "0"))
        self.net.append(cp, self.net.logs[cp][int(words[0].removeprefix("@"))][1])

    def _write(self, record: Record, options: dict[str, str]) -> None:
        cps: Iterable[int] = self.net.logs
        topic, partition = getattr(record, "topic", None), getattr(record, "partition", None)
        if topic is not None and partition is not None:
            cps = [route_lease(topic, partition, self.net.cps)]
        for cp in [int(options.pop("cp"))] if "cp" in options else cps:
            self.net.append(cp, encode(record))

    # -- a member ----------------------------------------------------------------------------------------

    def _starts(self, name: str, words: list[str], options: dict[str, str]) -> None:
        flags = ({"at-most-once", "ahead", "raises", "transactions", "shares"} | GROUP_FLAGS) & set(words)
        shared: dict[str, Any] = {"sharing": SharingOptions()} if "shares" in flags else {}
        if "hang" in options:
            shared["handler_timeout_ms"] = float(options.pop("hang"))
        topics = [word for word in words if word not in flags]
        self.starts[name] = instance = self.starts.get(name, 0) + 1
        hi = int(options.pop("hi", "1000"))
        member = TracedMember(self.net, name, f"{instance}", hi)
        member.stalled = member.drop_appends = self.net.is_away
        member.acks = options.pop("acks", "now")
        self.members[name] = member
        self.net.members.append(member)
        member.consumer(
            *topics,
            at_most_once="at-most-once" in flags,
            claim_ahead="ahead" in flags,
            transactions="transactions" in flags,
            start=options.pop("start", "earliest"),
            batch_size=int(options.pop("batch", "5")),
            raises=frozenset({Why.POSITION} if "raises" in flags else ()),
            revoke_timeout_ms=float(options.pop("revoke", "60000")),
            group=group_of(flags, options),
            **shared,
        )

    def _does(self, member: TracedMember, *words: str) -> None:
        if plays(member, words):
            return
        match words:
            case ("takes", "a", "batch", "of", count):
                self._takes_a_batch(member, int(count))
            case ("commits" | "aborts" as how, place):
                self._ends_a_batch(member, how, *place.split("@"))
            case ("loses", "track" | "the" as what, *_, name):
                self._loses_its_producer(member, name, is_known=what == "the")
            case ("takes", *limit):
                self._takes(member, int(limit[0]) if limit else 5)
            case ("loops", count):
                self._loops(member, int(count))
            case ("leaves", "its", "loop") if member.loop is not None:
                member.leave_run(member.loop)
                member.loop = None
            case ("works", ms):
                self._pass(int(ms), lambda: member.gets(self._worked(member)))
            case ("done", name, *ranges):
                for word in ranges:
                    first, _, last = word.partition("-")
                    for offset in range(int(first), int(last or first) + 1):
                        member.done(member.in_hand[lease_name(name)][offset])
            case ("parks", name, offset, attempts, reason):
                self._parks(member, lease_name(name), int(offset), int(attempts), reason)
            case ("gives", "back", name, offset):
                run = member.assignment(lease_name(name)).tracker.run_at(int(offset))
                assert isinstance(run, BatchRun)
                consumer = member.engine.consumers[run.assignment.consumer.number]
                assert isinstance(consumer, SharedConsumer)
                member.engine.take(consumer.number, consumer.delivery.give_back_run, run, member.clock())
                member.settle()
            case ("closes",):
                member.close()
            case ("dies",):
                member.kill()
            case ("freezes",):
                member.paused = True
            case ("goes", "on"):
                member.paused = False
            case ("loses", what):
                member.drop_appends = what == "all"
                kinds = KINDS["nothing" if what == "all" else what]
                member.drop_if = lambda record: isinstance(record, kinds)
            case ("hears", what):
                member.stalled = {"nothing": True, "all": False}[what]
            case ("acks", "arrive"):
                member.deliver_acks()
            case ("acks", how):
                member.acks = how
            case ("asks", "in", "vain"):
                member.hold_lookups = True
            case ("is", "answered"):
                member.hold_lookups = False
                member.answer_lookups()
                member.settle()
            case ("callbacks", how):
                member.hold_callbacks = {"run": True, "return": False}[how]
                member.return_callbacks()
            case _:
                raise ValueError(f"{' '.join(words)!r} means nothing")

    def _parks(self, member: TracedMember, key: tuple[str, int], offset: int, attempts: int, reason: str) -> None:
        assignment = member.assignment(key)
        number, of = assignment.consumer.number, hash_of(FakeMessage(key, offset))
        park = member.engine.consumers[number].park
        member.engine.take(number, park, key, assignment.epoch, offset, of, attempts, reason, member.clock())
        member.settle()

    def _takes(self, member: TracedMember, limit: int) -> None:
        before = len(self.net.trace)
        if any(consumer.at_most_once for consumer in member.consumers):
            member.gets(member.work_granted(limit))
        else:
            member.fetch(max(limit, 5))
            run = member.take(limit)
            member.gets([] if run is None else run.messages)  # type: ignore[arg-type]
        if len(self.net.trace) == before:
            self.net.say(f"{member.client_id} is handed nothing")

    def _takes_a_batch(self, member: TracedMember, count: int) -> None:
        member.fetch()
        run = member.take(count)
        if run is None:
            self.net.say(f"{member.client_id} is handed nothing")
        else:
            member.batches[*run.assignment.key, run.first] = run
            member.gets(run.messages)  # type: ignore[arg-type]

    def _ends_a_batch(self, member: TracedMember, how: str, name: str, first: str) -> None:
        run = member.batches[*lease_name(name), int(first)]
        if how == "commits":
            found = member.commit(run)
        else:
            found = "aborted"
            consumer = member.engine.consumers[run.assignment.consumer.number]
            member.engine.take(consumer.number, consumer.positions.take_overs.abort, run, member.clock())
            member.settle()
        self.net.say(f"{member.client_id} {name} {run.first}-{run.last}: {found}")

    def _loses_its_producer(self, member: TracedMember, name: str, *, is_known: bool) -> None:
        [(consumer, assignment)] = [
            (each, each.assignments[lease_name(name)])
            for each in member.consumers
            if lease_name(name) in each.assignments
        ]
        of = assignment.key, assignment.epoch, is_known, member.clock()
        member.engine.take(consumer.number, consumer.untake, *of)
        member.settle()

    def _producers(self, words: list[str], options: dict[str, str]) -> None:
        for member in [member for member in self.net.members if not member.paused]:
            member.hold_take_overs = {"hang": True, "answer": False}[words[0]]
            if not member.hold_take_overs:
                member.answer_take_overs()
                member.settle()

    def _offset(self, words: list[str], options: dict[str, str]) -> None:
        by = options.pop("by", "")
        for name in list(options):
            self.net.offsets[lease_name(name)] = (int(options.pop(name)), by.replace("_", " "))
        if not words:
            return
        name, *gone = words
        key = lease_name(name)
        if gone:
            del self.net.offsets[key]
        found = self.net.offsets.get(key)
        self.net.trace.append(
            f"{name} " + ("is not in Kafka" if found is None else f"{found[0]} in Kafka, by {found[1]!r}")
        )

    def _loops(self, member: TracedMember, count: int) -> None:
        if member.loop is None:
            member.fetch(max(count, 5))
            member.loop = member.take(count, iterating=True)
        got = [] if member.loop is None else list(islice(member.loop.walk, count))
        member.gets(got)  # type: ignore[arg-type]

    def _worked(self, member: TracedMember) -> list[FakeMessage]:
        at_most_once = any(consumer.at_most_once for consumer in member.consumers)
        return member.work_granted() if at_most_once else member.work()

    def _what_is_raised(self, member: Member) -> None:
        found = [error for consumer in member.consumers for error in consumer.errors]
        for error in [*found, *([member.engine.failure] if member.engine.failure else [])]:
            if error not in self.raised:
                self.raised.add(error)
                self.net.say(f"{member.client_id} raises {type(error).__name__}: {error}")

    # -- looking -----------------------------------------------------------------------------------------

    def _state(self, words: list[str], options: dict[str, str]) -> None:
        for member in self.net.members:
            leases = sorted(member.engine.book.leases.items())
            for (topic, partition), lease in leases:
                stage = member.stage((topic, partition))
                self.net.say(
                    f"{member.client_id} {topic}:{partition} {lease.state}, {stage}, {self._until(member, lease)}"
                )
            if not leases:
                self.net.say(f"{member.client_id} holds nothing")

    def _until(self, member: Member, lease: HeldLease) -> str:
        if lease.in_doubt_since is not None:
            return "in doubt"
        if member.clock() >= lease.hand_out_until:
            return "hands out nothing"
        return f"hands out until {self.net.time(lease.hand_out_until)}"

    def _lease(self, words: list[str], options: dict[str, str]) -> None:
        key = lease_name(words[0])
        world = self.net.judges[route_lease(*key, self.net.cps)]
        lease = world.lease(options.pop("group", "g"), *key)
        if lease is None:
            self.net.trace.append(f"{words[0]} never claimed")
        else:
            holder = lease.client_id or ""
            self.net.trace.append(lease_words(lease, world.log_time, holder))

    def _log(self, words: list[str], options: dict[str, str]) -> None:
        self.net.trace.extend(self.net.in_log)


COMMANDS: dict[str, Callable[[Members, list[str], dict[str, str]], None]] = {
    "cluster": Members._cluster,
    "topic": Members._topic,
    "wait": Members._wait,
    "clock": Members._clock,
    "kafka": Members._kafka,
    "producers": Members._producers,
    "offset": Members._offset,
    "again": Members._again,
    "state": Members._state,
    "lease": Members._lease,
    "log": Members._log,
    "operator": lambda members, words, _: members.net.pause(float(words[1])),
}
