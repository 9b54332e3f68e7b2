"""Deploys that fail a third of all messages, or all of them, and a downstream that is away: what is set aside."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from tests.campaigns.crew import AWAY
from tests.campaigns.parks.campaign import Campaign, Group

__all__ = ["STORIES"]

#: Open messages of a partition, at most (H5).
LIMIT = 10_000

#: How long a deploy fails everything, and what is behind the handlers is away (s).
OUTAGE_S = 10.0

#: More messages of a process than this are not "next to nothing": the first failures that open the breaker set none
#: aside with five tries, and then one comes after 20, 40, 80 … 1,000 failures.
FEW = 5


def third(campaign: Campaign) -> None:
    """A deploy fails a third of all messages: they are set aside up to the limit, and the good release handles them."""
    campaign.release = "third"
    campaign.write(66_000, paced=False, plain=True)
    left, until, kill_at = list(campaign.groups), time.monotonic() + 180.0, time.monotonic() + 8.0
    while left and time.monotonic() < until:
        for group in campaign.groups:
            group.crew.tend()
        if time.monotonic() > kill_at:
            campaign.rng.choice(left).crew.kill()
            kill_at = time.monotonic() + campaign.options.kill_every_s
        with suppress(*AWAY):
            left = [x for x in left if _aside(campaign, x) != dict.fromkeys(range(campaign.options.partitions), LIMIT)]
        time.sleep(0.5)
    campaign.violations += [f"{x.kind}: not at the limit: {_aside(campaign, x)}, {campaign.health()}" for x in left]
    _say_so(campaign)
    _mend(campaign)


def _say_so(campaign: Campaign) -> None:
    """At the limit the tools say why nothing moves."""
    for group in campaign.groups:
        problems = campaign.command("check", "--group", group.name, status=1)["problems"]
        if not any(each["kind"] == "holes" for each in problems):
            campaign.violations.append(f"{group.kind}: at the limit check says {problems}")
    health = campaign.health()
    campaign.say("\n".join(health))
    if not any("10,000" in text for text in health):
        campaign.violations.append(f"at the limit no worker says so: {health}")


def everything(campaign: Campaign) -> None:
    """A deploy fails all messages."""
    campaign.release = "all"
    _outage(campaign, 0.0)
    campaign.release = "good"
    _mend(campaign)


def away(campaign: Campaign) -> None:
    """What is behind the handlers is away."""
    _outage(campaign, 6.0)
    (campaign.folder / "away").unlink()
    campaign.writing_ends.set()
    campaign.await_quiet(parked=True)
    _mend(campaign)


def _outage(campaign: Campaign, after_s: float) -> None:
    """Nothing works for a while, after this time (s); count what is set aside."""
    writer = threading.Thread(target=campaign.write, args=(10**9,), kwargs={"paced": True, "plain": True})
    writer.start()
    for group in campaign.groups:
        group.crew.tend()
    while not all(campaign.known(group) for group in campaign.groups):
        time.sleep(0.2)
    time.sleep(after_s)
    (campaign.folder / "away").touch()
    time.sleep(OUTAGE_S)
    for group in campaign.groups:
        count = sum(_aside(campaign, group).values())
        campaign.counts[f"{group.kind}: set aside in {OUTAGE_S:g} s"] = count
        if count > FEW * campaign.options.workers:
            campaign.violations.append(f"{group.kind}: {count} messages were set aside in an outage")
    campaign.writing_ends.set()
    writer.join()


def _mend(campaign: Campaign) -> None:
    campaign.release = "good"
    for group in campaign.groups:
        group.crew.deploy()
    with suppress(FileNotFoundError):
        (campaign.folder / "away").unlink()
    campaign.redrive_all()


def _aside(campaign: Campaign, group: Group) -> dict[int, int]:
    with campaign.admin() as admin:
        return dict(Counter(each.partition for each in admin.open_messages(group.name, parked=True)))


#: Name → what happens, and settings of the campaign.
STORIES: Final[dict[str, tuple[Callable[[Campaign], None], dict[str, Any]]]] = {
    "third": (third, {"attempts": 1, "work_ms": 0.0, "killers": 0, "keys": 500}),
    "all": (everything, {"attempts": 5, "backoff": (0.1, 1.0), "killers": 0}),
    "away": (away, {"attempts": 5, "backoff": (0.1, 1.0), "killers": 0}),
}
