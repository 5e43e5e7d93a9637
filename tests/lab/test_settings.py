"""What can be chosen, what a method's name means, and what is refused before anything runs."""

import dataclasses
import itertools
import json
import math
import typing
from typing import NamedTuple

import pytest
from conftest import short_settings
from hypothesis import given
from hypothesis import strategies as st

from lab.folder import read_settings
from lab.settings import Experiment, LanguageModel, Settings, check, check_dials, parse_method
from minirlvr import CALIBRATIONS, ESTIMATORS, resolve_update
from tests.runs import EVERY_METHOD, SAMPLING
from toy_tasks import UserError
from toy_tasks.ranges import Range, range_of
from toy_tasks.sharpening import REGIMES

GROUPS = {part.name: part.type for part in dataclasses.fields(Settings)}


def number_type(hint):
    """int or float where an annotation holds one, bare or inside an option; else None.

    >>> number_type(int | None), number_type(bool), number_type(tuple[str, ...])
    (<class 'int'>, None, None)
    """
    bare = hint.__origin__ if hasattr(hint, "__metadata__") else hint
    return bare if bare in (int, float) else next(filter(None, map(number_type, typing.get_args(bare))), None)


class Number(NamedTuple):
    """A number that can be chosen: where it stands and what it may be."""

    group: str
    name: str
    type: type
    bounds: Range | None

    @property
    def outside(self) -> list:
        """The numbers just outside the range, and those that are in none."""
        low, high = self.bounds
        beyond = [low - 1, high + 1] if self.type is int else [math.nextafter(low, -1e9), math.nextafter(high, 1e9)]
        if high == math.inf:  # the one range that reaches so far: nothing lies above it
            return [beyond[0], math.nan, -math.inf]
        return [*beyond, math.nan, math.inf, -math.inf]


HINTS = [
    (group, name, hint)
    for group, part in GROUPS.items()
    for name, hint in typing.get_type_hints(part, include_extras=True).items()
]
NUMBERS = [Number(group, name, number_type(hint), range_of(hint)) for group, name, hint in HINTS if number_type(hint)]
every_number = pytest.mark.parametrize("number", NUMBERS, ids=[number.name for number in NUMBERS])


def settings_with(number, value) -> Settings:
    """Settings that are right but for this number: of a language model where it is one's."""
    groups = {"experiment": Experiment(policy="hf:model"), "language_model": LanguageModel(dataset="rows.jsonl")}
    settings = Settings(**groups) if number.group == "language_model" else Settings()
    group = dataclasses.replace(getattr(settings, number.group), **{number.name: value})
    return dataclasses.replace(settings, **{number.group: group})


def flag_of(number) -> str:
    return number.name.replace("_", "-")


# --- numbers --------------------------------------------------------------------------------------------------------


def test_every_number_has_a_range():
    """No number is without bounds, every default that is given lies within its own, and the walk finds them all."""
    assert len(NUMBERS) > 30
    for group, name, _, bounds in NUMBERS:
        assert bounds is not None, f"{group}.{name} has no Range"
        default = getattr(GROUPS[group](), name)
        assert default is None or bounds.least <= default <= bounds.most, name
    ranged = {(group, name) for group, name, hint in HINTS if range_of(hint)}
    assert ranged == {(group, name) for group, name, _, _ in NUMBERS}, "a range beside what is no number"


@every_number
def test_a_number_just_outside_its_range_is_refused(number):
    """One line that names the flag, the value and the range; both ends of the range are allowed."""
    low, high = number.bounds
    for value in number.outside:
        with pytest.raises(UserError) as error:
            check(settings_with(number, value))
        assert str(error.value) == f"--{flag_of(number)} is {value!s:.40}: it must be from {low:g} to {high:g}"
    for value in number.bounds:
        check_dials(settings_with(number, value))


@given(st.sampled_from(NUMBERS), st.floats() | st.integers())
def test_a_number_is_refused_exactly_where_it_is_outside(number, value):
    """Any number at all, in any field."""
    settings = settings_with(number, value)
    if number.bounds.least <= value <= number.bounds.most:
        check_dials(settings)
    else:
        with pytest.raises(UserError, match=f"^--{flag_of(number)} is "):
            check_dials(settings)


@every_number
def test_a_folder_with_a_number_outside_its_range_is_refused(folder, number):
    """config.json edited by hand is held to the same ranges, NaN and infinity included: one line for the number."""
    config = json.loads((folder / "config.json").read_text())
    for value in number.outside:
        config["settings"] = dataclasses.asdict(settings_with(number, value))
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError) as error:
            read_settings(folder)
        start, line = f"--resume {folder}: its config.json is damaged or of another version (", str(error.value)
        assert line.startswith(start) and "\n" not in line
        assert line.removeprefix(start).startswith((f"{number.name} is {value}", f"--{flag_of(number)} is {value}"))


# --- methods --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY_METHOD)
def test_every_method_is_read_as_written(name):
    """The estimator may hold plus signs of its own."""
    method = parse_method(name)
    assert method.name == name
    assert "+".join((method.estimator, *method.calibrations)) == name
    assert (method.regime, method.has_memory) == ("task", "dlc" in name)


@pytest.mark.parametrize(
    ("name", "estimator", "regime", "calibrations"),
    [
        ("reinforce++", "reinforce++", "task", ()),
        ("reinforce+++iac", "reinforce++", "task", ("iac",)),
        ("reinforce+++dlc+iac", "reinforce++", "task", ("iac", "dlc")),
        ("reinforce++@tilt+dlc", "reinforce++", "tilt", ("dlc",)),
        ("sharpen", "rloo", "sharpen", ()),
        ("temper+iac", "rloo", "temper", ("iac",)),
        ("grpo@tilt+iac+dlc", "grpo", "tilt", ("iac", "dlc")),
        ("exact", "exact", "task", ()),
    ],
)
def test_a_name_is_an_estimator_a_regime_and_calibrations(name, estimator, regime, calibrations):
    """P2's regimes alone mean RLOO; `@` puts one behind any estimator; calibrations stand behind all."""
    assert tuple(parse_method(name)) == (name, estimator, regime, calibrations)


@pytest.mark.parametrize("stem", [*SAMPLING, "sharpen", "grpo@tilt"])
def test_calibrations_in_any_order_are_the_same_method(stem):
    """Every order means one method, which "each once" counts once."""
    names = ["+".join((stem, *order)) for order in itertools.permutations(CALIBRATIONS)]
    assert len({parse_method(name)[1:] for name in names}) == 1
    assert [parse_method(name).name for name in names] == names
    with pytest.raises(UserError, match="each once"):
        check(short_settings(task="sums", methods=tuple(names)))
    assert check(short_settings(task="sums", methods=(stem, names[0])))


def test_the_same_method_under_two_names_is_refused():
    """`tilt` is RLOO's; the regime `task` is none."""
    for methods in (("tilt", "rloo@tilt"), ("grpo", "grpo@task"), ("rloo+iac", "rloo+iac")):
        with pytest.raises(UserError, match="each once"):
            check(short_settings(task="sums", methods=methods))


REFUSED = ["", "grpp", "exact+iac", "grpo+iac+iac", "GRPO", "grpo+", "+iac", "grpo iac", "grpo+dlc+iac+dlc"]
REFUSED += ["grpo@", "grpo@chess", "@tilt", "exact@tilt", "grpo+iac@tilt", "reinforce", "reinforce+iac", "+", "++"]
REFUSED += ["grpo+iac+dlc+iac", "grpo+ iac", "grpo\niac", "tilt@tilt", "grpo@tilt@tilt", "grpo" * 100]


@pytest.mark.parametrize("name", REFUSED, ids=lambda name: repr(name)[:20])
def test_a_method_that_is_none_is_refused(name):
    """One line that lists the estimators, the regimes and the calibrations; a calibration twice is refused too."""
    with pytest.raises(UserError, match=r"dr_grpo.*\+iac.*\+dlc") as error:
        parse_method(name)
    assert len(str(error.value)) < 400 and "\n" not in str(error.value)
    assert all(regime in str(error.value) for regime in REGIMES if regime != "task")


# --- defaults -------------------------------------------------------------------------------------------------------


def test_defaults_are_pinned():
    """Nothing is on by surprise: no entropy bonus, no KL, clips of .2 and .2, DAPO's .28, one epoch."""
    update = Settings().update
    assert (update.entropy_bonus, update.beta, update.epochs, update.micro_batches) == (0, 0, 1, 1)
    assert (Settings().calibration.alpha, Settings().calibration.importance) == (1.0, "none")
    assert (Settings().sampling.temperature, Settings().sampling.group_size) == (1.0, 8)
    assert Settings().experiment.methods == ("grpo", "grpo+iac", "grpo+dlc", "grpo+iac+dlc")
    assert (Settings().experiment.task, Settings().experiment.seeds) == ("sums", 3)
    averages = {"grpo": "sequence", "dr_grpo": "constant", "dapo": "token", "rloo": "token"}
    for name, estimator in ESTIMATORS.items():
        resolved = resolve_update(update, estimator)
        assert (resolved.clip_low, resolved.clip_high) == (0.2, 0.28 if name == "dapo" else 0.2), name
        assert resolved.aggregate == averages.get(name, resolved.aggregate), name


def test_settings_given_are_settings_used():
    """A clip or an average that is given wins over the paper's."""
    update = dataclasses.replace(Settings().update, clip_low=0.1, clip_high=0.5, aggregate="constant")
    resolved = resolve_update(update, ESTIMATORS["dapo"])
    assert (resolved.clip_low, resolved.clip_high, resolved.aggregate) == (0.1, 0.5, "constant")
    zero = resolve_update(dataclasses.replace(update, clip_low=0.0, clip_high=0.0), ESTIMATORS["grpo"])
    assert (zero.clip_low, zero.clip_high) == (0.0, 0.0)
