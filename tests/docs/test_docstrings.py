"""Each entry of an `Args:` section of the package names a parameter or field, and is on its own line."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping

import pytest
from support.documents import ROOT

FILES = sorted((ROOT / "penstock").rglob("*.py"))
EXAMPLE = '''
class Shape:
    width: int

class Box(Shape):
    """A box.

    Args:
        width: outer width,
            in mm.
        depth: outer depth.
    """

    def __init__(self, depth: int) -> None: ...

def pack(box: Box, *others: Box, gap: int = 0) -> None:
    """Pack boxes.

    Args:
        box: the first box.
        *others: the next boxes.
        gap: distance in mm.

    Raises:
        ValueError: the boxes do not fit.
    """
'''
Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

_SECTION = re.compile(r"^Args:\n((?:    .*\n?|\n)+)", flags=re.MULTILINE)
_ENTRY = re.compile(r"    (\*{0,2}\w+): \S")
"""The first line of an entry. The other lines of the entry have a larger indentation."""


def args_entries(docstring: str) -> list[str]:
    """Return the entries of the ``Args:`` section, with the indentation of their first lines."""
    entries: list[str] = []
    for section in _SECTION.findall(docstring):
        for line in section.rstrip().split("\n"):
            if line.startswith("     ") and entries:
                entries[-1] += " " + line.strip()
            else:
                entries.append(line)
    return entries


def parameter_names(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return the parameter names except self and cls, with the stars of ``*args`` and ``**kwargs``."""
    arguments = function.args
    names = {argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    for stars, argument in (("*", arguments.vararg), ("**", arguments.kwarg)):
        if argument is not None:
            names.add(stars + argument.arg)
    return names - {"self", "cls"}


def field_names(definition: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> set[str]:
    """Return the annotated fields and the parameters of ``__init__`` and ``__new__``, also of base classes.

    Args:
        definition: the class.
        classes: the classes of the package, by name. Other base classes are ignored.
    """
    names: set[str] = set()
    for base in definition.bases:
        base_name = ast.unparse(base).split("[")[0].split(".")[-1]
        if base_name in classes and classes[base_name] is not definition:
            names |= field_names(classes[base_name], classes)
    for member in definition.body:
        if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
            names.add(member.target.id)
        elif isinstance(member, ast.FunctionDef) and member.name in ("__init__", "__new__"):
            names |= parameter_names(member)
    return names


def entry_errors(entry: str, known_names: set[str]) -> Iterator[str]:
    """Yield the errors of an entry: its form, unknown names, and further entries in its text."""
    match = _ENTRY.match(entry)
    if match is None:
        yield f"not an entry: {entry.strip()!r}"
        return
    if match[1] not in known_names:
        yield f"no parameter or field: {match[1]!r}"
    for name in re.findall(r"[.,;] (\*{0,2}\w+): ", entry[match.end(1) :]):
        if name in known_names:
            yield f"not on its own line: {name!r}"


def docstring_errors(source: str, classes: Mapping[str, ast.ClassDef]) -> list[str]:
    """Return the errors in the ``Args:`` sections of a module, each with line and name of its definition."""
    errors: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, Documented):
            continue
        names = field_names(node, classes) if isinstance(node, ast.ClassDef) else parameter_names(node)
        for entry in args_entries(ast.get_docstring(node) or ""):
            errors += [f"{node.lineno} {node.name}: {error}" for error in entry_errors(entry, names)]
    return errors


def class_definitions(sources: Iterable[str]) -> dict[str, ast.ClassDef]:
    """Return the classes of some modules by name."""
    nodes = (node for source in sources for node in ast.walk(ast.parse(source)))
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


def test_entries_of_args_sections_name_parameters_or_fields_and_are_on_their_own_lines() -> None:
    sources = {path.relative_to(ROOT): path.read_text() for path in FILES}
    assert sum(source.count("  Args:\n") for source in sources.values()) > 500
    classes = class_definitions(sources.values())
    errors = [
        f"{path}:{error}" for path, source in sources.items() for error in docstring_errors(source, classes)
    ]
    assert not errors, "\n".join(errors)


def test_a_correct_docstring_has_no_errors() -> None:
    assert docstring_errors(EXAMPLE, class_definitions([EXAMPLE])) == []


@pytest.mark.parametrize(
    ("original", "faulty", "error"),
    [
        ("depth: outer", "height: outer", "5 Box: no parameter or field: 'height'"),
        ("width: int", "size: int", "5 Box: no parameter or field: 'width'"),
        ("        *others: ", "        others: ", "16 pack: no parameter or field: 'others'"),
        ("box: the", "boxes: the", "16 pack: no parameter or field: 'boxes'"),
        (".\n        gap: ", ". gap: ", "16 pack: not on its own line: 'gap'"),
        (" box.\n        *others: ", " box, *others: ", "16 pack: not on its own line: '*others'"),
        ("gap: distance", "box, gap: distance", "16 pack: not an entry: 'box, gap: distance in mm.'"),
        ("    in mm.", "in mm.", "5 Box: not an entry: 'in mm.'"),
    ],
)
def test_an_error_in_a_docstring_is_detected(original: str, faulty: str, error: str) -> None:
    assert EXAMPLE.count(original) == 1
    source = EXAMPLE.replace(original, faulty)
    assert docstring_errors(source, class_definitions([source])) == [error]
