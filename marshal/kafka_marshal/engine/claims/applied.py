"""What claims conclude from the records that our replica has applied: our own, and those of other members."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from random import Random
from typing import Any, Protocol

from kafka_marshal.engine.claims.client import ClaimsClient
from kafka_marshal.engine.claims.keys import KeySource, ShareSource
from kafka_marshal.engine.claims.leases import HeldLease, LeaseBook, LeaseState, ManualLease
from kafka_marshal.engine.claims.peers import Peers, vacant_since
from kafka_marshal.engine.claims.queues import Queues
from kafka_marshal.engine.effects import Outbox, Warn
from kafka_marshal.engine.figures import Histogram
from kafka_marshal.engine.holding import HandIn
from kafka_marshal.engine.inputs import given
from kafka_marshal.engine.plane import DRAINED, Loss, Settles
from kafka_marshal.engine.settings import ConsumerSettings, EngineSettings
from kafka_marshal.engine.subscription import Subscription
from kafka_marshal.errors import ClientReplacedError, coordinated_group
from kafka_marshal.topic_names import is_lock
from kafka_marshal.types import Key
from rationalizer import (
    ClaimingMessages,
    ClaimingPartition,
    ClaimingShare,
    ForgetGroup,
    Heartbeat,
    HeartbeatBatch,
    Outcome,
    ReleaseGroup,
    ReleasingPartition,
    SettlingMessages,
    World,
    codes,
)
from rationalizer.wire.records import LeaseRecord


class ClaimsEngine(Protocol):
    """The engine, as far as claims need it."""

    def messages_opened(self, key: Key, entries: Settles, answers: Sequence[str] | None, now: float) -> None:
        """A record has opened, parked or settled messages of a partition."""

    def wanted_by_an_operator(self, key: Key, record: SettlingMessages, answers: Sequence[str], now: float) -> None:
        """An operator wants to settle messages; the log answers, entry by entry."""

    def unblock(self, keys: Collection[Key]) -> None:
        """An offset was set for these partitions, or the group was forgotten and starts again."""

    def answered_late(self, key: Key, epoch: int | None, last_offset: int, accepted: bool) -> None:
        """The log answered a ClaimingMessages for a lease that is over (C13)."""

    def wrong_kind(self) -> None:
        """The group is coordinated: none of its partitions can be claimed (G1)."""

    def fail(self, error: Exception, now: float) -> None:
        """End this member with an error."""


class LeaseRecords:
    """Our leases, and what we know of the leases of others."""

    def __init__(
        self, settings: EngineSettings, worlds: Mapping[int, World], outbox: Outbox, rng: Random, host: ClaimsEngine
    ) -> None:
        self.settings = settings
        self.outbox = outbox
        self.peers: Peers = Peers(settings, worlds)
        self.queues: Queues = Queues(settings, self.peers)
        self.book: LeaseBook = LeaseBook(settings, outbox, rng)
        #: Consumer number → the source of its partitions.
        self.sources: dict[int, ClaimsClient] = {}
        self.manual: dict[Key, ManualLease] = {}
        #: An operator has asked us to hand over (C19).
        self.draining: bool = False
        #: In seconds: from sending a claim to the log's answer; and how long the lease had no live holder before it.
        self.claim_times: Histogram = Histogram()
        self.gaps: Histogram = Histogram()
        self._worlds = worlds
        #: CPs with records applied since the last ``compare_clocks``.
        self._moved: set[int] = set()
        self._host = host

    def source(self, number: int, settings: ConsumerSettings, subscription: Subscription) -> ClaimsClient:
        """Create the source of partitions for a new consumer."""
        kind = KeySource if settings.keys is not None else ClaimsClient if settings.sharing is None else ShareSource
        made = kind(self.settings, settings, subscription, self.book, self.peers, self.outbox, self.lets_all_go)
        self.sources[number] = made
        return made

    @property
    def is_coordinated(self) -> bool:
        """Whether any coordination partition knows the group as coordinated, so that none of it can be claimed (G1)."""
        return any(world.group(self.settings.group_id) is not None for world in self._worlds.values())

    @given
    def claim(self, key: Key, now: float) -> ManualLease:
        """Claim a lease by hand, at once if that may succeed; else ``step`` does. Raises WrongKindError."""
        if self.is_coordinated:
            raise coordinated_group(self.settings.group_id)
        manual = self.manual[key] = ManualLease(key, self.book, self.queues, self.peers, self.outbox, self.settings.ids)
        manual.step(now)
        return manual

    def step(self, now: float) -> None:
        """Do what is due for leases claimed by hand."""
        for manual in [x for x in self.manual.values() if x.loss or x.is_released]:
            del self.manual[manual.key]
        for manual in self.manual.values():
            manual.step(now)

    def applied(self, cp: int, offset: int, outcome: Outcome, now: float, *, has_ended: bool) -> None:
        """Our replica applied one record.

        has_ended: the engine has ended; only answers to our earlier ClaimingMessages are passed on.
        """
        self._moved.add(cp)
        message = outcome.message
        if message is None or message.group_id != self.settings.group_id:
            return
        own = message.instance_id == self.settings.instance_id and message.client_id == self.settings.client_id
        if has_ended:
            if own and isinstance(record := outcome.record, ClaimingMessages):  # sent before: never delivered
                self._grant_applied(record, outcome, now)
            return
        if outcome.is_a(HeartbeatBatch):  # most of the log, and large: create no object per entry
            self._beats_applied(cp, offset, message.entries, outcome.entries or (), outcome, own, now)
            return
        if outcome.is_a(ClaimingPartition):  # most of the log while a group starts
            self._claim_applied(cp, offset, message, outcome, own, now)
            return
        record = outcome.record
        match record:
            case Heartbeat(epoch=None):
                self._takeover_applied(cp, offset, record, outcome, own, now)
            case Heartbeat(topic=topic, partition=partition, epoch=epoch, last_offset=last_offset):
                entry = (topic, partition, epoch, last_offset)
                self._beats_applied(cp, offset, [entry], (outcome.code,), outcome, own, now)
            case ReleasingPartition():
                self._release_applied(record, outcome, own, now)
            case ClaimingMessages() if own:
                self._grant_applied(record, outcome, now)
            case ReleaseGroup():
                self._look_again()
            case ForgetGroup() if outcome.accepted:
                self._forgotten(cp, now)
            case ClaimingShare():
                self._share_applied(cp, offset, record, outcome, own, now)
            case SettlingMessages():
                if record.epoch is None and outcome.entries is not None:
                    place = record.topic, record.partition
                    self._host.wanted_by_an_operator(place, record, outcome.entries, now)
                if outcome.accepted:
                    self._settle_applied(cp, offset, record, outcome, own, now)
            case _:
                pass
        if isinstance(record, LeaseRecord):
            self._verify((record.topic, record.partition), now)
        if outcome.accepted and isinstance(record, Heartbeat | ReleasingPartition) and record.last_offset is not None:
            pause = self._worlds[cp].pause(self.settings.group_id)
            if pause is not None and pause.client_id == record.client_id:
                self._unblock([(record.topic, record.partition)])

    @given
    def compare_clocks(self, now: float) -> None:
        """Compare log time with our clock (T5), after records were applied.

        Call it before releasing the lock, even if ``step`` can wait.
        """
        if self._moved:
            self.book.log_times_moved({cp: self._worlds[cp].log_time for cp in self._moved if cp in self._worlds}, now)
            self._moved.clear()

    def _unblock(self, keys: Collection[Key]) -> None:
        """These partitions may be worked on again (P11): an offset was set (C11), or the group was forgotten."""
        self._host.unblock(keys)
        self._look_again()

    def _look_again(self, key: Key | None = None) -> None:
        """A lease (None: any lease) changed, or another member asked for it."""
        for source in self.sources.values():
            source.look_again(key)

    def _verify(self, key: Key, now: float) -> None:
        """Check that the world still holds our lease under our ids and epoch; otherwise it is lost (C5)."""
        for lease in self.book.leases.all_of(key):
            if lease.state not in (LeaseState.HELD, LeaseState.RELEASING):
                continue
            if not lease.is_ours_in(self.peers.lease(key), self.settings.ids):
                if lease.state is LeaseState.RELEASING:
                    self.released(lease, now)
                else:
                    self.book.lose(lease, Loss.FENCED, now)

    def _claim_applied(self, cp: int, offset: int, message: Any, outcome: Outcome, own: bool, now: float) -> None:
        key = (message.topic, message.partition)
        if own:
            self._own_claim_applied(cp, offset, key, None, message.heartbeat_interval_ms, outcome, outcome.epoch, now)
        if outcome.code == codes.OK:
            self.peers.granted(message.client_id, message.instance_id, key, now)
            self.queues.granted(message.client_id, key)
            self._look_again(key)
        elif outcome.code == codes.HELD:
            self.peers.wished(message.client_id, key, now)
            self.queues.asked(message.client_id, key, now)
            self._look_again(key)
        self._verify(key, now)

    def _own_claim_applied(
        self,
        cp: int,
        offset: int,
        key: Key,
        lo: int | None,
        heartbeat_interval_ms: int,
        outcome: Outcome,
        granted: int | None,
        now: float,
    ) -> None:
        lease = self.book.leases.claimed_as(key, lo)
        wanted = lease is not None and lease.state is LeaseState.WANTED
        self.book.unseen.answered(key)
        if not outcome.accepted:
            if outcome.code == codes.HELD:
                self.peers.refused(key, now)
            elif outcome.code == codes.WRONG_KIND:
                self._host.wrong_kind()
            if lease is not None and wanted:
                lease.pending.claim_sent_at = None
                lease.owner.refused(outcome.code, now)
            return
        epoch = offset if granted is None else granted
        if lease is not None and wanted and outcome.code == codes.OK:
            self._measure(lease, now)
            self.book.grant(lease, epoch, offset, outcome.log_time, heartbeat_interval_ms, now)
        elif lease is None or wanted or lease.epoch != epoch:
            # Granted, but no longer wanted, or it ends an epoch that we hold or are releasing: release it (C17).
            self.book.unseen.release(key, cp, epoch)
            if lease is not None and wanted:
                lease.pending.claim_sent_at = None
                lease.owner.refused(outcome.code, now)

    def _measure(self, lease: HeldLease, now: float) -> None:
        """Our claim was granted: record how long it took, and how long the partition had no live holder."""
        if (sent_at := lease.pending.claim_sent_at) is not None:
            self.claim_times.observe((now - sent_at) / 1000)
        if not is_lock(lease.key[0]) and (since := vacant_since(self.peers, lease.key)) is not None:
            self.gaps.observe(max(0.0, now - since) / 1000)

    def _takeover_applied(
        self, cp: int, offset: int, record: Heartbeat, outcome: Outcome, own: bool, now: float
    ) -> None:
        key = (record.topic, record.partition)
        lease = self.book.leases.get(key)
        if not own:
            if outcome.accepted:
                self.peers.granted(record.client_id, record.instance_id, key, now)
                self._look_again(key)
                ours = lease is not None and lease.state in (LeaseState.HELD, LeaseState.RELEASING)
                if record.client_id == self.settings.client_id and ours:
                    self._replaced(record, now)
            return
        self.book.unseen.answered(key)
        if not outcome.accepted:
            if outcome.code == codes.NOT_FRESH:
                self.peers.refused(key, now)
            elif outcome.code == codes.WRONG_KIND:
                self._host.wrong_kind()
            if lease is not None and lease.state is LeaseState.WANTED:
                lease.pending.claim_sent_at = None
                lease.owner.refused(outcome.code, now)
            return
        wanted = lease is not None and lease.state is LeaseState.WANTED
        if lease is not None and wanted:
            self._measure(lease, now)
        self.peers.granted(record.client_id, record.instance_id, key, now)
        world = self.peers.lease(key)
        if lease is not None and wanted and world is not None:
            self.book.grant(lease, offset, offset, outcome.log_time, world.heartbeat_interval_ms, now)
        else:
            self.book.unseen.release(key, cp, offset)

    def _replaced(self, record: Heartbeat, now: float) -> None:
        self._host.fail(
            ClientReplacedError(
                f"a newer instance ({record.instance_id}) of client_id {self.settings.client_id!r} took over "
                f"{record.topic} [{record.partition}]: this Marshal has ended and commits nothing more. Give "
                "every worker "
                "of a group its own client_id; a restarted one keeps its old one"
            ),
            now,
        )

    def _beats_applied(
        self,
        cp: int,
        offset: int,
        entries: Sequence[tuple[str, int, int | None, int | None]],
        entry_codes: tuple[str, ...],
        outcome: Outcome,
        own: bool,
        now: float,
    ) -> None:
        beaten: list[tuple[Key, int]] = []
        for (topic, partition, epoch, last_offset), code in zip(entries, entry_codes, strict=False):
            key = (topic, partition)
            accepted = code in codes.ACCEPTED
            if accepted and self.peers.heard(key, now):
                self._look_again(key)
            if not own:
                continue
            if accepted and epoch is not None:
                beaten.append((key, epoch))
            lease = self.book.leases.of(key, epoch)
            if lease is not None:
                lease.owner.beaten(last_offset, accepted, now)
                if not accepted:  # an accepted one proves that it is ours: only the holder's beats are accepted (C5)
                    self._verify(key, now)
        if beaten:
            self.book.beat_applied(cp, offset, outcome.log_time, beaten, now)

    def _release_applied(self, record: ReleasingPartition, outcome: Outcome, own: bool, now: float) -> None:
        key = (record.topic, record.partition)
        lease = self.book.leases.of(key, record.epoch)
        is_held = lease is not None and lease.held
        if own:
            self.book.unseen.released(key, record.epoch)
        if not outcome.accepted:
            if is_held and not own and record.client_id == self.settings.client_id:
                self.drain(record.instance_id)
            return
        self.peers.freed(record.client_id, key, now)
        self._look_again(key)
        if own and is_held and lease is not None:  # we sent no release: an operator evicted us (C18)
            self.book.lose(lease, Loss.EVICTED, now)
            return
        if own and lease is not None:
            pause = self._worlds[lease.cp].pause(self.settings.group_id)
            pausing = pause is not None and pause.client_id == self.settings.client_id
            lease.owner.handed_in(HandIn(record.last_offset, outcome.code, pausing))

    def drain(self, instance_id: str) -> None:
        """An operator asks us to hand over all partitions and to claim no more (C19)."""
        if not self.draining:
            self.draining = True
            self.outbox.add(
                Warn(
                    f"an operator (instance {instance_id}) asks {self.settings.client_id!r} to hand over: its "
                    "partitions are released when what is in hand of them is done, and it claims none for as long as "
                    "this Marshal lives. Nothing is lost. End the process when it holds nothing"
                )
            )

    def released(self, lease: HeldLease, now: float) -> None:
        self.book.leases.remove(lease)
        lease.state = LeaseState.LOST
        lease.owner.released(now)

    def _share_applied(
        self, cp: int, offset: int, record: ClaimingShare, outcome: Outcome, own: bool, now: float
    ) -> None:
        """A lease is shared from now on: held, for those that want all of it (B4)."""
        key = (record.topic, record.partition)
        if own:
            interval_ms = record.heartbeat_interval_ms
            self._own_claim_applied(cp, offset, key, record.lo, interval_ms, outcome, outcome.share, now)
        if outcome.accepted:
            self.peers.shared(key, now)
            self._look_again(key)

    def _settle_applied(
        self, cp: int, offset: int, record: SettlingMessages, outcome: Outcome, own: bool, now: float
    ) -> None:
        """Messages were settled, or a batch was taken: a beat of the sender's."""
        key = (record.topic, record.partition)
        self.peers.heard(key, now)
        if own and record.epoch is not None:
            pause = self._worlds[cp].pause(self.settings.group_id)
            if pause is None or pause.client_id == self.settings.client_id:  # else it moves no last beat (H3)
                self.book.beat_applied(cp, offset, outcome.log_time, [(key, record.epoch)], now)
            lease = self.book.leases.of(key, record.epoch)
            if lease is not None:
                lease.owner.settled(outcome.taken, now)
        self._host.messages_opened(key, record, outcome.entries if own else None, now)
        self._look_again(key)

    def _grant_applied(self, record: ClaimingMessages, outcome: Outcome, now: float) -> None:
        key = (record.topic, record.partition)
        lease = self.book.leases.get(key)
        if lease is None or lease.epoch != record.epoch:
            self._host.answered_late(key, record.epoch, record.proposed_last_offset, outcome.accepted)
            return
        lease.owner.answered(record.proposed_last_offset, outcome.accepted, outcome.code, now)

    def _forgotten(self, cp: int, now: float) -> None:
        self._unblock(self.peers.forgotten(cp))
        for lease in [lease for lease in self.book.leases.values() if lease.cp == cp]:
            self._verify(lease.key, now)
        self._look_again()

    def lets_all_go(self) -> str:
        """Why all partitions are to be released; "": they are not."""
        return DRAINED if self.draining else ""
