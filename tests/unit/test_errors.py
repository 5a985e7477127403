"""Errors: one message builds each, a process boundary keeps each, a builtin name catches each."""

from __future__ import annotations

import builtins
import copy
import pickle
import re
import traceback

import pytest

from aioflux import errors as _errors

ERRORS = [getattr(_errors, name) for name in _errors.__all__]
NODE = re.compile(r"^ {4}(?P<stem>[│├└─ ]*)(?P<name>[A-Z]\w+)(?: *\((?P<builtin>\w+)\))?")

by_name = pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)


def drawn_tree() -> dict[str, tuple[str, str | None]]:
    """The tree in the module's docstring: name -> (parent, builtin base)."""
    assert _errors.__doc__ is not None
    tree: dict[str, tuple[str, str | None]] = {}
    ancestors: list[str] = []
    for line in _errors.__doc__.splitlines():
        if node := NODE.match(line):
            depth = len(node["stem"]) // 4
            del ancestors[depth:]
            tree[node["name"]] = (ancestors[-1] if ancestors else "", node["builtin"])
            ancestors.append(node["name"])
    return tree


def real_tree() -> dict[str, tuple[str, str | None]]:
    tree = {}
    for error in ERRORS:
        ours = [base.__name__ for base in error.__bases__ if base in ERRORS]
        builtin = [base.__name__ for base in error.__bases__ if base not in ERRORS]
        tree[error.__name__] = ("".join(ours), builtin[0] if builtin else None)
    return tree


def test_the_docstring_draws_the_tree_that_is() -> None:
    assert drawn_tree() == real_tree()


@by_name
def test_one_message_builds_it(error: type[_errors.AiofluxError]) -> None:
    """PyTorch re-raises the error of a DataLoader worker as `type(error)(text)`."""
    built = error("the text")
    assert str(built) == "the text"
    assert built.message == "the text"


@pytest.mark.parametrize("uri", ["gs://b/k", 'gs://b/a "b"\u2028c: d, \n'], ids=["plain", "odd"])
@pytest.mark.parametrize("maybe_done", [True, False], ids=["maybe done", "not done"])
@pytest.mark.parametrize("status", [404, None])
def test_a_traceback_carries_fields_if_requested(
    uri: str, status: int | None, *, maybe_done: bool
) -> None:
    """Of several errors the last one, which is the one that was raised."""
    error = _errors.NotFoundError("gone", uri=uri, status=status, maybe_done=maybe_done)
    error.carry_fields()
    error.carry_fields()
    assert len(error.__notes__) == 1
    error.__cause__ = _errors.ChecksumError("before", uri="gs://b/other")
    error.__cause__.carry_fields()
    text = "Caught it in a worker.\n" + "".join(traceback.format_exception(error))
    built = _errors.NotFoundError(text)
    assert (built.uri, built.status, str(built)) == (uri, status, text)
    assert built.maybe_done == maybe_done


def test_a_text_that_only_speaks_of_fields_carries_none() -> None:
    built = _errors.StorageError(
        'no line with aioflux: uri, status, maybe_done ["gs://b/k", 404, true]'
    )
    assert (built.uri, built.status) == ("", None)


@by_name
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_keeps_fields_and_notes(error: type[_errors.AiofluxError], protocol: int) -> None:
    """torch.distributed.checkpoint gathers errors by pickle."""
    fields = {}
    if issubclass(error, _errors.StorageError):
        fields = {"uri": "gs://b/k", "status": 412, "maybe_done": True}
    if error is _errors.TransientError:
        fields |= {"retry_after_seconds": 1.5, "num_bytes_received": 7}
    sent = error("the text", **fields)
    sent.add_note("the clean-up failed too")

    received = pickle.loads(pickle.dumps(sent, protocol))

    assert type(received) is error
    assert str(received) == "the text"
    assert received.__notes__ == ["the clean-up failed too"]
    assert {name: getattr(received, name) for name in fields} == fields


@by_name
def test_a_copy_is_equal_in_type_and_fields(error: type[_errors.AiofluxError]) -> None:
    original = error("the text")
    twin = copy.copy(original)
    assert type(twin) is error
    assert vars(twin) == vars(original)


@pytest.mark.parametrize(
    ("error", "builtin"),
    [(name, builtin) for name, (_, builtin) in drawn_tree().items() if builtin],
)
def test_the_builtin_base_catches_it(error: str, builtin: str) -> None:
    with pytest.raises(getattr(builtins, builtin), match="the text"):
        raise getattr(_errors, error)("the text")


def test_a_storage_error_without_fields_names_no_object_and_no_status() -> None:
    error = _errors.StorageError("the text")
    assert (error.uri, error.status) == ("", None)
