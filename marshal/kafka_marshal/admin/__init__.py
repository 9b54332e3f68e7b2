"""Pausing, repositioning and cleaning up a group while it runs, with nothing but the log.

==================  ============================================================================================
``client``          :class:`Admin`: what an operator calls. Each of its verbs has its module:
``topic``           the coordination topic: created, raised to a level, pruned, archived
``groups``          what needs no pause or ends one: evict, drain, settings, resume; and reads
``transfer``        positions from Kafka's own consumer groups, and to them
``conversion``      a group changed to the other kind, with the file that is written first
``checkpoints``     checkpoints of a group: taken, pinned, retired, begun, ended; and the way back to one
``forking``         a group forked at a checkpoint of another one; and two groups compared
``open_messages``   what is open (set aside, waiting, in a batch): listed; redrive, discard and park
``redo``            done messages opened again: found, planned in a file, opened, undone
``dead_letters``    dead-letter topics, read without committing anything; redriven in transactions
``stored_message``  one message of a data topic, by its offset
``pause``           :class:`Pause`: a group paused in every CP, and what is done meanwhile, on threads of the library
``base``            what all verbs use: the log read, a session for a group, a pause around a call
``repositioning``   moves positions under a pause, and puts them back if that fails
``members``         the pause, kept without a break; members during it: which hold what, which are alive
``positions``       targets: offsets, ``"earliest"``, ``"readable"``, moments → :class:`Move`; what undoes one
``session``         one run against one group: a replica, and records appended and awaited
==================  ============================================================================================
"""

from kafka_marshal.admin.checkpoints import KeptCheckpoint, Rewound, RolledBack, TakenCheckpoint
from kafka_marshal.admin.client import Admin
from kafka_marshal.admin.conversion import Conversion, Repeat
from kafka_marshal.admin.dead_letters import DeadLetters, RedrivenLetters
from kafka_marshal.admin.forking import Compared, Forked, ForkedPartition
from kafka_marshal.admin.groups import PausedPartition
from kafka_marshal.admin.members import InHand
from kafka_marshal.admin.open_messages import OpenMessage, Settled
from kafka_marshal.admin.pause import Pause
from kafka_marshal.admin.positions import Move, MovePlan
from kafka_marshal.admin.redo import Redone, RedoPartition, RedoPlan
from kafka_marshal.admin.stored_message import StoredMessage
from kafka_marshal.admin.topic import TopicReport
from kafka_marshal.snapshots.prune import PrunedPartition, PrunePlan
from kafka_marshal.types import Target

__all__ = [
    "Admin",
    "Compared",
    "Conversion",
    "DeadLetters",
    "Forked",
    "ForkedPartition",
    "InHand",
    "KeptCheckpoint",
    "Move",
    "MovePlan",
    "OpenMessage",
    "Pause",
    "PausedPartition",
    "PrunePlan",
    "PrunedPartition",
    "RedoPartition",
    "RedoPlan",
    "Redone",
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
