"""The old name of :mod:`kafka_marshal.testing.fail_points`; the campaign itself is no part of the package."""

from kafka_marshal.testing.fail_points import POINTS, Doom, Moment, dying

__all__ = ["POINTS", "Doom", "Moment", "dying"]
