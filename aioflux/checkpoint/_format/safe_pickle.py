"""A machine for pickles that runs no code: it builds plain values, and what a table lets it. Pure.

A pickle is a program. Here it may make None, bools, numbers, strings, bytes, tuples, lists and
dictionaries with plain keys, and what a `Table` knows by module and name; it calls nothing else,
sets no attribute and looks up no name with dots. Whatever differs ends it with a `PickleError`.

Time and memory grow with the number of bytes and not with what they claim: no length is trusted
before the bytes are there, no memo is sized by an index, and no key hashes nested values. The
module `pickle` of CPython promises none of these, whatever its `find_class` does: it sizes its memo
by a number in the pickle, and hashes tuples that hold each other for as long as they tell it.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PickleError", "Table", "run_pickle"]

_PLAIN_KEYS: Final = frozenset({str, int, bool, bytes, type(None)})
_MAX_NAME: Final = 512
"""Bytes of a module's or a global's name."""

_U16 = struct.Struct("<H")
_I32 = struct.Struct("<i")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_F64 = struct.Struct(">d")


class PickleError(ValueError):
    """The pickle is damaged, or asks for something that it may not have."""


class Table(Protocol):
    """What a pickle may name, and what becomes of it. Each method may refuse by PickleError."""

    def find(self, module: str, name: str) -> Any:
        """Return what stands for a global."""

    def call(self, what: Any, arguments: tuple[Any, ...]) -> Any:
        """Return what the call of a global that was found makes."""

    def make(self, what: Any, arguments: tuple[Any, ...]) -> Any:
        """Return an instance, without fields, of a global that was found."""

    def fill(self, instance: Any, state: Any) -> None:
        """Give an instance that was made its fields."""

    def load(self, name: Any) -> Any:
        """Return what a persistent id stands for."""

    def is_key(self, value: Any) -> bool:
        """Tell whether a value that is not plain may be the key of a dictionary."""


class _Machine:
    def __init__(self, data: bytes, table: Table) -> None:
        self.data = data
        self.table = table
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Run up to the STOP and return what is made."""
        data, memo, operations = self.data, self.memo, _OPERATIONS
        while True:
            code = data[self.at]
            self.at += 1
            # The five operations that most of a pickle of metadata is made of are done in place.
            if code == 0x94:  # MEMOIZE
                memo[len(memo)] = self.stack[-1]
            elif code == 0x4B:  # BININT1
                self.stack.append(data[self.at])
                self.at += 1
            elif code == 0x68:  # BINGET
                self.stack.append(memo[data[self.at]])
                self.at += 1
            elif code == 0x6A:  # LONG_BINGET
                self.stack.append(memo[_U32.unpack_from(data, self.at)[0]])
                self.at += 4
            elif code == 0x85:  # TUPLE1
                self.stack[-1] = (self.stack[-1],)
            elif code == 0x2E:  # STOP
                return self.stack.pop()
            else:
                operation = operations.get(code)
                if operation is None:
                    raise PickleError(f"operation {code:#04x} at byte {self.at - 1} is not allowed")
                operation(self)

    def take(self, size: int) -> bytes:
        end = self.at + size
        if end > len(self.data):
            raise PickleError(f"it ends within a value of {size} bytes at byte {self.at}")
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def number(self, form: struct.Struct) -> Any:
        (value,) = form.unpack_from(self.data, self.at)
        self.at += form.size
        return value

    def take_name(self) -> str:
        end = self.data.find(b"\n", self.at, self.at + _MAX_NAME)
        if end < 0:
            raise PickleError(f"a name at byte {self.at} has no end")
        line = self.take(end + 1 - self.at)[:-1]
        return line.decode("ascii")

    def pop_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def global_(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise PickleError(f"it names a global at byte {self.at} by something that is no name")
        self.stack.append(self.table.find(module, name))


def run_pickle(data: bytes, table: Table) -> tuple[Any, int]:
    """Return the value of the pickle at the beginning of `data`, and where the pickle ends.

    Raises:
        PickleError: It is damaged, or asks for what `table` does not let it have.
    """
    machine = _Machine(data, table)
    try:
        return machine.run(), machine.at
    except PickleError:
        raise
    except (IndexError, KeyError, struct.error, UnicodeError) as exc:
        raise PickleError(f"it is damaged before byte {machine.at}") from exc


def _mark(self: _Machine) -> None:
    self.marks.append(self.stack)
    self.stack = []


def _tuple(self: _Machine) -> None:
    items = self.pop_mark()
    self.stack.append(tuple(items))


def _tuple2(self: _Machine) -> None:
    last = self.stack.pop()
    self.stack[-1] = (self.stack[-1], last)


def _tuple3(self: _Machine) -> None:
    last = self.stack.pop()
    middle = self.stack.pop()
    self.stack[-1] = (self.stack[-1], middle, last)


def _append(self: _Machine) -> None:
    item = self.stack.pop()
    _list(self.stack[-1]).append(item)


def _appends(self: _Machine) -> None:
    items = self.pop_mark()
    _list(self.stack[-1]).extend(items)


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise PickleError("it appends to something that is no list")
    return value


def _setitem(self: _Machine) -> None:
    value = self.stack.pop()
    key = self.stack.pop()
    _set(self, [key, value])


def _setitems(self: _Machine) -> None:
    _set(self, self.pop_mark())


def _set(self: _Machine, pairs: list[Any]) -> None:
    target = self.stack[-1]
    if not isinstance(target, dict):
        raise PickleError("it sets items of something that is no dictionary")
    is_key = self.table.is_key
    keys = pairs[::2]
    for key in keys:
        if type(key) not in _PLAIN_KEYS and not is_key(key):
            raise PickleError(f"a {type(key).__name__} is no key of a dictionary")
    target.update(zip(keys, pairs[1::2], strict=True))


def _reduce(self: _Machine) -> None:
    arguments = self.stack.pop()
    if type(arguments) is not tuple:
        raise PickleError("it calls with arguments that are no tuple")
    self.stack[-1] = self.table.call(self.stack[-1], arguments)


def _newobj(self: _Machine) -> None:
    arguments = self.stack.pop()
    if type(arguments) is not tuple:
        raise PickleError("it makes an instance of arguments that are no tuple")
    self.stack[-1] = self.table.make(self.stack[-1], arguments)


def _build(self: _Machine) -> None:
    state = self.stack.pop()
    self.table.fill(self.stack[-1], state)


def _stack_global(self: _Machine) -> None:
    name = self.stack.pop()
    self.global_(self.stack.pop(), name)


def _global(self: _Machine) -> None:
    module = self.take_name()
    self.global_(module, self.take_name())


def _proto(self: _Machine) -> None:
    version = self.take(1)[0]
    if version > 5:
        raise PickleError(f"it is of protocol {version}")


def _frame(self: _Machine) -> None:
    self.take(8)  # its size: a hint for readers of streams


def _binput(self: _Machine) -> None:
    self.memo[self.take(1)[0]] = self.stack[-1]


def _long_binput(self: _Machine) -> None:
    self.memo[self.number(_U32)] = self.stack[-1]


def _long1(self: _Machine) -> None:
    self.stack.append(int.from_bytes(self.take(self.take(1)[0]), "little", signed=True))


def _persid(self: _Machine) -> None:
    self.stack[-1] = self.table.load(self.stack[-1])


def _pushes(value: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    def push(self: _Machine) -> None:
        # Before the stack is looked up: it is another one behind a mark.
        made = value(self)
        self.stack.append(made)

    return push


def _text(size: struct.Struct) -> Callable[[_Machine], None]:
    return _pushes(lambda self: self.take(self.number(size)).decode("utf-8", "surrogatepass"))


def _binary(size: struct.Struct) -> Callable[[_Machine], None]:
    return _pushes(lambda self: self.take(self.number(size)))


_U8 = struct.Struct("<B")

_OPERATIONS: Final[dict[int, Callable[[_Machine], None]]] = {
    0x80: _proto,
    0x95: _frame,
    ord("("): _mark,
    ord("N"): _pushes(lambda _: None),
    0x88: _pushes(lambda _: True),
    0x89: _pushes(lambda _: False),
    ord("J"): _pushes(lambda self: self.number(_I32)),
    ord("M"): _pushes(lambda self: self.number(_U16)),
    0x8A: _long1,
    ord("G"): _pushes(lambda self: self.number(_F64)),
    0x8C: _text(_U8),
    ord("X"): _text(_U32),
    0x8D: _text(_U64),
    ord("C"): _binary(_U8),
    ord("B"): _binary(_U32),
    0x8E: _binary(_U64),
    ord(")"): _pushes(lambda _: ()),
    ord("t"): _tuple,
    0x86: _tuple2,
    0x87: _tuple3,
    ord("]"): _pushes(lambda _: []),
    ord("a"): _append,
    ord("e"): _appends,
    ord("}"): _pushes(lambda _: {}),
    ord("s"): _setitem,
    ord("u"): _setitems,
    ord("q"): _binput,
    ord("r"): _long_binput,
    ord("c"): _global,
    0x93: _stack_global,
    ord("R"): _reduce,
    0x81: _newobj,
    ord("b"): _build,
    ord("Q"): _persid,
}
"""What a pickle of protocols 2 to 5 is made of; without extensions, buffers and text forms."""
