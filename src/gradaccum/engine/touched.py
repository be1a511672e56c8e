"""What to say of gradients that are not what they should be."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from gradaccum.errors import InterferenceError, NonFiniteError, StaleGradientError

__all__ = ["name_of", "nonfinite_error", "stale_error", "touched_error"]


def stale_error(left: Sequence[str], parameters: int, updates: int) -> StaleGradientError:
    """Gradients stood there when a window opened.

    Args:
        left: names of the parameters that have one.
        parameters: how many there are in all.
        updates: made so far.
    """
    some = "" if len(left) == parameters else " The others have none."
    since = f"since update {updates - 1}" if updates else "before the first window"
    likely = (
        "another loss's backward, which reaches them through a shared part (a GAN, a regulariser)"
        if some
        else "a `loss.backward()` of your own without a zero_grad, or another accumulator that "
        "was left in mid-window"
    )
    names = ", ".join(f"`{name}`" for name in left[:3])
    return StaleGradientError(
        "stale-gradient",
        "A gradient stands in the parameters though no micro-batch has been added, so it "
        "would leak into this update.",
        got=f"{len(left)} of {parameters} parameters have a gradient ({names}"
        f"{', ...' if len(left) > 3 else ''}), left {since}.{some} "
        f"Most likely it was left by {likely}",
        expected="no gradient when a window opens",
        do='optimizer.zero_grad() after what left it; or Accumulator(..., on_stale="zero") '
        "where another loss is meant to pass through these parameters",
    )


def touched_error(name: str, grad: Tensor | None, held: Tensor | None) -> InterferenceError:
    """A gradient is not what the last micro-batch left.

    Args:
        name: of its parameter.
        grad: what stands there.
        held: what stood there.
    """
    if grad is None:
        what = "was set to None (a `zero_grad()`)"
    elif held is None:
        what = "appeared"
    elif grad is not held:
        what = "was replaced"
    else:
        what = (
            "was changed in place (a `zero_grad(set_to_none=False)`, a clip, or another backward)"
        )
    return InterferenceError(
        "gradients-changed",
        "Gradients changed in the middle of a window, so the update would miss or count twice "
        "some of its micro-batches.",
        got=f"the gradient of `{name}` {what} since the last micro-batch",
        expected="gradients that only `micro.backward` adds to",
        do="remove zero_grad, clipping and other backwards from inside the loop (the "
        'accumulator does them once per update); where another loss must pass, on_stale="zero"',
    )


def nonfinite_error(name: str, shape: tuple[int, ...]) -> NonFiniteError:
    """The window's gradient is no number, though its micro-batches' were."""
    return NonFiniteError(
        "non-finite",
        f"The window's gradient of `{name}` is not finite.",
        got=f"NaN or infinity in a gradient of shape {shape}",
        expected="finite numbers; no parameter was changed",
        do="drop the window with acc.discard(), or find the operation with "
        "torch.autograd.set_detect_anomaly(True)",
    )


def name_of(parameter: nn.Parameter, model: nn.Module, optimizers: Sequence[Optimizer]) -> str:
    """A parameter's name in the model, or its place in an optimizer."""
    for name, candidate in model.named_parameters(remove_duplicate=False):
        if candidate is parameter:
            return name
    for o, optimizer in enumerate(optimizers):
        for g, group in enumerate(optimizer.param_groups):
            for i, candidate in enumerate(group["params"]):
                if candidate is parameter:
                    return f"optimizer {o}, group {g}, parameter {i} (not in the model)"
    return "a parameter that no optimizer owns"
