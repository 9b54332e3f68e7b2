"""One story: its clients, how they differ, and its faults. Drawn from a seed or written down."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from random import Random

from kafka_marshal.engine.work.lanes import Order
from kafka_marshal.types import Delivery, Strategy
from rationalizer.limits import MIN_HEARTBEAT_INTERVAL_MS

#: Kinds of faults and their weights.
FAULTS: dict[str, float] = {
    "crash": 5,  # kill -9; started again after ``intervals``
    "term": 4,  # SIGTERM; started again after ``intervals``
    "stop": 4,  # SIGSTOP for ``intervals``
    "zombie": 1,  # SIGSTOP, and a successor is started; it continues after ``intervals``
    "lost": 3,  # appends do not arrive; ``size`` of them
    "unacknowledged": 3,  # they arrive, but their acknowledgements do not
    "duplicated": 2,  # they are written twice
    "late": 2,  # they arrive long after they were given up
    "slow network": 2,  # the latency is ``size`` HI
    "deaf": 3,  # a part of the coordination topic does not reach this client
    "cut off": 2,  # this client reaches no broker
    "outage": 1,  # no client does
    "slow handler": 2,  # the work takes ``size`` times as long
    "grow": 1,  # the topic gets another partition
    "pause": 2,  # an admin pauses the group for ``intervals``, and moves positions where size > 0.5
    "forget": 0,  # an admin pauses the group and forgets it; only in some seeds, see _forgotten
    "retention": 0,  # the first ``size`` of a partition's messages are gone; only in stories that are written down
    "markers": 0,  # three offsets of a partition hold no message, as transactions leave them; only in written stories
    "prune": 0,  # an admin removes old log and old snapshots; only in seeds that have snapshots, see _prunes
    "interrupts": 0,  # ``size`` / 4 of a worker's calls are ended by an exception; only in seeds that have it
    "torn reads": 0,  # ``size`` / 2 of its reads raise, with messages taken already; only in seeds that have it
    "clock": 0,  # a broker's clock is set, by ``size`` HI; only in seeds that have it
    "evict": 0,  # an operator removes a member of a coordinated group; only in stories that have one
    "brief pause": 0,  # an admin pauses the group, and waits for no release; only in written stories, and of sharers
    "foreign commit": 0,  # another program commits an offset for the group in Kafka; only in stories of transactions
    "dropped offset": 0,  # Kafka's offset of the group is deleted; only in stories of transactions
    "deploy": 0,  # SIGTERM for one client after the other, ``intervals`` apart; only in stories with checkpoints
    "go back": 0,  # a member rolls the group back; only in stories with checkpoints
    "rollback": 0,  # an operator does; only in stories with checkpoints
    "late rollback": 0,  # one of ``intervals`` ago arrives now; only in stories with checkpoints
    "redoes": 0,  # an operator opens done messages; only in stories of redo
    "settles": 0,  # an operator redrives, discards or sets aside; only in stories of sharers and of parks
    "hang": 0,  # its next handler hangs until all else is handled; only in written stories with lanes
}


@dataclass(frozen=True, slots=True)
class Client:
    """One member: its worker is restarted whenever it ends."""

    name: str
    #: The name of a built-in worker, or "yours" for the one under test.
    worker: str = "iterate"
    policy: str = "balanced"
    #: Rate of its clock relative to the brokers'.
    rate: float = 1.0
    #: At most once: requests the next batch while one is handled.
    claims_ahead: bool = False
    #: Interval of its fetches (HI), each with several records; 0: records arrive at once.
    fetches_every: float = 0.0
    #: Time of its first start (HI).
    joins: float = 0.0
    #: The only data topic that it reads; "": all.
    reads: str = ""
    #: Its heartbeat interval (HI) by start; (): that of the story.
    paces: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong."""

    #: When it begins, in HI from the start.
    at: float
    kind: str
    #: The client concerned; "" for none in particular.
    client: str = ""
    #: How long it lasts, in HI.
    intervals: float = 1.0
    #: Severity; its meaning depends on the kind.
    size: float = 0.5
    #: The partition of the coordination topic, if it matters.
    partition: int = 0


@dataclass(frozen=True, slots=True)
class Counting:
    """How a story's group takes checkpoints; times in HI."""

    hold: bool = False
    every: float = 5.0
    keep: int = 2
    drain: float = 2.0
    timeout: float = 8.0
    #: Partitions are shared by key.
    shares: bool = False
    #: Some saves fail or are slow, and some handlers hang.
    fails: bool = True


HEARD = frozenset({"crash", "term", "grow", "markers", "slow handler", "redoes"})


@dataclass(frozen=True, slots=True)
class Terms:
    """The promises that hold in a story."""

    are_clocks_trusted: bool
    #: The only faults are requests to end.
    is_orderly: bool
    #: Everything that a living member sends reaches the log.
    is_heard: bool

    @classmethod
    def of(cls, scenario: Scenario) -> Terms:
        """Those of this one."""
        kinds = {fault.kind for fault in scenario.faults}
        return cls(scenario.clocks_are_trusted, kinds <= {"term", "deploy"}, kinds <= HEARD)


#: In stories of a coordinated group: weight of "evict", strategies, and workers beside WORKERS with their share.
EVICT_WEIGHT = 2.0
STRATEGIES: tuple[Strategy, ...] = ("sticky", "sticky", "range", "roundrobin")
GROUP_WORKERS = ("terminates", "holds-back", "latest")
GROUP_WORKERS_SHARE = 0.1

#: Stories of sharers: their workers, and those of clients that hold partitions whole, with their number.
SHARING_WORKERS = ("shares", "shares", "shares-lanes")
WHOLE_WORKERS, WHOLE_CLIENTS = ("iterate", "poll", "batches", "explicit"), (0, 0, 1, 1, 2)
SHARING_CLIENTS = (2, 3, 4, 5)

#: Stories of redo: how often operators do; workers that skip what their sink has, or what was there before them.
REDOS = (3, 10)
HANDLES_ALL = {"fenced": "batches", "latest": "iterate"}

#: The share of stories in which a broker's clock is set, and the weight of that fault.
CLOCK_SHARE = 0.15
CLOCK_WEIGHT = 10.0

#: The share of stories in which the group is forgotten.
FORGOTTEN_SHARE = 0.1

#: The share of stories in which heartbeat intervals differ, and their values by start (HI).
PACES_SHARE = 0.125
PACES = ((), (0.7,), (1.5,), (1.0, 1.5), (1.5, 0.7), (0.7, 1.5))

#: The share of stories in which some clients check their callbacks and sometimes hang.
CALLBACKS_SHARE = 0.125

#: The share of stories with asynchronous exceptions, and the workers that continue after them.
INTERRUPTED_SHARE = 0.2
INTERRUPTED = frozenset({"iterate", "terminates", "explicit", "poll", "consume", "batches", "fenced", "lanes"})

#: Workers by delivery; see workers.py.
WORKERS: dict[str, tuple[str, ...]] = {
    "at-least-once": ("iterate", "defer", "explicit", "poll", "consume", "batches"),
    "at-most-once": ("iterate", "iterate", "poll", "consume", "batches"),
}
#: Stories with lanes (``consumer.run``): their order, the share of clients without lanes, and the workers of those,
#: which handle each partition's messages in order, too.
ORDERS: tuple[Order, ...] = ("key", "key", "key", "partition", "none")
PLAIN_SHARE = 0.15
PLAIN_WORKERS = ("iterate", "poll")

#: Stories of groups that take checkpoints: workers, the share of those with partitions shared by key, and of those that
#: hold; and which faults there are (None: all).
COUNTING_WORKERS = ("counts", "counts-explicit", "counts-batches", "counts-lanes", "counts-lanes")
KEY_SHARE, HOLDING_SHARE = 0.3, 0.3
CHECKPOINT_FAULTS: tuple[frozenset[str] | None, ...] = (
    *(None, None, None, None, None),
    frozenset({"term", "deploy"}),
    frozenset({"term", "deploy", "crash", "stop", "go back", "rollback", "late rollback"}),
)

POLICIES = ("balanced", "balanced", "balanced", "max-claims", "release-if-behind")

#: T4's margin is a tenth of HI within 2 · HI: rates may differ by a twentieth, less a little for the latency.
DRIFT_WITHIN = 0.03
DRIFT_BEYOND = 0.35

#: Minimum records of a story's log per HI: a thousand in a story of the usual length.
RECORDS_PER_INTERVAL = 11.5

#: Longest absence of an ended process (HI): groups grow and shrink, and absence costs no time here.
ABSENCE = 90
#: The share of clients that join late, and how late at most, in shares of the faulty time.
LATE_SHARE = 0.8
LATEST = 0.9

#: Fetch intervals (HI). A fetch per record costs the simulator most, so few clients have 0.
FETCHES = (0.0, 0.1, 0.2, 0.2, *8 * (0.4, 0.5))

#: Records between two snapshots: few enough that every start uses one.
SNAPSHOTS_EVERY = (0, 50, 150)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that decides a run, together with the code."""

    seed: int
    clients: tuple[Client, ...]
    faults: tuple[Fault, ...] = ()
    delivery: Delivery = "at-least-once"
    heartbeat_interval_ms: int = 500
    coordination_partitions: int = 2
    data_partitions: int = 8
    #: Mean number of messages per HI.
    messages: float = 17.0
    #: Mean time to handle a message (ms).
    handling_ms: float = 3.0
    #: Duration of the time with faults (HI).
    intervals: int = 80
    #: Afterwards the group must recover; False: the story ends there.
    recovers: bool = True
    #: It continues without faults until the log has this many records, or for as long again.
    records: int = 0
    #: Records of a coordination partition between two snapshots; 0: no snapshots.
    snapshots: int = 0
    #: Partitions of a second data topic, which not every client reads; 0: none.
    other_partitions: int = 0
    #: The strategy of a coordinated group (section 5), with sessions of two HI; None: the group claims its partitions.
    strategy: Strategy | None = None
    #: The order kept by the workers "lanes", with keyed messages. None: no such workers.
    order: Order | None = None
    #: Whether workers commit their outputs and progress in transactions.
    transactions: bool = False
    #: Whether the log is at the level at which messages can be set aside.
    parks: bool = False
    #: Whether operators open what is done (R2): the log is at that level.
    redoes: bool = False
    #: Whether workers with lanes, and those that set messages aside, get lists (``run(…, batch=…)``).
    lists: bool = False
    #: Whether handlers of workers that set messages aside have some tried later, soon and in the log.
    later: bool = False
    #: Whether partitions are shared by batches.
    sharing: bool = False
    #: Whether partitions of a coordinated group are shared by key.
    shares: bool = False
    #: How the group takes checkpoints, of what its workers count. None: it takes none.
    checkpoints: Counting | None = None

    #: Fixed names.
    group_id = "group"
    topic = "__marshal"
    data_topic = "events"
    other_topic = "orders"

    @property
    def data_topics(self) -> dict[str, int]:
        """Data topic → number of partitions at the start."""
        found = {self.data_topic: self.data_partitions, self.other_topic: self.other_partitions}
        return {topic: partitions for topic, partitions in found.items() if partitions}

    def topics_of(self, client_id: str) -> list[str]:
        """The data topics that this client reads."""
        reads = next((client.reads for client in self.clients if client.name == client_id), "")
        return [topic for topic in self.data_topics if reads in ("", topic)]

    def is_interrupted(self, client_id: str) -> bool:
        """Whether this client's calls or reads raise."""
        return any(x.client == client_id and x.kind in ("interrupts", "torn reads") for x in self.faults)

    @property
    def longest_interval_ms(self) -> float:
        """The longest heartbeat interval of any client (ms)."""
        return self.heartbeat_interval_ms * max([1.0, *(pace for client in self.clients for pace in client.paces)])

    def interval_of(self, client_id: str, start: int) -> int:
        """The heartbeat interval of a client at its first, second … start (ms)."""
        paces = next((client.paces for client in self.clients if client.name == client_id), ()) or (1.0,)
        return max(MIN_HEARTBEAT_INTERVAL_MS, round(self.heartbeat_interval_ms * paces[(start - 1) % len(paces)]))

    @property
    def at_most_once(self) -> bool:
        """Whether each message is delivered at most once (C13)."""
        return self.delivery == "at-most-once"

    @property
    def clocks_are_trusted(self) -> bool:
        """Whether all clocks agree within the margin (T4), and no broker's is set (T5)."""
        rates = [1.0, *(client.rate for client in self.clients)]
        return max(rates) - min(rates) <= 2.05 * DRIFT_WITHIN and all(fault.kind != "clock" for fault in self.faults)

    @classmethod
    def from_seed(
        cls,
        seed: int,
        worker: bool = False,
        intervals: int = 88,
        delivery: Delivery | None = None,
        coordinated: bool = False,
        lanes: bool = False,
        transactions: bool = False,
        checkpoints: bool = False,
        parks: bool = False,
        sharing: bool = False,
        lists: bool = False,
        redoes: bool = False,
        later: bool = False,
    ) -> Scenario:
        """The story of a seed; coordinated groups, workers with lanes and with transactions have different ones.

        worker: every second client runs the one under test. delivery: overrides the drawn one. Lanes and transactions:
        at least once. lists: handlers of that story get lists. later: some of its messages wait for a time.
        """
        coordinated = coordinated or checkpoints
        kinds = {"groups": coordinated, "lanes": lanes, "transactions": transactions, "checkpoints": checkpoints}
        kinds |= {"parks": parks and not worker, "sharing": sharing, "redoes": redoes}
        named = "".join(f"{kind}/" for kind, is_it in kinds.items() if is_it) + str(seed)
        rng = Random(f"kafka-marshal/{named}")
        drawn: Delivery = "at-most-once" if rng.random() < 0.25 and not worker else "at-least-once"
        at_least = lanes or transactions or checkpoints or kinds["parks"] or sharing
        delivery = "at-least-once" if at_least else delivery or drawn
        count = 5 if rng.random() < 0.05 else 4
        drift = rng.choice([0.0, 0.0, DRIFT_WITHIN, DRIFT_WITHIN, DRIFT_WITHIN, DRIFT_BEYOND])
        fenced = rng.random() < 0.25  # all write to the fenced sink
        clients = tuple(_client(rng, index, delivery, drift, fenced, worker, intervals) for index in range(count))
        if not worker and rng.random() < 0.1 and not coordinated:
            rate = round(1 + rng.uniform(-1, 1) * drift, 4)
            # It also claims when all is well, and must send its first heartbeat within half an HI.
            clients += (Client("hand", "by-hand", rate=rate, fetches_every=0.1),)
        cps, extra = 3 if rng.random() < 0.1 else 2, {"clock": CLOCK_WEIGHT} if rng.random() < CLOCK_SHARE else {}
        extra |= {"evict": EVICT_WEIGHT} if coordinated else {}
        faults = _faults(rng, clients, cps, intervals, extra)
        snapshots = Random(f"kafka-marshal/{named}/snapshots").choice(SNAPSHOTS_EVERY)
        faults = _in_order(faults, _prunes(named, intervals) if snapshots else (), _forgotten(named, intervals))
        other = 0 if worker else Random(f"kafka-marshal/{named}/topic2").choice((3, 4, *(0,) * 6))  # in every fourth
        clients = _with_topics(named, clients) if other else clients
        clients = _members(named, clients, fenced) if coordinated else clients
        clients = _with_lanes(named, clients) if lanes else clients
        clients = _in_transactions(clients) if transactions else clients
        faults = _in_order(faults, _offsets(named, intervals) if transactions else ())
        if not worker:
            clients = _with_paces(named, clients if at_least else _with_callbacks(named, clients))
            faults = _in_order(faults, _interrupts(named, clients, intervals))
        found = cls(
            seed=seed,
            clients=clients,
            faults=faults,
            delivery=delivery,
            heartbeat_interval_ms=rng.choice([150, 200, 200, 300, 300, 500]),
            coordination_partitions=cps,
            data_partitions=(10 if rng.random() < 0.1 else 8) - other,
            messages=round(rng.uniform(12.8, 14), 1),
            handling_ms=rng.choice([2.0, 10.0, 25.0] if worker else [1.0, 2.0, 4.0]),
            intervals=intervals,
            records=int(RECORDS_PER_INTERVAL * intervals),
            snapshots=snapshots,
            other_partitions=other,
            strategy=Random(f"kafka-marshal/{named}/strategy").choice(STRATEGIES) if coordinated else None,
            order=Random(f"kafka-marshal/{named}/order").choice(ORDERS) if lanes or kinds["parks"] > sharing else None,
            transactions=transactions,
            parks=parks,
            lists=lists,
            later=later,
        )
        draw = _with_sharers if sharing else _with_parks if kinds["parks"] else _with_checkpoints
        found = draw(named, found) if sharing or kinds["parks"] or checkpoints else found
        return _with_redos(named, found) if redoes else found

    def script(self, worker: str = "", violation: str = "") -> str:
        """A Python program that runs this story. worker: "module:function" or "file.py:function" of the tested one."""
        lines = [
            '"""Shows what the simulator found:',
            "",
            *(violation.splitlines() or ["(nothing)"]),
            '"""',
            "",
            f"from kafka_marshal.testing.simulation import {self._imported}",
            "",
            "scenario = Scenario(",
            *(f"    {name}={value}," for name, value in self._arguments()),
            ")",
            "",
            'if __name__ == "__main__":',
            f"    result = simulate_one(scenario, worker={f'load_worker({worker!r})' if worker else None})",
            "    print(result.tell())",
            "    raise SystemExit(result.violation is not None)",
            "",
        ]
        return "\n".join(lines)

    @property
    def _imported(self) -> str:
        counting = "" if self.checkpoints is None else "Counting, "
        return f"Client, {counting}Fault, Scenario, load_worker, simulate_one"

    def _arguments(self) -> list[tuple[str, str]]:
        found = []
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("clients", "faults") and value:
                inner = "".join(f"        {_short(item)},\n" for item in value)
                found.append((field.name, f"(\n{inner}    )"))
            else:
                found.append((field.name, repr(value)))
        return found


def _short(item: Client | Fault) -> str:
    """Its constructor call without defaults."""
    said = [
        f"{field.name}={getattr(item, field.name)!r}"
        for field in fields(item)
        if getattr(item, field.name) != field.default
    ]
    return f"{type(item).__name__}({', '.join(said)})"


def _fault(at: float, kind: str, client: str, intervals: float, size: float, partition: int = 0) -> Fault:
    """A fault as drawn, with few digits."""
    return Fault(round(at, 2), kind, client, round(intervals, 2), round(size, 3), partition)


def _in_order(*faults: Iterable[Fault]) -> tuple[Fault, ...]:
    """All of these by time."""
    return tuple(sorted(chain(*faults), key=lambda fault: fault.at))


def _client(rng: Random, index: int, delivery: str, drift: float, fenced: bool, worker: bool, intervals: int) -> Client:
    kind = "fenced" if fenced and delivery == "at-least-once" else rng.choice(WORKERS[delivery])
    if worker and index % 2 == 0:
        kind = "yours"
    # One client has no limit, so that everything is owned at the end.
    policy = rng.choice(("balanced", "balanced", "greedy")) if index == 0 else rng.choice(POLICIES)
    rate = round(1 + rng.uniform(-1, 1) * drift, 4)
    ahead, fetches = rng.random() < 0.4, rng.choice(FETCHES)
    late = round(rng.uniform(0, LATEST * intervals), 2) if rng.random() < LATE_SHARE and index > 0 else 0.0
    return Client(f"c{index}", kind, policy, rate, ahead, fetches, late)


def _members(seed: str, clients: Sequence[Client], fenced: bool) -> tuple[Client, ...]:
    """The clients as members of a coordinated group, where policies don't exist."""
    rng = Random(f"kafka-marshal/{seed}/members")
    found = [replace(client, policy="balanced", claims_ahead=False) for client in clients]
    if rng.random() < GROUP_WORKERS_SHARE and not fenced:
        kind = rng.choice(GROUP_WORKERS)
        stays = [kind != "latest" and rng.random() < 0.2 for _ in found]  # all must agree where the group begins
        found = [
            x if x.worker == "yours" or as_is else replace(x, worker=kind)
            for x, as_is in zip(found, stays, strict=True)
        ]
    return tuple(found)


def _with_lanes(seed: str, clients: tuple[Client, ...]) -> tuple[Client, ...]:
    """Give most clients the worker "lanes"; those that claim by hand or are under test keep theirs."""
    rng = Random(f"kafka-marshal/{seed}/workers")
    found = []
    for client in clients:
        plain = rng.choice(PLAIN_WORKERS) if rng.random() < PLAIN_SHARE else "lanes"
        found.append(client if client.worker in ("by-hand", "yours") else replace(client, worker=plain))
    return tuple(found)


def _in_transactions(clients: tuple[Client, ...]) -> tuple[Client, ...]:
    """All members of a group commit in transactions; who claims by hand has another topic."""
    return tuple(x if x.worker in ("by-hand", "yours") else replace(x, worker="transacts") for x in clients)


def _with_checkpoints(seed: str, story: Scenario) -> Scenario:
    """A group that takes checkpoints; in some stories there are only joins, leaves and deploys, or losses besides."""
    rng = Random(f"kafka-marshal/{seed}/checkpoints")
    workers = tuple(replace(x, worker=rng.choice(COUNTING_WORKERS)) for x in story.clients)
    last = story.intervals - 6.0
    faults = [
        _fault(
            rng.uniform(2.0, last),
            kind := rng.choice(("deploy", "go back", "go back", "rollback", "late rollback")),
            rng.choice(workers).name if kind == "go back" else "",
            rng.uniform(0.2, 6),
            rng.random(),
        )
        for _ in range(rng.randint(0, 6))
    ]
    allowed, is_quiet = rng.choice(CHECKPOINT_FAULTS), False
    kept = tuple(x for x in (*story.faults, *faults) if x.kind not in ("interrupts", "torn reads"))
    if allowed is not None:
        kept = tuple(fault for fault in kept if fault.kind in allowed)
        is_quiet = "crash" not in allowed
    shares = rng.random() < KEY_SHARE
    timeout = rng.choice((4.0, 8.0, 16.0))
    return replace(
        story,
        clients=tuple(replace(x, reads="") for x in workers) if shares else workers,
        faults=_in_order(kept),
        data_partitions=rng.choice((1, 2, 3)) if shares else story.data_partitions,
        other_partitions=0 if shares else story.other_partitions,
        order="key" if shares else rng.choice(ORDERS),
        checkpoints=Counting(
            hold=rng.random() < HOLDING_SHARE,
            every=rng.choice((2.0, 5.0, 10.0)),
            keep=rng.choice((1, 2, 4)),
            drain=min(rng.choice((0.5, 2.0, 6.0)), timeout / 2) if not is_quiet else timeout / 2,
            timeout=timeout,
            shares=shares,
            fails=not is_quiet,
        ),
    )


def _in_turns(client: Client, rng: Random, *, is_whole: bool) -> Client:
    """With a worker that shares, or one that holds partitions whole."""
    worker = rng.choice(WHOLE_WORKERS if is_whole else SHARING_WORKERS)
    return replace(client, worker=worker, policy=client.policy if is_whole else "balanced", reads="")


def _with_sharers(seed: str, story: Scenario) -> Scenario:
    """Most clients share partitions by batches, some hold them whole; operators settle what is open."""
    rng = Random(f"kafka-marshal/{seed}/sharers")
    whole, last = rng.choice(WHOLE_CLIENTS), story.intervals - 6.0
    chosen = [x for x in story.clients if x.worker != "by-hand"][: rng.choice(SHARING_CLIENTS)]
    clients = tuple(
        x if x.worker == "yours" else _in_turns(x, rng, is_whole=0 < index <= whole) for index, x in enumerate(chosen)
    )
    faults = [
        _fault(rng.uniform(4.0, last), kind, "", rng.uniform(0.1, 2), rng.random())
        for kind in ("settles", "brief pause")
        for _ in range(rng.randint(0, 6))
    ]
    names = {"", *(x.name for x in clients)}
    kept = [x for x in story.faults if x.kind not in ("interrupts", "torn reads") and x.client in names]
    return replace(
        story,
        clients=clients,
        faults=_in_order(kept, faults),
        data_partitions=rng.choice((1, 2, 2, 4)),
        other_partitions=0,
        sharing=True,
    )


def _with_parks(seed: str, story: Scenario) -> Scenario:
    """All workers set aside what always fails, and operators redrive, discard and set aside."""
    rng = Random(f"kafka-marshal/{seed}/parks")
    last = story.intervals - 6.0
    faults = [
        _fault(rng.uniform(4.0, last), "settles", "", rng.uniform(0.1, 2), rng.random())
        for _ in range(rng.randint(0, 8))
    ]
    # An exception between two lines of a handler's call would count as a failed try.
    kept = [x for x in story.faults if x.kind not in ("interrupts", "torn reads")]
    shares = story.strategy is not None and rng.random() < KEY_SHARE
    workers = (x if x.worker == "by-hand" else replace(x, worker="parks") for x in story.clients)
    return replace(
        story,
        clients=tuple(replace(x, reads="") if shares else x for x in workers),
        faults=_in_order(kept, faults),
        data_partitions=rng.choice((1, 2, 3)) if shares else story.data_partitions,
        other_partitions=0 if shares else story.other_partitions,
        order="key" if shares else story.order,
        shares=shares,
    )


def _with_redos(seed: str, story: Scenario) -> Scenario:
    """Operators open what is done. All workers handle each message that is handed to them."""
    rng = Random(f"kafka-marshal/{seed}/redos")
    last = story.intervals - 6.0
    faults = [
        _fault(rng.uniform(4.0, last), "redoes", "", rng.uniform(0.05, 2), rng.random())
        for _ in range(rng.randint(*REDOS))
    ]
    # A position that is set takes M3's mark away: until a member has been back no operator knows of transactions.
    kept = [x for x in story.faults if not story.transactions or x.kind not in ("pause", "forget")]
    workers = (replace(x, worker=HANDLES_ALL.get(x.worker, x.worker)) for x in story.clients)
    return replace(story, clients=tuple(workers), faults=_in_order(kept, faults), redoes=True)


def _with_topics(seed: str, clients: Sequence[Client]) -> tuple[Client, ...]:
    """Choose each client's topics; the first reads all, so that everything is owned at the end."""
    rng, first = Random(f"kafka-marshal/{seed}/readers"), clients[0]
    topics = ("", "", Scenario.data_topic, Scenario.other_topic)
    return first, *(replace(client, reads=rng.choice(topics)) for client in clients[1:])


def _with_paces(seed: str, clients: tuple[Client, ...]) -> tuple[Client, ...]:
    """In every eighth story, give some clients different heartbeat intervals, which change when they restart."""
    rng = Random(f"kafka-marshal/{seed}/paces")
    if rng.random() > PACES_SHARE:
        return clients
    return tuple(replace(client, paces=rng.choice(PACES)) for client in clients)


def _with_callbacks(seed: str, clients: tuple[Client, ...]) -> tuple[Client, ...]:
    """In every eighth story, some clients check their callbacks and sometimes hang."""
    rng = Random(f"kafka-marshal/{seed}/hung")
    if rng.random() > CALLBACKS_SHARE:
        return clients
    may = [client.worker in WORKERS["at-least-once"] and rng.random() < 0.5 for client in clients]
    return tuple(replace(x, worker="callbacks") if chosen else x for x, chosen in zip(clients, may, strict=True))


def _faults(
    rng: Random, clients: Sequence[Client], cps: int, intervals: int, extra: Mapping[str, float]
) -> tuple[Fault, ...]:
    """Draw faults; extra: weights of those that are not in every story."""
    weights = {**FAULTS, **extra}
    kinds, found = list(weights), []
    for _ in range(rng.randint(6, 24)):
        kind = rng.choices(kinds, list(weights.values()))[0]
        client = None if kind in ("outage", "grow", "pause", "clock") else rng.choice(clients)
        size = rng.uniform(-3, 3) if kind == "clock" else rng.random()
        length = rng.uniform(0.1, ABSENCE if kind in ("crash", "term") else 5)
        first = 1.0 if client is None else min(1.0 + client.joins, intervals - 6.0)
        at = round(rng.uniform(first, intervals - 5), 2)
        found.append(_fault(at, kind, "" if client is None else client.name, length, size, rng.randrange(cps)))
        if kind == "clock":  # while messages are handled
            found.append(Fault(round(at - 0.5, 2), "slow network", rng.choice(clients).name, 2.0, 0.4))
    return _in_order(found)


def _forgotten(seed: str, intervals: int) -> list[Fault]:
    """In every tenth story, an admin forgets the group while it works: it starts over (C16)."""
    rng = Random(f"kafka-marshal/{seed}/forgotten")
    if rng.random() > FORGOTTEN_SHARE:
        return []
    at, length, size = rng.uniform(0.2, 0.7) * intervals, rng.uniform(0.5, 4), rng.random()
    return [_fault(at, "forget", "", length, size)]


def _interrupts(seed: str, clients: Sequence[Client], intervals: int) -> list[Fault]:
    """In every fifth story, the calls or reads of some workers sometimes raise."""
    rng = Random(f"kafka-marshal/{seed}/interrupts")
    if rng.random() > INTERRUPTED_SHARE:
        return []
    found = []
    for client in clients:
        for kind in ("interrupts", "torn reads"):
            if client.worker in INTERRUPTED and rng.random() < 0.6:
                at = rng.uniform(min(1.0 + client.joins, intervals - 6.0), intervals - 5)
                length, size = rng.uniform(5, intervals / 2), rng.uniform(0.1, 1)
                found.append(_fault(at, kind, client.name, length, size))
    return found


def _offsets(seed: str, intervals: int) -> list[Fault]:
    """In stories of transactions, Kafka's offsets of the group are changed or dropped, up to four times."""
    rng = Random(f"kafka-marshal/{seed}/offsets")
    found = []
    for _ in range(rng.choice((0, 1, 2, 4))):
        kind = rng.choice(("foreign commit", "dropped offset"))
        at, size, partition = rng.uniform(0.1, 0.95) * intervals, rng.random(), rng.randrange(100)
        found.append(_fault(at, kind, "", 1.0, size, partition))
    return found


def _prunes(seed: str, intervals: int) -> list[Fault]:
    """When an admin prunes the log, up to three times: mostly late, as snapshots must exist first."""
    rng = Random(f"kafka-marshal/{seed}/prunes")
    found = []
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        at, length, size = rng.uniform(0.3, 0.95) * intervals, rng.uniform(0.01, 1), rng.random()
        found.append(_fault(at, "prune", "", length, size))
    return found
