"""An environment with one tool: it replies to `<calc>48/2</calc>` with `<result>24</result>`.

Arithmetic only: numbers, + - * / // % and parentheses. What cannot be calculated gets the reason as its result, so that the
model can correct itself.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

OPEN, CLOSE = "<calc>", "</calc>"
LONGEST = 200  # characters of an expression

OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


class Calculator:
    """Replies to turns of the policy that end with a call; any other turn ends the sequence."""

    def reset(self, example: Mapping[str, Any]) -> None:
        """Nothing is kept between turns."""

    def step(self, completion: str) -> str | None:
        """Returns the result of the call at the end of a turn, or None."""
        _, called, call = completion.rpartition(OPEN)
        if not called:
            return None
        expression, closed, _ = call.partition(CLOSE)
        return f"{'' if closed else CLOSE}<result>{calculate(expression)}</result>\n"


def calculate(expression: str) -> str:
    """Returns the value of the expression, or why it has none."""
    if len(expression) > LONGEST:
        return "error: too long"
    try:
        return f"{_value(ast.parse(expression.strip(), mode='eval').body):.10g}"
    except ZeroDivisionError:
        return "error: division by zero"
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        return "error: not arithmetic"


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.operand))
    raise ValueError("not arithmetic")
