"""Small scope, with the engine in it: every order of what can happen to two or three real members, to some depth.

Clients are the real cores (:mod:`kafka_marshal.engine`) with a replica and a consumer each, on two partitions of a few
messages. The search chooses the next move: a record is written, lost, or written with its acknowledgement lost; a
member reads, gets an answer, takes a turn; its user asks for a message or marks one as done; its process is killed
and restarted; time passes, to the very millisecond at which a lease ends. See :mod:`.rules` for the invariants after
each move, :mod:`.searching` for the starts and limits of the searches.
"""

from tests.campaigns.small_scope.engine.searching import SCENARIOS, Found, Scenario, explore_engines, search

__all__ = ["SCENARIOS", "Found", "Scenario", "explore_engines", "search"]
