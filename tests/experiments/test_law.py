"""The map of the table world and what lasted: read from rows whose verdict is known."""

import pytest

from experiments import law
from experiments.law import Setting, settings_of, told


def setting(name="grpo", R=0.5, modes=1.2):
    return Setting(name, (R, R - 0.1, R + 0.1), (modes, modes - 0.2, modes + 0.2), (0.98, 0.97, 0.99))


@pytest.mark.parametrize(
    ("R", "modes", "right"),
    [(0.9, 1.4, True), (0.9, 1.6, False), (1.1, 3.1, True), (1.1, 2.9, False), (1.1, 1.0, False), (0.2, 5.0, False)],
)
def test_collapse_below_one_and_keeping_above_it(R, modes, right):
    """Reference 5 modes: below R = 1 fewer than 1.5 must be left, above it at least 3."""
    assert setting(R=R, modes=modes).sorted_rightly(reference=5.0) == right


def test_the_exceptions_are_counted_and_named():
    """In order of R, with the fraction that the law sorts rightly."""
    text = told([setting("kept", 1.3, 4.0), setting("odd one", 0.8, 3.0), setting("lost", 0.1, 1.0)], reference=5.0)
    lines = text.splitlines()
    order = [next(i for i, line in enumerate(lines) if line.startswith(name)) for name in ("lost", "odd one", "kept")]
    assert order == sorted(order)
    assert "sorted rightly: 2 of 3" in text and text.endswith("exceptions: odd one")


def test_a_setting_is_its_last_step_on_the_trained_prompts():
    """Means and intervals over seeds of R, modes and pass@1; earlier steps and held-out rows do not count."""
    rows = []
    for seed, end in enumerate((1.0, 1.2)):
        for step, split, R in ((0, "train", 9.0), (40, "train", end), (40, "heldout", 7.0)):
            row = {"method": "grpo+pos", "seed": seed, "step": step, "split": split, "R": R, "effective_modes": 2 * R}
            rows.append(row | {"pass@1": R / 10})
    (found,) = settings_of(rows)
    assert found.name == "grpo+pos"
    assert found.R[0] == pytest.approx(1.1) and found.R[1] < 1.0 and found.R[2] > 1.2
    assert found.modes[0] == pytest.approx(2.2) and found.accuracy[0] == pytest.approx(0.11)


def test_law_and_table_agree_away_from_the_line(tmp_path):
    """Every cell of the map that is more than 5 % away from R = 1; and both kinds of cell are there."""
    found = law.law_map(law.MUS, law.KAPPAS)
    assert law.draw_map(tmp_path / "map.png", found) == 1.0
    assert 0.2 < found.law.double().mean() < 0.8
    assert (tmp_path / "map.png").stat().st_size > 10_000


def test_it_takes_no_arguments():
    with pytest.raises(SystemExit, match=r"usage: python -m experiments\.law"):
        law.main(["--help"])
