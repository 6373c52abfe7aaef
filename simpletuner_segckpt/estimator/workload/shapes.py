"""The inputs of a training step at real size, from the ``[training]`` table of a family file.

On top of what ``tiny.make`` understands: a dimension or ``fill`` may be an expression, ``ones`` or
``zeros`` is the number of leading columns of a mask that are true or false, ``value`` is a number
and ``each`` stands for a list with one entry for each sample. ``when`` is a switch of the model's
config without which the argument is None.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from ...messages.errors import FamilyError

_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
}


def resolved(spec: Any, words: Mapping[str, int]) -> Any:
    """``spec`` in terms that ``tiny.make`` understands. Raises ``FamilyError``."""
    if isinstance(spec, (list, tuple)):
        return [resolved(entry, words) for entry in spec]
    if not isinstance(spec, Mapping):
        return spec
    if "when" in spec:
        rest = {key: value for key, value in spec.items() if key != "when"}
        return resolved(rest, words) if number(spec["when"], words) else None
    if "each" in spec:
        return [resolved(spec["each"], words) for _ in range(words["batch"])]
    if "value" in spec:
        return number(spec["value"], words)
    if "shape" not in spec:
        return {name: resolved(value, words) for name, value in spec.items()}
    shape = [number(size, words) for size in spec["shape"]]
    for leading, name in enumerate(("zeros", "ones")):
        if name in spec:
            length = number(spec[name], words)
            row = [leading if column < length else 1 - leading for column in range(shape[-1])]
            return {"values": [row] * shape[0], "dtype": spec.get("dtype", "bool")}
    if isinstance(spec.get("fill"), str):
        spec = {**spec, "fill": number(spec["fill"], words)}
    return {**spec, "shape": shape}


def number(expression: str | int, words: Mapping[str, int]) -> int:
    """The value of a sum of products of words and integers; a division is rounded down."""
    if isinstance(expression, int):
        return expression
    try:
        return _value(ast.parse(expression, mode="eval").body, words)
    except (KeyError, SyntaxError, ValueError, ZeroDivisionError) as error:
        raise FamilyError(f"training: {expression!r} cannot be worked out: {error!r}") from None


def _value(node: ast.expr, words: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return words[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, words), _value(node.right, words))
    raise ValueError(ast.dump(node))
