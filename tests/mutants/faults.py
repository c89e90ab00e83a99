"""Which faults a module can have: each is one small change of its source, as a hand that slips makes it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

# How an operator is written, and what a slip makes of it.
_SLIPS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
_NEGATED_BY_FLIP = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
_OTHER_NAME = {"min": "max", "max": "min", "any": "all", "all": "any", "amin": "amax", "amax": "amin"}
_TELLS = {"debug", "info", "warn", "warning", "warn_once"}  # calls of these say something and do nothing
_ASKS = {"isinstance", "getattr", "hasattr", "issubclass"}  # calls of these name two arguments of different types


@dataclass(frozen=True)
class Fault:
    """One change of a module's source.

    Args:
        function: The function it is in, with its class; empty at the module's level.
        line: The first line that changes, from 1.
        last_line: The last one.
        start: Where the replaced text begins, in bytes.
        end: Where it ends.
        text: What stands there instead.
    """

    function: str
    line: int
    last_line: int
    start: int
    end: int
    text: str

    def apply(self, source: str) -> str:
        """Return the source with this fault."""
        content = source.encode()
        return (content[: self.start] + self.text.encode() + content[self.end :]).decode()

    def lines(self, source: str) -> tuple[str, str]:
        """Return the lines that change, before and after, each as one line without indentation."""
        after, last = self.apply(source), self.last_line + self.text.count("\n")
        last -= source.encode()[self.start : self.end].count(b"\n")
        return _joined(source, self.line, self.last_line), _joined(after, self.line, last)


def faults(source: str) -> list[Fault]:
    """Return all faults of a module, in the order of its source.

    Messages, docstrings, types and decorators have none, nor have functions that Triton compiles from their text.
    """
    tree = ast.parse(source)
    starts = [0, *_running_sum(len(line) for line in source.encode().splitlines(keepends=True))]
    found = []
    for function, node in _walk(tree, ""):
        for part, text in _changes(node, source):
            start, end = starts[part.lineno - 1] + part.col_offset, starts[part.end_lineno - 1] + part.end_col_offset
            found.append(Fault(function, part.lineno, part.end_lineno, start, end, text))
    return found


def _running_sum(lengths: Iterator[int]) -> Iterator[int]:
    total = 0
    for length in lengths:
        total += length
        yield total


def _joined(source: str, first: int, last: int) -> str:
    return " ".join(line.strip() for line in source.splitlines()[first - 1 : last])


def _walk(node: ast.AST, function: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield the nodes that may be wrong, each with the name of its function."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        if any("triton" in ast.unparse(decorator) for decorator in node.decorator_list):
            return
        function = f"{function}.{node.name}".lstrip(".")
    yield function, node
    for child in _children(node):
        yield from _walk(child, function)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the children of a node but for messages, types, decorators and imports."""
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom | ast.arg) or _tells(node):
        return
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    skipped = {*getattr(node, "decorator_list", ()), getattr(node, "annotation", None), getattr(node, "returns", None)}
    yield from (child for child in ast.iter_child_nodes(node) if child not in skipped)


def _tells(node: ast.AST) -> bool:
    """Return whether a call makes an error or tells users something."""
    name = _called(node)
    return name in _TELLS or name.endswith(("Error", "Warning"))


def _called(node: ast.AST) -> str:
    function = node.func if isinstance(node, ast.Call) else None
    return (
        function.id if isinstance(function, ast.Name) else function.attr if isinstance(function, ast.Attribute) else ""
    )


def _changes(node: ast.AST, source: str) -> Iterator[tuple[ast.AST, str]]:
    """Yield each change of one node: which part of it is replaced, and by what."""
    yield from chain(_of_statement(node), _of_test(node, source), _of_operator(node, source), _of_value(node, source))


def _of_statement(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Leave out a call, a raise, or an assignment to a part of something; return nothing."""
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not _tells(node.value)
    is_part = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript)
    if is_call or is_part or isinstance(node, ast.Raise | ast.AugAssign):
        yield node, "pass"
    if isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
        yield node, "return None"


def _of_test(node: ast.AST, source: str) -> Iterator[tuple[ast.AST, str]]:
    """Negate the condition of an if, a while or a comprehension."""
    tests = node.ifs if isinstance(node, ast.comprehension) else [getattr(node, "test", None)]
    for test in tests:
        flips = isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], _NEGATED_BY_FLIP)
        is_not = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        if isinstance(test, ast.expr) and not flips and not is_not:
            yield test, f"not ({ast.get_source_segment(source, test)})"


def _of_operator(node: ast.AST, source: str) -> Iterator[tuple[ast.AST, str]]:
    """Flip a comparison, swap and with or, plus with minus; drop a not."""
    match node:
        case ast.UnaryOp(op=ast.Not()):
            yield node, _text(node.operand, source)
            return
        case ast.Compare(left=left, ops=[op, *_], comparators=[right, *_]):
            pass
        case ast.BoolOp(op=op, values=[left, right, *_]):
            pass
        case ast.BinOp(op=op, left=left, right=right) if not {type(left), type(right)} & {ast.JoinedStr, ast.List}:
            pass
        case _:
            return
    if type(op) in _SLIPS:
        gap = _between(left.end_lineno, left.end_col_offset, right.lineno, right.col_offset)
        yield gap, (ast.get_source_segment(source, gap) or "").replace(*_SLIPS[type(op)], 1)


def _of_value(node: ast.AST, source: str) -> Iterator[tuple[ast.AST, str]]:
    """Change a number by one, a truth, the order of two arguments, or which of several is taken."""
    match node:
        case ast.Constant(value=bool()):
            yield node, str(not node.value)
        case ast.Constant(value=int()):
            yield node, str(node.value + 1)
        case ast.Call(func=ast.Name(id=name)) if name in _OTHER_NAME:
            yield node.func, _OTHER_NAME[name]
        case ast.Call(func=ast.Attribute(value=inner, attr=name)) if name in _OTHER_NAME:
            yield node.func, f"{_text(inner, source)}.{_OTHER_NAME[name]}"
    if isinstance(node, ast.Call) and not _tells(node) and _called(node) not in _ASKS and len(node.args) > 1:
        first, second = (ast.get_source_segment(source, each) for each in node.args[:2])
        if first != second and all(isinstance(each, ast.Name | ast.Attribute) for each in node.args[:2]):
            a, b = node.args[:2]
            yield _between(a.lineno, a.col_offset, b.end_lineno, b.end_col_offset), f"{second}, {first}"


def _between(line: int, column: int, end_line: int | None, end_column: int | None) -> ast.AST:
    """Return a node that stands for a part of the source."""
    return ast.Pass(lineno=line, col_offset=column, end_lineno=end_line, end_col_offset=end_column)


def _text(node: ast.expr, source: str) -> str:
    """Return the source of an operand, in the parentheses that it may have lost."""
    text = ast.get_source_segment(source, node) or ""
    is_whole = isinstance(
        node, ast.Name | ast.Constant | ast.Attribute | ast.Call | ast.Subscript | ast.Tuple | ast.List
    )
    return text if is_whole else f"({text})"
