"""What is to be fetched again of a partition: as in a plain set of offsets, and in few steps for each message."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from kafka_marshal.engine.work.open_messages import Mine, OpenMessages

#: As many as may be open of one partition (H5).
MANY = 10_000


class Counted(list[Mine]):
    """Counts the items that are read."""

    looks = 0

    def __getitem__(self, at: Any) -> Any:
        self.looks += 1
        return super().__getitem__(at)

    def __iter__(self) -> Any:
        for each in super().__iter__():
            self.looks += 1
            yield each


def opened() -> OpenMessages:
    holder: Any = SimpleNamespace(is_read=False)
    return OpenMessages(holder)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_fetched_is_what_a_plain_set_has(seed: int) -> None:
    random, made, plain = Random(seed), opened(), dict[int, int]()
    for number in range(300):
        first = random.randrange(60)
        last = first + random.choice([0, 0, 1, 5, 20])
        if random.random() < 0.6:
            made._read(Mine(first, last, number, 1))
            plain |= dict.fromkeys(range(first, last + 1), number)
        else:
            made._stop_reading(first, last)
            plain = {offset: of for offset, of in plain.items() if not first <= offset <= last}
        found = {offset: each.key_hash for each in made.reading for offset in range(each.first, each.last + 1)}
        assert found == plain
        assert made.reading == sorted(made.reading)
        assert sum(each.last + 1 - each.first for each in made.reading) == len(plain), "none twice"


def test_ten_thousand_redriven_at_once_take_few_steps_each() -> None:
    made = opened()
    made.reading = looked_at = Counted()
    for offset in range(0, 2 * MANY, 2):
        made._read(Mine(offset, offset, 1, 5))
    for offset in range(0, 2 * MANY, 2):
        made._read(Mine(offset, offset, 1, 5))
    assert made.reading is looked_at
    assert len(looked_at) == MANY
    assert looked_at.looks < 100 * 2 * MANY
