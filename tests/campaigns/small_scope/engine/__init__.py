"""Small scope, with the engine in it: every order of what can happen to two or three real members, to some depth.

Clients are the real cores (:mod:`kafka_marshal.engine`) with a replica and a consumer each, on two partitions of a few
messages. What can come next is a matter of the search, move by move: a record is written, or lost, or written with its
acknowledgement lost; a member reads, hears, takes a turn; its user asks for a message or has one done; its process is
killed and started again; time goes by, to the very millisecond at which a lease ends. See :mod:`.rules` for what must
hold after each move, :mod:`.searching` for where the searches begin and how far they go.
"""

from tests.campaigns.small_scope.engine.searching import SCENARIOS, Found, Scenario, explore_engines, search

__all__ = ["SCENARIOS", "Found", "Scenario", "explore_engines", "search"]
