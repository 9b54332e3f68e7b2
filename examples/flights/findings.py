"""All that a run found out, and the sentences that say it: the same on the terminal and in the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from flights.check import Range, Verdict
from flights.dead_letters import Letters
from flights.ownership import Change, History, Takeover
from flights.process import Manner, Stage, Story
from flights.timeline import Mark

__all__ = ["Audited", "Findings", "Row", "ranges_text"]

#: (partition, from, to, when, freed by, after the last beat, after the kill)
Row = tuple[str, str, str, str, str, str, str]


_STAGES: Final = {
    Stage.UNWRITTEN: "not yet written",
    Stage.COMPUTED: "added up by Spark and not yet written",
    Stage.LETTERED: "not yet written, but for its dead letters",
    Stage.UNREPORTED: "committed to the database and not yet reported to the log",
}


@dataclass(frozen=True, slots=True)
class Audited:
    """What the audit of the coordination log said."""

    verdict: str
    #: No violation, and all of it was replayed.
    clean: bool
    violations: int
    #: Records replayed.
    records: int
    #: The address of its report, relative to the demo's.
    page: str


@dataclass(frozen=True, slots=True)
class Findings:
    """A run, done."""

    topic: str
    verdict: Verdict
    story: Story
    history: History
    seed: int
    heartbeat_interval_ms: int
    #: The workers had watchdogs.
    watchdog: bool
    manner: Manner
    letters: Letters = field(default_factory=lambda: Letters(0, {}))
    #: (check, flights that fail it)
    quality: Sequence[tuple[str, int]] = ()
    #: None: the log was not audited.
    audit: Audited | None = None

    @property
    def noun(self) -> str:
        """What those are called who did the work."""
        return self.manner.noun

    @property
    def equal(self) -> bool:
        """The result is the files', and the log shows no violation."""
        return self.verdict.equal and (self.audit is None or self.audit.clean)

    @property
    def clients(self) -> list[str]:
        """The workers, in the order of their names' numbers."""
        named = {tenure.client_id for tenure in self.history.all_tenures()}
        return sorted(named, key=lambda name: (len(name), name))

    @property
    def start_ms(self) -> int:
        """Log time of the first claim."""
        return min((tenure.since for tenure in self.history.all_tenures()), default=self.story.started_ms)

    def verdict_text(self) -> str:
        """The one sentence that matters most."""
        verdict = self.verdict
        rows, groups = f"{verdict.rows:,} flight{_s(verdict.rows)}", f"{verdict.groups:,} group{_s(verdict.groups)}"
        if verdict.equal:
            text = f"EQUAL: {rows} in {groups}, compared number by number with the file: 0 lost, 0 double."
        else:
            text = (
                f"NOT EQUAL: {len(verdict.differences):,} number{_s(len(verdict.differences))} of {groups} differ from "
                f"the file; {verdict.rows_lost:,} of {rows} lost, {verdict.rows_double:,} double."
            )
        dead = len(self.letters.found)
        if dead and verdict.equal:
            are = "messages were no flights: dead letters" if dead > 1 else "message was no flight: a dead letter"
            text += f" {dead:,} more {are}, each accounted for."
        return text if self.audit is None else f"{text} Audit: {self.audit.verdict}."

    def differences(self, most: int = 10) -> list[str]:
        """What differs, as lines; the first few of each kind."""
        verdict = self.verdict
        lines = [
            f"{'/'.join(map(str, each.group))} {each.measure}: {each.in_database} in the database, {each.in_file} in "
            "the file"
            for each in verdict.differences[:most]
        ]
        lines += [f"lost: {ranges_text(verdict.lost, most)}"] if verdict.lost else []
        lines += [f"double: {ranges_text(verdict.double, most)}"] if verdict.double else []
        return lines

    def sentences(self) -> list[str]:
        """What happened, in some sentences."""
        found = [*self._kill_sentences(), *self._repeat_sentences(), *self._crash_sentences()]
        found.append(self._handover_sentence())
        repeated = self.letters.repeated
        if repeated:
            found.append(
                f"{repeated:,} dead letter{'s were' if repeated > 1 else ' was'} written again, by the one who did the "
                "killed driver's work; their source's offset tells them apart."
            )
        return found

    def _kill_sentences(self) -> list[str]:
        kill, added = self.story.kill, self.story.added
        if kill is None:
            return ["Nobody was killed: the rows were done before there was a batch to do it in."]
        share = 100 * kill.rows_done / self.verdict.rows
        killed = (
            f"{kill.client_id} was killed with -9 when {share:.0f} % of the rows were done, with a batch of "
            f"{kill.rows:,} row{_s(kill.rows)} in flight that was {_STAGES[kill.stage]} (seed {self.seed})."
        )
        found = [killed, *self._fate_sentences(kill.client_id, self._killed_ms())]
        if added is not None:
            found.append(f"{added[0]} was added {(added[1] - kill.at_ms) / 1000:.1f} s after the kill.")
        if self.audit is not None:  # Spark ran
            after = "was killed, too" if kill.rest_ms is None else f"was gone {kill.rest_ms:,} ms after the driver"
            found.append(f"Its JVM {after}.")
        return found

    def _killed_ms(self) -> int | None:
        """When the kill was, by this machine's clock; None where the log's, the broker's, plainly goes otherwise.

        (If nothing was released or taken over before it, they may still differ, on another machine.)
        """
        kill = self.story.kill
        if kill is None:
            return None
        since = [each.at_ms - (each.vacant_ms or 0) for each in self.takeovers() if each.old == kill.client_id]
        return kill.at_ms if min(since, default=kill.at_ms) >= kill.at_ms else None

    def _fate_sentences(self, client_id: str, died_ms: int | None) -> list[str]:
        """How what a dead worker held came to others; times only where we know when it died."""
        freed = [each for each in self.takeovers() if each.old == client_id]
        released = [each for each in freed if each.change is Change.WATCHDOG]
        silent = [each for each in freed if each.change is Change.SILENT]
        found = []
        if released:
            text = f"Its watchdog released {_of(released, freed)}"
            if died_ms is not None:
                last_ms = max(each.at_ms - (each.vacant_ms or 0) for each in released)
                text += f" within {last_ms - died_ms:,} ms; {_taken(released, died_ms)}"
            found.append(f"{text}.")
        if silent:
            text = f"{_of(silent, freed)} fell free after {self._silence} (2 · HI)"
            text = text[0].upper() + text[1:] if self.watchdog else f"It had no watchdog: {text}"
            found.append(f"{text}; {_taken(silent, died_ms)}." if died_ms is not None else f"{text}.")
        return found

    def _repeat_sentences(self) -> list[str]:
        repeated, fenced = self.story.repeated, self.story.fenced
        found = []
        if repeated:
            found.append(
                f"{repeated:,} row{_s(repeated)} {'was' if repeated == 1 else 'were'} handed out again (at least "
                "once); the database knew their offsets and counted them once."
            )
        if fenced:
            found.append(f"{fenced:,} batch{'es' if fenced != 1 else ''} came too late and met a newer epoch: refused.")
        return found

    def _crash_sentences(self) -> list[str]:
        found = []
        for crash in self.story.crashes:
            found.append(
                f"{crash.client_id} ended by itself, which was not planned (status {crash.status}): "
                f"{(crash.last_words or 'no word').rstrip('.')}."
            )
            found += self._fate_sentences(crash.client_id, None)
        return found + [f"{name} was started in the place of {old}." for name, _, old in self.story.successors]

    def _handover_sentence(self) -> str:
        handed = self.handovers()
        vacant = sorted(each.vacant_ms or 0 for each in handed)
        if not handed:
            return f"No partition was handed over by a living {self.noun}."
        first = self.story.kill.at_ms if self.story.kill is not None else self.story.ended_ms
        early = sum(each.at_ms <= first for each in handed)
        text = f"Living {self.noun}s handed over {len(handed)} partition{_s(len(handed))}"
        if early:
            text += f", {early} of them while the first ones joined"
        return f"{text}; each had nobody for {vacant[len(vacant) // 2]} ms (median), {vacant[-1]} ms at most."

    def takeovers(self) -> list[Takeover]:
        """The changes after a death, or after silence."""
        return self._changes(Change.WATCHDOG, Change.SILENT)

    def handovers(self) -> list[Takeover]:
        """The changes by living workers."""
        return self._changes(Change.HANDED_OVER)

    def _changes(self, *changes: Change) -> list[Takeover]:
        """Without those of the end: while all close, the ones that close last still claim what falls free."""
        end = self.story.closing_ms
        found = self.history.takeovers(self._watched_dead())
        return [each for each in found if each.change in changes and not 0 < end <= each.at_ms]

    def _watched_dead(self) -> set[str]:
        """Those whose watchdog had to speak: killed, by us or by others. Who ends with an error releases by itself."""
        if not self.watchdog:
            return set()
        kill = self.story.kill
        dead = {crash.client_id for crash in self.story.crashes if crash.status < 0}
        return dead if kill is None else dead | {kill.client_id}

    def freed_by(self, takeover: Takeover) -> str:
        """What set a partition free, for people."""
        if takeover.change is Change.WATCHDOG:
            return "its watchdog"
        return self._silence

    @property
    def _silence(self) -> str:
        return f"{2 * self.heartbeat_interval_ms / 1000:g} s of silence"

    def rows_of(self, takeovers: Sequence[Takeover]) -> list[Row]:
        """Takeovers as rows of a table."""
        kill, killed_ms = self.story.kill, self._killed_ms()
        rows = []
        for each in takeovers:
            killed = kill is not None and each.old == kill.client_id
            rows.append(
                (
                    f"flights {each.partition}",
                    each.old,
                    each.new,
                    f"{(each.at_ms - self.start_ms) / 1000:.1f} s",
                    self.freed_by(each),
                    f"{each.since_last_beat_ms:,} ms",
                    f"{each.at_ms - killed_ms:,} ms" if killed and killed_ms is not None else "-",
                )
            )
        return rows

    def summary(self) -> dict[str, object]:
        """For programs."""
        if self.audit is None:
            return self._summary_of_run()
        kill = self.story.kill
        return {
            **self._summary_of_run(),
            "jvm_gone_ms": None if kill is None else kill.rest_ms,
            "successors": [name for name, _, _ in self.story.successors],
            "dead_letters": len(self.letters.found),
            "dead_letters_written": self.letters.written,
            "quality": dict(self.quality),
            "violations": self.audit.violations,
            "records_audited": self.audit.records,
        }

    def _summary_of_run(self) -> dict[str, object]:
        verdict, kill, added = self.verdict, self.story.kill, self.story.added
        killed_ms = self._killed_ms()
        return {
            "equal": verdict.equal,
            "rows": verdict.rows,
            "groups": verdict.groups,
            "differences": len(verdict.differences),
            "lost": verdict.rows_lost,
            "double": verdict.rows_double,
            "repeated": self.story.repeated,
            "fenced": self.story.fenced,
            "seed": self.seed,
            "killed": None if kill is None else kill.client_id,
            "added": None if added is None else added[0],
            "ended_by_themselves": [crash.client_id for crash in self.story.crashes],
            "watchdog": self.watchdog,
            "takeovers": [
                {
                    "partition": each.partition,
                    "from": each.old,
                    "to": each.new,
                    "at_ms": each.at_ms - self.start_ms,
                    "freed_by": "watchdog" if each.change is Change.WATCHDOG else "silence",
                    "after_last_beat_ms": each.since_last_beat_ms,
                    "after_kill_ms": each.at_ms - killed_ms
                    if kill is not None and killed_ms is not None and each.old == kill.client_id
                    else None,
                    "vacant_ms": each.vacant_ms,
                }
                for each in self.takeovers()
            ],
        }

    def title(self) -> str:
        """Of the picture: what it shows."""
        kill = self.story.kill
        freed = [each for each in self.takeovers() if kill is not None and each.old == kill.client_id]
        if kill is None or not freed:
            return "Who owned which partition when"
        killed_ms = self._killed_ms()
        if killed_ms is not None and all(each.change is Change.WATCHDOG for each in freed):
            after = f"{_duration(max(each.at_ms for each in freed) - killed_ms)} later"
        else:
            after = f"{_duration(max(each.since_last_beat_ms for each in freed))} after its last beat"
        return f"{kill.client_id} is killed; {after} all it held is in other hands"

    def subtitle(self) -> str:
        """Of the picture: how to read it, and the verdict."""
        verdict = "0 lost, 0 double" if self.verdict.equal else "the result differs"
        hatched = any(each.change is Change.SILENT for each in self.takeovers())
        return (
            "Who owned which partition when, replayed from the coordination log. "
            f"{'Hatched: silent, not yet replaced. ' if hatched else ''}{self.verdict.rows:,} flights: {verdict}."
        )

    def marks(self) -> list[Mark]:
        """What the picture marks."""
        kill, added = self.story.kill, self.story.added
        marks = []
        if kill is not None:
            spoke = any(each.old == kill.client_id and each.change is Change.WATCHDOG for each in self.takeovers())
            text = f"{kill.client_id} killed (-9){', its watchdog spoke' if spoke else ''}"
            marks.append(Mark(kill.at_ms, text, death=True))
        marks += [Mark(at_ms, f"{name} started", death=False) for name, at_ms, _ in self.story.successors]
        return marks if added is None else [*marks, Mark(added[1], f"{added[0]} added", death=False)]


def ranges_text(ranges: Sequence[Range], most: int) -> str:
    """Offsets by partition, the first few."""
    listed = ", ".join(f"[{partition}] {first}…{last}" for partition, first, last in ranges[:most])
    return listed + (f" and {len(ranges) - most} more" if len(ranges) > most else "")


def _of(some: Sequence[Takeover], freed: Sequence[Takeover]) -> str:
    """How many of the partitions that a dead worker held."""
    if len(some) == len(freed):
        return f"its {len(freed)} partitions" if len(freed) > 1 else "its one partition"
    return f"{len(some)} of its {len(freed)} partitions"


def _taken(freed: Sequence[Takeover], died_ms: int) -> str:
    taken = f"{max(each.at_ms for each in freed) - died_ms:,} ms after the kill"
    return f"{taken} it was in other hands" if len(freed) == 1 else f"{taken} all of them were in other hands"


def _duration(ms: int) -> str:
    return f"{ms} ms" if ms < 1_000 else f"{ms / 1000:.1f} s"


def _s(count: int) -> str:
    return "" if count == 1 else "s"
