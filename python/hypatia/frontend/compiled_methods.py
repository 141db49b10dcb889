"""A model whose methods call it compiled: its own attributes under a class with another `__call__`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)

_PLAIN = ("_assisted_decoding",)
"""Methods of transformers' that call the model as it is: the lengths of drafts are others every time."""


def with_compiled_calls(model: M, call: Callable[..., object]) -> M:
    """An object that is the model in all but its calls, which are ``call``.

    It is of a class derived from the model's and has the model's own ``__dict__``: what a method sets is set
    on the model, `isinstance` and `super` are as they were, and the model itself stays as it is for others.

    Raises:
        TypeError: nothing can be derived from the model's class.
    """
    kind: Any = type(model)
    own: dict[str, object] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    own["__call__"] = lambda _self, *args, **kwargs: call(*args, **kwargs)
    for name in _PLAIN:
        if hasattr(kind, name):
            own[name] = lambda _self, *args, _name=name, **kwargs: getattr(model, _name)(*args, **kwargs)
    if hasattr(kind, "get_compiled_call"):
        # transformers asks it how to call the model for one token: it would be torch.compile's Inductor.
        own["get_compiled_call"] = lambda _self, config=None: (
            call if config is None else model.get_compiled_call(config)  # type: ignore[operator]
        )
    made = object.__new__(type(kind)(kind.__name__, (kind,), own))
    # Not `vars(made).update`: it is to be the same dictionary.
    object.__setattr__(made, "__dict__", vars(model))
    return made
