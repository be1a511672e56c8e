"""A window's gradients: where they stand, and who else has touched them.

They stand in the parameters' `.grad`, where autograd adds to them without a copy and where users
expect to see them. They are taken out only where two sums must not mix (several loss terms with
unknown denominators, and another loss's gradients, `on_stale="zero"`), while a micro-batch lands
that is to be undone if it fails (`restore`: `aside.py`), and where the sums are wider than the
parameters (`accumulate_dtype`): those are in `outside.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from itertools import cycle, repeat
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradaccum.engine.finite import all_finite
from gradaccum.engine.grads import slots
from gradaccum.engine.grads.aside import Aside
from gradaccum.engine.grads.merge import Merge, Share
from gradaccum.engine.grads.outside import Outside
from gradaccum.engine.grads.slots import GradientSum, grad_of
from gradaccum.engine.guard import Guard
from gradaccum.engine.lists import clip_norm_, scale_, values_of, versions
from gradaccum.engine.loss import Count
from gradaccum.engine.precision import StandIn
from gradaccum.engine.touched import name_of, nonfinite_error, stale_error, touched_error
from gradaccum.engine.wide import Width
from gradaccum.engine.window import Term

__all__ = ["Gradients"]

_version = operator.attrgetter("_version")


class Gradients:
    """The gradients of the parameters that some optimizers own.

    Args:
        model: gives parameters their names, and says which may change in a forward.
        optimizers: owners of the parameters; read anew at each window, since groups may be added.
        on_stale: `"raise"` or `"zero"`, for a gradient that is there when a window opens.
        width: of the sums of narrower parameters; `None` sums in `.grad`.
        restore: whether each micro-batch lands apart from the sums, so that it can be undone;
            `None`: once memory has run out in one.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        on_stale: str,
        width: Width | None = None,
        restore: bool | None = None,
    ) -> None:
        self._model = model
        self._optimizers = optimizers
        self._apart = on_stale == "zero"
        # Sparse gradients add by appending rows: their memory would grow with the micro-batches.
        self._appending = [
            module.weight
            for module in model.modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        ]
        self._parameters: list[nn.Parameter] = []
        self._guard = Guard(model, optimizers, self._name)
        self._width = width
        self._outside: Outside | None = None
        self._aside: Aside | None = None
        self._restore = restore
        self.restores = restore is True
        """Whether a micro-batch lands apart from the sums, so that it can be undone."""
        self._held: GradientSum = []
        self._marks: list[int] = []
        self._merge = Merge()
        self._absent = -1

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters in the optimizers' order."""
        return [
            parameter
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]

    @property
    def accumulate_dtype(self) -> str | None:
        """The name of what narrower gradients are summed in; `None` for their own dtype."""
        return None if self._width is None or self._width.dtype is None else self._width.name

    def open(self, updates: int) -> None:
        """Take note of the parameters as a window opens; refuse or clear what is stale."""
        self._parameters = self.parameters
        if self._apart:
            self._clear()
        else:
            self._refuse_stale(updates)
        self._guard.open(self._parameters)
        self._absent = -1
        self._open_sums()

    def resume(self, last: bool) -> None:
        """Before a micro-batch: make sure that all is as the last one left it."""
        if self._guard.changed():
            self._guard.refuse_changed()
        if last:
            self._guard.refuse_grown()
        if self._apart:
            self.set(self._held)
            return
        grads = list(map(grad_of, self._parameters))
        if not all(map(operator.is_, grads, self._held)) or self._mark(grads) != self._marks:
            self._refuse_touched(grads)

    def make_room(self) -> None:
        """Before a micro-batch that is to be undone if it fails: let it land apart."""
        if self._outside is None and self._held:
            self._aside = Aside(self._parameters, list(self._held))

    @property
    def may_restore(self) -> bool:
        """Whether micro-batches are to land apart once memory has run out."""
        return self._restore is not False

    def ran_short(self) -> None:
        """Memory ran out in a backward: the next one is to be undone, unless that was declined."""
        self.restores = self.may_restore

    def backward(
        self,
        losses: Tensor | Sequence[Tensor],
        seeds: Tensor | Sequence[Tensor] | None,
        *,
        retain_graph: bool,
        name: str | None = None,
        lands: bool = False,
    ) -> None:
        """Run autograd.

        Args:
            losses: shape `()` each.
            seeds: the gradients that enter them.
            retain_graph: as in `torch.autograd.backward`.
            name: of a term whose sums stand apart from the first's.
            lands: whether gradients must not go into wide sums before all of them are there.
        """
        if self._outside is None or lands or self._kept_apart():
            torch.autograd.backward(losses, seeds, retain_graph=retain_graph)
            return
        with self._outside.at_once(name):
            torch.autograd.backward(losses, seeds, retain_graph=retain_graph)

    def _kept_apart(self) -> bool:
        """Whether gradients land until all of them are there."""
        return self.restores or (self._width is not None and self._width.apart)

    def join(self, terms: dict[str, GradientSum], seeds: Iterable[Tensor | None] = ()) -> None:
        """All of a micro-batch's gradients are there: where sums stood aside, add them up.

        Args:
            terms: the sums of further terms.
            seeds: they entered the backward, and are kept for the next one.
        """
        if self._aside is not None:
            if self._absent:  # a gradient that is kept as it is must not share its memory
                self.separate(seeds)
            self._aside.join(terms)
            self._aside = None

    def commit(self) -> None:
        """All of the last micro-batch's gradients are there: add them to sums outside of `.grad`.

        An error, such as a want of memory, comes before any sum has changed: it can be undone.
        """
        if self._outside is not None:
            self._outside.commit()

    def seal(self, terms: Iterable[Term] = ()) -> None:
        """After a micro-batch: remember what stands in the parameters.

        Args:
            terms: their seeds entered the backward, and are kept for the next one.
        """
        if self._outside is not None:
            self._outside.commit([term.seed for term in terms])
            return
        for parameter in self._appending:
            grad = parameter.grad
            if grad is not None and grad.is_sparse and grad._nnz() > 2 * grad.shape[0]:
                parameter.grad = grad.coalesce()
        held = list(map(grad_of, self._parameters))
        if self._absent == 0 and not self._apart:  # the short way: nothing can be new
            self._held, self._marks = held, list(map(_version, held))
            return
        absent = sum(map(operator.is_, held, repeat(None)))
        if absent != self._absent:  # only a gradient that is new may share its memory
            self._absent = absent
            self.separate([term.seed for term in terms])
            held = list(map(grad_of, self._parameters))
        self._held, self._marks = held, self._mark(held)
        if self._apart:
            self._clear()

    def undo(self, first: bool) -> bool:
        """After a backward that failed: make the gradients what they were; say whether they are.

        Autograd adds to what stands there, so what has arrived can be taken back only where nothing
        stood before.

        Args:
            first: whether the window had no micro-batch before.
        """
        if self._outside is not None:  # no sum has been touched, unless it came while they were
            return self._outside.undo()
        if self._aside is not None:
            self._merge.forget()
            whole, self._aside = self._aside.undo(), None
            if self._apart:
                self._clear()
            return whole
        if first:
            self._merge.forget()
            self._clear()
            self._guard.close()
            return True
        if self._merge.waiting == len(self._parameters):  # the last factor has touched none
            self._merge.forget()
            self.set(self._held)
        grads = list(map(grad_of, self._parameters))
        same = all(map(operator.is_, grads, self._held)) and self._mark(grads) == self._marks
        if same and self._apart:
            self._clear()
        return same

    def refuse_stepped(self) -> None:
        """After a window's first backward: no optimizer may have stepped inside it."""
        self._guard.refuse_stepped()

    def release(self, widen: bool = False) -> None:
        """The window's micro-batches are in: what changes from here on is its own update.

        Args:
            widen: let wide sums stand also where every parameter had one gradient at most.
        """
        self._guard.close()
        self.commit()
        if self._outside is not None and self._outside.stand(widen=widen):
            return
        if self._absent:
            slots.separate(self._parameters)

    def settle(self) -> None:
        """Where wide sums stand, put them into `.grad`, each rounded once; one at a time."""
        if self._outside is not None and self._outside.standing:
            self._outside.settle()

    @property
    def lands(self) -> bool:
        """Whether a micro-batch's gradients land apart from the sums."""
        return self._outside is not None or self._aside is not None

    @property
    def outside(self) -> bool:
        """Whether the window's sums stand outside of `.grad`."""
        return self._outside is not None

    def land(self, name: str) -> None:
        """Set aside what has landed, to be committed to the sums of a term of its own."""
        place = self._outside or self._aside
        assert place is not None
        place.land(name)

    def separate(self, seeds: Iterable[Tensor | None] = ()) -> None:
        """Give every gradient memory of its own, also beside the seeds of their backward."""
        slots.separate(self._parameters, seeds)

    def take(self) -> GradientSum:
        """Move all gradients out of the parameters."""
        return slots.take(self._parameters)

    def take_sums(self) -> GradientSum:
        """Move the window's sums out of the parameters, if they are not out already."""
        return self.take() if self._aside is None else self._aside.sums

    def set(self, grads: GradientSum) -> None:
        """Move gradients into the parameters."""
        slots.put(self._parameters, grads)

    def adopt(self, grads: GradientSum, apart: dict[str, GradientSum]) -> dict[str, GradientSum]:
        """Take gradients from elsewhere as those of the window's micro-batches so far.

        Args:
            grads: of all terms, or of the first.
            apart: of the other terms.

        Returns:
            Those of `apart` that are not kept here.
        """
        self._parameters = self.parameters
        self._guard.open(self._parameters)
        self._open_sums()
        if self._outside is not None:
            self._outside.adopt(grads, apart)
            return {}
        self.set(grads)
        self.seal()
        return apart

    def held(self) -> GradientSum:
        """The window's gradients between micro-batches, wherever they are kept."""
        return list(self._held) if self._outside is None else self._outside.plain()

    def held_apart(self) -> dict[str, GradientSum]:
        """The gradients of further terms, as far as they are kept here."""
        return {} if self._outside is None else self._outside.terms()

    def zero(self) -> None:
        """Drop the gradients: every `.grad` of an owned parameter becomes `None`."""
        self._guard.close()
        self._merge.stop()
        self._clear()
        self._held = []
        self._outside = self._aside = None

    @contextmanager
    def merging(self, shares: list[Share]) -> Generator[None]:
        """Within it, a gradient that arrives is added to `Σ factor · gradient` of `shares`."""
        if self._aside is None:
            with self._merge.into(self._parameters, shares):
                yield
            return
        yield
        self._aside.changing = True
        self._merge.now(self._parameters, shares)
        self._aside = None

    @contextmanager
    def combining(self, factors: dict[str, Count]) -> Generator[None]:
        """`merging` where gradients land apart: what lands within it is added to `Σ factor · sum`.

        Args:
            factors: of each term; the first one's sums are the window's own.
        """
        assert self._outside is not None
        yield
        self._outside.combine(factors)

    def stand_in(self, optimizer: Optimizer) -> StandIn | None:
        """What a scaler may take for an optimizer while wide sums stand outside of `.grad`."""
        if self._outside is None or not self._outside.standing:
            return None
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        pairs = zip(self._parameters, self._current(), strict=True)
        return StandIn([total for p, total in pairs if id(p) in mine and total is not None])

    def rounded(self, optimizer: Optimizer) -> list[Tensor]:
        """An optimizer's gradients in `.grad` that were rounded from wide sums."""
        if self._outside is None or self._width is None:
            return []
        grads = [p.grad for g in optimizer.param_groups for p in g["params"] if self._width.of(p)]
        return [values_of(grad) for grad in grads if grad is not None]

    def scale_(self, factor: Count) -> None:
        """Multiply every gradient in place: one pass."""
        scale_(self._current(), factor)

    def clip_norm_(self, max_norm: float, factor: Count) -> Tensor:
        """Scale by `factor` and clip to a total norm in the one pass that clipping makes.

        Returns:
            The total norm of the scaled gradient before clipping; shape `()`.
        """
        self._coalesce()
        return clip_norm_(self._current(), max_norm, factor)

    def clip_value_(self, limit: float) -> None:
        """Clamp every element to `[-limit, limit]`."""
        self._coalesce()
        for grad in self._current():
            if grad is not None:
                values_of(grad).clamp_(-limit, limit)

    def refuse_nonfinite(self) -> None:
        """Raise if a gradient holds NaN or infinity; waits for the device."""
        for parameter in self._parameters:
            if parameter.grad is not None and not torch.isfinite(values_of(parameter.grad)).all():
                raise nonfinite_error(self._name(parameter), tuple(parameter.shape))

    def all_finite(self) -> bool | Tensor:
        """Whether the update's gradients are; a tensor that nobody waits for on a device."""
        return all_finite(map(grad_of, self._parameters))

    def landed(self) -> GradientSum:
        """What the micro-batch at hand has brought, where it lands apart."""
        assert self._outside is not None
        return self._outside.landed()

    def void(self, bad: Tensor) -> None:
        """Make nothing of what has landed where `bad` says so, without waiting for the device."""
        for grad in self.landed():
            if grad is not None:
                values_of(grad).masked_fill_(bad.to(grad.device), 0)

    def first_bad(self) -> str:
        """The name of a parameter whose gradient has landed and is not finite."""
        for parameter, grad in zip(cycle(self._parameters), self.landed(), strict=False):
            if grad is not None and not torch.isfinite(values_of(grad)).all():
                return f"`{self._name(parameter)}`"
        return "a parameter"

    def arrived(self) -> bool:
        """Whether the window has brought any parameter a gradient."""
        sums = self._held if self._outside is None else self._outside.sums
        grads = map(grad_of, self._parameters)
        return any(map(operator.is_not, (*sums, *grads), repeat(None)))

    def names(self) -> list[str]:
        """A name for each parameter, in the optimizers' order."""
        return [self._name(parameter) for parameter in self.parameters]

    def _open_sums(self) -> None:
        wide = self._width.over(self._parameters) if self._width is not None else None
        self._outside = None if wide is None else Outside(self._parameters, wide)
        if self._outside is not None:  # what stands in `.grad` between micro-batches
            self._held = [None] * len(self._parameters)
            self._marks = versions(self._held)

    def _current(self) -> GradientSum:
        """What the update is made of: the wide sums until they are settled, then `.grad`."""
        if self._outside is not None and self._outside.standing:
            return self._outside.plain()
        return list(map(grad_of, self._parameters))

    def _coalesce(self) -> None:
        # A sparse gradient lists a row once for each use; its size is that of their sum.
        if self._outside is not None and self._outside.standing:
            self._outside.coalesce()
        else:
            slots.coalesce(self._parameters)

    def _clear(self) -> None:
        slots.clear(self._parameters)

    def _refuse_stale(self, updates: int) -> None:
        stale = [p for p in self._parameters if p.grad is not None]
        if not stale:
            return
        # `zero_grad(set_to_none=False)` leaves zeros; only this path, off the usual one, reads them
        left = [p for p in stale if bool(values_of(p.grad).any())]
        if not left:
            self._clear()
            return
        raise stale_error([self._name(p) for p in left], len(self._parameters), updates)

    def _mark(self, grads: GradientSum) -> list[int]:
        return list(map(_version, grads)) if self._absent == 0 else versions(grads)

    def _refuse_touched(self, grads: GradientSum) -> NoReturn:
        touched = next(
            i
            for i, (grad, held) in enumerate(zip(grads, self._held, strict=True))
            if grad is not held or versions([grad]) != self._marks[i : i + 1]
        )
        name = self._name(self._parameters[touched])
        raise touched_error(name, grads[touched], self._held[touched])

    def _name(self, parameter: nn.Parameter) -> str:
        return name_of(parameter, self._model, self._optimizers)
