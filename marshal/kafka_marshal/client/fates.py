"""What an error that a handler of ``consumer.run`` raises means for its message.

The library's own errors mean that a program is wrong, a cluster does not answer, or another member has the lease. The
message is not the reason, so none of them makes a dead letter. docs/handlers.md has the same table.
"""

from __future__ import annotations

from enum import IntEnum

from kafka_marshal import errors


class Fate(IntEnum):
    """What follows an error. Of a group of exceptions, the strongest counts: the one with the lowest number."""

    #: The run ends at once, and the message comes again.
    ENDS = 0
    #: It is tried again, even if ``Retry.on`` lacks it; after the last try the run ends, and the message comes again.
    RETRIED = 1
    #: The message has failed: it is tried again. After the last try it is a dead letter, or ends the run.
    FAILED = 2


#: Class → fate; a class that is not here has the fate of its nearest base class.
FATES: dict[type[errors.MarshalError], Fate] = {
    errors.MarshalError: Fate.ENDS,
    errors.KafkaUnavailableError: Fate.RETRIED,
    errors.AuthenticationError: Fate.ENDS,
    errors.AuthorizationError: Fate.ENDS,
    errors.LeaseError: Fate.RETRIED,
    errors.AdminError: Fate.RETRIED,
    errors.SinkError: Fate.FAILED,
    errors.StaleEpochError: Fate.RETRIED,
    errors.WrongEpochKindError: Fate.ENDS,
}


def fate_of(error: BaseException) -> Fate:
    """The fate of an error; of a group, the strongest fate in it."""
    if isinstance(error, BaseExceptionGroup):
        return min(fate_of(each) for each in error.exceptions)
    if not isinstance(error, Exception):
        return Fate.ENDS
    if not isinstance(error, errors.MarshalError):
        return Fate.FAILED
    if isinstance(error, errors.SinkError | errors.ProduceError | errors.TransactionError) and error.retry:
        return Fate.RETRIED
    return next(FATES[kind] for kind in type(error).__mro__ if kind in FATES)
