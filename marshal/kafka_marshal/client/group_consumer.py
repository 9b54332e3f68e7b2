"""GroupConsumer: messages of the pieces that a coordinated group gives this member (section 5)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from shlex import quote
from typing import NoReturn

from kafka_marshal.client.base import Host
from kafka_marshal.client.consumer import Consumer
from kafka_marshal.client.group_member import GroupMember, Piece
from kafka_marshal.client.offset_mirror import OffsetMirror
from kafka_marshal.client.options import ConsumerOptions
from kafka_marshal.errors import ConfigurationError, KeyRangeError
from kafka_marshal.node.driver import Driver

PiecesCallback = Callable[["GroupConsumer", list[Piece]], object]


class GroupConsumer(GroupMember, Consumer):
    """A member of a coordinated group, with all methods of a Consumer. Made by :meth:`Marshal.group_consumer`."""

    def __init__(
        self,
        marshal: Host,
        driver: Driver,
        options: ConsumerOptions,
        config: Mapping[str, object],
        mirror_offsets: bool = False,
    ) -> None:
        self._offset_mirror: OffsetMirror | None = None
        self._join_in(driver, options)
        try:
            super().__init__(marshal, driver, options, config)
        except BaseException:
            self._listen_no_more()
            raise
        if mirror_offsets:
            self._offset_mirror = OffsetMirror(driver, self._member.member, self._engine)
            self._leaving.before, self._leaving.after = self._offset_mirror.before_release, self._offset_mirror.last

    def _freed(self) -> None:
        if self._offset_mirror is not None:
            with self._driver.condition:
                self._offset_mirror.end()
        super()._freed()

    def _require_sharing_level(self, what: str) -> None:
        super()._require_sharing_level(what)
        group = self._member.member.group
        if group is not None and not group.settings.accept_individual_commit:
            name = self._driver.engine.settings.group_id
            raise KeyRangeError(
                f"{what}: the setting accept_individual_commit of group {name!r} is off, so the log settles no message "
                "by itself. Nothing was delivered or set aside. Run without it, or switch the setting on: "
                f"kafka-marshal group {quote(name)} --set accept_individual_commit=true",
                kip_number=88,
            )

    def assign(self, partitions: object = None) -> NoReturn:
        """Refuse (ConfigurationError): the group assigns partitions."""
        raise ConfigurationError(
            "assign() is not possible in a coordinated group: the group assigns its members' partitions, and moves as "
            "few as possible. Nothing was changed. Choose a strategy=; a claimed group (marshal.consumer) has "
            "policies, and marshal.claim(topic, partition) claims one partition by hand"
        )

    def seek(self, topic: str, partition: int, offset: int, *, force: bool = False) -> None:
        """Go forward to offset; as :meth:`Consumer.seek`. ConfigurationError in a group that takes checkpoints."""
        if self._takes_checkpoints:
            raise ConfigurationError(
                "seek() is not possible in a group that takes checkpoints: a position is the group's, and belongs to "
                "the state that was saved with it. Nothing was changed. rollback() goes back with the state; "
                f"kafka-marshal release-group {quote(self._marshal.group_id)} sets positions alone; "
                "start= says where a new group begins"
            )
        super().seek(topic, partition, offset, force=force)
