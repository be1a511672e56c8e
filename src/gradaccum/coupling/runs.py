"""Runs of the user's forward and backward over groups of samples, under chosen conditions."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradaccum.coupling.modes import Held, Statistics, Widen
from gradaccum.coupling.stage import Change, Stage, numpy_state, seed_all
from gradaccum.engine.loss import Part, read_parts, read_result
from gradaccum.engine.policies.keyed import Keyed
from gradaccum.engine.policies.sites import Names, Site
from gradaccum.planner.pytree import flatten
from gradaccum.planner.split import Samples, move

__all__ = ["Conditions", "Group", "Piece", "Runner"]

Group = tuple[Sequence[int], int | None]
"""Positions of samples, and the width that their padding is cut to."""


@dataclass(frozen=True)
class Conditions:
    """What is held still in a run."""

    quiet: bool = False
    """Random numbers are all the same."""

    fixed: bool = False
    """BatchNorm normalises by the whole batch's statistics."""

    restored: bool = False
    """What a forward changes is put back before each micro-batch."""

    seed: int = 0


@dataclass
class Piece:
    """One term of one micro-batch: its loss as it was handed over, its count and its gradient."""

    loss: float
    count: float
    gradient: Tensor
    """Of the loss as it was handed over; flat, float64."""

    samples: int = 0

    @property
    def finite(self) -> bool:
        """Whether neither the loss nor its gradient has NaN or infinity."""
        return math.isfinite(self.loss) and bool(torch.isfinite(self.gradient).all())


class Runner:
    """Runs groups of samples through the model on its stage.

    Args:
        stage: holds the model.
        loss_fn: `(model, micro_batch) -> (loss, count)`, or a dict of such pairs.
        samples: of the batch.
        reduction: what the losses are of their terms.
        met: leaves outside the model that some forward reached; shared by the runners of a check.
        given: tensors of the batch, by id: their gradients are nobody's parameters'.
    """

    def __init__(
        self,
        stage: Stage,
        loss_fn: Callable[[nn.Module, Any], object],
        samples: Samples,
        reduction: str,
        met: dict[int, Tensor],
        given: dict[int, Tensor] | None = None,
    ) -> None:
        self._met = met
        self._given = given or {}
        self.stage = stage
        self.samples = samples
        self.reduction = reduction
        self._loss_fn = loss_fn
        self.device = next((p.device for p in stage.model.parameters()), torch.device("cpu"))
        self._names = Names(stage.model)
        self._statistics: dict[Site, tuple[Tensor, Tensor]] = {}
        self.widen = Widen() if stage.dtype == torch.float64 else None
        self.normalised: dict[Site, float] = {}
        self.drawn: dict[Site, tuple[int, ...]] = {}
        self.drew = False
        self.others_drew = False
        self.changed: list[Change] = []
        self.leaked: list[str] = []
        self.uncounted = False
        self.reached = False
        """Whether a parameter of the model itself got a gradient."""

        self._own = {id(parameter) for parameter in stage.model.parameters()}

    def run(self, groups: Sequence[Group], conditions: Conditions) -> dict[str, list[Piece]]:
        """Forward and backward of each group in turn, from the stage's start.

        Returns:
            The pieces of each term, in the groups' order; a term without terms in a group has a
            piece of count 0 there.
        """
        self.begin(conditions)
        rows: list[dict[str, Piece]] = []
        for number, group in enumerate(groups):
            if number and conditions.restored:
                self.stage.reset_only(self.changed)
            if number and conditions.quiet:
                # What draws one number for each forward, outside of `Held`, draws the same again.
                seed_all(conditions.seed)
            rows.append(self._one(group, conditions))
        names = list(dict.fromkeys(name for row in rows for name in row))
        size = sum(p.numel() * (2 if p.is_complex() else 1) for p in self.stage.parameters.values())
        nothing = torch.zeros(size, dtype=torch.float64, device=self.device)
        return {n: [row.get(n) or Piece(0.0, 0.0, nothing) for row in rows] for n in names}

    def begin(self, conditions: Conditions) -> None:
        """Put the stage to its start; hooks that were set since are gone."""
        self.stage.reset()
        seed_all(conditions.seed)

    def forward(self, group: Group, conditions: Conditions) -> object:
        """What the loss function returns for a group, after `begin`."""
        with self._conditions(conditions):
            return self._loss_fn(self.stage.model, self._batch(group))

    def _one(self, group: Group, conditions: Conditions) -> dict[str, Piece]:
        # Activation checkpointing runs parts of the forward again, inside backward.
        with self._conditions(conditions):
            result = self._loss_fn(self.stage.model, self._batch(group))
            self._note_leaks()
            if isinstance(result, Tensor):
                self.uncounted = True
                result = (result, len(group[0]))
            loss, count = read_result(result, "check")
            parts = read_parts(loss, count, self.reduction, lambda: "check")
            strangers = self._strangers([part.loss for part in parts])
            try:
                pieces = self._backward(parts, len(group[0]))
            finally:
                for leaf, grad in strangers:
                    leaf.grad = grad
        # leaves that were taken in only now ran in their own dtype
        return self._one(group, conditions) if self._adopt(strangers) else pieces

    def _backward(self, parts: list[Part], samples: int) -> dict[str, Piece]:
        pieces: dict[str, Piece] = {}
        for i, part in enumerate(parts):
            torch.autograd.backward(part.loss, retain_graph=i + 1 < len(parts))
            gradient, amount, loss = self._take(), float(part.count), float(part.loss.detach())
            if part.mean and not amount:  # the mean of no terms is NaN, and stands for nothing
                gradient, loss = torch.zeros_like(gradient), 0.0
            pieces[part.name] = Piece(loss, amount, gradient, samples)
        return pieces

    def _batch(self, group: Group) -> Any:
        indices, width = group
        micro = move(self.samples.microbatch(indices, width), self.device)
        if self.stage.dtype is None:
            return micro
        tree = flatten(micro)
        return tree.build(iter(list(map(self._cast, tree.leaves))))

    def leaves(self, group: Group) -> list[Tensor]:
        """Tensors of a group's batch."""
        leaves = flatten(self._batch(group)).leaves
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    @contextmanager
    def _conditions(self, conditions: Conditions) -> Generator[None]:
        self._names.begin()
        held = Held(self._names)
        statistics = Statistics(self._names, self._statistics, fixed=conditions.fixed)
        before = _generators()
        with ExitStack() as scope:
            if self.widen is not None:
                scope.enter_context(self.widen)
            scope.enter_context(statistics)
            if conditions.quiet:
                scope.enter_context(Keyed(held))
            yield
        drew = not _same(before, _generators())
        if conditions.quiet:
            self.drawn |= held.sites
            self.others_drew |= drew
        else:
            self.drew |= drew
        for site, apart in statistics.apart.items():
            self.normalised[site] = max(apart, self.normalised.get(site, 0.0))

    def _cast(self, leaf: Any) -> Any:
        narrow = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(self.stage.dtype) if narrow else leaf

    def _strangers(self, losses: list[Tensor]) -> list[tuple[Tensor, Tensor | None]]:
        """Take gradients out of leaves that the losses reach and the stage does not hold."""
        known = {id(parameter) for parameter in self.stage.parameters.values()}
        found = [(leaf, leaf.grad) for leaf in _leaves(losses) if id(leaf) not in known]
        for leaf, _ in found:
            leaf.grad = None
        return found

    def _adopt(self, strangers: list[tuple[Tensor, Tensor | None]]) -> bool:
        """Take leaves onto the stage that a second forward reaches: others were made by the first.

        A temperature beside the model is met again; a copy of the inputs, for a gradient penalty,
        is not.
        """
        taken = False
        for leaf, _ in strangers:
            if id(leaf) in self._given:
                continue
            if id(leaf) in self._met:
                number = sum(name.startswith("outside the model") for name in self.stage.parameters)
                self.stage.adopt(f"outside the model, {number}", leaf)
                taken = True
            self._met[id(leaf)] = leaf
        return taken

    def _note_leaks(self) -> None:
        for name, parameter in self.stage.parameters.items():
            if parameter.grad is not None:
                if name not in self.leaked:
                    self.leaked.append(name)
                parameter.grad = None

    def _take(self) -> Tensor:
        flat = []
        for parameter in self.stage.parameters.values():
            grad, parameter.grad = parameter.grad, None
            self.reached |= grad is not None and id(parameter) in self._own
            if grad is None:
                grad = torch.zeros_like(parameter)
            grad = grad.to_dense() if grad.layout is not torch.strided else grad
            grad = torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad
            flat.append(grad.detach().to(self.device, torch.float64).reshape(-1))
        nothing = torch.zeros(0, dtype=torch.float64, device=self.device)
        return torch.cat([nothing, *flat])


def _leaves(losses: list[Tensor]) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    seen: set[Any] = set()
    waiting = [loss.grad_fn for loss in losses]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            found[id(variable)] = variable
        waiting.extend(following for following, _ in node.next_functions)
    return list(found.values())


def _generators() -> list[Any]:
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *devices, random.getstate(), numpy_state()]


def _same(before: list[Any], after: list[Any]) -> bool:
    return all(
        torch.equal(one, two) if isinstance(one, Tensor) else one == two
        for one, two in zip(before, after, strict=True)
    )
