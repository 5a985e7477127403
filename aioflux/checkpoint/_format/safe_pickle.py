"""An interpreter of pickles that runs no code from the pickle. Pure.

A pickle is a program. This interpreter lets it build None, bools, numbers, strings, bytes, tuples,
lists, dictionaries with plain keys, and the objects that an `AllowedGlobals` permits. A pickle that
does anything else raises `PickleError`.

Time and memory are bounded by the size of the pickle. A length allocates nothing unless that many
bytes follow. The memo is a dictionary, so a large index allocates nothing. Tuples are rejected as
keys: if they nest and share elements, the time to hash them is exponential.

Other unpicklers cannot replace this interpreter. torch's cannot read protocol 4. CPython's has none
of these bounds: a pickle of 9 bytes allocated 1 GiB, although `find_class` rejected every global.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final

_PLAIN_KEYS: Final = frozenset({str, int, bool, bytes, type(None)})
_MAX_NAME: Final = 512
"""Maximum length of the name of a module or a global in the operation GLOBAL, in bytes, with the
line end."""

_U16 = struct.Struct("<H")
_I32 = struct.Struct("<i")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_F64 = struct.Struct(">d")


class PickleError(ValueError):
    """The pickle is damaged, or does something that is not allowed."""


class AllowedGlobals:
    """Globals that a pickle may use. This base class rejects all; subclasses override methods."""

    def find(self, module: str, name: str) -> Any:
        """Return the object for a global. The other methods receive it as `target`."""
        raise PickleError(f"the pickle names {module[:80]}.{name[:80]}, which is not allowed")

    def call(self, target: Any, arguments: tuple[Any, ...]) -> Any:
        """Return the result of a call; `target` is an object that `find` returned."""
        raise PickleError("the pickle calls something that is not allowed")

    def create(self, target: Any, arguments: tuple[Any, ...]) -> Any:
        """Return an instance without fields; `target` is a class that `find` returned."""
        raise PickleError("the pickle creates an instance of a class that is not allowed")

    def set_state(self, instance: Any, state: Any) -> None:
        """Set the fields of an instance that `create` returned."""
        raise PickleError("the pickle sets fields of an object, which is not allowed")

    def persistent_load(self, persistent_id: Any) -> Any:
        """Return the object for a persistent id."""
        raise PickleError("the pickle has a persistent id, which is not allowed")

    def is_key(self, value: Any) -> bool:
        """Return whether a value may be the key of a dictionary. Plain keys are always allowed."""
        return False


class _Interpreter:
    def __init__(self, data: bytes, allowed: AllowedGlobals) -> None:
        self.data = data
        self.allowed = allowed
        self.position = 0
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Run the pickle up to its STOP, and return the value."""
        data, memo, operations = self.data, self.memo, _OPERATIONS
        while True:
            code = data[self.position]
            self.position += 1
            # DCP metadata consists mostly of the next five operations.
            if code == 0x94:  # MEMOIZE
                memo[len(memo)] = self.stack[-1]
            elif code == 0x4B:  # BININT1
                self.stack.append(data[self.position])
                self.position += 1
            elif code == 0x68:  # BINGET
                self.stack.append(memo[data[self.position]])
                self.position += 1
            elif code == 0x6A:  # LONG_BINGET
                self.stack.append(memo[_U32.unpack_from(data, self.position)[0]])
                self.position += 4
            elif code == 0x85:  # TUPLE1
                self.stack[-1] = (self.stack[-1],)
            elif code == 0x2E:  # STOP
                return self.stack.pop()
            else:
                operation = operations.get(code)
                if operation is None:
                    raise PickleError(
                        f"operation {code:#04x} at byte {self.position - 1} is not allowed"
                    )
                operation(self)

    def read(self, size: int) -> bytes:
        end = self.position + size
        if end > len(self.data):
            raise PickleError(
                f"the pickle ends within a value of {size} bytes at byte {self.position}"
            )
        data = self.data[self.position : end]
        self.position = end
        return data

    def read_number(self, form: struct.Struct) -> Any:
        (value,) = form.unpack_from(self.data, self.position)
        self.position += form.size
        return value

    def read_name(self) -> str:
        end = self.data.find(b"\n", self.position, self.position + _MAX_NAME)
        if end < 0:
            raise PickleError(f"the name at byte {self.position} is truncated or too long")
        line = self.read(end + 1 - self.position)[:-1]
        return line.decode("ascii")

    def pop_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def push_global(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise PickleError(f"the name of a global at byte {self.position} is not a string")
        self.stack.append(self.allowed.find(module, name))


def run_pickle(data: bytes, allowed: AllowedGlobals) -> tuple[Any, int]:
    """Return the value of the pickle at the beginning of `data`, and the offset of its end.

    Raises:
        PickleError: The pickle is damaged, or does something that is not allowed.
    """
    interpreter = _Interpreter(data, allowed)
    try:
        return interpreter.run(), interpreter.position
    except PickleError:
        raise
    except (IndexError, KeyError, struct.error, UnicodeError) as exc:
        raise PickleError(f"the pickle is damaged before byte {interpreter.position}") from exc


def _mark(self: _Interpreter) -> None:
    self.marks.append(self.stack)
    self.stack = []


def _tuple(self: _Interpreter) -> None:
    items = self.pop_mark()
    self.stack.append(tuple(items))


def _tuple2(self: _Interpreter) -> None:
    last = self.stack.pop()
    self.stack[-1] = (self.stack[-1], last)


def _tuple3(self: _Interpreter) -> None:
    last = self.stack.pop()
    middle = self.stack.pop()
    self.stack[-1] = (self.stack[-1], middle, last)


def _append(self: _Interpreter) -> None:
    item = self.stack.pop()
    _list(self.stack[-1]).append(item)


def _appends(self: _Interpreter) -> None:
    items = self.pop_mark()
    _list(self.stack[-1]).extend(items)


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise PickleError("the pickle appends to something that is not a list")
    return value


def _setitem(self: _Interpreter) -> None:
    value = self.stack.pop()
    key = self.stack.pop()
    _set(self, [key, value])


def _setitems(self: _Interpreter) -> None:
    _set(self, self.pop_mark())


def _set(self: _Interpreter, pairs: list[Any]) -> None:
    target = self.stack[-1]
    if not isinstance(target, dict):
        raise PickleError("the pickle sets items of something that is not a dictionary")
    is_key = self.allowed.is_key
    if len(pairs) % 2:
        raise PickleError("the pickle sets a key without a value")
    keys = pairs[::2]
    for key in keys:
        if type(key) not in _PLAIN_KEYS and not is_key(key):
            raise PickleError(f"a {type(key).__name__} is not allowed as a key of a dictionary")
    target.update(zip(keys, pairs[1::2], strict=True))


def _reduce(self: _Interpreter) -> None:
    arguments = self.stack.pop()
    if type(arguments) is not tuple:
        raise PickleError("the arguments of a call in the pickle are not a tuple")
    self.stack[-1] = self.allowed.call(self.stack[-1], arguments)


def _newobj(self: _Interpreter) -> None:
    arguments = self.stack.pop()
    if type(arguments) is not tuple:
        raise PickleError("the pickle creates an instance with arguments that are not a tuple")
    self.stack[-1] = self.allowed.create(self.stack[-1], arguments)


def _build(self: _Interpreter) -> None:
    state = self.stack.pop()
    self.allowed.set_state(self.stack[-1], state)


def _stack_global(self: _Interpreter) -> None:
    name = self.stack.pop()
    self.push_global(self.stack.pop(), name)


def _global(self: _Interpreter) -> None:
    module = self.read_name()
    self.push_global(module, self.read_name())


def _protocol(self: _Interpreter) -> None:
    version = self.read(1)[0]
    if version > 5:
        raise PickleError(f"the pickle has the unknown protocol {version}")


def _frame(self: _Interpreter) -> None:
    self.read(8)  # the size of the frame: a hint for readers of streams


def _binput(self: _Interpreter) -> None:
    self.memo[self.read(1)[0]] = self.stack[-1]


def _long_binput(self: _Interpreter) -> None:
    self.memo[self.read_number(_U32)] = self.stack[-1]


def _long1(self: _Interpreter) -> None:
    self.stack.append(int.from_bytes(self.read(self.read(1)[0]), "little", signed=True))


def _persid(self: _Interpreter) -> None:
    self.stack[-1] = self.allowed.persistent_load(self.stack[-1])


def _pushes(value: Callable[[_Interpreter], Any]) -> Callable[[_Interpreter], None]:
    def push(self: _Interpreter) -> None:
        # Call `value` before reading `self.stack`, because `value` may replace the stack.
        result = value(self)
        self.stack.append(result)

    return push


def _text(size: struct.Struct) -> Callable[[_Interpreter], None]:
    return _pushes(lambda self: self.read(self.read_number(size)).decode("utf-8", "surrogatepass"))


def _binary(size: struct.Struct) -> Callable[[_Interpreter], None]:
    return _pushes(lambda self: self.read(self.read_number(size)))


_U8 = struct.Struct("<B")

_OPERATIONS: Final[dict[int, Callable[[_Interpreter], None]]] = {
    0x80: _protocol,
    0x95: _frame,
    ord("("): _mark,
    ord("N"): _pushes(lambda _: None),
    0x88: _pushes(lambda _: True),
    0x89: _pushes(lambda _: False),
    ord("J"): _pushes(lambda self: self.read_number(_I32)),
    ord("M"): _pushes(lambda self: self.read_number(_U16)),
    0x8A: _long1,
    ord("G"): _pushes(lambda self: self.read_number(_F64)),
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
"""The allowed opcodes of protocols 2 to 5, except the six that `_Interpreter.run` itself handles.
All other opcodes are rejected, such as those of sets, extensions, buffers and numbers in text
form."""
