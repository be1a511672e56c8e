"""What an expression can stand for while a loop is walked: numbers, tensors, things by identity.

Values are followed instead of names: an optimizer is what an optimizer's constructor returned,
wherever it was put since.
"""

from __future__ import annotations

import ast
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from gradaccum.lint.files.program import Module

__all__ = [
    "Class",
    "Divisor",
    "Env",
    "Func",
    "Num",
    "Seq",
    "Tensor",
    "Thing",
    "Value",
    "varies",
]


@dataclass(slots=True, unsafe_hash=True)  # as if frozen, which would make it slower to make
class Num:
    """A number we know, perhaps because we chose it for a symbol (`tags` says which)."""

    value: float
    tags: frozenset[str] = frozenset()
    varies: bool = False
    """Whether it changes from iteration to iteration."""


@dataclass(slots=True, unsafe_hash=True)
class Divisor:
    """One number that a loss was divided by."""

    key: str
    value: float | None
    fixed: bool = False
    """Whether it is the same for all micro-batches."""


LONGEST = 400
"""Characters of a key from which on its end is a checksum: `x = x * y + x` doubles it each time."""


def _shortened(key: str) -> str:
    return f"{key[:LONGEST]}#{zlib.crc32(key.encode())}"


@dataclass(slots=True, eq=False, init=False)
class Thing:
    """An object followed by identity; `kind` is what the source proves about it."""

    kind: str
    key: str
    varies: bool
    attrs: dict[str, Value]
    models: frozenset[Thing]
    args: tuple[Value, ...]
    kwargs: dict[str, Value]
    uses: set[str]
    node: ast.AST | None
    depth: int
    """How many loops were open when it was made."""

    def __init__(
        self,
        kind: str,
        key: str,
        varies: bool = False,
        attrs: dict[str, Value] | None = None,
        models: frozenset[Thing] = frozenset(),
        args: tuple[Value, ...] = (),
        kwargs: dict[str, Value] | None = None,
        uses: set[str] | None = None,
        node: ast.AST | None = None,
        depth: int = 0,
    ) -> None:
        # by hand: a walk makes thousands, and a generated one calls a factory for each field
        self.kind = kind
        self.key = key if len(key) <= LONGEST else _shortened(key)
        self.varies = varies
        self.attrs = {} if attrs is None else attrs
        self.models = models
        self.args = args
        self.kwargs = {} if kwargs is None else kwargs
        self.uses = set() if uses is None else uses
        self.node = node
        self.depth = depth


@dataclass(slots=True, eq=False)
class Tensor:
    """A tensor with a history: which models, what it was divided by, whether it has a graph."""

    models: frozenset[Thing] = frozenset()
    divisors: tuple[Divisor, ...] = ()
    forwards: frozenset[int] = frozenset()
    flags: frozenset[str] = frozenset()
    scaler: Thing | None = None
    graph: bool = True
    partial: tuple[Divisor, ...] = ()
    """Divisors that only some of its summed terms have."""
    made: ast.AST | None = None

    def but(self, **changes: Any) -> Tensor:
        """The same with some fields changed; a third of the time of `dataclasses.replace`."""
        made = Tensor(self.models, self.divisors, self.forwards, self.flags, self.scaler,
                      self.graph, self.partial, self.made)  # fmt: skip
        for name, value in changes.items():
            setattr(made, name, value)
        return made


@dataclass(slots=True, eq=False)
class Seq:
    """A list or tuple whose items are known; `grows` once something was appended in a loop."""

    items: list[Value]
    depth: int = 0
    open: bool = False
    key: str = ""
    """Where it was written, if it is a list of its own."""
    count: int | None = None
    """How many items there are in truth, where not all of them are here."""


@dataclass(slots=True, eq=False)
class Func:
    """A function, method, closure or lambda defined in the files we were given."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    env: Env
    module: Module
    owner: Value = None
    home: Class | None = None
    bound: tuple[Value, ...] = ()
    bound_kw: dict[str, Value] = field(default_factory=dict)
    within: str = ""
    """A context that it was wrapped in."""


@dataclass(slots=True, eq=False)
class Class:
    """A class defined in the files we were given."""

    node: ast.ClassDef
    env: Env
    module: Module


@dataclass(slots=True, eq=False)
class Env:
    """Names of one scope."""

    names: dict[str, Value]
    parent: Env | None
    module: Module
    outer: dict[str, Env] = field(default_factory=dict)

    def find(self, name: str) -> Env | None:
        """The scope that holds `name`, seen from here."""
        env: Env | None = self
        while env is not None:
            if name in env.names:
                return env
            env = env.parent
        return None

    def set(self, name: str, value: Value) -> None:
        """Bind `name` here, or where `global` or `nonlocal` said."""
        self.outer.get(name, self).names[name] = value


Value: TypeAlias = bool | str | Num | Thing | Tensor | Seq | Func | Class | None


def varies(value: Value) -> bool:
    """Whether a value may differ from one iteration to the next."""
    if isinstance(value, (Num, Thing)):
        return value.varies
    return isinstance(value, Tensor)
