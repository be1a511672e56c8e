"""The files we were given, parsed once, and how a name in one leads to another."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING

from gradaccum.lint.files.older import modernised

if TYPE_CHECKING:
    from gradaccum.lint.files.slicing import Slice

__all__ = ["Module", "Program", "parse", "parse_older"]


@dataclass(slots=True, eq=False)
class Module:
    """One parsed file."""

    path: str
    tree: ast.Module
    imports: dict[str, str] = field(default_factory=dict)
    """Local name to dotted path, for every import in the file, wherever it stands."""
    stars: list[str] = field(default_factory=list)
    """Dotted paths of the files that everything was imported from."""
    functions: dict[str, ast.AST] = field(default_factory=dict)
    """Top-level functions and classes by name."""
    refused: SyntaxError | None = None
    """Why this Python does not parse it, where it was read as an older one."""
    env: object = None
    """The module's scope, once somebody walked its top level."""


def parse_older(text: str | bytes, path: str, refused: SyntaxError) -> Module | None:
    """Parse what `parse` refuses as the older Python that it may be; `None` if it is none."""
    decoded = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    new = modernised(decoded)
    module = parse(new, path) if new is not None else None
    if module is not None:
        module.refused = refused
    return module


def parse(text: str | bytes, path: str) -> Module:
    """Parse one file; raises `SyntaxError` or `ValueError` as `ast.parse` does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the user's invalid escapes are not ours to report
        tree = ast.parse(text, filename=path)
    module = Module(path, tree)
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.split(".")[0]
                module.imports[name] = alias.name if alias.asname else name
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                if alias.name == "*":
                    module.stars.append(base)
                    continue
                dot = "" if base.endswith(".") else "."
                module.imports[alias.asname or alias.name] = f"{base}{dot}{alias.name}"
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            module.functions[node.name] = node
    return module


def _statements(tree: ast.Module) -> Iterable[ast.stmt]:
    stack: list[ast.stmt] = list(reversed(tree.body))
    while stack:
        node = stack.pop()
        yield node
        for name in ("body", "orelse", "finalbody"):
            stack.extend(reversed(getattr(node, name, None) or []))
        for handler in getattr(node, "handlers", ()):
            stack.extend(reversed(handler.body))
        for case in getattr(node, "cases", ()):
            stack.extend(reversed(case.body))


class Program:
    """All files of one run, by path; a file is parsed when something first leads there."""

    def __init__(self, texts: dict[str, str | bytes] | None = None) -> None:
        self.texts = texts or {}
        self.modules: dict[str, Module | None] = {}
        self.slices: dict[str, Slice] = {}
        """What slicing.py found in each file."""
        self.wide: dict[str, Slice] = {}
        """The same, as other files need it."""
        self._tails: dict[str, list[tuple[str, tuple[str, ...]]]] = {}
        for path in self.texts:
            pieces = PurePath(path).with_suffix("").parts
            if pieces[-1:] == ("__init__",):
                pieces = pieces[:-1]  # a package is called by its folder
            if pieces:
                self._tails.setdefault(pieces[-1], []).append((path, pieces))

    def add(self, module: Module) -> None:
        """Put in a file that is already parsed."""
        self.modules[module.path] = module

    def load(self, path: str) -> Module | None:
        """The parsed file, or `None` if it does not parse."""
        if path not in self.modules:
            try:
                self.modules[path] = parse(self.texts[path], path)
            except SyntaxError as error:
                self.modules[path] = parse_older(self.texts[path], path, error)
            except (ValueError, RecursionError, MemoryError):
                self.modules[path] = None
        return self.modules[path]

    def source(self, path: str) -> str:
        """The text of a file, for a quick look at its words."""
        data = self.texts.get(path, "")
        return data.decode("utf-8", "replace") if isinstance(data, bytes) else data

    def resolve(self, dotted: str, origin: str) -> tuple[Module, str] | None:
        """The file and the name in it that `dotted` means in `origin`, if we were given it."""
        parts = [part for part in dotted.lstrip(".").split(".") if part]
        for cut in (len(parts) - 1, len(parts)):
            if cut < 1:
                continue
            path = self._nearest(parts[:cut], origin)
            if path is None:
                continue
            module = self.load(path)
            if module is not None:
                return module, ".".join(parts[cut:])
        return None

    def everything(self, module: Module) -> list[Module]:
        """The given files that `module` imported everything from."""
        found = [self.resolve(dotted, module.path) for dotted in module.stars]
        return [other for target in found if target is not None and not target[1]
                for other in [target[0]] if other is not module]  # fmt: skip

    def _nearest(self, parts: list[str], origin: str) -> str | None:
        best, best_common = None, -1
        candidates = self._tails.get(parts[-1])
        if not candidates:
            return None
        here = PurePath(origin).parts[:-1]
        for path, pieces in candidates:
            if path == origin:
                continue
            if pieces[-len(parts) :] != tuple(parts):
                continue
            common = 0
            for left, right in zip(here, pieces, strict=False):
                if left != right:
                    break
                common += 1
            # An import is found from the importer's own tree, or not at all.
            if common >= len(pieces) - len(parts) and common > best_common:
                best, best_common = path, common
        return best
