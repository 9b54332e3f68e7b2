"""What one client wants the log to show of open messages: sent until it is shown, and no longer."""

from __future__ import annotations

from kafka_marshal.engine.work.open_messages import Entries, Kind, Request, Settled, Settling
from rationalizer import Progress, codes
from rationalizer.holes import NO_OWNER, Hole, Holes

AGAIN = 1_000.0


def log(stable: int, *holes: Hole) -> Progress:
    progress = Progress()
    if stable >= 0:
        progress.through(stable)
    progress.holes = Holes(holes) if holes else None
    return progress


def free(offset: int, attempts: int = 1, last: int | None = None, owner: int = NO_OWNER) -> Hole:
    key_hash = 7 if last is None else -1
    return Hole(offset, offset if last is None else last, owner, 3, attempts, key_hash, None)


def test_it_is_sent_until_the_log_shows_it() -> None:
    settling, park = Settling(), Request(5, 5, Kind.PARKED, 7, 3, "Bad")
    settling.want(park)
    sent = Entries(parked=((5, 7, 3, "Bad"),))
    assert settling.entries(log(-1), 0.0, AGAIN) == sent
    assert settling.entries(log(-1), 999.0, AGAIN) is None
    assert settling.entries(log(-1), 1_000.0, AGAIN) == sent
    assert settling.look(log(-1)) == []
    assert settling.look(log(-1, free(5)._replace(reason="Bad"))) == [Settled(park, True)]
    assert settling.entries(log(-1), 9_000.0, AGAIN) is None


def test_a_refused_entry_that_is_still_wanted_comes_with_the_next_heartbeat() -> None:
    settling = Settling()
    settling.want(Request(5, 5, Kind.OPEN, 7, 2))
    sent = settling.entries(log(-1), 0.0, AGAIN)
    assert sent == Entries(open=((5, 5, 7, 2),))
    assert settling.refused(sent, [codes.FENCED]) == [(5, codes.FENCED)]
    assert settling.entries(log(-1, free(5, 1)), 300.0, AGAIN) == sent
    assert settling.look(log(-1, free(5, 2)))[0].is_shown


def test_what_another_client_has_settled_or_set_aside_has_no_object() -> None:
    settling, tried = Settling(), Request(5, 5, Kind.OPEN, 7, 2)
    for shown in (log(9), log(9, free(5)._replace(reason="by an operator"))):
        settling.want(tried)
        assert settling.look(shown) == [Settled(tried, False)]


def test_done_waits_for_the_hole_that_is_under_way_or_for_progress() -> None:
    """The record that opens it may still come: an entry before it would be rejected, and one after it is needed."""
    settling, done = Settling(), Request(5, 5, Kind.DONE, 7)
    settling.want(done)
    assert settling.entries(log(3), 0.0, AGAIN) is None
    assert settling.look(log(3)) == []
    assert settling.entries(log(3, free(5)), 10.0, AGAIN) == Entries(done=((5, 5),))
    assert settling.look(log(3, free(5))) == []
    assert settling.look(log(5)) == [Settled(done, True)]


def test_of_a_batch_what_is_done_goes_out_in_ranges_and_only_what_is_ours() -> None:
    settling = Settling(owner=70)
    for first, last in ((100, 147), (148, 150), (152, 199)):
        settling.want(Request(first, last, Kind.DONE, None))
    mine, other = free(100, 1, 199, 70), free(190, 2, 199, 64)
    assert settling.entries(log(299, mine), 0.0, AGAIN) == Entries(done=((100, 150), (152, 199)))
    assert settling.entries(log(299, mine._replace(last=189), other), 2_000.0, AGAIN) == Entries(
        done=((100, 150), (152, 189))
    )
    found = settling.look(log(299, other))
    assert [(each.request.first, each.is_shown) for each in found] == [(100, True), (148, True), (152, False)]


def test_what_is_wanted_later_replaces_it_once_what_was_sent_is_applied() -> None:
    """Until then its ``seen`` lies below that record: it would be rejected."""
    settling = Settling()
    settling.want(Request(5, 5, Kind.OPEN, 7, 2))
    sent = settling.entries(log(-1), 0.0, AGAIN)
    settling.want(Request(5, 5, Kind.PARKED, 7, 5, "Bad"))
    assert settling.behind_since == 0.0
    assert settling.entries(log(-1), 1.0, AGAIN) is None
    assert settling.look(log(-1, free(5, 2))) == []
    assert sent is not None
    assert settling.refused(sent, [codes.OK]) == []
    assert settling.entries(log(-1, free(5, 2)), 2.0, AGAIN) == Entries(parked=((5, 7, 5, "Bad"),))
    settling.forget(5)
    assert not len(settling)
    settling.want(Request(6, 6, Kind.OPEN, 7, 2))
    settling.entries(log(-1), 0.0, AGAIN)
    settling.want(Request(6, 6, Kind.OPEN, 7, 1))
    assert settling.entries(log(-1), AGAIN, AGAIN) == Entries(open=((6, 6, 7, 1),)), "the first one was lost"


def test_fewer_tries_are_shown_when_the_log_has_no_more_than_these() -> None:
    settling, back = Settling(), Request(5, 5, Kind.OPEN, 7, 1)
    settling.want(back)
    assert settling.look(log(-1, free(5, 2))) == []
    assert settling.look(log(-1, free(5, 1))) == [Settled(back, True)]
