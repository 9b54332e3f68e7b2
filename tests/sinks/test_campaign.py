"""The short form of ``make sinks``: several writers, stale tokens, kills, stops and rewinds."""

from __future__ import annotations

from pathlib import Path
from random import SystemRandom

import pytest

from tests.campaigns.sinks import Options, run_campaign
from tests.campaigns.sinks.member import Place
from tests.sinks.conftest import Postgres


@pytest.mark.flaky(reruns=0)
def test_sqlite(tmp_path: Path) -> None:
    seed = SystemRandom().randrange(1_000_000)
    found = run_campaign(Options.short(500, seed), Place("sqlite", str(tmp_path / "campaign.db")))
    assert found.ok, (seed, found.violations)


@pytest.mark.flaky(reruns=0)
def test_postgres(postgres: Postgres) -> None:
    """With a strict default."""
    seed = SystemRandom().randrange(1_000_000)
    dsn = postgres.dsn(postgres.new_database("repeatable read"))
    found = run_campaign(Options.short(2_500, seed), Place("postgres", dsn))
    assert found.ok, (seed, found.violations)
