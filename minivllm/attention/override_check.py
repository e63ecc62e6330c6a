"""Refuses, when a class is defined, an override that a call through its base class would break.

A helper of a base class that calls `self.method(name=value)` cannot know that a subclass renamed `name`; a type
checker that sees only the subclass may not know it either, and the call fails in the middle of a run, in the one
configuration that uses that subclass (vLLM #17483). Here the class itself cannot be defined. vLLM has no such check.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from inspect import Parameter, Signature
from typing import Any

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


class ChecksOverrides:
    """Base of classes whose methods may be overridden only so that every call the base allows stays right.

    An override may add optional parameters. It may not rename, move, drop or make keyword-only any parameter, nor
    require one that the base does not require. Holds for all methods but private (`__name`) and special ones, with
    `__init__` included, over any number of levels and through mixins.

    Mirrors: none; vLLM has type checkers only.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        checked = [base for base in cls.__mro__ if issubclass(base, ChecksOverrides) and base is not ChecksOverrides]
        for name in dict.fromkeys(name for base in checked for name in vars(base)):
            if name == "__init__" or not (name.startswith("_") and "__" in name):
                _check_method(cls, name)


def _check_method(cls: type, name: str) -> None:
    owners = [base for base in cls.__mro__ if name in vars(base) and base is not object]
    newest = vars(owners[0])[name]
    for base in owners[1:]:
        overridden = vars(base)[name]
        if not issubclass(base, ChecksOverrides) or not _is_method(overridden):
            continue
        where = f"{cls.__qualname__}.{name}"
        if not _is_method(newest):
            raise TypeError(f"{where} = {newest!r} replaces a method of {base.__qualname__} by something not callable")
        if isinstance(overridden, staticmethod | classmethod) and not isinstance(newest, staticmethod | classmethod):
            raise TypeError(
                f"{where} must be a staticmethod or classmethod, as {base.__qualname__}.{name} is: it is called on the"
                " class"
            )
        ours, theirs = _signature(newest), _signature(overridden)
        if (problem := _problem(ours, theirs)) is not None:
            raise TypeError(
                f"{cls.__qualname__}.{name} cannot stand in for {base.__qualname__}.{name}: {problem}.\n"
                f"  base:     {base.__qualname__}.{name}{theirs}\n"
                f"  override: {owners[0].__qualname__}.{name}{ours}\n"
                "Code of the base class calls it by the base's parameter names and order: keep these, and give any"
                " parameter you add a default"
            )


def _is_method(attribute: object) -> bool:
    return isinstance(attribute, staticmethod | classmethod) or inspect.isroutine(attribute)


def _signature(attribute: Any) -> Signature:
    """As seen by a caller: without self or cls."""
    if isinstance(attribute, staticmethod):
        return inspect.signature(attribute.__func__)
    function = attribute.__func__ if isinstance(attribute, classmethod) else attribute
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    # A method that takes self through *args keeps it.
    drop = bool(parameters) and parameters[0].kind in _POSITIONAL
    return signature.replace(parameters=parameters[drop:])


def _problem(ours: Signature, theirs: Signature) -> str | None:
    """Why some call that `theirs` allows fails or means another thing with `ours`, or None."""
    for kind, stars in zip(_VARIADIC, ("*args", "**kwargs"), strict=True):
        if any(p.kind is kind for p in theirs.parameters.values()) and not any(
            p.kind is kind for p in ours.parameters.values()
        ):
            return f"{stars} is missing"
    for description, args, kwargs in _calls(theirs):
        try:
            bound = ours.bind(*args, **kwargs).arguments
        except TypeError as error:
            return f"a call {description} fails: {error}"
        # Each argument is its parameter's own name, so that one that lands elsewhere shows.
        for name, value in bound.items():
            if (
                ours.parameters[name].kind is Parameter.POSITIONAL_OR_KEYWORD
                and value != name
                and theirs.parameters[value].kind is not Parameter.POSITIONAL_ONLY
            ):
                return f"a call {description} puts {value!r} into {name!r}"
    return None


def _calls(signature: Signature) -> Iterator[tuple[str, list[str], dict[str, str]]]:
    """The shapes of call that a signature allows: all or only required parameters, by position or by keyword."""
    for which, optional in (("all parameters", True), ("the required parameters only", False)):
        wanted = [
            p
            for p in signature.parameters.values()
            if p.kind not in _VARIADIC and (optional or p.default is Parameter.empty)
        ]
        for how, by_position in (("by keyword", (Parameter.POSITIONAL_ONLY,)), ("by position", _POSITIONAL)):
            args = [p.name for p in wanted if p.kind in by_position]
            kwargs = {p.name: p.name for p in wanted if p.kind not in by_position}
            yield f"with {which} {how}", args, kwargs
