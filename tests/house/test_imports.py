"""The rooms of the house: each imports what stands before it and nothing behind, but for two doors that are named."""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("toy_tasks", "minirlvr", "lab", "ports", "language_models", "benchmarks", "experiments")
DOORS = {("minirlvr", "lab.command_line"), ("lab.command_line", "language_models.run")}
STDLIB = sys.stdlib_module_names


def module_of(path: Path) -> str:
    """lab/run.py -> lab.run; lab/__init__.py -> lab."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def files_of(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py")) if (ROOT / room).is_dir() else [ROOT / f"{room}.py"]


def imports_of(tree: ast.Module, module: str, package: bool = False) -> list[tuple[str, bool]]:
    """(module that is imported, whether it is put off) of every import; what is put off waits for a call or for
    `__main__`. Relative ones are spelled out.

    >>> imports_of(ast.parse("import torch.nn" + chr(10) + "def f():" + chr(10) + "    from lab import run"), "x")
    [('torch.nn', False), ('lab', True), ('lab.run', True)]
    """
    later = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or is_main_guard(node)
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in later) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            up = module.split(".")[: len(module.split(".")) - node.level + package] if node.level else []
            base = ".".join([*up, *filter(None, [node.module])])
            inside = [f"{base}.{alias.name}" for alias in node.names if is_module(base, alias.name)]
            found += [(name, id(node) in later) for name in (base, *inside)]
    return found


def is_module(base: str, name: str) -> bool:
    """Is `name` a file or folder of the package `base`, not a thing inside of a file?"""
    folder = ROOT.joinpath(*base.split("."))
    return (folder / f"{name}.py").exists() or (folder / name).is_dir()


def is_main_guard(node) -> bool:
    """Is this `if __name__ == "__main__":`, and no wider?"""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def room_of(name: str) -> str | None:
    """The room that a module belongs to, None for a stranger's."""
    first = name.split(".")[0]
    return first if first in ROOMS else None


def every_import() -> list[tuple[str, str, bool]]:
    """(module, what it imports, put off?) of every import in every room."""
    return [
        (module_of(path), name, later)
        for room in ROOMS
        for path in files_of(room)
        if path.exists()
        for name, later in imports_of(ast.parse(path.read_text()), module_of(path), path.name == "__init__.py")
    ]


IMPORTS = every_import()


def test_the_walk_sees_the_rooms():
    """Some imports that are known to be there, so that an empty walk is no success."""
    seen = {(module, name) for module, name, _ in IMPORTS}
    assert {("lab.run", "minirlvr"), ("lab.run", "lab.checkpoint"), ("toy_tasks.sums", "toy_tasks.task")} <= seen
    assert {room_of(module) for module, _, _ in IMPORTS} >= set(ROOMS) - {"ports"}


def test_a_room_imports_only_what_stands_before_it():
    """toy_tasks, the lesson, the lab, ports, language models, benchmarks, experiments: nothing looks ahead."""
    wrong = {
        (module, name)
        for module, name, _ in IMPORTS
        if room_of(name) and ROOMS.index(room_of(name)) > ROOMS.index(room_of(module)) and (module, name) not in DOORS
    }
    assert not wrong


def test_the_two_doors_are_there_and_open_late():
    """Only inside a function, or under __main__: importing a room never opens one."""
    for door in DOORS:
        opened = [later for module, name, later in IMPORTS if (module, name) == door]
        assert opened == [True], door


def test_the_lesson_imports_torch_and_toy_tasks_only():
    """And the standard library."""
    others = {name.split(".")[0] for module, name, later in IMPORTS if module == "minirlvr" and not later}
    assert others - STDLIB == {"torch", "toy_tasks"}


def test_no_room_imports_what_stands_on_top():
    """Tests, notebooks and results are imported by no room."""
    tops = {"tests", "conftest", "notebooks", "results"}
    assert not [(module, name) for module, name, _ in IMPORTS if name.split(".")[0] in tops]


def test_one_file_at_the_root():
    """The lesson; results are data alone."""
    assert [path.name for path in ROOT.glob("*.py")] == ["minirlvr.py"]
    assert not list((ROOT / "results").rglob("*.py"))


def test_rooms_are_packages_that_do_nothing_by_themselves():
    """An `__init__.py` in each with a docstring; tests have none."""
    for room in ROOMS:
        if (ROOT / room).is_dir():
            assert ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text())), room
    assert not list((ROOT / "tests").rglob("__init__.py"))


def sources() -> list[Path]:
    """Every Python file of the house."""
    folders = (*ROOMS, "notebooks", "tests", "results")
    inside = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return sorted({*ROOT.glob("*.py"), *inside} - {Path(__file__)})


def bends_the_path(node) -> bool:
    """Does a statement or call change where Python looks for modules?

    >>> lines = "sys.path.insert(0, x)", "sys.path[:0] = [x]", "sys.path += x", "site.addsitedir(x)", "print(sys.path)"
    >>> [bends_the_path(node) for line in lines for node in ast.walk(ast.parse(line)) if isinstance(node, CHANGES)]
    [True, True, True, True, False]
    """
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) in ("site.addsitedir", *(f"sys.path.{name}" for name in ADDING))
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(ast.unparse(target).startswith("sys.path") for target in targets)


CHANGES = ast.Call, ast.Assign, ast.AugAssign
ADDING = "append", "extend", "insert"


def test_no_file_bends_the_path():
    """What is imported is installed or lies at the root. (A notebook must: it may be started in its own folder.)"""
    bent = [
        str(path.relative_to(ROOT))
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, CHANGES) and bends_the_path(node)
    ]
    assert not bent


def test_no_test_imports_another():
    """What tests share stands in conftest.py or in a module of helpers."""
    wrong = [
        (path.name, name)
        for path in (ROOT / "tests").rglob("*.py")
        for name, _ in imports_of(ast.parse(path.read_text()), module_of(path))
        if any(part.startswith("test_") for part in name.split("."))
    ]
    assert not wrong
