"""Fixed stories: each repeats a combination that chance produces too rarely."""

from __future__ import annotations

from dataclasses import replace

from kafka_marshal import Delivery
from kafka_marshal.testing.simulation import Client, Fault, Scenario

HI = 300
#: Enough messages that there are always some in flight or requested.
MESSAGES = 60.0
#: The CP (of two) with the lease of the data's partition 0.
CP_OF_KEY = 1


def _pauses_meet_claims(*workers: str) -> Scenario:
    """At most once, on a slow network, an admin pauses the group every third HI: requests of messages are rejected."""
    clients = tuple(Client(f"c{i}", worker, claims_ahead=i % 2 == 0) for i, worker in enumerate(workers))
    slow = tuple(Fault(2.0, "slow network", client.name, 60.0, 0.15) for client in clients)
    pauses = tuple(Fault(at + 0.37 * i, "pause", "", 0.6, 0.2) for i, at in enumerate(range(4, 76, 3)))
    return Scenario(0, clients, slow + pauses, "at-most-once", HI, messages=MESSAGES, handling_ms=1.0)


def _stopped_with_a_batch_in_hand(seed: int) -> Scenario:
    """At most once, each process is repeatedly stopped for longer than its leases last, within a batch."""
    workers = ("iterate", "poll", "batches", "batches")
    clients = tuple(Client(f"c{i}", worker, claims_ahead=i % 2 == 0) for i, worker in enumerate(workers))
    stops = tuple(Fault(3 + 1.7 * i, "stop", f"c{i % 4}", 3.0) for i in range(42))
    return Scenario(seed, clients, stops, "at-most-once", HI, messages=MESSAGES, handling_ms=8.0)


def _a_topic_that_is_whole() -> Scenario:
    """One topic that is claimed as a whole, whose holder dies, ends, stops, or receives nothing of one CP."""
    workers = ("iterate", "explicit", "poll", "defer")
    clients = tuple(Client(f"c{i}", worker, "whole-topic") for i, worker in enumerate(workers))
    ends = tuple(Fault(4 + 4.1 * i, ("crash", "term", "stop")[i % 3], f"c{i % 4}", 5.0) for i in range(10))
    deaf = tuple(Fault(48 + 3.7 * i, "deaf", f"c{i % 4}", 3.0, 0.5, CP_OF_KEY) for i in range(8))
    faults = ends + deaf
    return Scenario(0, clients, faults, "at-least-once", HI, 2, messages=MESSAGES, handling_ms=1.0)


def _ranges_of_offsets(delivery: Delivery, handling_ms: float = 1.0) -> Scenario:
    """Members that take ranges, as Spark does, die, stop and are cut off; an admin pauses and moves positions."""
    clients = tuple(Client(f"c{i}", "ranges") for i in range(4))
    kinds = ("crash", "stop", "pause", "cut off", "term", "deaf", "slow network")
    faults = tuple(Fault(3 + 2.3 * i, kinds[i % 7], f"c{i % 4}", 3.0, 0.7, i % 2) for i in range(33))
    return Scenario(0, clients, faults, delivery, HI, messages=MESSAGES, handling_ms=handling_ms)


def _steered(worker: str, delivery: Delivery = "at-least-once") -> Scenario:
    """Members that pause partitions or seek behind their database's offset; they die, stop, and are cut off."""
    clients = tuple(Client(f"c{i}", worker, claims_ahead=i % 2 == 0) for i in range(4))
    kinds = ("crash", "stop", "cut off", "term", "slow network", "deaf")
    faults = tuple(Fault(3 + 2.3 * i, kinds[i % 6], f"c{i % 4}", 3.0, 0.7, i % 2) for i in range(33))
    return Scenario(0, clients, faults, delivery, HI, messages=MESSAGES, handling_ms=1.0)


def _a_limit_while_something_is_in_hand() -> Scenario:
    """Seed 6161, shrunk: a member at its limit releases a lease with a long-running message."""
    clients = (
        Client("c0", "poll", fetches_every=0.3),
        Client("c1", "consume", fetches_every=0.4, joins=4.63),
        Client("c2", "defer", "max-claims", joins=35.23),
        Client("c3", "defer", claims_ahead=True, fetches_every=0.3, joins=31.56),
    )
    faults = (
        Fault(3.9, "outage", "", 3.8, 0.111),
        Fault(9.6, "pause", "", 3.94, 0.753, 1),
        Fault(23.58, "deaf", "c1", 4.78, 0.733, 1),
        Fault(28.91, "pause", "", 2.69, 0.406),
        Fault(33.24, "duplicated", "c3", 3.87, 0.61),
    )
    return Scenario(6161, clients, faults, "at-least-once", 150, messages=13.2, handling_ms=4.0, intervals=40)


def _limits_and_slow_handlers() -> Scenario:
    """Members at their limit release leases with long-running messages as others join and leave."""
    others = (Client(f"c{i}", "defer", "max-claims", joins=3.0 * i) for i in range(1, 4))
    faults = tuple(Fault(5 + 1.3 * i, "term", f"c{i % 4}", (3.0, 2.0, 1.5)[i % 3], 0.45, i % 2) for i in range(56))
    clients = (Client("c0", "poll"), *others)
    return Scenario(1, clients, faults, "at-least-once", 200, messages=14.0, handling_ms=60.0, intervals=80)


def _a_claim_renews_what_is_let_go(seed: int) -> Scenario:
    """Seed 825463, shrunk: members that receive nothing claim repeatedly, until one wins a lease of another."""
    clients = (Client("c0"), Client("c1", "consume"), Client("c2", "consume"))
    faults = (
        Fault(55.99, "outage", "", 3.21, 0.305, 1),
        Fault(57.13, "unacknowledged", "c1", 4.31, 0.722, 1),
        Fault(58.13, "term", "c0", 31.79, 0.113, 1),
        Fault(58.62, "deaf", "c1", 4.17, 0.409, 1),
        Fault(60.15, "crash", "c2", 18.64, 0.709),
    )
    return Scenario(seed, clients, faults, "at-most-once", 200, 2, 4, 0.1, 1.0, 69, recovers=False)


def _old_messages_go(delivery: Delivery = "at-least-once", worker: str = "", seed: int = 0) -> Scenario:
    """Retention overtakes members that are slow, die, stop and are cut off; some have fetched deleted messages."""
    workers = [worker] * 4 if worker else ["iterate", "poll", "consume", "defer"]
    clients = tuple(Client(f"c{i}", kind, claims_ahead=i % 2 == 0) for i, kind in enumerate(workers))
    kinds = ("crash", "stop", "cut off", "term", "slow handler", "deaf")
    faults = tuple(Fault(5 + 2.9 * i, kinds[i % 6], f"c{i % 4}", 4.0, 0.9, i % 2) for i in range(25))
    cuts = tuple(Fault(8 + 0.61 * i, "retention", "", 1.0, (0.9, 0.97, 1.0)[i % 3], 3 * i) for i in range(110))
    return Scenario(seed, clients, faults + cuts, delivery, HI, messages=MESSAGES, handling_ms=4.0)


def _the_group_begins_at_the_end(*more: Fault) -> Scenario:
    """Messages exist before the group; later its topic grows, unseen by members that start afterwards."""
    clients = tuple(Client(f"c{i}", "latest", joins=2.0 * i) for i in range(4))
    kinds = ("cut off", "slow handler", "deaf", "slow network")
    early = tuple(Fault(3 + 2.9 * i, kinds[i % 4], f"c{i % 4}", 2.0, 0.4, i % 2) for i in range(12))
    grows = (Fault(14, "grow"), *(Fault(50 + 14 * i, "grow") for i in range(3)))
    starts = tuple(Fault(50.3 + 14 * i, "crash", f"c{i}", 0.1) for i in range(3))
    faults = early + grows + starts + more
    return Scenario(0, clients, faults, "at-least-once", HI, messages=MESSAGES, intervals=110)


def _restarts_without_a_release(delivery: Delivery) -> Scenario:
    """Members end without a release and restart at once, or only when others could take their leases."""
    clients = tuple(Client(f"c{i}", "terminates", claims_ahead=i % 2 == 0) for i in range(4))
    faults = tuple(Fault(3 + 1.1 * i, "term", f"c{i % 4}", (0.1, 0.6, 0.3, 2.5)[i // 4 % 4]) for i in range(70))
    return Scenario(0, clients, faults, delivery, HI, messages=MESSAGES, handling_ms=2.0)


def _restarts_with_another_interval() -> Scenario:
    """As above, and a lease that a member takes over from itself has another heartbeat interval than its claims."""
    clients = tuple(Client(f"c{i}", "terminates", paces=((1.0, 8.0), (8.0, 1.0))[i % 2]) for i in range(4))
    faults = tuple(Fault(3 + 1.7 * i, "term", f"c{i % 4}", (0.1, 0.1, 1.2)[i // 4 % 3]) for i in range(28))
    return Scenario(0, clients, faults, "at-least-once", HI, messages=20.0, handling_ms=2.0, intervals=55)


def _an_admin_dies_and_the_log_falls_silent() -> Scenario:
    """The pause is not ended, and no lease needs heartbeats: it ends by the members' clocks."""
    clients = tuple(Client(f"c{i}", ("iterate", "poll")[i % 2]) for i in range(4))
    faults = tuple(Fault(5 + 15.0 * i, "pause", "", 0.4, 0.05) for i in range(2))  # while messages are in flight
    return Scenario(0, clients, faults, "at-least-once", HI, messages=10.0, handling_ms=150.0, intervals=40)


def _done_beyond_gaps() -> Scenario:
    """Members that defer messages die, without other faults: their progress beyond gaps is known."""
    clients = tuple(Client(f"c{i}", "defer") for i in range(4))
    faults = tuple(Fault(4 + 2.3 * i, "crash", f"c{i % 4}", 3.0) for i in range(24))
    return Scenario(0, clients, faults, "at-least-once", HI, messages=MESSAGES, handling_ms=1.0, intervals=65)


def _offsets_without_messages(*workers: str) -> Scenario:
    """Transactions end in the partitions all the time, and their holders die."""
    clients = tuple(Client(f"c{i}", worker) for i, worker in enumerate(workers))
    gaps = tuple(Fault(2 + 0.23 * i, "markers", "", 1.0, 0.5, i) for i in range(140))
    ends = tuple(Fault(4 + 3.1 * i, ("crash", "term")[i % 2], f"c{i % 4}", 3.0) for i in range(12))
    return Scenario(0, clients, gaps + ends, "at-least-once", HI, messages=MESSAGES, handling_ms=1.0, intervals=50)


def _moved_back_while_it_waits() -> Scenario:
    """Seed 8001209, shrunk: messages waited in consume() while an admin moved the position back."""
    clients = (Client("c0", "consume", rate=0.9757, fetches_every=0.2),)
    faults = (Fault(4.1, "pause", "", 1.07, 0.532, 1),)
    return Scenario(8001209, clients, faults, "at-most-once", 200, 1, 8, 13.9, 4.0, 7, recovers=False)


def _releases_get_lost() -> Scenario:
    """Members leave repeatedly, and half of their releases are lost."""
    clients = tuple(Client(f"c{i}", ("iterate", "poll")[i % 2]) for i in range(4))
    ends = tuple(Fault(4 + 2.1 * i, "term", f"c{i % 4}", 1.5) for i in range(32))
    lost = tuple(Fault(fault.at - 0.05, "lost", fault.client, 0.4, 0.6) for fault in ends)
    return Scenario(0, clients, ends + lost, "at-least-once", HI, messages=MESSAGES, handling_ms=2.0)


def _ends_while_more_is_claimed_ahead() -> Scenario:
    """At most once, more messages arrive than are handled, so that a member always has a request when it ends."""
    clients = tuple(Client(f"c{i}", "terminates", claims_ahead=True) for i in range(4))
    faults = tuple(Fault(5 + 1.1 * i, "term", f"c{i % 4}", (0.1, 0.6, 0.3, 2.5)[i // 4 % 4]) for i in range(18))
    return Scenario(0, clients, faults, "at-most-once", HI, messages=150.0, handling_ms=8.0, intervals=25)


def _clocks_jump_while_members_come(seed: int, by: float = 1.5) -> Scenario:
    """On a slow network, log time repeatedly runs ahead while members claim leases that others have released."""
    clients = tuple(Client(f"c{i}", ("iterate", "poll")[i % 2], fetches_every=(0.3, 0.0)[i % 2]) for i in range(4))
    slow = tuple(Fault(2.0, "slow network", client.name, 75.0, 0.1) for client in clients)
    ends = tuple(Fault(3 + 1.3 * i, "term", f"c{i % 4}", (0.6, 1.6)[i % 2], 0.45) for i in range(55))
    jumps = tuple(Fault(4 + 2.3 * i, "clock", "", 0.5, by) for i in range(30))
    faults = ends + jumps + slow
    return Scenario(seed, clients, faults, "at-most-once", HI, messages=20.0, handling_ms=2.0, intervals=80)


def _doubts_while_a_batch_fills(seed: int, rate: float) -> Scenario:
    """Seed 3002105, shrunk: with a clock so slow that a lease is in doubt every 60 ms, a batch fills for 50 ms."""
    clients = (
        Client("c0", "fenced", rate=1.2331, fetches_every=0.4),
        Client("c1", "fenced", rate=1.1593, fetches_every=0.4, joins=62.72),
        Client("c2", "fenced", "max-claims", rate=0.7151, fetches_every=0.4),
        Client("c3", "fenced", rate=rate, fetches_every=0.4, joins=73.34),
    )
    faults = (
        Fault(42.87, "pause", "", 2.35, 0.616, 1),
        Fault(46.39, "slow network", "c2", 2.0, 0.4),
        Fault(59.1, "term", "c2", 28.27, 0.928),
        Fault(71.02, "crash", "c1", 7.98, 0.794),
        Fault(81.36, "lost", "c3", 3.61, 0.631, 1),
    )
    return Scenario(seed, clients, faults, heartbeat_interval_ms=200, messages=13.3, handling_ms=1.0, intervals=88)


def _a_limit_while_the_log_is_paused_in_part() -> Scenario:
    """Seed 5005970, shrunk: claims of a member at its limit wait in one CP for the end of a pause."""
    clients = (
        Client("c0", rate=0.7795, claims_ahead=True),
        Client("c1", "defer", "max-claims", rate=1.0804, fetches_every=0.4, joins=49.86),
        Client("c2", "explicit", rate=0.7073, claims_ahead=True, fetches_every=0.5, joins=20.22),
        Client("c3", "poll", "release-if-behind", rate=0.7678, fetches_every=0.4, joins=71.76),
        Client("hand", "by-hand", rate=1.0367, fetches_every=0.1),
    )
    faults = (
        Fault(54.62, "pause", "", 0.44, 0.907),
        Fault(56.78, "pause", "", 2.22, 0.177),
        Fault(64.3, "crash", "hand", 3.02, 0.2),
        Fault(64.57, "outage", "", 4.49, 0.21, 1),
    )
    return Scenario(
        5005970,
        clients,
        faults,
        heartbeat_interval_ms=300,
        messages=0.1,
        handling_ms=1.0,
        intervals=73,
        recovers=False,
        records=0,
        snapshots=0,
    )


def _readers_of_different_topics() -> Scenario:
    """Partitions idle after a pause are claimed by members that see different shares (seed 80)."""
    clients = (Client("c0", rate=0.98, fetches_every=0.4), Client("c1", "batches", fetches_every=0.4, reads="events"))
    pauses = tuple(Fault(10.0 + 9 * i, "pause", "", 2.6, 0.285, 1) for i in range(5))
    scenario = Scenario(80, clients, pauses, "at-most-once", HI, 1, 2, 1.0, 1.0, 51)
    return replace(scenario, other_partitions=4)


def _stopped_within_consume() -> Scenario:
    """Messages wait in ``consume`` for more until the lease is over (seed 12300008)."""
    clients = (Client("c0", "consume"), Client("c1", "consume", claims_ahead=True))
    stops = tuple(Fault(10.0 + 6.3 * i, "stop", f"c{i % 2}", 3.0) for i in range(8))
    return Scenario(5, clients, stops, "at-most-once", messages=8.0, intervals=70, recovers=False)


#: Each was the first to catch a bug of the list.
STORIES: tuple[Scenario, ...] = (
    _pauses_meet_claims("iterate", "poll", "consume", "batches"),
    _stopped_with_a_batch_in_hand(0),
    _a_topic_that_is_whole(),
    _ranges_of_offsets("at-least-once"),
    _ranges_of_offsets("at-most-once"),
    _pauses_meet_claims("ranges", "ranges", "ranges", "ranges"),
    _a_limit_while_something_is_in_hand(),
    _steered("ahead"),
    _steered("holds-back"),
    _steered("holds-back", "at-most-once"),
    _old_messages_go(),
    _the_group_begins_at_the_end(),
    _restarts_without_a_release("at-least-once"),
    _a_claim_renews_what_is_let_go(1),
    _clocks_jump_while_members_come(0),
    _limits_and_slow_handlers(),
    _ends_while_more_is_claimed_ahead(),
    _clocks_jump_while_members_come(1),
    _doubts_while_a_batch_fills(2, 0.6597),
    _a_limit_while_the_log_is_paused_in_part(),
    _readers_of_different_topics(),
    _the_group_begins_at_the_end(Fault(20.0, "forget", "", 2.0)),
    _restarts_with_another_interval(),
    _an_admin_dies_and_the_log_falls_silent(),
    _releases_get_lost(),
    _offsets_without_messages("iterate", "defer", "poll", "batches"),
    _clocks_jump_while_members_come(0, 0.6),
    _steered("callbacks"),
    _stopped_within_consume(),
)

#: Written for bugs that others catch sooner: ``--stories`` of :mod:`tests.mutants.short` runs them, too.
MORE_STORIES: tuple[Scenario, ...] = (
    _stopped_with_a_batch_in_hand(1),
    _old_messages_go("at-most-once", "poll"),
    _old_messages_go(worker="fenced"),
    _restarts_without_a_release("at-most-once"),
    _ranges_of_offsets("at-most-once", handling_ms=6.0),
    *map(_a_claim_renews_what_is_let_go, (2, 4)),
    _old_messages_go(seed=1),
    *(_doubts_while_a_batch_fills(seed, 0.62) for seed in (3, 4)),
    _done_beyond_gaps(),
    _moved_back_while_it_waits(),
    _steered("callbacks", "at-most-once"),
)
