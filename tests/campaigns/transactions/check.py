"""What a read_committed reader must find: the output of each input once, in order, and nothing else.

It knows the inputs, what the reader has read, and what an operator did. Nothing of what the workers or the log say.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.campaigns.frame import Violation


@dataclass(frozen=True, slots=True)
class Input:
    """A message that was written."""

    offset: int
    #: Its handler always fails: it becomes a dead letter.
    fails: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """What a worker produced for an input."""

    partition: int
    offset: int
    #: False: by a try that failed, or in a block that raised.
    counts: bool = True
    who: str = ""


@dataclass(slots=True)
class Partition:
    """What there is to know of one input partition."""

    inputs: Sequence[Input]
    #: Where the group was set to, in order: a reader may find a jump to each of these, once.
    restarts: Sequence[int] = ()


@dataclass(slots=True)
class Read:
    """What a read_committed reader has read; each list in the order of its partition."""

    #: Output partition = input partition.
    ordered: Mapping[int, Sequence[Output]]
    #: A second output of the same transactions, anywhere.
    second: Sequence[Output]
    #: Sources of dead letters.
    letters: Sequence[Output]


@dataclass(slots=True)
class _Round:
    """A run through the inputs without a jump, by offsets."""

    #: It covers the inputs from here on.
    begin: int
    #: The last output, or −1.
    last: int = -1


@dataclass(slots=True)
class _Walk:
    """One partition's outputs, in the order of the reader."""

    partition: int
    known: Partition
    found: list[Violation] = field(default_factory=list)
    rounds: list[_Round] = field(default_factory=lambda: [_Round(0)])
    unused: int = 0

    def run(self, outputs: Sequence[Output]) -> None:
        expected = [each.offset for each in self.known.inputs if not each.fails]
        places = {offset: place for place, offset in enumerate(expected)}
        restarts = list(self.known.restarts)
        missing: set[int] = set()
        at = 0
        for output in outputs:
            place = places.get(output.offset)
            if not output.counts:
                self._say("a failed try left an output", output)
                continue
            if place is None:
                self._say("an output of no input", output)
                continue
            if place != at:
                jump = next((n for n, x in enumerate(restarts) if bisect_left(expected, x) == place), None)
                if jump is not None:
                    self.rounds.append(_Round(restarts[jump]))
                    self.unused += jump
                    del restarts[: jump + 1]
                elif place < at:
                    self._say("out of order" if output.offset in missing else "twice", output)
                    missing.discard(output.offset)
                    continue
                else:
                    missing.update(expected[at:place])
            at = place + 1
            self.rounds[-1].last = output.offset
        self.unused += len(restarts)
        if not any(bisect_left(expected, x) == len(expected) for x in restarts):
            missing.update(expected[at:])
        if missing:
            text = f"{len(missing)} inputs of [{self.partition}] have no output: {_few(sorted(missing))}"
            self.found.append(Violation("lost", text))

    def letters(self, letters: Sequence[Output]) -> None:
        """Each input that fails has a dead letter in each round that covers it."""
        count = Counter(each.offset for each in letters if each.partition == self.partition)
        good = [each.offset for each in self.known.inputs if not each.fails]
        for each in self.known.inputs:
            if not each.fails:
                continue
            least = maybe = 0
            for number, run in enumerate(self.rounds):
                is_last = number == len(self.rounds) - 1 and not self.unused
                after = bisect_left(good, run.last + 1)
                next_good = good[after] if after < len(good) else 2**63
                if run.begin <= each.offset and (each.offset < run.last or is_last):
                    least += 1
                elif run.begin <= each.offset < max(next_good, run.begin):
                    maybe += 1
            was = count.pop(each.offset, 0)
            # A jump that left no output may have left dead letters.
            if not least <= was <= least + maybe + self.unused:
                what = f"[{self.partition}] {each.offset}: {was} times, expected {least} to {least + maybe}"
                self.found.append(Violation("dead letter", what))
        for offset, times in count.items():
            what = f"[{self.partition}] {offset}: {times} times, but its handler does not fail"
            self.found.append(Violation("dead letter", what))

    def _say(self, promise: str, output: Output) -> None:
        what = f"[{self.partition}] {output.offset} (by {output.who or 'unknown'}, after {self.rounds[-1].last})"
        self.found.append(Violation(promise, what))


def _few(offsets: Sequence[int]) -> str:
    return f"{', '.join(map(str, offsets[:8]))}{', …' if len(offsets) > 8 else ''}"


def check_order(partition: int, known: Partition, outputs: Sequence[Output]) -> list[Violation]:
    """Each input's output once and in order, apart from jumps to where the group was set to."""
    walk = _Walk(partition, known)
    walk.run(outputs)
    return walk.found


def check(partitions: Mapping[int, Partition], read: Read) -> list[Violation]:
    """Everything: order, the second output, dead letters."""
    found: list[Violation] = []
    first: Counter[tuple[int, int]] = Counter()
    for partition, known in partitions.items():
        outputs = read.ordered.get(partition, ())
        walk = _Walk(partition, known)
        walk.run(outputs)
        walk.letters(read.letters)
        found += walk.found
        for output in outputs:
            if output.partition != partition:
                found.append(Violation("an output of no input", f"[{output.partition}] {output.offset} in {partition}"))
            first[output.partition, output.offset] += 1
    second = Counter((each.partition, each.offset) for each in read.second)
    for key in sorted(first.keys() | second.keys()):
        if first[key] != second[key]:
            what = f"[{key[0]}] {key[1]}: {first[key]} and {second[key]} times in the two topics"
            found.append(Violation("not atomic", what))
    return found
