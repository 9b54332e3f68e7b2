"""Pausing, repositioning and cleaning up a group while it runs, with nothing but the log.

==================  ============================================================================================
``client``          :class:`Admin`: what an operator calls
``pause``           :class:`Pause`: a group paused in every CP, for as long as it is needed
``pause_work``      its work, on threads of the library: the pause begun, extended without a break, ended
``repositioning``   moves positions under a pause, and puts them back if that fails
``members``         members during a pause: which hold what, which released when, which are alive
``positions``       targets: offsets, ``"earliest"``, ``"latest"``, ``"readable"``, moments → :class:`Move`
``move_plans``      the positions before a move, in a file, to undo it
``groups``          what needs no pause or ends one: evict, forget, resume
``coordinated``     the same for coordinated groups
``transfer``        positions from Kafka's own consumer groups, and to them
``conversion``      a group changed to the other kind, with the file that is written first
``group_moves``     the methods of :class:`Admin` for these two
``checkpoints``     the methods of :class:`Admin` about checkpoints
``checkpoint_work`` checkpoints of a group: taken, pinned, retired, listed
``rollback``        a group put back to a checkpoint; the first checkpoint, and the end of them
``dead_letters``    dead-letter topics, read without committing anything
``setting_aside``   the methods of :class:`Admin` about open messages
``open_messages``   what is open: set aside, waiting for its next try, in a batch
``settling``        redrive, discard and park, record by record
``redriving``       dead letters, produced into a topic in transactions
``aside``           open messages written again: after a move that failed, in a conversion
``stored_message``  one message of a data topic, by its offset
``topic``           the coordination topic, created or completed: the work of ``init``
``prune``           old log and old snapshots, removed up to a checked snapshot
``archiving``       the method of :class:`Admin` that archives the log (``kafka_marshal.archive``)
``session``         one run against one group: a replica, and records appended and awaited
==================  ============================================================================================
"""

from kafka_marshal.admin.checkpoint_work import KeptCheckpoint, TakenCheckpoint
from kafka_marshal.admin.client import Admin
from kafka_marshal.admin.conversion import Conversion, Repeat
from kafka_marshal.admin.dead_letters import DeadLetters
from kafka_marshal.admin.groups import PausedPartition
from kafka_marshal.admin.members import InHand
from kafka_marshal.admin.move_plans import MovePlan
from kafka_marshal.admin.open_messages import OpenMessage
from kafka_marshal.admin.pause import Pause
from kafka_marshal.admin.positions import Move
from kafka_marshal.admin.redriving import RedrivenLetters
from kafka_marshal.admin.rollback import Rewound, RolledBack
from kafka_marshal.admin.settling import Settled
from kafka_marshal.admin.stored_message import StoredMessage
from kafka_marshal.admin.topic import TopicReport
from kafka_marshal.snapshots.prune import PrunedPartition, PrunePlan
from kafka_marshal.types import Target

__all__ = [
    "Admin",
    "Conversion",
    "DeadLetters",
    "InHand",
    "KeptCheckpoint",
    "Move",
    "MovePlan",
    "OpenMessage",
    "Pause",
    "PausedPartition",
    "PrunePlan",
    "PrunedPartition",
    "RedrivenLetters",
    "Repeat",
    "Rewound",
    "RolledBack",
    "Settled",
    "StoredMessage",
    "TakenCheckpoint",
    "Target",
    "TopicReport",
]
