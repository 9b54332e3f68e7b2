"""States that were tampered with, near every edge: `World.restore` against the oracle (S1, Q23)."""

from __future__ import annotations

from random import Random
from typing import Any

from rationalizer import SnapshotError, World
from rationalizer.levels import SUPPORTED_LEVEL
from tests.rationalizer.group_author import write_group_log
from tests.rationalizer.oracle import is_state, parse
from tests.rationalizer.oracle.lease_states import MOST_RANGES
from tests.rationalizer.oracle.progress import LARGEST_HASH
from tests.rationalizer.oracle.spelling import EVERYTHING_ODD, Raw, paths, replaced, spell
from tests.rationalizer.sharers import write_sharing_log
from tests.rationalizer.strategies import LARGEST, by_seed, write_log

#: Length of the log whose state is forged, of claims and of groups.
LENGTH, GROUP_LENGTH = 40, 80
#: One log in this number is of coordinated groups.
GROUPS_EVERY = 2
#: Of the others, one in this number is of leases that several share, and such as have open messages.
SHARING_EVERY, SHARING_LENGTH = 3, 120
#: Of a group that takes no checkpoints.
PARTS = range(7)
#: This number of each.
FORGERIES = 40


def restore_differs(seed: int) -> str:
    """A difference between the two; "" if they agree."""
    source = Random(seed)
    of_groups = seed % GROUPS_EVERY == 0 and SUPPORTED_LEVEL > 1
    cp, cps = ((0, 1), (1, 2))[seed // GROUPS_EVERY % 2]
    if of_groups:
        _, after = write_group_log(by_seed(seed), GROUP_LENGTH, cp, cps)
    elif seed % SHARING_EVERY == 0:
        _, after = write_sharing_log(by_seed(seed), SHARING_LENGTH, cp, cps)
    else:
        _, after = write_log(by_seed(seed), LENGTH, cp, cps)
    tree: Any = parse(after.snapshot())
    if seed % 40 == 0 and (wrong := _limit_differs(MOST_RANGES + seed // 40 % 2)):
        return f"state {seed}: {wrong}"
    for number in range(FORGERIES):
        data, partitions = _forged(tree, source), source.choice((cps,) * 8 + (1, 2, 8))
        wanted = is_state(data, partitions, SUPPORTED_LEVEL)
        try:
            written = World.restore(data, partitions).snapshot()
        except SnapshotError as error:
            if wanted:
                return f"state {seed}, {number}: refused ({error}), and right"
        else:
            if not wanted or written != data:
                return f"state {seed}, {number}: taken, and {'written otherwise' if wanted else 'wrong'}"
    return ""


def _limit_differs(count: int) -> str:
    """As many ranges as a lease may have, or one more (P5)."""
    ranges = [[at, at] for at in range(2, 2 + 2 * count, 2)]
    lease = ["g", "t", 0, None, None, 0, 1000, 0, [[0, LARGEST_HASH, 0]], ranges, -1]
    data = spell([1, 0, 1, 0, 1, [lease], [], []])
    try:
        World.restore(data, 1)
    except SnapshotError:
        return "" if count > MOST_RANGES else f"{count:,} ranges are refused"
    return f"{count:,} ranges are taken" if count > MOST_RANGES else ""


def _forged(tree: Any, source: Random) -> bytes:
    """Valid or almost valid progress with key ranges, then one or two values changed at any depth; rarely the bytes."""
    for place in range(len(tree[5])):
        if source.random() < 0.5:
            tree = replaced(tree, (5, place), [*tree[5][place][:8], *_progress(source), *tree[5][place][11:]])
    for place, group in enumerate(tree[7]):
        if group[6] and source.random() < 0.3:
            number = source.randrange(len(group[6]))
            changed = _partition(group, group[6][number], source)
            tree = replaced(tree, (7, place, 6, number), changed)
    for _ in range(source.choice((0, 0, 1, 1, 1, 2))):
        tree = _tampered(tree, source) if isinstance(tree, list) and tree else tree
    data = spell(tree, source.choice) if source.random() < 0.1 else spell(tree)
    return data[: source.randrange(len(data))] if source.random() < 0.05 else data


def _progress(source: Random) -> list[Any]:
    """Small numbers, so that it is valid every other time."""
    stable = source.randrange(-1, 6)
    edges = sorted(source.choices((1, 2, 7, 1 << 40, LARGEST_HASH - 1), k=source.choice((0, 0, 1, 2, 2))))
    offsets = [stable, *(stable + source.choice((0, 1, 2, 5)) for _ in edges)]
    source.shuffle(offsets)
    pieces = [[lo, hi - 1, done] for lo, hi, done in zip([0, *edges], [*edges, LARGEST_HASH + 1], offsets, strict=True)]
    if source.random() < 0.1:
        place, edge = source.randrange(len(pieces)), source.choice((0, 1))
        pieces[place][edge] += source.choice((-1, 1))
    ranges, at = [], stable + 1
    for _ in range(source.choice((0, 0, 1, 2, 3))):
        first = at + source.choice((0, 1, 1, 1, 2, 4))
        at = first + source.choice((0, 0, 1, 3)) + 1
        ranges.append([first, at - 1])
    return [pieces, ranges, stable + source.choice((-2, -1, 0, 0, 1)) if stable > 0 else -1]


def _partition(group: Any, row: Any, source: Random) -> Any:
    """A partition of a coordinated group with pieces as sharers leave them, or with progress, or nearly."""
    topic, number, pieces, *progress = row
    generation, slots = group[1], [member[0] for member in group[5]]
    if source.random() < 0.5 or not slots or not pieces:
        if len(group) > len(PARTS):
            return [topic, number, pieces, source.choice((None, -1, 0, 3)), *_versions(group, progress[1:], source)]
        done_through, ranges, _ = _progress(source)
        return [
            topic,
            number,
            pieces,
            [source.choice((-1, 0, 3)), done_through, ranges, source.choice((None, "", "m"))],
        ]
    edges = sorted(set(source.choices((1, 7, 1 << 40, LARGEST_HASH), k=source.choice((0, 1, 1, 2)))))
    found = []
    for lo, hi in zip([0, *edges], [*edges, LARGEST_HASH + 1], strict=True):
        owner, target = source.choice(slots), source.choice((*slots * 3, -1))
        since = source.choice((owner, generation, generation, owner - 1))
        revoked = -1 if owner == target else source.choice((generation, generation, since, since + 1, -1))
        found.append([lo, hi - 1, owner, since, target, revoked])
    if source.random() < 0.1:
        del found[source.randrange(len(found))]
    return [topic, number, found, *progress]


def _versions(group: Any, versions: list[Any], source: Random) -> list[Any]:
    """Versions of a partition that was in the forge: more, fewer, or of other checkpoints, states and progress."""
    _, _, barrier, kept = group[7]
    ids = [each[0] for each in kept] + ([] if barrier is None else [barrier[0]])
    found = []
    for checkpoint in sorted({*[version[0] for version in versions], source.choice(ids)}):
        if source.random() < 0.2:
            continue
        done_through, ranges, _ = _progress(source)
        edges = sorted(set(source.choices((1, 7, 1 << 40, LARGEST_HASH), k=source.choice((0, 1, 1, 2)))))
        near = (checkpoint, checkpoint, 0, ids[0], checkpoint + source.choice((-1, 1)))
        parts = zip([0, *edges], [*edges, LARGEST_HASH + 1], strict=True)
        states = [[lo, hi - 1, source.choice(near)] for lo, hi in parts]
        found.append([checkpoint, states, done_through, ranges, source.choice((None, "m"))])
    return found


def _way_down(tree: Any, source: Random) -> tuple[int, ...]:
    """A path to a part of a state, with equal chance for each kind: there are few pauses and many offsets."""
    path: tuple[int, ...] = (source.randrange(len(tree)),)
    item = tree[path[0]]
    while isinstance(item, list) and item and source.random() < 0.9:
        path = (*path, source.randrange(len(item)))
        item = item[path[-1]]
    return path


def _tampered(tree: Any, source: Random) -> Any:
    path = source.choice(list(paths(tree))) if source.random() < 0.5 else _way_down(tree, source)
    item = tree
    for step in path:
        item = item[step]
    if isinstance(item, int) and not isinstance(item, bool) and source.random() < 0.7:
        times = [number for number in tree[2:4] if isinstance(number, int)]
        return replaced(
            tree, path, source.choice((item - 1, item + 1, -1, 0, LARGEST, LARGEST + 1, LARGEST + 2, *times))
        )
    if isinstance(item, list) and item and source.random() < 0.8:
        again, left_out = source.choice(item), source.randrange(len(item))
        return replaced(
            tree, path, source.choice(([*item, again], item[:left_out] + item[left_out + 1 :], item[::-1], [again]))
        )
    odd = source.choice(EVERYTHING_ODD)
    return tree if isinstance(odd, Raw) and len(odd.value) > 900 else replaced(tree, path, odd)
