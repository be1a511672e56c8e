"""The only room that touches `.grad`: what stands there, and sums that stand elsewhere."""

from gradaccum.engine.grads.gradients import Gradients
from gradaccum.engine.grads.merge import Share
from gradaccum.engine.grads.slots import GradientSum, apart, fill

__all__ = ["GradientSum", "Gradients", "Share", "apart", "fill"]
