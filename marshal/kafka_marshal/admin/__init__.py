"""Pausing, repositioning and tidying up a group while it runs (C10, C11, C16), with nothing but the log.

==================  ============================================================================================
``client``          :class:`Admin`: what an operator asks for
``pause``           :class:`Pause`: a group paused in every CP, for as long as it is needed
``pausing``         its work, on threads of ours: user threads may be interrupted anywhere
``moving``          the way positions are moved under a pause, and put back when that fails (C11)
``hold``            the pause itself: begun, extended without a break, ended (C10)
``members``         what members do meanwhile: who holds what, who let go when
``positions``       where to: offsets, ``"earliest"``, ``"latest"``, moments → :class:`Move`
``move_plans``      what a move replaced, in a file, so that it can be undone
``groups``          what needs no pause or ends one: evict, forget, resume
``transfer``        positions from Kafka's own consumer groups, and to them (G21)
``converting``      a group made one of the other kind; ``conversion``: the file that is written first
``group_moves``     what :class:`Admin` offers of these two
``dead_letters``    dead-letter topics, read without committing anything
``stored_message``  one message of a data topic, by its offset
``topic``           the coordination topic, created or completed: what ``init`` does
``prune``           old log and old snapshots, removed up to a checked snapshot (L1, S2)
``session``         one run against one group: a replica, and records appended and awaited
``history``         was a client_id seen consuming? Then it must not pause (C11)
==================  ============================================================================================
"""

from kafka_marshal.admin.client import Admin
from kafka_marshal.admin.conversion import Conversion, Repeat
from kafka_marshal.admin.dead_letters import DeadLetters
from kafka_marshal.admin.groups import PausedPartition
from kafka_marshal.admin.members import InHand
from kafka_marshal.admin.move_plans import MovePlan
from kafka_marshal.admin.pause import Pause
from kafka_marshal.admin.positions import Move, Target
from kafka_marshal.admin.prune import PrunedPartition, PrunePlan
from kafka_marshal.admin.stored_message import StoredMessage
from kafka_marshal.admin.topic import TopicReport

__all__ = [
    "Admin",
    "Conversion",
    "DeadLetters",
    "InHand",
    "Move",
    "MovePlan",
    "Pause",
    "PausedPartition",
    "PrunePlan",
    "PrunedPartition",
    "Repeat",
    "StoredMessage",
    "Target",
    "TopicReport",
]
