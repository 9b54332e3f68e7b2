"""Planted bugs in the plane of coordinated groups: members, commits, pieces, targets, hand-over, states."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

_SENDER = "if member is None or member.member_id != member_id or member.instance_id != instance_id:"
_REPLACED = "if sender is not None and sender.instance_id != instance_id and sender.joined >= seen:"
_COMMIT_REFUSED = "if since > self._generation or (action == LET_GO and revoked > self._generation):"
_MERGED = "if merged and merged[-1].hi + 1 == piece.lo and merged[-1][2:] == piece[2:]:"
_SINCE = "topic.since[partition] = NEVER if target == NOBODY else generation"
_WHOLE = "whole = min(max((2 * len(others) * count + members) // (2 * members), 1), count - 1)"
_COUNTS = "self.restore_counts({topic: count for topic, count in self.counts.items() if topic in self.reports})"
_BEAT = "return Verdict(codes.OK if generation == group.generation else codes.ILLEGAL_GENERATION, True)"
_REVOKED = (
    'want(ok.is_offset(revoked) and since < revoked <= group.generation, f"{named} was revoked when it could not be")'
)
_KIND = "if plane is not None and any(other.knows(group_id) for other in self._planes if other is not plane):"
_ALIKE = "alike.setdefault(seen[member.pattern] if member.pattern else member.topics, []).append(slot)"

GROUPS: tuple[Mutation, ...] = (
    # Who is a member.
    Mutation("a group may be of both kinds", "_replay", _KIND, "if False:", "G1"),
    Mutation(
        "members belong to every CP",
        "KnownGroups.belongs",
        "return kind.belongs is Belongs.EVERYWHERE or self._is_home(message[4])",
        "return True",
        "L3",
    ),
    Mutation("a mark keeps the map", "_configure_group", "if not self._is_home(group_id):", "if False:", "G2"),
    Mutation(
        "an id is good for any instance",
        "Group.sender",
        _SENDER,
        _SENDER.replace(" or member.instance_id != instance_id", ""),
        "G6",
    ),
    Mutation("any id will do", "Group.sender", _SENDER, _SENDER.replace(" or member.member_id != member_id", ""), "G6"),
    Mutation(
        "ids are of version 4",
        "member_id_of",
        "digest[6] = digest[6] & 0x0F | 0x50",
        "digest[6] = digest[6] & 0x0F | 0x40",
        "G6",
    ),
    Mutation(
        "a restart keeps its predecessor's id",
        "_join_group",
        "if sender is None or replaced:",
        "if sender is None:",
        "G11",
    ),
    Mutation("a late join ends its successor", "_join_group", _REPLACED, _REPLACED.replace(">= seen", "> seen"), "G11"),
    Mutation(
        "who joins again may be replaced by itself",
        "_join_group",
        _REPLACED,
        _REPLACED.replace("sender.instance_id != instance_id and ", ""),
        "G11",
    ),
    Mutation(
        "a restart keeps its tokens",
        "_join_group",
        "self._rebalance(group, context, witness.gone | replaced, others)",
        "self._rebalance(group, context, witness.gone, others)",
        "G11",
    ),
    Mutation(
        "a join again does not count as one",
        "_join_group",
        "member.joined = context.offset",
        "member.joined = member.slot",
        "G11",
    ),
    Mutation(
        "who joins the same again does not see growth", "_join_group", "if same and not grown:", "if same:", "G11"
    ),
    Mutation(
        "the first strategy stays for ever",
        "_join_group",
        "group.strategy = strategy",
        "group.strategy = group.strategy or strategy",
        "G11",
    ),
    Mutation(
        "the dead have a say in the strategy",
        "_join_refusal",
        "others = len(group.members) - len(gone) - (sender is not None)",
        "others = len(group.members) - (sender is not None)",
        "G11",
    ),
    Mutation(
        "a session may not be as long as the setting",
        "_join_refusal",
        "if session_timeout_ms > group.settings.max_session_timeout_ms:",
        "if session_timeout_ms >= group.settings.max_session_timeout_ms:",
        "G11",
    ),
    # Who lives.
    Mutation(
        "a member dies a millisecond late",
        "deadline",
        "return self.last_beat + self.session_timeout_ms",
        "return self.last_beat + self.session_timeout_ms + 1",
        "G8",
    ),
    Mutation(
        "after an outage all but the first are dead",
        "_who_goes",
        "if len(late) == len(group.members) - len(left):",
        "if False:",
        "G8",
    ),
    Mutation("an outage makes nobody's timer restart", "bury", "group.beat(member, log_time)", "pass", "G8"),
    Mutation("who is heard in time is dead all the same", "Group.beat", "self.late.discard(member.slot)", "pass", "G8"),
    Mutation(
        "a beat is a millisecond old",
        "_lives",
        "group.beat(sender, context.log_time)",
        "group.beat(sender, max(sender.last_beat, context.log_time - 1))",
        "G9",
    ),
    Mutation(
        "the dead keep what they had", "_lives", "if witness.gone or others:", "if not group.members or others:", "G9"
    ),
    Mutation(
        "a beat of an older generation is rejected",
        "_group_heartbeat",
        _BEAT,
        _BEAT.replace(", True)", ", generation == group.generation)"),
        "G13",
    ),
    Mutation(
        "who leaves keeps what it had",
        "_leave_group",
        "self._rebalance(group, context, witness.gone | leaver, others)",
        "self._rebalance(group, context, witness.gone, others)",
        "G13",
    ),
    # Topics, settings, pauses.
    Mutation(
        "a pattern is its member's alone",
        "subscriptions",
        _ALIKE,
        "alike.setdefault(member.topics, []).append(slot)",
        "G12",
    ),
    Mutation(
        "counts shrink",
        "raise_counts",
        "if topic in self.reports and count > self.counts.get(topic, -1):",
        "if topic in self.reports and count != self.counts.get(topic, -1):",
        "G12",
    ),
    Mutation("a topic of nobody is remembered", "rebalance", _COUNTS, "self.restore_counts(dict(self.counts))", "G12"),
    Mutation("topics change without a pattern", "_topics_changed", "if sender.pattern:", "if topics:", "G13"),
    Mutation(
        "what changes nothing is a rebalance",
        "_topics_changed",
        "if changed or witness.gone or others:",
        "if topics:",
        "G13",
    ),
    Mutation(
        "every setting is a rebalance",
        "_configure_group",
        "if group.members and (changed or wanted not in {None, group.strategy}):",
        "if group.members:",
        "G19",
    ),
    Mutation(
        "shared topics are a list",
        "_configure_group",
        'found["accept_range_fetch"] = tuple(sorted(set(found["accept_range_fetch"])))',
        'found["accept_range_fetch"] = tuple(sorted(found["accept_range_fetch"]))',
        "G19",
    ),
    Mutation(
        "positions are set without a pause", "_reposition", "if not context.pausing:", "if context.log_time < 0:", "G21"
    ),
    Mutation(
        "positions are set under members",
        "witness_of_positions",
        "return None if len(gone) < len(group.members) - len(left) else Witness(closing, gone, False)",
        "return None if len(gone) > len(group.members) - len(left) else Witness(closing, gone, False)",
        "G21",
    ),
    Mutation(
        "a group is forgotten without a pause",
        "KnownGroups.is_active",
        "return not context.pausing or len(group.overdue(context.log_time)) < len(group.members)",
        "return len(group.overdue(context.log_time)) < len(group.members)",
        "C16",
    ),
    # Commits.
    Mutation("anybody commits", "_refusal", "if owner != self._slot:", "if owner < 0:", "G14"),
    Mutation(
        "who lost it and got it back is not fenced",
        "_refusal",
        _COMMIT_REFUSED,
        "if action == LET_GO and revoked > self._generation:",
        "G14",
    ),
    Mutation("an older order is obeyed", "_refusal", _COMMIT_REFUSED, "if since > self._generation:", "G18"),
    Mutation(
        "of several pieces one has to be the sender's",
        "_Holding.refusal",
        "if not self.owned.cover(lo, hi):",
        "if not self.owned.los:",
        "G14",
    ),
    Mutation(
        "who lets go has to say how far it is",
        "Commits.commit",
        "if action == LET_GO:",
        "if action == LET_GO and through is not None:",
        "G14",
    ),
    Mutation(
        "who is behind can't let go", "Commits.commit", "if code not in codes.ACCEPTED:", "if code != codes.OK:", "G14"
    ),
    Mutation(
        "a commit is a start",
        "Commits.commit",
        "if action == START and through is not None:",
        "if through is not None:",
        "P9",
    ),
    Mutation(
        "a partition starts twice",
        "_start_refusal",
        "return None if self._group.kept(topic, partition) is None else codes.ALREADY_STARTED",
        "return None",
        "G14",
    ),
    Mutation(
        "order is for others",
        "Commits._commit_ranges",
        "if self._in_order and not progress.is_in_order(ranges):",
        "if self._in_order and not ranges:",
        "K8",
    ),
    Mutation(
        "individual commits can't be forbidden",
        "Commits._commit_ranges",
        "if not settings.accept_individual_commit:",
        "if not ranges:",
        "G14",
    ),
    Mutation(
        "the setting of intervals is ignored",
        "Commits._commit_ranges",
        "return progress.commit(ranges, settings.max_individual_commits)",
        "return progress.commit(ranges)",
        "G15",
    ),
    Mutation(
        "the pausing client may set ranges",
        "reposition_entry",
        "if action != COMMIT or lo != 0 or hi != MAX_KEY_HASH or ranges:",
        "if action != COMMIT or lo != 0 or hi != MAX_KEY_HASH:",
        "G21",
    ),
    # Pieces, and their changes of owner.
    Mutation("neighbours that differ are merged", "_merged", _MERGED, _MERGED.replace("[2:]", "[2:5]"), "G4"),
    Mutation("pieces are not merged", "_merged", _MERGED, "if not piece:", "G4"),
    Mutation(
        "a split partition was its first sharer's",
        "TopicPieces.before",
        "targets[partition] = _slot_of_all(pieces, {piece.target for piece in pieces})",
        "targets[partition] = pieces[0].target",
        "G17",
    ),
    Mutation(
        "a sharer was with its highest partition",
        "lowest_targets",
        "found.setdefault(target, partition)",
        "found[target] = partition",
        "K2",
    ),
    Mutation("the dead own on", "reconcile", "if owner == NOBODY or owner in gone:", "if owner == NOBODY:", "G16"),
    Mutation("every rebalance revokes anew", "reconcile", "elif topic.revoked[partition] == NEVER:", "else:", "G16"),
    Mutation(
        "a dead owner's successor has its token",
        "reconcile",
        _SINCE,
        "topic.since[partition] = NEVER if target == NOBODY else max(generation - 1, topic.since[partition])",
        "G5",
    ),
    Mutation(
        "a part lets the whole go",
        "let_go",
        "if topic.revoked[partition] != NEVER and lo == 0 and hi == MAX_KEY_HASH:",
        "if topic.revoked[partition] != NEVER:",
        "G14",
    ),
    Mutation(
        "a piece goes by its first half",
        "let_go",
        "if piece.revoked == NEVER or piece.lo < lo or hi < piece.hi:",
        "if piece.revoked == NEVER or piece.lo < lo:",
        "G14",
    ),
    Mutation(
        "what is let go has its old token",
        "let_go",
        "pieces.append(Piece(piece.lo, piece.hi, piece.target, generation, piece.target, NEVER))",
        "pieces.append(Piece(piece.lo, piece.hi, piece.target, piece.since, piece.target, NEVER))",
        "G5",
    ),
    Mutation(
        "a part is revoked anew",
        "_parts",
        "revoked = generation if old.revoked == NEVER else old.revoked",
        "revoked = generation",
        "G16",
    ),
    Mutation(
        "a part of the dead stays theirs", "_parts", "if old is None or old.owner in gone:", "if old is None:", "G16"
    ),
    Mutation("generations are counted", "rebalance", "self.generation = generation", "self.generation += 1", "G5"),
    # Targets.
    Mutation(
        "as many sharers as partitions share",
        "compute_targets",
        "if 1 <= count < len(takers):",
        "if 1 <= count <= len(takers):",
        "K1",
    ),
    Mutation(
        "sharing goes on without individual commits",
        "rebalance",
        "shared = set(self.settings.accept_range_fetch) if self.settings.accept_individual_commit else set[str]()",
        "shared = set(self.settings.accept_range_fetch)",
        "K1",
    ),
    Mutation(
        "whole partitions are rounded down",
        "_share",
        _WHOLE,
        "whole = min(max(len(others) * count // members, 1), count - 1)",
        "K1",
    ),
    Mutation(
        "the last get one more",
        "_deal_range",
        "times = chain(repeat(each + 1, more), repeat(each, len(takers) - more))",
        "times = chain(repeat(each, len(takers) - more), repeat(each + 1, more))",
        "G17",
    ),
    Mutation(
        "the circle begins again for each topic",
        "_deal_in_a_circle",
        "start = bisect_right(takers, last)",
        "start = 0",
        "G17",
    ),
    Mutation(
        "who owns it already does not get it",
        "hand_out",
        "taker = bits.get(owned[thing], 0) & takers or takers & -takers",
        "taker = takers & -takers",
        "G17",
    ),
    Mutation(
        "what stayed moves first",
        "_Levelling._rank",
        "return thing if self.stayed[thing] == slot else thing + len(self.holders)",
        "return thing",
        "G17",
    ),
    # Progress by key.
    Mutation(
        "a key range takes back what was done",
        "DoneThrough.plan",
        "put(max(start, lo), max(done, offset))",
        "put(max(start, lo), offset)",
        "P8",
    ),
    Mutation("a key range ends one hash early", "DoneThrough.plan", "put(hi + 1, done)", "put(hi, done)", "P8"),
    Mutation("the lowest piece is an older one", "carry_out", "insort(ladder, step)", "ladder.append(step)", "P8"),
    Mutation(
        "ranges do not touch what is just below them",
        "move_on",
        "place = bisect_left(ladder, (first - 1, NOTHING_DONE), place)",
        "place = bisect_left(ladder, (first, NOTHING_DONE), place)",
        "P10",
    ),
    # States.
    Mutation(
        "topics are written as they came",
        "GROUP",
        "row=lambda counts, _: sorted(counts.items()),",
        "row=lambda counts, _: list(counts.items()),",
        "S1",
    ),
    Mutation(
        "a target may be anybody",
        "_piece",
        "fits = type(target) is int and (target in takers if takers else target == NOBODY)",
        "fits = type(target) is int",
        "S1",
    ),
    Mutation(
        "a piece may be revoked before it was owned",
        "_piece",
        _REVOKED,
        _REVOKED.replace("since < revoked <= group.generation", "revoked <= group.generation"),
        "S1",
    ),
    Mutation(
        "a partition may be left out",
        "_add_partitions",
        'want(assigned == sum(group.counts.values()), f"{named} does not list all partitions of its topics")',
        "pass",
        "S1",
    ),
    Mutation(
        "keys of nobody are believed",
        "_add_partitions",
        'want(whole or not is_assigned, f"the pieces of {which} do not cover all keys")',
        "pass",
        "S1",
    ),
    Mutation(
        "a restored member has not joined since",
        "_add_member",
        "member.joined = said.joined",
        "member.joined = slot",
        "S3",
    ),
    Mutation(
        "a restored start is lost",
        "_add_progress",
        "kept.initial = said.initial",
        "kept.initial = min(said.initial, 0)",
        "S3",
    ),
)
