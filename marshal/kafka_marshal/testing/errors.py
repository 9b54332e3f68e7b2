"""Errors of local brokers.

::

    MarshalError
    └── LocalBrokerError        a local Kafka could not be started or controlled
        ├── JavaMissingError    no Java 17 or newer
        ├── JarsMissingError    the broker's jars are not in the cache and could not be downloaded
        ├── PortTakenError      a requested port is in use
        └── BrokerDiedError     the broker ended by itself; the message ends with the tail of its log
"""

from __future__ import annotations

from kafka_marshal.errors import MarshalError


class LocalBrokerError(MarshalError):
    """A local Kafka could not be started, or not be controlled as requested."""


class JavaMissingError(LocalBrokerError):
    """No Java of a supported version was found."""


class JarsMissingError(LocalBrokerError):
    """The broker's jars are not in the cache and could not be downloaded."""


class PortTakenError(LocalBrokerError):
    """A requested port is in use by another program."""


class BrokerDiedError(LocalBrokerError):
    """The broker's process ended by itself, or never answered."""
