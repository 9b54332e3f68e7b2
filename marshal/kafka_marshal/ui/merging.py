"""Makes one history of several, each of which has folded other coordination partitions of one log.

All but groups, names and sums is kept by coordination partition anyway. What several of them say of one partition of a
group carries its place in the log: the later place prevails.
"""

from __future__ import annotations

from collections.abc import Sequence

from kafka_marshal.ui.fold import GroupHistory, History


def merged(parts: Sequence[History]) -> History:
    """The history of all their coordination partitions. The parts are used up."""
    whole, *others = parts
    for other in others:
        for ours, theirs in ((whole, other), (other, whole)):
            for name in ours.groups.keys() - theirs.groups.keys():
                ours.groups[name].count_rejected(theirs.events)
        names, owners = whole.names.absorb(other.names), whole.owners.absorb(other.owners)
        base = len(whole.spans)
        whole.spans.absorb(other.spans, names, owners)
        whole.events.absorb(other.events, names)
        for by_cp in ("worlds", "marks", "starts", "joints", "folds"):
            getattr(whole, by_cp).update(getattr(other, by_cp))
        for name, group in other.groups.items():
            for found in group.keys.values():
                found.renumber(base, owners)
            known = whole.groups.get(name)
            if known is None:
                whole.groups[name] = group
            else:
                _absorb(known, group, whole, is_home=group.home in other.worlds)
    whole.worlds = dict(sorted(whole.worlds.items()))
    return whole


def _absorb(known: GroupHistory, other: GroupHistory, whole: History, *, is_home: bool) -> None:
    if is_home:  # only there
        for name in ("assignments", "rebalances", "pulses", "counts", "checkpoints"):
            setattr(known, name, getattr(other, name))
    known.paused.update(other.paused)
    known.series.absorb(other.series)
    for place, found in other.keys.items():
        if place in known.keys:
            known.keys[place].absorb(found)
        else:
            known.keys[place] = found
    leased = [found for found in known.keys.values() if found.open and found.open[0].is_lease]
    if known.assignments is None or not leased:
        return
    if known.assignments.now:
        for found in leased:
            found.begin([], whole.owners)
    else:  # it was converted: it has leases now (G1)
        known.assignments = None
