"""What an extra brings: if it is not installed, the error says which one to install."""

from __future__ import annotations

from importlib.util import find_spec

from kafka_marshal.errors import ExtraMissingError

#: What the extra ``[cli]`` brings.
_CLI = ("click", "rich")


def lacks_cli(error: ModuleNotFoundError) -> bool:
    """Whether the extra of the command is missing, and not a module of the library."""
    return (error.name or "").partition(".")[0] in _CLI


def needs(extra: str, *modules: str, kind: type[ExtraMissingError] = ExtraMissingError) -> None:
    """Raise ExtraMissingError (kind) unless all of these modules can be imported."""
    for module in modules:
        if find_spec(module) is None:
            raise kind(
                f"this needs the package {module!r}, which is not installed. Nothing was read or written. Install it "
                f"with: pip install 'kafka-marshal[{extra}]'",
                name=module,
            )
