"""Planted bugs in shares and open messages: who may settle what, what a take gives, when a share ends."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

_REACHES = "return hole.owner == self.owner if hole.owner != NO_OWNER else self.has_key(hole.key_hash)"
_MAKES = "return self.makes and (self.makes_unkeyed if key_hash == NO_KEY else self.has_key(key_hash))"
_LIMIT = "if growth > 0 and len(holes) + growth > MAX_HOLES:"
_PASSED = "if not (high <= progress.stable if key_hash == NO_KEY else progress.has_passed(low, key_hash))"
_REPEAT = "if holes is not None and holes.latest_of(share.epoch) >= min(seen, context.offset):"
_TAKES = "if taking is not None and (share is None or not share.by_batches):"
_SILENT = "if share.is_stale(log_time) and self.all_stale(log_time):"
_GIVEN = "given = hole._replace(last=last, owner=owner, since=offset, attempts=hole.attempts + 1)"
_ENDS = "return min(hole.last, hole.first + (1 if hole.attempts >= ONE_BY_ONE else count) - 1)"
_PARKED = "return [hole for hole in self._items[: bisect_right(self._firsts, offset)] if hole.reason is not None]"
_SAME = "if share.is_of(instance_id, client_id) and (share.lo, share.hi) == (lo, hi):"
_MERGES = "if before.last + 1 == hole.first and before[2:] == hole[2:]:"

SHARING: tuple[Mutation, ...] = (
    # Holes.
    Mutation(
        "who settles need not have seen the hole as it is", "Reach.has", "if hole.since >= seen:", "if False:", "H2"
    ),
    Mutation("a copy of an entry opens again", "Reach.has", "if hole.since >= seen:", "if hole.since > seen:", "H2"),
    Mutation("any sharer settles a batch", "Reach.has", _REACHES, "return self.owner >= 0 or self.keys != ()", "H2"),
    Mutation("an operator settles a batch", "Reach.has", _REACHES, _REACHES.replace("== self.owner", "> 0"), "H2"),
    Mutation("an operator opens what is done", "Reach.may_make", _MAKES, "return True", "H3"),
    Mutation("a share opens messages of other keys", "Reach.may_make", _MAKES, "return self.makes", "H3"),
    Mutation(
        "seen above the record counts", "Settling.__init__", "self._seen = min(seen, offset)", "self._seen = seen", "H2"
    ),
    Mutation(
        "what is not done leaves no hole and is settled",
        "Settling.done",
        "if not self._are_done(low, high):",
        "if False:",
        "H3",
    ),
    Mutation("a settled message above stable is not done", "close", "if ranges:", "if False:", "H3"),
    Mutation("a message that is done for its key is done for all", "close", _PASSED, "if high > progress.stable", "H3"),
    Mutation(
        "done ends at a limit", "close", "progress.commit(ranges, MAX_OFFSET)", "progress.commit(ranges, 1)", "H5"
    ),
    Mutation(
        "what is done is opened again",
        "Settling._make",
        "elif progress.has_passed_some(low, high, key_hash):",
        "elif False:",
        "H3",
    ),
    Mutation("a retry loses its key", "Settling._make", "kept = hole.key_hash", "pass", "H3"),
    Mutation(
        "holes are counted before they are merged",
        "Settling._make",
        _LIMIT,
        "if len(holes) + len(made) > MAX_HOLES:",
        "H5",
    ),
    Mutation("no limit of holes", "Settling._make", _LIMIT, "if False:", "H5"),
    Mutation("equal neighbours stay two holes", "_merged", _MERGES, "if False:", "H1"),
    Mutation(
        "neighbours of other attempts are one hole", "_merged", _MERGES, "if before.last + 1 == hole.first:", "H1"
    ),
    Mutation(
        "a neighbour is not joined if a hole began between them",
        "Holes.plan",
        "left = bisect_left(self._firsts, first) - 1",
        "left = bisect_right(self._firsts, first) - 1",
        "H1",
    ),
    Mutation("a position drops what is parked", "Holes.parked_through", _PARKED, "return []", "C11"),
    Mutation(
        "a position leaves what is parked above it",
        "Holes.parked_through",
        _PARKED,
        _PARKED.replace("[: bisect_right(self._firsts, offset)]", ""),
        "C11",
    ),
    Mutation(
        "done for some keys of a sharer is enough",
        "Progress.floor",
        "return min([self.pieces.lowest_of(lo, hi) for lo, hi in keys], default=self.stable)",
        "return self.pieces.highest",
        "H3",
    ),
    # Takes.
    Mutation("a take that is repeated takes again", "_take", _REPEAT, "if False:", "B5"),
    Mutation("a take ends no share", "_take", "if stale:", "if False:", "B4"),
    Mutation("the holder takes", "_settling_messages", _TAKES, "if taking is not None and share is None:", "H3"),
    Mutation(
        "new messages come before what was given back",
        "take",
        "if hole is not None:",
        "if hole is not None and _untaken(progress, count, up_to) is None:",
        "B5",
    ),
    Mutation(
        "a delivery is not counted", "_take_free", _GIVEN, _GIVEN.replace("hole.attempts + 1", "hole.attempts"), "B5"
    ),
    Mutation(
        "messages that failed twice come together",
        "_end_of",
        _ENDS,
        "return min(hole.last, hole.first + count - 1)",
        "B5",
    ),
    Mutation("at most once makes a hole", "_take_free", "if at_most_once:", "if False:", "B5"),
    Mutation(
        "a take passes the end of the log",
        "_untaken",
        "last = min(at + count - 1, up_to)",
        "last = at + count - 1",
        "B5",
    ),
    Mutation(
        "a take gives what is done",
        "_untaken",
        "return at, min(last, intervals.next_first(at) - 1)",
        "return at, last",
        "B5",
    ),
    Mutation("a take gives what is open", "_untaken", "if following is not None:", "if False:", "B5"),
    Mutation(
        "a take cuts holes at the limit",
        "_take_free",
        "if last < hole.last and len(holes) >= MAX_HOLES:",
        "if False:",
        "H5",
    ),
    # Shares.
    Mutation(
        "a claim takes a lease that is shared",
        "_claiming_partition",
        "if not lease.shares.all_stale(context.log_time):",
        "if False:",
        "B4",
    ),
    Mutation("a batch stays with a share that ended", "end_shares", "holes.disown(share.epoch)", "pass", "B4"),
    Mutation(
        "a share overlaps none of other keys than its first",
        "Shares.overlapping",
        "return sorted(self._keyed[left : bisect_right(self._los, hi, left)], key=_epoch)",
        "return sorted(self._keyed[left : bisect_right(self._los, lo, left)], key=_epoch)",
        "B3",
    ),
    Mutation(
        "keys and batches go together", "Shares.overlapping", "if (lo == NO_KEY) != self.by_batches:", "if False:", "B3"
    ),
    Mutation(
        "another instance holds the share already",
        "_claiming_share",
        _SAME,
        "if (share.lo, share.hi) == (lo, hi):",
        "B3",
    ),
    Mutation(
        "holes without keys go to sharers by keys",
        "_claiming_share",
        "wrong = progress.holes is not None and progress.holes.has_unkeyed()",
        "wrong = False",
        "B3",
    ),
    Mutation(
        "batches of keys at different places",
        "_claiming_share",
        "wrong = progress.piece_count > 1",
        "wrong = False",
        "B3",
    ),
    Mutation("start counts for no lease", "_claiming_share", "if start is not None:", "if False:", "B3"),
    Mutation("one beat after a silence is heard alone", "Shares.beat", _SILENT, "if False:", "B4"),
    Mutation("every late beat revives all", "Shares.beat", _SILENT, "if share.is_stale(log_time):", "B4"),
    Mutation(
        "a claim after a silence revives its client's dead",
        "Shares.revive",
        "if share.client_id != but_client:",
        "if True:",
        "B4",
    ),
    Mutation("a settle in a pause is a beat", "_settling_messages", "if not context.paused:", "if True:", "H3"),
    Mutation("a take passes a pause", "_is_refused", "return message[-1] is not None", "return False", "C10"),
    Mutation(
        "a sharer by batches moves progress",
        "_record_offset_of",
        "if last_offset is None or share.by_batches:",
        "if last_offset is None:",
        "B2",
    ),
    Mutation(
        "a share grants", "_claiming_messages", "return codes.WRONG_MODE", "return lease.progress.grant(proposal)", "B2"
    ),
    Mutation(
        "a shared lease is free to forget",
        "Lease.is_taken",
        "return self.shares is not None and not self.shares.all_stale(log_time)",
        "return False",
        "C16",
    ),
    # Coordinated groups.
    Mutation(
        "any member settles", "_OfMember._refusal", "if not all(map(self._reach.has_key, hashes)):", "if False:", "H4"
    ),
    Mutation(
        "a member settles by an old token",
        "_OfMember._refusal",
        "if not all(map(self._old.has_key, hashes)):",
        "if False:",
        "H4",
    ),
    Mutation(
        "the setting does not count",
        "_OfMember._refusal",
        "return codes.INDIVIDUAL_COMMIT_NOT_ALLOWED if makes and not self._makes else None",
        "return None",
        "H4",
    ),
    Mutation(
        "operators make holes",
        "_settle_offsets",
        "reach = _OWNER_OF_ALL if context.pausing and not group.members else _OPERATOR",
        "reach = _OWNER_OF_ALL",
        "H4",
    ),
    Mutation(
        "holes in a group that takes checkpoints",
        "_settle_offsets",
        "if group.checkpoints is not None:",
        "if False:",
        "H4",
    ),
    Mutation("checkpoints of a group with holes", "_begin_checkpoint", "if group.hole_count():", "if False:", "X4"),
)
