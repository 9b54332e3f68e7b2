"""A recorded run that is replayed has the same effects, one by one."""

from __future__ import annotations

from itertools import chain
from random import Random

from kafka_marshal.engine.effects import Append, Effect
from kafka_marshal.engine.engine import Engine
from kafka_marshal.engine.inputs import Applied, At, InputLog
from kafka_marshal.engine.policies import Balanced
from kafka_marshal.engine.settings import ConsumerSettings
from kafka_marshal.engine.subscription import Subscription
from rationalizer import World
from tests.engine.harness import HI, Net


def test_a_recorded_run_is_the_same_when_it_is_fed_in_again() -> None:
    """Two members share four partitions; one is killed, and the recorded one takes over."""
    net = Net(cps=2)
    net.topic("t", 4, end=400)
    member = net.member("a")
    log, effects = InputLog(), list[Effect]()
    member.engine.recorder = log.note
    take = member.engine.take_effects

    def take_effects() -> list[Effect]:
        effects.extend(found := take())
        return found

    member.engine.take_effects = take_effects  # type: ignore[method-assign]
    member.consumer("t")
    other = net.member("b")
    other.consumer("t")
    for turn in range(60):
        net.run(HI / 5)
        member.work()
        other.work()
        if turn == 30:
            other.kill()
    assert len(member.held()) == 4 and len(log.entries) > 300

    settings = member.engine.settings
    worlds = {cp: World(cp, net.cps) for cp in range(net.cps)}
    again = Engine(settings, worlds, Random("a"))
    subscription = Subscription(("t",), "__marshal")
    callbacks = next(iter(member.consumers)).settings.callbacks
    again.caught_up(0.0)
    again.add_consumer(subscription, ConsumerSettings(False, Balanced(), "earliest", 10, None, callbacks))
    made = log.feed(again, worlds, lambda cp, offset: net.logs[cp][offset])
    assert list(map(repr, chain.from_iterable(made))) == list(map(repr, effects))
    assert sum(isinstance(effect, Append) for effect in effects) > 40


def test_the_log_of_inputs_says_where_records_lie_and_not_what_they_were() -> None:
    log = InputLog()
    world = World(0, 1)
    log.note(Applied(0, 0, world.apply(0, 0, b"x")), 1.0)
    assert log.entries == [(1.0, At(0, 0))]
