"""Names of a package that are imported at their first use: importing the package itself costs next to nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module


def later(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package. modules: a module in it → what of that the package offers.

    The first parts of these modules' names are attributes, too, as if the package had imported them.
    """
    places = {name: module for module, names in modules.items() for name in names.split()}
    parts = {module.partition(".")[0] for module in modules}
    own = vars(import_module(package))

    def get(name: str) -> object:
        if name in places:
            own[name] = getattr(import_module(f"{package}.{places[name]}"), name)
        elif name in parts:
            own[name] = import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return own[name]

    return get, lambda: sorted({*own, *places, *parts})
