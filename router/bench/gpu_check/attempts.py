"""One row that cannot be had should not hide the others."""

from collections.abc import Callable
from typing import TypeVar

from triton.errors import TritonError

T = TypeVar("T")


def attempt(measure: Callable[[], T]) -> T | str:
    """What `measure` gives, or in one line why torch or Triton could not do it."""
    try:
        return measure()
    except (RuntimeError, TritonError, TypeError, ValueError) as error:
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {lines[0][:200]}"
