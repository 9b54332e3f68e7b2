"""All that a run with Spark drivers found out: dead letters, checks and the audit come to what every run finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kafka_marshal.demo.dead_letters import Letters
from kafka_marshal.demo.findings import Findings

__all__ = ["Audited", "SparkFindings"]


@dataclass(frozen=True, slots=True)
class Audited:
    """What the audit of the coordination log said."""

    verdict: str
    #: No violation, and all of it was replayed.
    clean: bool
    violations: int
    #: Records replayed.
    records: int
    #: The address of its own report, relative to ours.
    page: str


@dataclass(frozen=True, slots=True)
class SparkFindings(Findings):
    """A run with Spark drivers, done."""

    letters: Letters
    #: (check, flights that fail it)
    quality: Sequence[tuple[str, int]]
    audit: Audited

    @property
    def noun(self) -> str:
        return "driver"

    @property
    def equal(self) -> bool:
        """The result is the files', and the log shows no violation."""
        return self.verdict.equal and self.audit.clean

    def verdict_text(self) -> str:
        text = Findings.verdict_text(self)
        dead = len(self.letters.found)
        if dead and self.verdict.equal:
            are = (
                "more messages were no flights: dead letters"
                if dead > 1
                else "more message was no flight: a dead letter"
            )
            text += f" {dead:,} {are}, each accounted for."
        return f"{text} Audit: {self.audit.verdict}."

    def _kill_sentences(self) -> list[str]:
        found, kill = Findings._kill_sentences(self), self.story.kill
        if kill is not None:
            after = "was killed, too" if kill.rest_ms is None else f"was gone {kill.rest_ms:,} ms after the driver"
            found.append(f"Its JVM {after}.")
        return found

    def sentences(self) -> list[str]:
        found = Findings.sentences(self)
        repeated = self.letters.repeated
        if repeated:
            found.append(
                f"{repeated:,} dead letter{'s were' if repeated > 1 else ' was'} written again, by the one who did the "
                "killed driver's work; their source's offset tells them apart."
            )
        return found

    def summary(self) -> dict[str, object]:
        return {
            **Findings.summary(self),
            "jvm_gone_ms": None if self.story.kill is None else self.story.kill.rest_ms,
            "successors": [name for name, _, _ in self.story.successors],
            "dead_letters": len(self.letters.found),
            "dead_letters_written": self.letters.written,
            "quality": dict(self.quality),
            "violations": self.audit.violations,
            "records_audited": self.audit.records,
        }
