"""Gives tests to the processes of pytest-xdist by group, and continues when one of them dies or hangs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import pytest_timeout
from xdist.scheduler import LoadGroupScheduling

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import Scheduling
    from xdist.workermanage import WorkerController


class Groups(LoadGroupScheduling):
    """Without this, pytest-xdist 3.8 waits for ever after a crash (its issues 1323, 1327, 1371 and 1378)."""

    def remove_node(self, node: WorkerController) -> str | None:
        """Take a process out. Returns the test in which it died; what it did not begin goes to the others."""
        units = self.assigned_work.pop(node)
        pending = {scope: unit for scope, unit in units.items() if not all(unit.values())}
        if not pending:
            return None
        self.registered_collections.pop(node, None)
        unit = next(iter(pending.values()))
        died = next(name for name, is_done in unit.items() if not is_done)
        unit[died] = True
        self.workqueue.update((scope, unit) for scope, unit in pending.items() if not all(unit.values()))
        for other in self.nodes:
            if other in self.registered_collections:
                self._reschedule(other)
        return died

    def schedule(self) -> None:
        """Give the processes their first units, or a new one those that it may begin with."""
        is_first = self.collection is None
        super().schedule()
        if not is_first:  # a process begins a test when it knows the next, or that there is none
            for node in self.nodes:
                self._reschedule(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    """Replace the scheduler of ``--dist loadgroup``."""
    return Groups(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Limit another try, too: pytest-timeout cancels its timer when the first fails."""
    if getattr(item, "execution_count", 1) > 1:
        settings = pytest_timeout._get_item_settings(item)
        item.config.hook.pytest_timeout_set_timer(item=item, settings=settings)
