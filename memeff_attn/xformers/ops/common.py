"""The registry of operators that `info` lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch


class BaseOperator:
    """An operator by name."""

    OPERATOR: Any = None
    NAME: str = ""
    OPERATOR_CATEGORY: str = ""

    @classmethod
    def is_available(cls) -> bool:
        """Whether this installation has it."""
        return cls.OPERATOR is not None

    @classmethod
    def unavailable_reason(cls) -> str:
        """Why `is_available` is False, in one line."""
        return "unavailable: not a part of memeff_attn"


OPERATORS_REGISTRY: list[type[BaseOperator]] = []
FUNC_TO_XFORMERS_OPERATOR: dict[Any, type[BaseOperator]] = {}

_Class = TypeVar("_Class", bound=type[BaseOperator])


def register_operator(cls: _Class) -> _Class:
    """Puts a class into the registry."""
    OPERATORS_REGISTRY.append(cls)
    FUNC_TO_XFORMERS_OPERATOR[cls.OPERATOR] = cls
    return cls


def get_operator(library: str, name: str) -> Callable[..., Any]:
    """torch.ops.library.name; where there is none, a function that says so when it is called."""
    try:
        found: Callable[..., Any] = getattr(getattr(torch.ops, library), name)
        return found
    except (AttributeError, RuntimeError):

        def no_such_operator(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError(
                f"No such operator {library}::{name}: memeff_attn has xFormers' attention, and no "
                "compiled operators under xFormers' names."
            )

        return no_such_operator


def get_xformers_operator(name: str) -> Callable[..., Any]:
    """torch.ops.xformers.name, as `get_operator`."""
    return get_operator("xformers", name)


def _get_storage_base(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()
