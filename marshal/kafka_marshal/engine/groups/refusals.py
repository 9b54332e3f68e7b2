"""Why a JoinGroup was rejected: one error class for each code (G11)."""

from __future__ import annotations

from shlex import quote

from kafka_marshal.engine.settings import EngineSettings, GroupOptions
from kafka_marshal.errors import (
    ClientReplacedError,
    GroupForgottenError,
    GroupFullError,
    InconsistentPartitioningStrategyError,
    KeyRangeError,
    MarshalError,
    SessionTimeoutTooHighError,
    TooManyPartitionsError,
    UnknownPartitioningStrategyError,
    UpgradeRequiredError,
    claimed_group,
)
from kafka_marshal.types import Key
from rationalizer import codes
from rationalizer.levels import CHECKPOINTS_LEVEL, FIRST_LEVEL, GROUPS_LEVEL

TAKEN_FOR_DEAD = "this member was silent for longer than its session, and was taken for dead; it joins again"


def refusal_of(code: str, settings: EngineSettings, options: GroupOptions) -> MarshalError | None:
    """The error that a refused member raises; None: the refusal is temporary (PAUSED)."""
    group = f"group {settings.group_id!r}"
    nothing = "Nothing was handed out to this member, and the others go on"
    match code:
        case codes.WRONG_KIND:
            return claimed_group(settings.group_id)
        case codes.REPLACED:
            return ClientReplacedError(
                f"a newer instance of client_id {settings.client_id!r} is a member of {group}: this one has ended. "
                "Give every worker of a group its own client_id; a restarted one keeps its old one"
            )
        case codes.UNKNOWN_PARTITIONING_STRATEGY:
            return UnknownPartitioningStrategyError(f"{group}: no strategy is called {options.strategy!r}. {nothing}")
        case codes.INCONSISTENT_PARTITIONING_STRATEGY:
            return InconsistentPartitioningStrategyError(
                f"{group}: its members have another strategy than {options.strategy!r}. {nothing}. Give all members "
                "the same; to change it while they work: kafka-marshal group "
                f"{quote(settings.group_id)} --set strategy={quote(options.strategy)}"
            )
        case codes.SESSION_TIMEOUT_TOO_HIGH:
            return SessionTimeoutTooHighError(
                f"{group}: a session of {options.session_timeout_ms / 1000:g} s is above the group's setting. "
                f"{nothing}. Ask for less, or allow more: kafka-marshal group {quote(settings.group_id)} --set "
                "max_session_timeout_ms=…"
            )
        case codes.GROUP_FULL:
            return GroupFullError(f"{group} has 1,000 members, which is the most. {nothing}")
        case codes.TOO_MANY_PARTITIONS:
            return TooManyPartitionsError(
                f"{group}: the groups of its coordination partition would subscribe to topics of more than 100,000 "
                f"partitions. {nothing}. Use a coordination topic of its own for some of them"
            )
    return None


def other_strategy(settings: EngineSettings, options: GroupOptions, wanted: str) -> str:
    """The group's strategy is set, to another one than this program names (R6)."""
    return (
        f"group {settings.group_id!r} has strategy {wanted!r} by a setting, and this program names "
        f"{options.strategy!r}: the setting counts, and the member works. Name {wanted!r} in all programs; once they "
        f"do, end the setting: kafka-marshal group {quote(settings.group_id)} --unset strategy"
    )


def below_level(settings: EngineSettings, at: int = FIRST_LEVEL) -> UpgradeRequiredError:
    """The log does not know coordinated groups yet (G2), or their checkpoints (X11). at: its level."""
    level, what = (CHECKPOINTS_LEVEL, "checkpoints") if at >= GROUPS_LEVEL else (GROUPS_LEVEL, "coordinated groups")
    return UpgradeRequiredError(
        f"group {settings.group_id!r}: the coordination topic is at level {at}, and {what} need level {level}. Nothing "
        "was changed. Raise it, once all members run a release that knows it: kafka-marshal upgrade",
        level=level,
    )


def unasked(key: Key, settings: EngineSettings) -> KeyRangeError:
    """The log assigns this member some keys of a partition, and it allows no sharing (K2)."""
    return KeyRangeError(
        f"{key[0]} [{key[1]}]: group {settings.group_id!r} assigns this member some of its keys, and it was made "
        "without allow_key_share=True. Nothing of it was delivered here, and this member leaves; others get it. This "
        "must not happen: kafka-marshal audit says whether the log and its replicas agree",
        kip_number=90,
    )


def forgotten(settings: EngineSettings) -> GroupForgottenError:
    """The group was forgotten (G20)."""
    return GroupForgottenError(
        f"group {settings.group_id!r} was forgotten (kafka-marshal forget-group): its progress is gone from the log, "
        "and this member has ended. What it had in hand and had not committed counts as not done. Start it anew to "
        "begin a new group"
    )


def replaced(settings: EngineSettings) -> ClientReplacedError:
    """Another instance of our client_id is a member (G20)."""
    return ClientReplacedError(
        f"a newer instance of client_id {settings.client_id!r} has joined the group: this member has ended and commits "
        "nothing more. Give every worker of a group its own client_id; a restarted one keeps its old one"
    )
