"""Locks and leaders, in memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kafka_marshal import (
    ClosedError,
    ConfigurationError,
    HeldError,
    Leader,
    LeaseLostError,
    Marshal,
    aio,
)
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.node.coordination_topic import create_topic
from rationalizer import ReleasingPartition, encode
from tests.client.conftest import wait_until

HI_S = 1.5


class Place:
    """A cluster in memory, and members of one group."""

    def __init__(self) -> None:
        self.cluster = MemoryCluster()
        create_topic(self.cluster, "__marshal", 1, 10)
        self.members: list[Marshal] = []

    def on(self, client_id: str) -> tuple[MemoryCluster, dict[str, Any]]:
        named = {"group_id": "g", "client_id": client_id, "heartbeat_interval": HI_S}
        return MemoryCluster(broker=self.cluster.broker, client=client_id), named

    def member(self, client_id: str) -> Marshal:
        cluster, named = self.on(client_id)
        self.members.append(Marshal.on_cluster(cluster, **named))
        return self.members[-1]

    def aio(self, client_id: str) -> aio.Marshal:
        cluster, named = self.on(client_id)
        return aio.Marshal.on_cluster(cluster, **named)


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place()
    yield made
    for member in made.members:
        member.close(2)


class Calls:
    """What on_win and on_loss were called for, in order; each must be called without a lock of the library."""

    def __init__(self, marshal: Marshal) -> None:
        self.seen: list[str] = []
        self.marshal = marshal
        #: For how long on_loss does not return.
        self.hold = threading.Event()
        self.hold.set()

    def on_win(self, leader: Leader) -> None:
        self._check()
        assert leader.leading
        self.seen.append(f"win {leader.token}")

    def on_loss(self, leader: Leader) -> None:
        self._check()
        assert not leader.leading
        self.seen.append("loss")
        self.hold.wait(20)

    def _check(self) -> None:
        """Another thread gets the lock while we are in here."""
        got: list[bool] = []

        def take() -> None:
            with self.marshal._driver.condition:
                got.append(True)

        other = threading.Thread(target=take)
        other.start()
        other.join(10)
        assert got, "a callback is called with the lock held"

    @property
    def kinds(self) -> list[str]:
        return [each.split()[0] for each in self.seen]


def take_away(holder: Marshal, name: str) -> None:
    """Have the log show a release that it did not send (C18)."""
    lease = holder._driver.engine.book.leases[f"lock:{name}", 0]
    record = ReleasingPartition(*holder._driver.engine.settings.ids, f"lock:{name}", 0, lease.epoch, None)
    holder._driver.cluster.broker.produce("__marshal", 0, encode(record))  # type: ignore[attr-defined]


# -- locks --------------------------------------------------------------------------------------------------------


def test_a_lock_has_one_holder_and_its_token_grows(place: Place) -> None:
    a, b = place.member("a"), place.member("b")
    with a.lock("report") as first:
        with pytest.raises(HeldError, match="the lock 'report': held by 'a' ") as raised:
            b.lock("report", timeout=0)
        assert raised.value.holder == "a"
        with a.lock("another"), b.lock("third"):
            assert first.valid
    with b.lock("report") as second:
        assert second.token > first.token
        with pytest.raises(LeaseLostError, match="the lock 'report'"):
            first.require()
    with a.lock("report") as third:
        assert third.token > second.token


def test_threads_that_count_under_a_lock_lose_no_step(place: Place) -> None:
    """Members one after the other in a critical section that would show two at a time."""
    inside, most, tokens = [0], [0], list[int]()
    members = [place.member(f"m{number}") for number in range(4)]

    def work(member: Marshal) -> None:
        for _ in range(5):
            with member.lock("counter", timeout=None) as lock:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                tokens.append(lock.token)
                threading.Event().wait(0.002)
                inside[0] -= 1

    threads = [threading.Thread(target=work, args=(member,)) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == [1]
    assert len(tokens) == 20
    assert tokens == sorted(set(tokens))


def test_a_second_thread_of_one_marshal_is_refused(place: Place) -> None:
    a = place.member("a")
    with a.lock("x"), pytest.raises(ConfigurationError, match="a lock among members"):
        a.lock("x", timeout=5)


def test_one_that_waits_gets_it_when_it_is_released_or_its_marshal_is_closed(place: Place) -> None:
    a, b = place.member("a"), place.member("b")
    a.lock("x")
    got: list[int] = []
    waiting = threading.Thread(target=lambda: got.append(b.lock("x", timeout=None).token))
    waiting.start()
    wait_until(lambda: ("lock:x", 0) in b._driver.engine.leases.manual)
    a.close()
    waiting.join(20)
    assert got


def test_a_wait_ends_by_close_of_its_own_marshal(place: Place) -> None:
    a, b = place.member("a"), place.member("b")
    a.lock("x")
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            b.lock("x", timeout=None)
        except ClosedError as error:
            raised.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    wait_until(lambda: ("lock:x", 0) in b._driver.engine.leases.manual)
    b.close()
    waiting.join(20)
    assert raised


@pytest.mark.parametrize("name", ["a b", "a:b", "é", "x" * 245, "a/b"])
def test_odd_names_are_refused(place: Place, name: str) -> None:
    with pytest.raises(ConfigurationError, match="can't name a lock: 1 to 244 of"):
        place.member("a").lock(name)


def test_arguments_are_checked(place: Place) -> None:
    a = place.member("a")
    with pytest.raises(ValueError, match="name"):
        a.lock("")
    with pytest.raises(ValueError, match="timeout"):
        a.lock("x", timeout=-1)
    with pytest.raises(ValueError, match="on_win must be a function that takes"):
        a.lead("x", on_win=lambda: None)  # type: ignore[arg-type,misc]
    assert a.lock("x" * 244).topic == f"lock:{'x' * 244}"


# -- leaders ------------------------------------------------------------------------------------------------------


def test_a_leader_is_called_once_for_each_term_and_before_the_next_one_wins(place: Place) -> None:
    a, b = place.member("a"), place.member("b")
    calls = Calls(a)
    with a.lead("s", on_win=calls.on_win, on_loss=calls.on_loss) as leader:
        token = leader.token
        wait_until(lambda: calls.seen == [f"win {token}"])
        with pytest.raises(HeldError):
            b.lead("s", timeout=0)
        calls.hold.clear()
        resigning = threading.Thread(target=leader.resign)
        resigning.start()
        wait_until(lambda: calls.kinds == ["win", "loss"])
        with pytest.raises(HeldError):
            b.lead("s", timeout=0)
        with pytest.raises(LeaseLostError, match="resigned"):
            _ = leader.token
        calls.hold.set()
        resigning.join(20)
    with b.lead("s") as other:
        assert other.token > token
    assert calls.kinds == ["win", "loss"]
    assert not a._ending.leaders


def test_close_of_the_marshal_calls_on_loss_before_another_can_win(place: Place) -> None:
    a, b = place.member("a"), place.member("b")
    calls = Calls(a)
    a.lead("s", on_win=calls.on_win, on_loss=calls.on_loss)
    wait_until(lambda: calls.kinds == ["win"])
    calls.hold.clear()
    closing = threading.Thread(target=a.close)
    closing.start()
    wait_until(lambda: calls.kinds == ["win", "loss"])
    with pytest.raises(HeldError):
        b.lead("s", timeout=0)
    calls.hold.set()
    closing.join(20)
    with b.lead("s"):
        pass
    assert calls.kinds == ["win", "loss"]


def test_close_does_not_wait_for_ever_for_on_loss(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    a, b = place.member("a"), place.member("b")
    calls = Calls(a)
    a.lead("s", on_win=calls.on_win, on_loss=calls.on_loss)
    wait_until(lambda: calls.kinds == ["win"])
    calls.hold.clear()
    a.close(0.1)
    assert "close() does not wait any longer for on_loss of s" in caplog.text
    b.lead("s").resign()
    calls.hold.set()
    wait_until(lambda: not a._ending.leaders)
    assert calls.kinds == ["win", "loss"]


def test_after_a_loss_it_campaigns_again_behind_those_that_wait(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    a, b = place.member("a"), place.member("b")
    mine, others = Calls(a), Calls(b)
    leader = a.lead("s", on_win=mine.on_win, on_loss=mine.on_loss)
    first = leader.token
    standby: list[Leader] = []
    waiting = threading.Thread(
        target=lambda: standby.append(b.lead("s", timeout=None, on_win=others.on_win, on_loss=others.on_loss))
    )
    waiting.start()
    wait_until(lambda: b._driver.engine.leases.manual and b._driver.engine.leases.manual["lock:s", 0].refusal == "HELD")
    take_away(a, "s")
    waiting.join(20)
    wait_until(lambda: mine.kinds == ["win", "loss"] and others.kinds == ["win"])
    assert not leader.leading
    with pytest.raises(LeaseLostError, match="the lock 's'"):
        _ = leader.token
    wait_until(lambda: "lost the lock 's': an operator took it away" in caplog.text)
    assert standby[0].token > first
    standby[0].resign()
    wait_until(lambda: mine.kinds == ["win", "loss", "win"])
    assert leader.token > first
    assert others.kinds == ["win", "loss"]
    leader.resign()
    leader.resign()
    assert mine.kinds == ["win", "loss", "win", "loss"]


def test_one_that_was_evicted_leaves_it_to_others_for_a_while(place: Place) -> None:
    """C18: what hangs would have back at once what was taken from it."""
    a, b = place.member("a"), place.member("b")
    with a.lead("s") as leader:
        take_away(a, "s")
        wait_until(lambda: not leader.leading)
        for _ in range(3):
            with b.lock("s"):
                assert ("lock:s", 0) not in a._driver.engine.leases.manual
    assert not a._ending.leaders


def test_one_that_is_asked_to_hand_over_does_and_campaigns_no_more(place: Place) -> None:
    a, b = place.member("a"), place.member("b")
    calls = Calls(a)
    leader = a.lead("s", on_win=calls.on_win, on_loss=calls.on_loss)
    token = leader.token
    wait_until(lambda: calls.kinds == ["win"])
    place.cluster.broker.produce("__marshal", 0, encode(ReleasingPartition("i", "a", "g", "lock:s", 0, token, None)))
    with b.lead("s", timeout=20):
        assert calls.kinds == ["win", "loss"]
    wait_until(lambda: not a._ending.leaders)
    with pytest.raises(LeaseLostError, match="hands over"):
        _ = leader.token


def test_a_resignation_in_a_campaign_ends_it_and_calls_nothing(place: Place) -> None:
    a, b = place.member("a"), place.member("b")
    calls = Calls(a)
    leader = a.lead("s", on_win=calls.on_win, on_loss=calls.on_loss)
    wait_until(lambda: calls.kinds == ["win"])
    holder = threading.Thread(target=lambda: b.lock("s", timeout=None))
    holder.start()
    wait_until(lambda: b._driver.engine.leases.manual and b._driver.engine.leases.manual["lock:s", 0].refusal == "HELD")
    take_away(a, "s")
    holder.join(20)
    wait_until(lambda: ("lock:s", 0) in a._driver.engine.leases.manual)
    leader.resign()
    assert not a._ending.leaders
    wait_until(lambda: ("lock:s", 0) not in a._driver.engine.leases.manual)
    assert calls.kinds == ["win", "loss"]


@pytest.mark.parametrize("where", ["on_win", "on_loss"])
@pytest.mark.parametrize("what", ["resign", "close", "raise"])
def test_callbacks_may_resign_close_and_raise(place: Place, where: str, what: str) -> None:
    a, b = place.member("a"), place.member("b")
    seen: list[str] = []

    def act(name: str) -> Callable[[Leader], None]:
        def call(leader: Leader) -> None:
            seen.append(name)
            if name == where:
                if what == "raise":
                    raise SystemExit
                leader.resign() if what == "resign" else a.close()

        return call

    leader = a.lead("s", on_win=act("on_win"), on_loss=act("on_loss"))
    wait_until(lambda: "on_win" in seen)
    if where == "on_loss" or what == "raise":
        leader.resign()
    wait_until(lambda: not a._ending.leaders)
    assert seen == ["on_win", "on_loss"]
    b.lead("s").resign()


def test_terminate_calls_on_loss_and_a_restart_takes_the_term_over(place: Place) -> None:
    a = place.member("a")
    calls = Calls(a)
    token = a.lead("s", on_win=calls.on_win, on_loss=calls.on_loss).token
    wait_until(lambda: calls.kinds == ["win"])
    a.terminate()
    wait_until(lambda: calls.kinds == ["win", "loss"])
    with place.member("a").lead("s", timeout=2 * HI_S) as again:
        assert again.token > token


def test_a_leader_that_can_t_campaign_any_more_says_so(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    a = place.member("a")
    calls = Calls(a)
    a.lead("s", on_win=calls.on_win, on_loss=calls.on_loss)
    wait_until(lambda: calls.kinds == ["win"])
    a._driver.lock.fail(RuntimeError("over"))
    wait_until(lambda: not a._ending.leaders)
    assert calls.kinds == ["win", "loss"]


def test_a_caller_that_is_interrupted_leaves_no_lock_behind(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = place.member("a"), place.member("b")
    from kafka_marshal.node.serving import Reply

    def interrupted(self: Reply[Any], timeout: float | None = None) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Reply, "wait", interrupted)
        for call in (a.lock, a.lead):
            with pytest.raises(KeyboardInterrupt):
                call("x")
    with b.lock("x", timeout=20):
        assert not a._ending.leaders


# -- asyncio ------------------------------------------------------------------------------------------------------


async def test_locks_and_leaders_of_a_loop(place: Place) -> None:
    seen: list[str] = []

    async def won(leader: aio.Leader) -> None:
        assert isinstance(leader, aio.Leader)
        await asyncio.sleep(0)
        seen.append(f"win {leader.token}")

    async def lost(leader: aio.Leader) -> None:
        await asyncio.sleep(0.01)
        seen.append("loss")

    async with place.aio("a") as a, place.aio("b") as b:
        async with a.lock("x") as lock:
            with pytest.raises(HeldError):
                async with b.lock("x", 0):
                    pass
        async with b.lock("x") as second:
            assert second.token > lock.token
        async with a.lead("s", on_win=won, on_loss=lost) as leader:
            token = leader.token
            with pytest.raises(HeldError):
                async with b.lead("s", 0):
                    pass
            while not seen:
                await asyncio.sleep(0.005)
        assert seen == [f"win {token}", "loss"]
        async with b.lead("s", on_loss=lost) as other:
            assert other.token > token
            await b.close()
        assert seen[1:] == ["loss", "loss"]


async def test_a_cancelled_wait_leaves_no_claim_behind(place: Place) -> None:
    async with place.aio("a") as a, place.aio("b") as b, a.lock("x"):

        async def wait() -> None:
            async with b.lock("x", None):
                pass

        task = asyncio.create_task(wait())
        while ("lock:x", 0) not in b.sync._driver.engine.leases.manual:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while ("lock:x", 0) in b.sync._driver.engine.leases.manual:
            await asyncio.sleep(0.005)


async def test_a_coroutine_that_is_called_may_resign(place: Place) -> None:
    seen: list[str] = []

    async def won(leader: aio.Leader) -> None:
        seen.append("win")
        await leader.resign()

    async def lost(_: aio.Leader) -> None:
        seen.append("loss")

    async with place.aio("a") as a, a.lead("s", on_win=won, on_loss=lost):
        while a.sync._ending.leaders:
            await asyncio.sleep(0.005)
        assert seen == ["win", "loss"]
