"""Growth is found: memory, file descriptors, threads, and workers that ended by themselves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.campaigns.soak import STEADY, Sample, Series, plot


def series(**changes: float) -> Series:
    """Flat series, except the last worker: its figures grow by ``changes`` over the time."""
    found = Series()
    for name in STEADY:
        found.samples[name] = []
        for step in range(40):
            grown = {what: by * step / 40 if name == STEADY[-1] else 0.0 for what, by in changes.items()}
            rss_mb = (
                50.0 + (20 if step < 4 else 0) + grown.get("rss_mb", 0)
            )  # a decrease after the start does not matter
            descriptors, threads = 30 + int(grown.get("descriptors", 0)), 14 + int(grown.get("threads", 0))
            found.samples[name].append(Sample(2.0 * step, 7 + int(grown.get("pid", 0)), rss_mb, descriptors, threads))
    return found


def test_flat() -> None:
    assert series().problems() == []
    assert series(rss_mb=3, descriptors=2, threads=2).problems() == []


@pytest.mark.parametrize(
    ("what", "by", "said"),
    [
        ("rss_mb", 20.0, "MB of memory"),
        ("descriptors", 12.0, "file descriptors"),
        ("threads", 12.0, "threads"),
        ("pid", 2.0, "took turns"),
    ],
)
def test_not_flat(what: str, by: float, said: str) -> None:
    [problem] = series(**{what: by}).problems()
    assert said in problem
    assert problem.startswith(STEADY[-1])


def test_seen_too_rarely_to_judge() -> None:
    found = series()
    del found.samples[STEADY[0]]
    found.samples[STEADY[1]] = found.samples[STEADY[1]][:5]
    assert [problem.split(":")[0] for problem in found.problems()] == sorted(STEADY[:2])


def test_a_sample_of_this_process() -> None:
    sample = Sample.of(1.0, os.getpid())
    assert sample is not None
    assert sample.rss_mb > 10
    assert sample.descriptors >= 3
    assert sample.threads >= 1
    assert Sample.of(1.0, 2**22 + 1) is None


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(series(rss_mb=3), tmp_path / "soak.png")
    assert (tmp_path / "soak.png").stat().st_size > 1_000
