"""Errors travel between processes: multiprocessing, concurrent.futures and Ray pickle them."""

import copy
import importlib
import inspect
import pickle
import pkgutil

import eyas
from eyas.errors import EyasError, UnknownOptionError

MODULES = [module.name for module in pkgutil.walk_packages(eyas.__path__, "eyas.") if "__main__" not in module.name]


def kinds() -> list[type[BaseException]]:
    """Every exception class that eyas defines, in the modules that can be imported here."""
    found = set[type[BaseException]]()
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:  # an optional package is missing
            continue
        classes = (value for value in vars(module).values() if inspect.isclass(value))
        found |= {kind for kind in classes if issubclass(kind, BaseException) and kind.__module__.startswith("eyas.")}
    return sorted(found, key=lambda kind: f"{kind.__module__}.{kind.__qualname__}")


def made(kind: type[BaseException]) -> BaseException:
    """An exception of this class, with a value for each argument that it needs and for each by name."""
    values = {"status": 418}
    positional, named = [], dict[str, object]()
    if "__init__" not in vars(kind) and kind.__init__ in (Exception.__init__, ValueError.__init__):
        return kind("the message")
    for name, parameter in inspect.signature(kind.__init__).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            named[name] = {"Retry-After": "3"} if name == "headers" else f"the {name}"
        elif name != "self" and parameter.kind is not parameter.VAR_KEYWORD:
            positional.append(values.get(name, f"the {name}"))
    return kind(*positional, **named)


def test_every_error_survives_pickle() -> None:
    """Bug: an error with other arguments than its message cannot be unpickled; a pool breaks or waits for ever."""
    every = kinds()
    assert {UnknownOptionError, EyasError} < set(every)
    for kind in every:
        error = made(kind)
        for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
            assert (type(again), str(again), vars(again)) == (kind, str(error), vars(error))
