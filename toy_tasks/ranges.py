"""What a choice may be: a number's type and bounds in one, to stand beside its default; a name among those known."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints


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


def range_of(hint) -> Range | None:
    """The range that an annotation names, also inside an option.

    >>> range_of(Annotated[int, Range(1, 5)] | None), range_of(str)
    (Range(least=1, most=5), None)
    """
    found = [part for part in getattr(hint, "__metadata__", ()) if isinstance(part, Range)]
    found += [inner for option in get_args(hint) if (inner := range_of(option))]
    return found[0] if found else None


def first_fault(dials: Any) -> tuple[str, str] | None:
    """Of a dataclass of dials, the first number outside its range or word outside its Literal: its name, what is wrong.

    NaN is in no range. None where all is well.
    """
    for name, hint in get_type_hints(type(dials), include_extras=True).items():
        value, allowed = getattr(dials, name), range_of(hint)
        if allowed and value is not None and not allowed.least <= value <= allowed.most:
            return name, f"is {value!s:.40}: it must be from {allowed.least:g} to {allowed.most:g}"
        if get_origin(hint) is Literal and value not in get_args(hint):
            return name, f"is {value!r:.40}: it must be one of {', '.join(map(str, get_args(hint)))}"
    return None


def checked(dials: Any) -> Any:
    """A dataclass of dials as it is. Raises ValueError for the first fault in it."""
    fault = first_fault(dials)
    if fault:
        raise ValueError(" ".join(fault))
    return dials


Count = Annotated[int, Range(1, 10**6)]
Rate = Annotated[float, Range(1e-12, 1e6)]
Weight = Annotated[float, Range(0, 1e6)]
Share = Annotated[float, Range(0, 1)]
