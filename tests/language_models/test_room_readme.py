"""The README of the room tells the truth about what can be checked without running it."""

import re
from pathlib import Path

import language_models

ROOM = Path(language_models.__file__).parent
README = (ROOM / "README.md").read_text()


def test_every_link_and_picture_exists():
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", README):
        assert (ROOM / target).exists(), target


def test_every_file_is_in_the_table():
    names = re.findall(r"^\| \[(\w+\.py)\]", README, re.MULTILINE)
    assert sorted([*names, "__init__.py"]) == sorted(path.name for path in ROOM.glob("*.py"))
