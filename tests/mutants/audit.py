"""Planted bugs in what the audit follows of shares and open messages: broken logs are clean, or right ones broken."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

_ENDS = "self._end(watched, gone, EXPIRED)"
_FOLLOWS = "if mine is not None and state is not None and len(state) == len(shares):"

AUDIT: tuple[Mutation, ...] = (
    # Shares.
    Mutation(
        "the audit takes a stale sharer for one that lives",
        "ShareObserver.claim",
        "if alive is not None:",
        "if False:",
        "B3",
    ),
    Mutation(
        "the audit confirms a share of another instance",
        "ShareObserver.claim",
        "if not mine:",
        "if not mine and alive is None:",
        "B3",
    ),
    Mutation("the audit keeps shares silent after a claim", "ShareObserver.claim", "if was_silent:", "if False:", "B4"),
    Mutation("the audit keeps stale shares at a take", "ShareObserver._make_room", _ENDS, "pass", "B4"),
    Mutation(
        "a sharer's settle is no beat for the audit",
        "ShareObserver.of_sharer",
        "share.last_beat = log_time",
        "share.last_beat = share.last_beat if kind == SettlingMessages.TYPE else log_time",
        "H3",
    ),
    Mutation("the audit trusts the state's shares", "ShareObserver.compare", _FOLLOWS, "if state is not None:", "B1"),
    Mutation(
        "the audit lets a group be forgotten with a sharer",
        "ShareObserver._end_all",
        "if alive is not None:",
        "if False:",
        "C16",
    ),
    # Open messages.
    Mutation(
        "the audit lets anybody settle", "HoleObserver._close", "if not by.reaches(was, seen):", "if False:", "H2"
    ),
    Mutation(
        "the audit does not ask what was seen", "SettlingSender.reaches", "if run.since >= seen:", "if False:", "H2"
    ),
    Mutation(
        "the audit lets a sharer take what another has", "HoleObserver.take", "if not was.is_free:", "if False:", "B5"
    ),
    Mutation(
        "the audit lets what is done be opened",
        "HoleObserver._make",
        "if not is_again and (not by.may_open(key_hash) or low <= stable):",
        "if not is_again and not by.may_open(key_hash):",
        "H3",
    ),
    Mutation(
        "the audit frees no batch of a share that ended", "HoleObserver.disown", "holes.disown(epoch)", "pass", "B4"
    ),
    Mutation(
        "the audit drops what is parked with the position",
        "HoleObserver.reposition",
        "if run.reason is None or run.first > offset:",
        "if True:",
        "C11",
    ),
    Mutation(
        "the audit looks only at what a record names",
        "HoleObserver.compare",
        "if whole or mine is None or theirs is None:",
        "if whole:",
        "H1",
    ),
    Mutation(
        "a message that was set aside is done for the audit",
        "HoleObserver.not_open",
        "return [part[:2] for first, last in runs for part in _parts(holes, first, last) if part[2] is None]",
        "return list(runs)",
        "H1",
    ),
    Mutation("what was open is done for nobody", "HoleObserver._end", "if ended in _DONE_AS:", "if False:", "H3"),
)
