"""Planted bugs in what members do: the engine, the shell around it, the snapshots they keep, the admin."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

__all__ = ["MEMBERS"]

_ENGINE = "marshal/kafka_marshal/engine/"
_LEASES = _ENGINE + "leases.py"
_PROOFS = _ENGINE + "proofs.py"
_CORE = _ENGINE + "core.py"
_CONSUMER = _ENGINE + "consumer.py"
_DELIVERY = _ENGINE + "delivery.py"
_ASSIGNMENT = _ENGINE + "assignment.py"
_TRACKER = _ENGINE + "tracker.py"
_OBSERVER = _ENGINE + "observer.py"
_PLACEMENT = _ENGINE + "placement.py"
_POLICIES = _ENGINE + "policies.py"
_SUBSCRIPTION = _ENGINE + "subscription.py"
_SHELL = "marshal/kafka_marshal/consumer.py"
_KEEPER = "marshal/kafka_marshal/snapshots/keeper.py"
_REPLICA = "marshal/kafka_marshal/replica.py"

_VALID = "lease.valid_until = sent_at + 2 * lease.heartbeat_interval_ms - proof_margin_ms(lease.heartbeat_interval_ms)"

MEMBERS: tuple[Mutation, ...] = (
    # Stopping in time.
    Mutation("a lease is trusted for 3 HI", _LEASES, _VALID, _VALID.replace("2 * ", "3 * "), "T4"),
    Mutation(
        "a proof counts from when it came",
        _PROOFS,
        "return Proof(sent_at, log_time, tuple(leases))",
        "return Proof(now, log_time, tuple(leases))",
        "T4",
    ),
    Mutation("no margin for clocks that differ", _LEASES, _VALID, _VALID.replace(" - proof", " + 0 * proof"), "T4"),
    Mutation(
        "log time ahead of our clock raises no doubt",
        _LEASES,
        "if ahead > proof_margin_ms(lease.heartbeat_interval_ms):",
        "if ahead > 100 * lease.heartbeat_interval_ms:",
        "T5",
    ),
    Mutation(
        "beats go out once in HI", _ENGINE + "settings.py", "BEATS_PER_INTERVAL = 3", "BEATS_PER_INTERVAL = 1", "T4"
    ),
    Mutation(
        "a release that got lost is not sent again",
        _LEASES,
        "elif lease.state is LeaseState.RELEASING and now >= lease.release_sent_at + lease.heartbeat_interval_ms:",
        "elif lease.state is LeaseState.RELEASING and now >= lease.release_sent_at + 9**9:",
        "C17",
    ),
    Mutation(
        "a claim that got lost is waited for for ever",
        _ENGINE + "consumer.py",
        "if self.assignments.get(assignment.key) is assignment:",
        "if assignment.grant is not None:",
        "C17",
        within="def look_after",
    ),
    Mutation(
        "what nobody wants any more is kept",
        _CORE,
        "elif lease is None or wanted or lease.epoch != epoch:",
        "elif lease is not None and (wanted or lease.epoch != epoch):",
        "C17",
    ),
    Mutation(
        "what is granted while it is let go is kept",
        _CORE,
        "elif lease is None or wanted or lease.epoch != epoch:",
        "elif lease is None or wanted or (lease.held and lease.epoch != epoch):",
        "C17",
    ),
    Mutation(
        "a replaced instance goes on",
        _CORE,
        "if record.client_id == self.settings.client_id and ours:",
        "if record.client_id != self.settings.client_id and ours:",
        "C7",
    ),
    Mutation(
        "nobody takes over from himself",
        _OBSERVER,
        "self.inherited[key] = lease.epoch",
        "pass",
        "C7",
    ),
    Mutation(
        "what is taken over is trusted by the member's own interval",
        _LEASES,
        "hi = heartbeat_interval_ms",
        "hi = self._settings.heartbeat_interval_ms",
        "C7",
    ),
    Mutation(
        "what is taken over is beaten by the member's own interval",
        _LEASES,
        "interval = min(lease.heartbeat_interval_ms for lease in leases) / BEATS_PER_INTERVAL",
        "interval = self._settings.heartbeat_interval_ms / BEATS_PER_INTERVAL",
        "C7",
    ),
    Mutation(
        "who ends without a release says nothing of what is done",
        _CORE,
        "self.book.beat_all(now)",
        "pass",
        "C14",
    ),
    Mutation(
        "a release that is sent again has forgotten what is done",
        _LEASES,
        "lease.last_release = last_offset",
        "lease.last_release = None",
        "C8",
    ),
    Mutation(
        "where the log is silent a pause never ends",
        _OBSERVER,
        "ends = self._moved.get(cp, now) + (pause.expires - world.log_time)",
        "ends = now + (pause.expires - world.log_time)",
        "C10",
    ),
    # At least once.
    Mutation(
        "the message in hand is committed",
        _TRACKER,
        "self._commit(run, run.done_count, cursor - 1)",
        "self._commit(run, run.done_count, min(cursor, len(run.messages) - 1))",
        "C14",
    ),
    Mutation(
        "a loop's message counts when it is given out",
        _TRACKER,
        "self._cursor = max(self._cursor, place[2] - 1)",
        "self._cursor = max(self._cursor, place[2])",
        "C14",
    ),
    Mutation(
        "what is fetched is reported as done",
        _ASSIGNMENT,
        "stable = self.tracker.done.stable",
        "stable = self.fetch_next - 1",
        "C14",
    ),
    Mutation(
        "what is fetched is released as done",
        _CONSUMER,
        "done = -1 if self.at_most_once else assignment.tracker.done.stable",
        "done = -1 if self.at_most_once else assignment.fetch_next - 1",
        "C8",
    ),
    Mutation(
        "beats carry no progress",
        _ASSIGNMENT,
        "return stable if stable > self.consumer.known_stable(self.key) else None",
        "return stable if stable > self.consumer.known_stable(self.key) + 20 else None",
        "C14",
    ),
    Mutation(
        "done means all before it, too",
        _TRACKER,
        "self._commit(run, index, index)",
        "self._commit(run, 0, index)",
        "C14",
    ),
    Mutation(
        "the last message is done twice",
        _CONSUMER,
        "assignment.begin(stable + 1, stable, lease.progress.ranges)",
        "assignment.begin(max(stable, 0), max(stable, 0) - 1, lease.progress.ranges)",
        "C14",
        within="def on_granted",
    ),
    Mutation(
        "a message is passed over",
        _CONSUMER,
        "assignment.begin(stable + 1, stable, lease.progress.ranges)",
        "assignment.begin(stable + 2, stable + 1, lease.progress.ranges)",
        "C14",
        within="def on_granted",
    ),
    Mutation(
        "ranges are forgotten at the start",
        _CONSUMER,
        "assignment.begin(stable + 1, stable, lease.progress.ranges)",
        "assignment.begin(stable + 1, stable, [])",
        "P6",
        within="def on_granted",
    ),
    Mutation(
        "what is done beyond a gap is not left out",
        _ASSIGNMENT,
        "messages = [m for m in messages if not done.is_done(offset_of(m))]",
        "messages = [m for m in messages if offset_of(m) > done.stable]",
        "P6",
    ),
    Mutation(
        "a release does not wait for what is in hand",
        _CONSUMER,
        "if assignment.tracker.runs and not self.closing:",
        "if assignment.tracker.in_hand > 10 and not self.closing:",
        "C14",
    ),
    Mutation(
        "what comes back after a break is lost",
        _DELIVERY,
        "assignment.put_back(rest, covers_from)",
        "assignment.put_back(rest[1:], covers_from)",
        "C14",
    ),
    # At most once.
    Mutation(
        "a claim that was refused is handed out",
        _DELIVERY,
        "if grant.accepted:",
        "if grant.accepted is not None:",
        "C13",
        within="def collect",
    ),
    Mutation(
        "nobody waits for the claim of messages",
        _SHELL,
        "return assignment.over or assignment.grant is None or assignment.grant.accepted is not None",
        "return True",
        "C13",
    ),
    Mutation(
        "less is claimed than handed out",
        _DELIVERY,
        "assignment.grant = Grant(run, run.last, now)",
        "assignment.grant = Grant(run, run.first, now)",
        "C12",
    ),
    Mutation(
        "granted and not handed out: not reported",
        _DELIVERY,
        "if rest:",
        "if len(rest) > 1000:",
        "C13",
        within="def _finish",
    ),
    Mutation(
        "granted and given up: not reported",
        _DELIVERY,
        "if grant is not None and grant.accepted:",
        "if grant is not None and grant.accepted is None:",
        "C13",
    ),
    Mutation(
        "granted late: not reported",
        _DELIVERY,
        "self._report(key, entry[2], last_offset)",
        "self.ignored_done[key] += 1",
        "C13",
    ),
    Mutation(
        "granted messages go out when the lease is over",
        _SHELL,
        "return self._driver.now_ms() < run.assignment.lease.proven_until",
        "return run.assignment.lease.epoch >= 0",
        "T4",
    ),
    # Pauses.
    Mutation(
        "members do not see that their group is forgotten",
        _CORE,
        "case ForgetGroup() if outcome.accepted:",
        "case ForgetGroup() if False:",
        "C16",
    ),
    Mutation(
        "members do not see a pause",
        _OBSERVER,
        "if pause is None or pause.client_id == self._settings.client_id:",
        "if pause is None or pause.client_id != self._settings.client_id:",
        "C10",
    ),
    Mutation(
        "an admin's positions are off by one",
        "marshal/kafka_marshal/admin/positions.py",
        "return self.after - 1",
        "return self.after",
        "C11",
    ),
    Mutation(
        "a prune goes beyond the newest snapshot",
        "marshal/kafka_marshal/admin/prune.py",
        "cut = fit[-1] if fit else None",
        "cut = checked[-1] + 1 if fit else None",
        "S2",
    ),
    # Who gets what.
    Mutation(
        "what was taken up idle is let go again",
        "marshal/kafka_marshal/engine/placement.py",
        "TAKEN_UP_INTERVALS = 3",
        "TAKEN_UP_INTERVALS = 0",
        "C4",
    ),
    Mutation(
        "the balance drops a partition",
        _POLICIES,
        "free = [key for key in partitions.free if key not in mine]",
        "free = [key for key in partitions.free if key not in mine and key[1] != 3]",
        "C4",
    ),
    Mutation(
        "shares are rounded up",
        _POLICIES,
        "base, larger = divmod(partitions, len(counts))",
        "base, larger = partitions // len(counts) + 1, 0",
        "C4",
    ),
    Mutation(
        "nobody lets go of more than its share",
        _POLICIES,
        "if wanted <= 0 or len(mine) <= shares[view.client_id]:",
        "if wanted <= 0 or len(mine) <= shares[view.client_id] + 2:",
        "C4",
    ),
    Mutation(
        "a limit is passed by one",
        _POLICIES,
        "room = max(0, self.limit - len(own) - len(view.letting_go))",
        "room = max(0, self.limit + 1 - len(own) - len(view.letting_go))",
        "C4",
    ),
    Mutation(
        "a range given back after its lease is not reported",
        _ENGINE + "ranges.py",
        "self._report((given.topic, given.partition), given.first, given.last)",
        "pass",
        "C13",
    ),
    Mutation(
        "a refused range is handed out",
        _ENGINE + "ranges.py",
        "if grant.accepted:",
        "if grant.accepted is not None:",
        "C13",
    ),
    Mutation(
        "a range runs into one that is in hand",
        _ENGINE + "ranges.py",
        "end = min(end, in_hand)",
        "end = max(end, in_hand)",
        "P6",
    ),
    Mutation(
        "a range that was given back does not come again",
        _ENGINE + "ranges.py",
        "run.assignment.tracker.throw_back(run)",
        "run.assignment.tracker.mark_run(run)",
        "C14",
    ),
    Mutation(
        "who lost a whole topic's key keeps its rest",
        _POLICIES,
        "orphans = tuple(key for key in own if key[0] not in topics and key[1] != 0)",
        "orphans = ()",
        "C4",
    ),
    Mutation(
        "the rest of a whole topic stays idle",
        _POLICIES,
        "claim=tuple(keys + rest),",
        "claim=tuple(keys + rest[1:]),",
        "C4",
    ),
    Mutation(
        "the last partition is not seen",
        _SUBSCRIPTION,
        "self.partitions = tuple((name, p) for name, count in sorted(self._counts.items()) for p in range(count))",
        "self.partitions = tuple((name, p) for name, count in sorted(self._counts.items()) for p in range(count - 1))",
        "P9",
    ),
    Mutation(
        "partitions that are added are not seen",
        _SUBSCRIPTION,
        "self._counts[name] = info.partitions",
        "self._counts[name] = old or info.partitions",
        "P9",
    ),
    # Snapshots.
    Mutation(
        "a snapshot is taken one record late",
        _REPLICA,
        "end = bisect_left(entries, self._stops[cp] - 1, begin, key=_OFFSET) + 1",
        "end = bisect_left(entries, self._stops[cp], begin, key=_OFFSET) + 1",
        "S2",
    ),
    Mutation(
        "a snapshot names the wrong place",
        _KEEPER,
        "waiting.append(_Pending(next_offset, state, at))",
        "waiting.append(_Pending(next_offset + 1, state, at))",
        "S2",
    ),
    # Holding back, and passing over.
    Mutation(
        "what the user holds back is handed out",
        _ASSIGNMENT,
        "and not self.user_paused",
        "and self.user_paused is not None",
        "C14",
    ),
    Mutation("a loop goes on with what is held back", _DELIVERY, "run.cut_short()", "pass", "C14"),
    Mutation(
        "what is granted passes a user's pause",
        _DELIVERY,
        "if grant.accepted and assignment.user_paused:",
        "if grant.accepted and self is None:",
        "C13",
    ),
    Mutation(
        "held back and given up: not reported",
        _DELIVERY,
        "runs = [self.granted, *self._held_back]",
        "runs = [self.granted]",
        "C13",
    ),
    Mutation(
        "what is let go does not count against the limit",
        _POLICIES,
        "room = max(0, self.limit - len(own) - len(view.letting_go))",
        "room = max(0, self.limit - len(own))",
        "C4",
    ),
    Mutation(
        "a seek passes over one too many",
        _CONSUMER,
        "assignment.tracker.done.through(offset - 1)",
        "assignment.tracker.done.through(offset)",
        "C14",
    ),
    # Where to begin, and what is gone.
    Mutation("going on at the log's start passes one over", _CONSUMER, "position = low", "position = low + 1", "P9"),
    Mutation(
        "more is told to be gone than is",
        _CONSUMER,
        "self._gap(assignment, position, low - 1)",
        "self._gap(assignment, position, low)",
        "P9",
    ),
    Mutation(
        "what retention took is not told",
        _CONSUMER,
        "if position > 0 or not assignment.is_new:",
        "if position < 0:",
        "P9",
    ),
    Mutation(
        "a start at the end is for every claim",
        _CONSUMER,
        "assignment.first_claim = assignment.first_claim and assignment.key not in self._engine.observer.claimed",
        "assignment.first_claim = True",
        "P9",
    ),
    Mutation(
        "the first message after the start is passed over",
        _CONSUMER,
        "assignment.begin(stable + 1, stable, ranges)",
        "assignment.begin(stable + 2, stable, ranges)",
        "P9",
        within="def on_beaten",
    ),
    Mutation(
        "what follows a gap is passed over",
        _CONSUMER,
        "assignment.tracker.done.commit([(assignment.fetch_next, position - 1)])",
        "assignment.tracker.done.commit([(assignment.fetch_next, position)])",
        "P9",
    ),
    Mutation(
        "partitions that are added begin at the end",
        _CONSUMER,
        "assignment.is_new = assignment.first_claim and assignment.key not in self.subscription.grown",
        "assignment.is_new = assignment.first_claim",
        "P9",
    ),
    Mutation(
        "who did not see a topic grow begins at its end",
        _ENGINE + "past.py",
        "return oldest if 0 < count <= key[1] else {}",
        "return {}",
        "P9",
    ),
    Mutation(
        "a part of a batch is not held against the clock",
        "marshal/kafka_marshal/driver.py",
        "self.engine.compare_clocks(self.now_ms())",
        "pass",
        "T5",
    ),
    Mutation(
        "what is proven late is not held against the clock",
        _CORE,
        "self.book.compare_clocks(lease, self._worlds[lease.cp].log_time, now)",
        "pass",
        "T5",
    ),
    Mutation(
        "a doubt begins the wait for a full batch anew",
        _SHELL,
        "elif not fullest and not self._delivery.is_waiting:",
        "elif not fullest:",
        "T5",
    ),
    Mutation(
        "a claim under way in a part that is paused does not count against the limit",
        _PLACEMENT,
        "letting_go=frozenset(assignments).difference(keys) if len(keys) < len(assignments) else _NONE,",
        "letting_go=frozenset(assignments).difference(key for key, _ in own),",
        "C10",
    ),
    Mutation(
        "granted after the end: not reported",
        _DELIVERY,
        "for assignment in self._consumer.assignments.values():",
        "for assignment in ():",
        "C13",
    ),
)
