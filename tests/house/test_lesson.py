"""The lesson keeps to its budget: one file that is read in one sitting, in short functions."""

import ast
import io
import statistics
import tokenize
from pathlib import Path

TEXT = (Path(__file__).parents[2] / "minirlvr.py").read_text()
SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def has_docstring(node) -> bool:
    first = node.body[0]
    return isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)


def docstring_lines(tree) -> set[int]:
    """The numbers of the lines that docstrings fill."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    found = [node.body[0] for node in ast.walk(tree) if isinstance(node, documented) and has_docstring(node)]
    return {line for node in found for line in range(node.lineno, node.end_lineno + 1)}


def code_lines(text: str) -> set[int]:
    """The numbers of the lines that hold code: no docstring, no comment alone, no blank.

    >>> sorted(code_lines('x = (  # one' + chr(10) + '    # two' + chr(10) + '    1)' + chr(10)))
    [1, 3]
    """
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    spoken = {line for t in tokens if t.type not in SILENT for line in range(t.start[0], t.end[0] + 1)}
    return spoken - docstring_lines(ast.parse(text))


def body_lengths(text: str) -> dict[str, int]:
    """name -> lines of code in the body of each function, those of classes too; a function in a function is its own."""
    code, lengths = code_lines(text), {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            lines = set(range(node.body[0].lineno, node.end_lineno + 1)) & code
            lengths[f"{node.name} (line {node.lineno})"] = len(lines)
    return lengths


def test_the_lesson_is_at_most_850_lines():
    """Of which at most 520 are code; the rest says what it does and why."""
    assert len(TEXT.splitlines()) <= 850
    assert len(code_lines(TEXT)) <= 520


def test_no_function_is_longer_than_60_lines():
    """And half of them are shorter than 15."""
    lengths = body_lengths(TEXT)
    assert len(lengths) > 40
    assert max(lengths.values()) <= 60, max(lengths, key=lengths.get)
    assert statistics.median(lengths.values()) < 15


def test_every_public_function_and_class_says_what_it_does():
    """A docstring on each; a method of three lines of code may do without."""
    silent = [
        node.name
        for node in ast.parse(TEXT).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not has_docstring(node)
    ]
    assert not silent
