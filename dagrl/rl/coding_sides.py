"""What runs in the two sandboxes of a coding task: the program, and its tests.

    python -I -c SOURCE program|tests FD

The program's names are `Remote` objects in the tests: calls, attributes and items go to the program's process over the
socket FD, and numbers, texts and containers of them come back by value. Tests compare values in their own process. It reads
no pickle that names a class or function, as the program may have written it.
"""

import builtins
import io
import json
import operator
import pickle
import resource
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import IO, Any

LIMITS = {"CPU": 10, "AS": 2 << 30, "FSIZE": 16 << 20, "CORE": 0, "NPROC": 256}
"""Limits of each process: `resource.RLIMIT_*`."""

VALUES: tuple[type[Any], ...] = (bool, int, float, str, bytes)
CONTAINERS = (list, tuple, set, frozenset)
CHANGED_IN_PLACE = (list, dict, set)

REQUESTS: dict[str, Callable[..., Any]] = {
    **{name: getattr(builtins, name) for name in ("bool", "getattr", "iter", "len", "next", "repr", "setattr", "str")},
    **{name: getattr(operator, name) for name in ("call", "eq", "getitem", "setitem")},
}


class Number(int):
    """Stands for an object of the program in what is sent to the tests."""


class Replies(pickle.Pickler):
    def persistent_id(self, value: object) -> int | None:
        return int(value) if type(value) is Number else None


class Requests(pickle.Unpickler):
    def __init__(self, requests: IO[bytes], objects: Sequence[object]) -> None:
        super().__init__(requests)
        self.persistent_load = objects.__getitem__  # type: ignore[method-assign]


class Program:
    """The program's names and objects, and the answers to what tests ask of them."""

    def __init__(self, text: str) -> None:
        self.objects: list[object] = []
        self._numbers: dict[int, Number] = {}
        module = sys.modules["program"] = ModuleType("program")
        self._names = vars(module)
        exec(compile(text, "program", "exec", dont_inherit=True), self._names)  # noqa: S102  # in a sandbox

    def names(self) -> dict[str, Any]:
        """Returns the names that tests get; of modules those of the standard library, which they import again."""
        return {
            name: self._plain(value)
            for name, value in self._names.items()
            if not isinstance(value, ModuleType) or name in sys.stdlib_module_names
        }

    def answer(self, name: str, arguments: Sequence[Any], keywords: dict[str, Any]) -> tuple[str, Any, Any]:
        """Returns the first builtin class of what the request raises, or "", its result, and the arguments after it."""
        try:
            raised, result = "", self._plain(REQUESTS[name](*arguments, **keywords))
        except Exception as error:
            raised = next(base.__name__ for base in type(error).__mro__ if getattr(builtins, base.__name__, None) is base)
            result = str(error)
        return raised, result, [self._plain(item) if isinstance(item, CHANGED_IN_PLACE) else None for item in arguments]

    def _plain(self, value: Any) -> Any:
        """Returns values as those of Python's own class; other objects, and those of the program's classes, by number."""
        if type(value).__module__ == "program" and not hasattr(value, "_fields"):
            return self._number(value)
        if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a number of numpy or torch
            value = value.item()
        for base in VALUES:
            if isinstance(value, base):
                return base(value)
        for kind in CONTAINERS:
            if isinstance(value, kind):
                return kind(map(self._plain, value))
        if isinstance(value, dict):
            return {self._plain(key): self._plain(item) for key, item in value.items()}
        return None if value is None else self._number(value)

    def _number(self, value: object) -> Number:
        number = self._numbers.setdefault(id(value), Number(len(self.objects)))
        if number == len(self.objects):
            self.objects.append(value)
        return number


def run_program(text: str, requests: IO[bytes], replies: IO[bytes]) -> None:
    """Runs the program, and answers its tests until they have ended."""
    program = Program(text)
    reply: object = program.names()
    while True:
        Replies(replies).dump(reply)
        replies.flush()
        reply = program.answer(*Requests(requests, program.objects).load())


# In the tests' process. What it reads may be forged.


class Lost(BaseException):
    """The program's process has ended, or sends what it should not; no error that a test may expect."""


class Remote:
    """An object of the program."""

    __slots__ = ("_ask", "_number")

    def __init__(self, ask: Callable[..., Any], number: int) -> None:
        object.__setattr__(self, "_ask", ask)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("getattr", self, name)

    def __setattr__(self, name: str, value: object) -> None:
        self._ask("setattr", self, name, value)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._ask("call", self, *arguments, **keywords)

    def __bool__(self) -> bool:
        return bool(self._ask("bool", self))

    def __len__(self) -> int:
        return int(self._ask("len", self))

    def __iter__(self) -> Any:
        return self._ask("iter", self)

    def __next__(self) -> Any:
        return self._ask("next", self)

    def __getitem__(self, key: Any) -> Any:
        return self._ask("getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._ask("setitem", self, key, value)

    def __str__(self) -> str:
        return str(self._ask("str", self))

    def __repr__(self) -> str:
        return str(self._ask("repr", self))

    def __eq__(self, other: object) -> bool:
        """Compares two objects of the program as it says. None is equal to a value of a test."""
        return type(other) is Remote and self._ask("eq", self, other) is True

    __hash__ = object.__hash__


class Asked(pickle.Pickler):
    def persistent_id(self, value: object) -> int | None:
        return value._number if type(value) is Remote else None


class Answers(pickle.Unpickler):
    """Reads values and numbers of objects; nothing that names a class or function."""

    def __init__(self, answers: IO[bytes], remote: Callable[[int], Remote]) -> None:
        super().__init__(answers)
        self.persistent_load = remote  # type: ignore[method-assign]

    def find_class(self, module: str, name: str) -> Any:
        raise Lost(f"{module}.{name}")


class Talk:
    """The tests' end of the connection."""

    def __init__(self, answers: IO[bytes], requests: IO[bytes]) -> None:
        self._answers, self._requests = answers, requests
        self._remotes: dict[int, Remote] = {}

    def ask(self, name: str, *arguments: Any, **keywords: Any) -> Any:
        """Returns what the program answers, raises what it raises, and changes arguments that it has changed."""
        request = io.BytesIO()  # all of it or none
        Asked(request).dump((name, arguments, keywords))
        self._requests.write(request.getbuffer())
        raised, result, changed = self.receive()
        for before, after in zip(arguments, changed, strict=True):
            if type(before) in CHANGED_IN_PLACE and type(before) is type(after) and before != after:
                before.clear()
                (before.extend if type(before) is list else before.update)(after)
        if raised:
            kind = getattr(builtins, raised)
            raise kind(result) if issubclass(kind, Exception) else Lost(raised)
        return result

    def receive(self) -> Any:
        """Sends what was asked, and reads the next answer."""
        try:
            self._requests.flush()
            return Answers(self._answers, lambda number: self._remotes.setdefault(number, Remote(self.ask, number))).load()
        except Exception as error:
            raise Lost(str(error)) from error


def run_tests(tests: Sequence[str], answers: IO[bytes], requests: IO[bytes]) -> None:
    """Writes how many tests pass."""
    talk, passed, names, output = Talk(answers, requests), 0, dict[str, Any](), sys.stdout
    sys.stdout = sys.stderr
    for name, value in talk.receive().items():
        if not (name.startswith("__") or hasattr(builtins, name)):
            names[name] = import_module(name) if name in sys.stdlib_module_names else value
    for test in tests:
        try:
            exec(compile(test, "test", "exec", dont_inherit=True), dict(names))  # noqa: S102  # in a sandbox
            passed += 1
        except BaseException:  # noqa: S110
            pass
    output.write(str(passed))


def main(side: str, connection: int) -> None:
    """Runs one side; its text comes as JSON."""
    for limit, value in LIMITS.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{limit}"), (value, value))
    run = {"program": run_program, "tests": run_tests}[side]
    run(json.load(sys.stdin), open(connection, "rb"), open(connection, "wb"))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
