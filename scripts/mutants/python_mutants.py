"""Python source with one thing wrong: every way of breaking a rule at one place of its syntax tree."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

COMPARISONS: dict[type, type] = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
REVERSED: dict[type, type] = {ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.GtE: ast.Lt}
OPERATORS: dict[type, type] = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
SWAPPED_NAMES = {
    "target": "law",
    "law": "target",
    "token_law": "token_mass",
    "children": "parents",
    "parents": "children",
}
JUNCTIONS: dict[type, type] = {ast.And: ast.Or, ast.Or: ast.And}
TINY = 1e-3  # constants below are bounds on rounding
CAPS = {"clip", "minimum", "maximum", "min", "max"}


def replacements(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """(what, node in its place) for one node of the syntax tree."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        for table in (COMPARISONS, REVERSED):
            new = table.get(type(node.ops[0]))
            if new is not None:
                yield f"{type(node.ops[0]).__name__} -> {new.__name__}", _with(node, ops=[new()])
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        new = OPERATORS[type(node.op)]
        yield f"{type(node.op).__name__} -> {new.__name__}", _with(node, op=new())
    if isinstance(node, ast.BoolOp):
        new = JUNCTIONS[type(node.op)]
        yield f"{type(node.op).__name__} -> {new.__name__}", _with(node, op=new())
    if isinstance(node, ast.Constant) and type(node.value) is float and 0 < node.value < TINY:
        yield f"{node.value:g} times 1e8", ast.Constant(node.value * 1e8)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CAPS:
        kept = node.func.value if node.func.attr == "clip" else node.args[0] if len(node.args) == 2 else None
        if kept is not None:
            yield f"drop {node.func.attr}", kept
    if isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value in (0, 1):
        yield f"{node.value} -> {1 - node.value}", ast.Constant(type(node.value)(1 - node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Invert, ast.Not)):
        yield f"drop {type(node.op).__name__}", node.operand
    if isinstance(node, ast.Attribute) and node.attr in ("target", "law") and _is_operands(node):
        yield f"{node.attr} -> {SWAPPED_NAMES[node.attr]}", _with(node, attr=SWAPPED_NAMES[node.attr])
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in ("children", "parents"):
        yield f"{node.id} -> {SWAPPED_NAMES[node.id]}", _with(node, id=SWAPPED_NAMES[node.id])


def _is_operands(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "operands"


def _with(node: ast.AST, **fields) -> ast.AST:
    changed = copy.deepcopy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def changes(source: str) -> Iterator[tuple[int, str, str]]:
    """(line, what, changed source), one place at a time; strings, annotations, imports and error messages stay.

    Outside functions only tiny constants change.
    """
    module = ast.parse(source)
    holders = {id(node): (parent, name) for parent in ast.walk(module) for name, node in _fields(parent)}
    places = [node for function in _functions(module) for node in _code(function)]
    places += [node for statement in module.body if isinstance(statement, ast.Assign) for node in _tiny(statement)]
    for place in places:
        for what, new in replacements(place):
            yield place.lineno, what, _written(module, *holders[id(place)], place, new)


def _fields(parent: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """(name of the field, node) of every child."""
    for name, value in ast.iter_fields(parent):
        yield from ((name, node) for node in _nodes(value))


def _written(module: ast.Module, parent: ast.AST, name: str, old: ast.AST, new: ast.AST) -> str:
    """The module's source with `new` where `old` stands; the tree itself is left as it was."""
    value = getattr(parent, name)
    setattr(parent, name, [new if node is old else node for node in value] if isinstance(value, list) else new)
    try:
        return ast.unparse(module)
    finally:
        setattr(parent, name, value)


def _functions(module: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef) and node.name != "__repr__":
            yield node


def _tiny(statement: ast.Assign) -> list[ast.AST]:
    constants = [node for node in ast.walk(statement.value) if isinstance(node, ast.Constant)]
    return [node for node in constants if type(node.value) is float and 0 < node.value < TINY]


def _code(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Expressions of the body, without raise statements and nested functions (those come on their own)."""
    queue: list[ast.AST] = list(function.body)
    while queue:
        node = queue.pop()
        if isinstance(node, (ast.Raise, ast.FunctionDef)):
            continue
        yield node
        queue += [child for name, child in _fields(node) if name != "annotation"]


def _nodes(value: object) -> list[ast.AST]:
    return [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, ast.AST)]
