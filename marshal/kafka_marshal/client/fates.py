"""What an error that a handler of ``consumer.run`` raises means for its message.

The library's own errors say that a program is wrong, a cluster is away, or a lease is another member's. None of that is
the message's fault, so none of them makes a dead letter. docs/handlers.md has the same table.
"""

from __future__ import annotations

from enum import IntEnum

from kafka_marshal import errors

__all__ = ["FATES", "Fate", "fate_of"]


class Fate(IntEnum):
    """The strongest first: of a group of exceptions that one counts."""

    #: The run ends at once, and the message comes again.
    ENDS = 0
    #: It is tried again, whatever ``Retry.on`` says; after the last try the run ends, and the message comes again.
    RETRIED = 1
    #: The message has failed: it is tried again, and is a dead letter, or ends the run, after the last try.
    FAILED = 2


#: By class; of a class that is not here, that of the nearest one above it.
FATES: dict[type[errors.MarshalError], Fate] = {
    errors.MarshalError: Fate.ENDS,
    errors.KafkaUnavailableError: Fate.RETRIED,
    errors.AuthenticationError: Fate.ENDS,
    errors.AuthorizationError: Fate.ENDS,
    errors.LeaseError: Fate.RETRIED,
    errors.CoordinatorStartupNotCompleteError: Fate.RETRIED,
    errors.AdminError: Fate.RETRIED,
    errors.SinkError: Fate.FAILED,
    errors.StaleEpochError: Fate.RETRIED,
    errors.WrongEpochKindError: Fate.ENDS,
}


def fate_of(error: BaseException) -> Fate:
    """What an error means; of a group, what the strongest in it does."""
    if isinstance(error, BaseExceptionGroup):
        return min(fate_of(each) for each in error.exceptions)
    if not isinstance(error, Exception):
        return Fate.ENDS
    if not isinstance(error, errors.MarshalError):
        return Fate.FAILED
    if isinstance(error, errors.SinkError | errors.ProduceError) and error.retry:
        return Fate.RETRIED
    return next(FATES[kind] for kind in type(error).__mro__ if kind in FATES)
