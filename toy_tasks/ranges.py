"""What a choice may be: a number's type and bounds in one, to stand beside its default; a name among those known."""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple


class Range(NamedTuple):
    """The least and the most that a number may be, both allowed."""

    least: float
    most: float


def choose(what: str, name: str, known: Mapping[str, Any]) -> Any:
    """The entry of a table by its name. Raises ValueError, which names what there is, for any other name.

    >>> choose("policy", "tyo", {"toy": 1})
    Traceback (most recent call last):
    ValueError: unknown policy 'tyo'; choose one of toy
    """
    if name not in known:
        raise ValueError(f"unknown {what} {name!r:.60}; choose one of {', '.join(known)}")
    return known[name]


Count = Annotated[int, Range(1, 10**6)]
Rate = Annotated[float, Range(1e-12, 1e6)]
Weight = Annotated[float, Range(0, 1e6)]
Share = Annotated[float, Range(0, 1)]
