"""A module that stands for another: it has its parameters, methods and attributes."""

from __future__ import annotations

import functools
import logging
from types import FunctionType
from typing import Any

from torch import nn

from .compiled_methods import with_compiled_calls

log = logging.getLogger(__name__)

_STANDARD = tuple(name for name in vars(nn.Module()) if name != "training")
_KEPT = ("_call_impl", "_wrapped_call_impl", "_slow_forward")
"""Methods that calls are made of."""
_CALLING = ("generate",)
"""Methods that call the model again and again: they call the stand-in."""


class StandIn(nn.Module):
    """A module that stands for a model.

    Parameters, buffers, modules and hooks are the model's: the same dictionaries. Methods are the model's
    too; where they return the model they return the stand-in, and ``generate`` calls the stand-in. What is
    set is set on the model.
    """

    model: nn.Module

    def __init__(self, model: nn.Module, **own: object) -> None:
        # Not `nn.Module`'s: it would make dictionaries of its own.
        theirs = vars(model)
        vars(self).update({name: theirs[name] for name in _STANDARD if name in theirs}, model=model, **own)

    @property
    def training(self) -> bool:  # type: ignore[override]
        """The model's mode."""
        return self.model.training

    @property
    def forward(self) -> Any:  # type: ignore[override]
        """The model's own, not compiled."""
        return self.model.forward

    def __getattr__(self, name: str) -> Any:
        if name == "model":
            raise AttributeError(name)
        return getattr(self._calling() if name in _CALLING else self.model, name)

    def _calling(self) -> nn.Module:
        """The model, as one that calls the stand-in."""
        known: nn.Module | None = vars(self).get("_caller")
        if known is None or type(known).__base__ is not type(self.model):
            try:
                known = with_compiled_calls(self.model, self.__call__)
            except Exception:
                log.info("generate calls the model as it is: its class has no other", exc_info=True)
                return self.model
            vars(self)["_caller"] = known
        return known

    def __setattr__(self, name: str, value: object) -> None:
        own = name in vars(self) and name not in _STANDARD
        if own or any(
            name in vars(c) for c in type(self).__mro__ if c is not StandIn and issubclass(c, StandIn)
        ):
            vars(self)[name] = value
        else:
            setattr(self.model, name, value)

    def __delattr__(self, name: str) -> None:
        if name in vars(self) and name not in _STANDARD:
            del vars(self)[name]
        else:
            delattr(self.model, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.model)})


def _of_the_model(name: str) -> object:
    @functools.wraps(getattr(nn.Module, name))
    def method(self: StandIn, *args: object, **kwargs: object) -> object:
        result = getattr(self.model, name)(*args, **kwargs)
        return self if result is self.model else result

    return method


for _name, _value in vars(nn.Module).items():
    if isinstance(_value, FunctionType) and not _name.startswith("__") and _name not in (*_KEPT, "forward"):
        setattr(StandIn, _name, _of_the_model(_name))
