"""Finds the worker that a command line or a script names."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import cast

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.testing.simulation.process import Worker

__all__ = ["lasting", "load_worker", "name_of"]


def load_worker(name: str) -> Worker:
    """The function that ``package.module:function`` or ``path/to/file.py:function`` names."""
    where, _, function = name.rpartition(":")
    if not where or not function:
        raise ConfigurationError(f"{name!r} names no worker; write package.module:function or file.py:function")
    try:
        module = _load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
        worker = getattr(module, function)
        inspect.signature(worker).bind(None)
    except (ImportError, OSError, AttributeError) as error:
        raise ConfigurationError(f"the worker {name!r} was not found: {error}") from error
    except SyntaxError as error:
        raise ConfigurationError(f"the worker {name!r} can't be read: {error}") from error
    except TypeError as error:
        raise ConfigurationError(f"{name!r} is no function of one Job: {error}") from error
    return cast("Worker", worker)


def lasting(name: str) -> str:
    """The worker's name with an absolute path."""
    where, _, function = name.rpartition(":")
    return f"{Path(where).resolve()}:{function}" if where.endswith(".py") else name


def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.append(folder)  # modules beside it can be imported, as by a script
    spec.loader.exec_module(module)
    return module


def name_of(worker: Worker) -> str:
    """The name by which load_worker finds a function again; "" for one that can't be found."""
    module, function = getattr(worker, "__module__", ""), getattr(worker, "__qualname__", "")
    if not function.isidentifier():
        return ""
    source = getattr(sys.modules.get(module), "__file__", None)
    if module == "__main__" or (module and "." not in module and source is not None):
        return f"{source}:{function}" if source else ""
    return f"{module}:{function}" if module else ""
