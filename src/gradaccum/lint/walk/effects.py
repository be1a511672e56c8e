"""What the methods of models, optimizers, scalers and tensors do to gradients."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import TYPE_CHECKING

from gradaccum.lint.walk import by_hand, engines
from gradaccum.lint.walk.arithmetic import divided, merged
from gradaccum.lint.walk.contents import is_low, models_of, opaque, sums
from gradaccum.lint.walk.escapes import escapes
from gradaccum.lint.walk.evaluate import text
from gradaccum.lint.walk.means import LOSS
from gradaccum.lint.walk.values import Class, Func, Num, Seq, Tensor, Thing, Value

if TYPE_CHECKING:
    from gradaccum.lint.walk.walker import Walker

__all__ = [
    "METHODS",
    "OF_LEAF",
    "OF_OPTIMIZER",
    "PLAIN",
    "alias",
    "backward",
    "enter",
    "forward",
    "leaf",
]

Handler = Callable[["Walker", ast.Call, Thing, list[Value], dict[str, Value]], Value]

PLAIN = frozenset(
    {
        "apply", "buffers", "children", "get_parameter", "load_state_dict", "modules",
        "named_buffers", "named_children", "named_modules", "save", "save_pretrained",
        "state_dict", "share_memory", "enable_gradient_checkpointing",
        "gradient_checkpointing_enable",
        "named_parameters", "parameters", "print_trainable_parameters", "update_parameters",
    }
)  # fmt: skip
"""Methods of a model that are no forward pass."""

OF_OPTIMIZER = frozenset(
    {
        "add_param_group", "load_state_dict", "register_load_state_dict_post_hook",
        "register_load_state_dict_pre_hook", "register_state_dict_post_hook",
        "register_state_dict_pre_hook", "share_memory", "state_dict",
    }
)  # fmt: skip
"""Methods of an optimizer that leave gradients alone; those that do not are in METHODS."""


def leaf(thing: Thing) -> Tensor:
    """A leaf tensor in an expression: its own model."""
    return Tensor(frozenset((thing,)), flags=frozenset(("leaf",)))


def alias(walker: Walker, tensor: Tensor) -> Thing:
    """What turned out to be an object and not a tensor, because its methods say so."""
    if id(tensor) not in walker.aliases:
        made = Thing("unknown", "made", depth=len(walker.loops), models=tensor.models)
        walker.aliases[id(tensor)] = (tensor, made)
    return walker.aliases[id(tensor)][1]


def forward(
    walker: Walker, node: ast.AST, model: Thing, parts: list[Tensor], result: Value = None
) -> Tensor:
    """A call of a model: its output depends on it and on what went in."""
    quiet = walker.quiet()
    made = merged(parts, node) if parts else Tensor(made=node)
    own = frozenset((walker.tick(),))
    marks = ["past_ddp"] if "ddp" in model.uses and _past(node) else []
    if result is not None:
        marks.append("method")  # one that was walked: what it calls was noted there
    walker.note("forward", node, model, Tensor(forwards=own), *marks)
    model.uses.add("called")
    flags = made.flags - {"detached", "item", "sum", "leaf", "cat", "unsynced", "blind"}
    if quiet:
        flags |= {"inference"} if quiet == "inference_mode" else {"blind"}
    if walker.inside("no_sync"):
        flags |= {"unsynced"}
    home = model.attrs.get("__class__")
    if isinstance(home, Class) and sums(walker, home.module.path):
        flags |= {"hidden"}
    return Tensor(
        made.models | {model} | model.models,
        (),
        made.forwards | own,
        flags,
        None,
        not quiet,
        (),
        node,
    )


def _past(node: ast.AST) -> bool:
    """Whether what is called is `ddp.module`, or a method of it."""
    func = node.func if isinstance(node, ast.Call) else None
    while isinstance(func, ast.Attribute):
        if func.attr == "module":
            return True
        func = func.value
    return False


def backward(
    walker: Walker,
    node: ast.AST,
    tensor: Tensor,
    via: Thing | None,
    kwargs: dict[str, Value],
    *flags: str,
) -> None:
    """One backward pass, and the hooks that run in it."""
    marks = [
        *flags,
        *(name for name in ("retain_graph", "create_graph") if kwargs.get(name) is True),
        *(["gradient"] if "gradient" in kwargs else []),
    ]
    if "opaque" in tensor.flags and any(sums(walker, path) for path in walker.globals):
        tensor = tensor.but(flags=tensor.flags | {"hidden"})
    if "retain_graph" in marks and _passes_beside(walker, node) > 1:
        marks.append("others")
    walker.note("backward", node, via, tensor, *marks)
    walker.spent |= tensor.forwards
    if walker.inside("hook"):
        return
    walker.contexts.append(("hook", None))
    try:
        for hook, param in walker.hooks:
            walker.function(hook, [param], {})
    finally:
        walker.contexts.pop()


def _passes_beside(walker: Walker, node: ast.AST) -> int:
    """How many backward passes the function or class around a call spells out."""
    module = walker.program.load(walker.paths[-1])
    line = getattr(node, "lineno", 0)
    for outer in module.tree.body if module is not None else ():
        if outer.lineno <= line <= (outer.end_lineno or line):
            return sum(
                isinstance(child, ast.Attribute) and child.attr in ("backward", "manual_backward")
                for child in ast.walk(outer)
            )
    return 0


def _as_loss(value: Value) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Seq):
        parts = [_as_loss(item) for item in value.items if isinstance(item, (Tensor, Thing))]
        return merged(parts, ast.Pass()) if parts else Tensor()
    opaque = Tensor(flags=frozenset(("opaque",)))
    if isinstance(value, Thing) and "divided" in value.uses:
        return divided(opaque, value.args[1])
    return opaque


def _backward(walker: Walker, node: ast.Call, receiver: Thing, args: list[Value],
              kwargs: dict[str, Value]) -> Value:  # fmt: skip
    if receiver.kind == "leaf":
        backward(walker, node, leaf(receiver), None, kwargs)
        return None
    told = [*args, kwargs.get("optimizer")]
    if any(isinstance(one, Thing) and one.kind == "optimizer" for one in told):
        # a booster's, of ColossalAI: it differentiates, and leaves the window to the loop
        backward(walker, node, _as_loss(kwargs.get("loss", args[0] if args else None)), None, {})
        return None
    if not args or (receiver.kind in ("unknown", "grad") and not isinstance(args[0], (Tensor, Seq))
                    and not receiver.uses & {"step", "accumulate", "called", "prepare"}
                    and "gradient" not in kwargs and _looks_like_tensor(args[0])):  # fmt: skip
        receiver.uses.add("differentiated")
        seed = args[0] if args else kwargs.get("gradient")
        marks = () if by_hand.is_one(seed) else ("weighted",)
        backward(walker, node, _as_loss(receiver), None, kwargs, *marks)
        return None
    loss = _as_loss(args[0])
    if receiver.kind == "accelerator":
        steps = engines.accelerate_steps(walker, receiver)
        if isinstance(steps, (Num, Thing)):
            loss = divided(loss, steps)
        elif walker.inside("accumulate"):
            loss = divided(loss, Thing("unknown", "accelerate"))
        backward(walker, node, loss, receiver, kwargs, "accelerate")
    elif receiver.kind == "fabric":
        backward(walker, node, loss, receiver, kwargs, "fabric")
    else:
        receiver.uses.add("backward")
        backward(walker, node, loss, receiver, kwargs, "engine")
    return None


def _looks_like_tensor(value: Value) -> bool:
    return isinstance(value, Num) or value is None


def _manual_backward(walker: Walker, node: ast.Call, receiver: Thing, args: list[Value],
                     kwargs: dict[str, Value]) -> Value:  # fmt: skip
    if args:
        backward(walker, node, _as_loss(args[0]), receiver, kwargs, "lightning")
    return None


def _step(walker: Walker, node: ast.Call, receiver: Thing, args: list[Value],
          kwargs: dict[str, Value]) -> Value:  # fmt: skip
    first = args[0] if args else kwargs.get("optimizer", kwargs.get("closure"))
    if isinstance(first, Thing) and (
        receiver.kind == "scaler" or receiver.uses & {"scale", "unscale"}
    ):
        receiver.uses.add("scaler")
        first.uses.add("scaler_step")
        if not engines.idle(walker, first):
            if "scale" in kwargs:
                walker.note("grad_scale", node, first)  # an own scaler's, that divides as well
            by_hand.run_hooks(walker, node, first, True)
            walker.note("step", node, first, None, "scaler")
            by_hand.run_hooks(walker, node, first, False)
            walker.note("scaler_step", node, receiver)
        return None
    receiver.uses.add("step")
    if isinstance(first, Func):
        walker.contexts.append(("closure", None))
        try:
            walker.function(first, [], {})
        finally:
            walker.contexts.pop()
        walker.note("step", node, receiver, None, "closure")
    elif not engines.idle(walker, receiver):
        told = args or set(kwargs) - {"closure", "optimizer"}
        marks = ["args"] if told else []
        given = args[0] if args else kwargs.get("metrics")
        if (isinstance(given, Tensor) and given.forwards) or (
            isinstance(given, Thing) and LOSS in given.attrs
        ):
            marks.append("loss")
        by_hand.run_hooks(walker, node, receiver, True)
        walker.note("step", node, receiver, None, *marks)
        by_hand.run_hooks(walker, node, receiver, False)
    return None


def _zero_grad(walker: Walker, node: ast.Call, receiver: Thing, args: list[Value],
               kwargs: dict[str, Value]) -> Value:  # fmt: skip
    receiver.uses.add("zero_grad")
    if not engines.idle(walker, receiver):
        kept = [*args[:1], kwargs.get("set_to_none")]
        walker.note("zero", node, receiver, None, *(["filled"] if False in kept else []))
    return None


def _unscale(walker: Walker, node: ast.Call, receiver: Thing, args: list[Value],
             kwargs: dict[str, Value]) -> Value:  # fmt: skip
    receiver.uses.add("unscale")
    if args and isinstance(args[0], Thing):
        args[0].uses.add("unscale")
        walker.note("unscale", node, args[0])
        walker.note("scaler_unscale", node, receiver)
    return None


_SKIP_WORDS = ("get_scale", "._scale", "found_inf", "skipped")
"""How code asks whether a scaler skipped the step."""


def _update(walker: Walker, node: ast.Call, receiver: Thing, args: list[Value],
            kwargs: dict[str, Value]) -> Value:  # fmt: skip
    if receiver.kind == "scaler" or receiver.uses & {"scale", "unscale", "scaler"}:
        if args or kwargs:
            return None  # sets the scale by hand, beside the update of the window
        source = walker.program.source(walker.paths[-1])
        watched = any(word in source for word in _SKIP_WORDS)
        walker.note("scaler_update", node, receiver, None, *(["watched"] if watched else []))
    else:
        escapes(walker, node, [*args, *kwargs.values()])
    return None


def _scale(walker: Walker, node: ast.Call, receiver: Thing, args: list[Value],
           kwargs: dict[str, Value]) -> Value:  # fmt: skip
    if len(args) == 1 and receiver.kind in ("scaler", "unknown"):
        receiver.uses.add("scale")
        return _as_loss(args[0]).but(scaler=receiver)
    return opaque(walker, node)


def clip(walker: Walker, node: ast.AST, target: Value, limit: Value, *flags: str) -> Value:
    """A clip of the gradients of `target`."""
    endless = isinstance(limit, Num) and limit.value == float("inf")
    if not endless:
        thing = target if isinstance(target, Thing) else None
        if isinstance(target, Seq):
            thing = Thing("params", "list", models=models_of([target]),
                          args=tuple(target.items[:16]))  # fmt: skip
        if isinstance(limit, Num) and limit.value == 0:
            walker.note("zero", node, thing, None, "param")
            return Thing("unknown", f"norm@{getattr(node, 'lineno', 0)}", True)
        scaled = isinstance(limit, Thing) and "get_scale" in limit.key
        spent = thing is not None and by_hand.spend(thing)
        marks = [*flags, *(["rescaled"] if scaled else []), *(["spent"] if spent else [])]
        walker.note("clip", node, thing, None, *marks)
    return Thing("unknown", f"norm@{getattr(node, 'lineno', 0)}", True)


def _clip(walker: Walker, node: ast.Call, receiver: Thing, args: list[Value],
          kwargs: dict[str, Value]) -> Value:  # fmt: skip
    if receiver.kind == "accelerator":
        limit = args[1] if len(args) > 1 else kwargs.get("max_norm")
        return clip(walker, node, args[0] if args else None, limit, "accelerate")
    if receiver.kind in ("model", "unknown") and (len(args) == 1 or not args):
        limit = args[0] if args else kwargs.get("max_norm")
        return clip(walker, node, receiver, limit)
    return clip(walker, node, args[0] if args else None, args[1] if len(args) > 1 else None)


def _parameters(walker: Walker, node: ast.Call, receiver: Thing, args: list[Value],
                kwargs: dict[str, Value]) -> Value:  # fmt: skip
    models = frozenset((receiver,)) | receiver.models
    return Thing("params", f"{receiver.key}.parameters()", models=models, depth=receiver.depth,
                 uses={"iterator"})  # fmt: skip


def _mode(walker: Walker, node: ast.Call, receiver: Thing, args: list[Value],
          kwargs: dict[str, Value]) -> Value:  # fmt: skip
    flag = args[0] if args else kwargs.get("mode", True)
    if text(node.func).endswith(".eval"):
        walker.note("mode", node, receiver, None, "eval")
    elif flag is True:
        walker.note("mode", node, receiver, None, "train")
    else:
        said = [*node.args, *(word.value for word in node.keywords)]
        off = flag is False and isinstance(said[0], ast.Constant)
        walker.note("mode", node, receiver, None, "eval" if off else "restored")
    return receiver


def _itself(walker: Walker, node: ast.Call, receiver: Thing, args: list[Value],
            kwargs: dict[str, Value]) -> Value:  # fmt: skip
    return receiver


def _lower(walker: Walker, node: ast.Call, receiver: Thing, args: list[Value],
           kwargs: dict[str, Value]) -> Value:  # fmt: skip
    receiver.uses.add("low")
    return receiver


def _to(walker: Walker, node: ast.Call, receiver: Thing, args: list[Value],
        kwargs: dict[str, Value]) -> Value:  # fmt: skip
    if any(is_low(value) for value in (*args, *kwargs.values())):
        receiver.uses.add("low")
    return receiver


def _requires_grad(walker: Walker, node: ast.Call, receiver: Thing, args: list[Value],
                   kwargs: dict[str, Value]) -> Value:  # fmt: skip
    flag = args[0] if args else kwargs.get("requires_grad", True)
    if isinstance(flag, bool):
        walker.note("unfreeze" if flag else "freeze", node, receiver)
        if flag:
            receiver.uses.add("asks_grad")
    return receiver


def _in_place(walker: Walker, node: ast.Call, receiver: Thing, args: list[Value],
              kwargs: dict[str, Value]) -> Value:  # fmt: skip
    name = text(node.func).split(".")[-1]
    if receiver.kind == "grad":
        by_hand.write_grad(walker, node, receiver, name, args)
    elif receiver.kind in ("param", "leaf") or "weight" in receiver.uses:
        reads = any(isinstance(v, Thing) and (v.kind == "grad" or "grad" in v.uses) for v in args)
        flags = [*receiver.uses & {"data"}, *(["grad"] if reads else [])]
        walker.note("param_write", node, receiver, None, "in_place", *flags)
        if name in ("add_", "lerp_") and walker.loops and _of_another(receiver, args):
            walker.note("averaged", node, receiver)
    return receiver


def _of_another(param: Thing, args: list[Value]) -> bool:
    """Whether weights are moved towards those of another model."""
    return any(
        isinstance(value, Thing)
        and (value.kind == "param" or "param" in value.uses)
        and bool(value.models)
        and value.models.isdisjoint(param.models)
        for value in args
    )


METHODS: dict[str, Handler] = {
    "backward": _backward,
    "manual_backward": _manual_backward,
    "step": _step,
    "zero_grad": _zero_grad,
    "unscale_": _unscale,
    "update": _update,
    "scale": _scale,
    "clip_grad_norm_": _clip,
    "clip_grad_norm": _clip,
    "clip_grad_value_": _clip,
    "accumulate": engines.accumulate,
    "no_sync": engines.no_sync,
    "no_backward_sync": engines.no_sync,
    "prepare": engines.prepare,
    "prepare_data_loader": engines.prepare,
    "prepare_model": engines.prepare,
    "prepare_optimizer": engines.prepare,
    "prepare_scheduler": engines.prepare,
    "setup": engines.prepare,
    "setup_dataloaders": engines.prepare,
    "setup_module": engines.prepare,
    "setup_optimizers": engines.prepare,
    "parameters": _parameters,
    "named_parameters": _parameters,
    "train": _mode,
    "eval": _mode,
    "to": _to,
    "cuda": _itself,
    "cpu": _itself,
    "double": _itself,
    "bfloat16": _lower,
    "half": _lower,
    "requires_grad_": _requires_grad,
    "children": by_hand.parts,
    "modules": by_hand.parts,
    "named_children": by_hand.parts,
    "named_modules": by_hand.parts,
    "mul_": _in_place,
    "div_": _in_place,
    "add_": _in_place,
    "sub_": _in_place,
    "addcmul_": _in_place,
    "copy_": _in_place,
    "zero_": _in_place,
    "clamp_": _in_place,
    "lerp_": _in_place,
    "fill_": _in_place,
    "register_post_accumulate_grad_hook": by_hand.post_hook,
    "register_hook": by_hand.grad_hook,
    "load_state_dict": by_hand.load,
    "reset_parameters": by_hand.reset,
    "add_param_group": by_hand.add_group,
    "resize_token_embeddings": by_hand.resize,
    "register_step_pre_hook": by_hand.step_hook,
    "register_step_post_hook": by_hand.step_hook,
}

OF_LEAF = frozenset(
    {"backward", "mul_", "div_", "add_", "sub_", "addcmul_", "copy_", "zero_", "register_hook",
     "requires_grad_", "register_post_accumulate_grad_hook"}
)  # fmt: skip
"""Methods of a leaf tensor that act on the leaf itself."""


def enter(walker: Walker, value: Value, node: ast.AST) -> Value:
    """Open a `with` block; returns what `as` binds."""
    if not isinstance(value, Thing) or value.kind != "context":
        return value
    if value.key == "accumulate":
        accelerator = value.args[0]
        assert isinstance(accelerator, Thing)
        steps = accelerator.kwargs.get("gradient_accumulation_steps")
        if isinstance(steps, Num):
            every = int(steps.value) if steps.value <= 8 else 3
        else:
            key = steps.key if isinstance(steps, Thing) else "accelerate"
            walker.trace.window_keys.add(key)
            every = int(walker.symbol(key).value)
        walker.accumulations += 1
        last = walker.loops[-1].last if walker.loops else False
        count = walker.engines.get(id(accelerator), 0) + 1
        walker.sync = count % max(every, 1) == 0 or last
        walker.engines[id(accelerator)] = 0 if last else count
    walker.contexts.append((value.key, value.args[0] if value.args else None))
    if value.key == "scale_loss":
        loss = _as_loss(value.args[0])
        return loss.but(flags=loss.flags | {"apex"})
    return value
