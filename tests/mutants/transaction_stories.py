"""Fixed stories of transactions: positions are moved, and members that take over are struck right then."""

from __future__ import annotations

from random import Random

from kafka_marshal.testing.simulation import Client, Fault, Scenario

HI = 300


def struck_while_taking_over(seed: int, kind: str, worker: str = "transacts") -> Scenario:
    """After each move of positions, one of two members is killed, or stopped until the other has its partitions."""
    rng = Random(f"{kind}/{seed}")
    clients = (Client("c0", worker), Client("c1", worker))
    faults = [Fault(0.5, "slow network", client.name, 90.0, 0.08) for client in clients]
    for number in range(14):
        at = 3 + 4.6 * number
        faults.append(Fault(round(at, 2), "pause", "", 0.3, 0.6))
        for client in clients:
            if rng.random() < 0.7:
                struck = at + rng.uniform(0.3, 2.0)
                faults.append(Fault(round(struck, 3), kind, client.name, rng.uniform(1.0, 3.0)))
    return Scenario(
        seed,
        clients,
        tuple(sorted(faults, key=lambda fault: fault.at)),
        heartbeat_interval_ms=HI,
        data_partitions=4,
        messages=12.0,
        intervals=68,
        transactions=True,
        order="key" if worker == "transacts-in-lanes" else "none",
    )


TRANSACTION_STORIES: tuple[Scenario, ...] = (
    struck_while_taking_over(0, "crash"),
    struck_while_taking_over(1, "stop"),
    # Several batches of a partition at once; many handlers, and a lease that comes back while its last commit hangs.
    struck_while_taking_over(1, "crash", "transacts-at-once"),
    struck_while_taking_over(1, "stop", "transacts-in-lanes"),
)
