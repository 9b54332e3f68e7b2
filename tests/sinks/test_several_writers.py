"""Writers of parts of a partition, one transaction after another, beside a naive model of what the sink must answer."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from kafka_marshal.errors import StaleEpochError
from kafka_marshal.sinks import FencedSink
from kafka_marshal.types import SharedEpoch
from rationalizer.limits import MAX_KEY_HASH
from tests.campaigns.sinks.member import GROUP, TOPIC, Sent, hash_of
from tests.sinks.conftest import Kind

OFFSETS = 120
KEY = (TOPIC, 0)
HASHES = {offset: hash_of(0, offset) for offset in range(OFFSETS)}


#: (lo, hi, token) of each part of a writer's keys.
Parts = tuple[tuple[int, int, int], ...]


class Naive:
    """A token for each key, and a set of offsets."""

    def __init__(self) -> None:
        self.newest = dict.fromkeys(HASHES.values(), -1)
        self.done: set[int] = set()

    def enter(self, parts: Parts) -> None:
        for lo, hi, token in parts:
            for key, newest in self.newest.items():
                if lo <= key <= hi:
                    self.newest[key] = max(newest, token)

    def write(self, parts: Parts, offsets: Iterable[int]) -> list[int] | None:
        """What is new; None: the writer is refused."""
        keys = {HASHES[offset] for offset in offsets}
        pairs = [(self.newest[key], token) for key in keys for lo, hi, token in parts if lo <= key <= hi]
        if any(newest > token for newest, token in pairs):
            return None
        if any(newest < token for newest, token in pairs):
            self.enter(parts)
        new = sorted(set(offsets) - self.done)
        self.done |= set(new)
        return new


def write(sink: FencedSink[Any], form: str, parts: Parts, offsets: list[int]) -> list[int] | None:
    """The same of the sink."""
    newest = max(token for _, _, token in parts)
    is_whole = len(parts) == 1 and parts[0][:2] == (0, MAX_KEY_HASH)
    epoch = newest if is_whole else SharedEpoch(newest, parts[0][0], parts[-1][1], parts)
    about: dict[str, Any] = {"group_id": GROUP, "epoch": epoch, "kind": "coordinated"}
    messages: list[Any] = [Sent(0, offset) for offset in offsets]
    try:
        if form == "records":
            with sink.records(messages, **about) as several:
                return sorted(each.offset() for each in several.new)
        with sink.record(messages[0], **about) as tx:
            return [] if tx.is_done else offsets[:1]
    except StaleEpochError:
        return None


def shares(draw: Random) -> list[tuple[int, int]]:
    """All keys, cut at hashes of keys and beside them."""
    cuts = sorted({draw.choice(list(HASHES.values())) - draw.randint(0, 1) for _ in range(draw.randint(0, 4))})
    return list(zip([0, *(cut + 1 for cut in cuts)], [*cuts, MAX_KEY_HASH], strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_each_answer_is_that_of_a_model(kind: Kind, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kafka_marshal.sinks.base.MERGE_EVERY", 7)
    draw, naive, sink = Random(seed), Naive(), kind.sink()
    whole = 0, MAX_KEY_HASH
    token, known = 0, list[Parts]([((*whole, 0),)])
    refused = new = 0
    for _ in range(150):
        if draw.random() < 0.2:
            cut = list[tuple[int, int, int]]()
            for lo, hi in shares(draw):  # owned since one generation, or since different ones
                token += draw.randint(0, 1) if cut else 1
                cut.append((lo, hi, token))
            known += [(part,) for part in cut]
            known += [pair for pair in pairwise(cut) if draw.random() < 0.5]
        if draw.random() < 0.04:
            position = draw.randint(-1, OFFSETS // 3)
            sink.rewind(GROUP, {KEY: position}, epochs={KEY: token + 1}, kind="coordinated")
            naive.enter(((*whole, token + 1),))
            naive.done = set(range(position + 1))
            token += 2
            known.append(((*whole, token),))
        parts = draw.choice(known[-8:])
        found = [offset for offset, key in HASHES.items() if parts[0][0] <= key <= parts[-1][1]]
        if not found:
            continue
        form = draw.choice(("records", "record"))
        offsets = draw.choices(found, k=1 if form == "record" else draw.randint(1, 6))
        wanted = naive.write(parts, offsets)
        assert write(sink, form, parts, offsets) == wanted, (form, parts, offsets)
        refused, new = refused + (wanted is None), new + bool(wanted)
        if draw.random() < 0.1:
            sink = kind.sink()
    found_at = sink.progress(GROUP)[KEY]
    ranges = ((0, found_at.last_offset), *found_at.ranges)
    assert {at for first, end in ranges for at in range(first, end + 1)} == naive.done
    assert refused > 15 and new > 30
