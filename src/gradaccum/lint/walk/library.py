"""What the functions and classes of torch, Accelerate and their like make, by dotted name."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from gradaccum.lint.walk import by_hand, calls, effects, sizes
from gradaccum.lint.walk.arithmetic import merged, symbols
from gradaccum.lint.walk.attributes import attribute
from gradaccum.lint.walk.contents import has_params, is_complex, is_low, models_of, opaque
from gradaccum.lint.walk.evaluate import key_of, text
from gradaccum.lint.walk.means import is_quotient, shown
from gradaccum.lint.walk.sizes import KNOWN, SURE, count_of
from gradaccum.lint.walk.values import Class, Func, Num, Seq, Tensor, Thing, Value

if TYPE_CHECKING:
    from gradaccum.lint.walk.walker import Walker

__all__ = ["ITERABLES", "external_call"]

ITERABLES = frozenset({"cycle", "enumerate", "generator", "range", "zip", "loader", "wrapped"})
_CONTEXTS = {
    "no_grad": "no_grad",
    "inference_mode": "inference_mode",
    "nullcontext": "null",
    "autocast": "autocast",
    "enable_grad": "enable_grad",
}
_SAME = frozenset({"compile", "DataParallel", "convert_sync_batchnorm", "unwrap_model", "iter",
                   "fully_shard"})  # fmt: skip
_WRAPPERS = ("DistributedDataParallel", "DDP")
_OPTIMIZERS = re.compile(
    r"(adam|sgd|lamb|lars|lion|adafactor|ranger|novograd|sophia|muon|shampoo|prodigy|madgrad"
    r"|rmsprop|adagrad|adadelta|optimizer)(w|\d*bit|2|v2)?$",
    re.IGNORECASE,
)
"""Classes of optimizers that other libraries have, by how they are called."""
_MEANS = frozenset({"BCELoss", "BCEWithLogitsLoss", "CrossEntropyLoss", "HuberLoss", "L1Loss",
                    "MSELoss", "NLLLoss", "SmoothL1Loss"})  # fmt: skip
_MEAN_OF = frozenset(
    {"binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy", "huber_loss",
     "l1_loss", "mse_loss", "nll_loss", "smooth_l1_loss"}
)  # fmt: skip
"""Criteria that are a mean over the batch, if nobody says otherwise."""
_REDUCED = frozenset({"reduce", "reduction", "size_average"})
_TESTS = frozenset(
    {"isnan", "isinf", "isfinite", "argmax", "argmin", "eq", "ne", "gt", "lt", "ge", "le", "sign",
     "zeros_like", "ones_like", "rand_like", "randn_like"}
)  # fmt: skip
"""Functions of tensors whose results have no graph."""
_ROUND = {"max": max, "min": min}
_FRESH = frozenset({"zeros", "ones", "full", "randn", "rand", "empty", "tensor", "Parameter",
                    "nn.Parameter", "zeros_like", "ones_like"})  # fmt: skip


def external_call(
    walker: Walker, node: ast.Call, dotted: str, args: list[Value], kwargs: dict[str, Value]
) -> Value:
    """A call of something imported or built in."""
    name = dotted.split(".")[-1]
    if "." not in dotted:
        found = _builtin(walker, node, name, args, kwargs)
        if found is not NotImplemented:
            return found
    if name in _CONTEXTS:
        return Thing("context", _CONTEXTS[name])
    if name == "islice" and 1 < len(args) < 4:
        walker.trace.measured |= symbols(args[min(2, len(args) - 1)])
        return Thing("wrapped", "islice()", args=(args[0],))
    if name == "cycle" and len(args) == 1 and _counts_round(args[0]):
        return Thing("cycle", "cycle()", args=(args[0],))
    if name == "set_grad_enabled":
        return Thing("context", "no_grad" if args and args[0] is False else "null")
    if name == "scale_loss" and args:
        return Thing("context", "scale_loss", args=(args[0],))
    if name in ("clip_grad_norm_", "clip_grad_norm", "clip_grad_value_", "clip_grads_with_norm_"):
        limit = args[1] if len(args) > 1 else kwargs.get("max_norm", kwargs.get("clip_value"))
        target = args[0] if args else kwargs.get("parameters")
        return effects.clip(walker, node, target, limit)
    if name.startswith("_foreach_") and name.endswith("_") and dotted.startswith("torch."):
        by_hand.foreach(walker, node, name, args)
        return None
    if name.startswith("register_optimizer_step_"):
        by_hand.hook_in(walker, node, name, None, args[0] if args else kwargs.get("hook"))
        return None
    if name in ("zero_grad", "step") and "." in dotted and args and isinstance(args[0], Thing):
        # a method of a class that is called with its object
        return effects.METHODS[name](walker, node, args[0], args[1:], kwargs)
    if dotted.endswith("distributed.autograd.backward") and args:
        # gradients go into a context of their own, not into `.grad`
        effects.backward(walker, node, effects._as_loss(args[-1]), None, kwargs, "engine")
        return None
    if dotted.endswith("autograd.backward") and args:
        effects.backward(walker, node, effects._as_loss(args[0]), None, kwargs)
        return None
    if name in ("spawn", "Process") and "multiprocessing" in dotted:
        target = args[0] if name == "spawn" and args else kwargs.get("target", kwargs.get("fn"))
        given = kwargs.get("args", args[1] if len(args) > 1 else None)
        if isinstance(target, Func) and not walker.loops:
            rank: list[Value] = [Thing("unknown", "rank")] if name == "spawn" else []
            items = given.items if isinstance(given, Seq) and not given.open else []
            walker.function(target, [*rank, *items], {})
        return opaque(walker, node)
    if name == "checkpoint" and args and ("checkpoint.checkpoint" in dotted or "utils" in dotted):
        return _checkpoint(walker, node, args, kwargs)
    if dotted.endswith("autograd.grad"):
        parts = calls.tensors(args[:1])
        walker.note("autograd_grad", node, None, merged(parts, node) if parts else None)
        if kwargs.get("create_graph") is True and parts:
            return merged(parts, node)
        by = args[1] if len(args) > 1 else kwargs.get("inputs")
        input_ = isinstance(by, Tensor) or (isinstance(by, Thing) and "asks_grad" in by.uses)
        if input_ and "create_graph" not in kwargs:
            return Tensor(flags=frozenset(("ungraphed",)), graph=False, made=node)
        return opaque(walker, node)
    result = _construct(walker, node, dotted, name, args, kwargs)
    if isinstance(result, Thing) and result.node is node:
        sizes.sized(result, sizes.made(dotted, args, kwargs))
    return result


def _counts_round(value: Value) -> bool:
    """Whether what is repeated for ever are numbers, that count the micro-batches of a window."""
    if isinstance(value, Seq):
        return all(isinstance(item, Num) for item in value.items)
    return isinstance(value, Thing) and value.kind == "range"


def _checkpoint(
    walker: Walker, node: ast.Call, args: list[Value], kwargs: dict[str, Value]
) -> Value:
    """Activation checkpointing: the function runs once now, and once more in the backward."""
    inner = args[0]
    marks = ["no_rng"] if kwargs.get("preserve_rng_state") is False else []
    body, path = _body_of(walker, inner)
    parts = (inner.models | {inner}) if isinstance(inner, Thing) else frozenset()
    if any(part.key.startswith("Dropout") for part in parts) or (
        body is not None and "dropout" in ast.unparse(body).lower()
    ):
        marks.append("dropout")
    walker.paths.append(path or walker.paths[-1])
    for side in _side_effects(body):
        walker.note("checkpoint_side", side)
    walker.paths.pop()
    walker.note("checkpoint", node, inner if isinstance(inner, Thing) else None, None, *marks)
    return calls.apply(walker, node, inner, args[1:], {})


def _body_of(walker: Walker, inner: Value) -> tuple[ast.AST | None, str]:
    """The code that a checkpoint runs, where we have it, and its file."""
    if isinstance(inner, Func):
        return inner.node, inner.module.path
    home = inner.attrs.get("__class__") if isinstance(inner, Thing) else None
    if isinstance(home, Class):
        return find_method_node(home), home.module.path
    return None, ""


def find_method_node(home: Class) -> ast.AST | None:
    """The `forward` of a module."""
    for node in home.node.body:
        if isinstance(node, ast.FunctionDef) and node.name == "forward":
            return node
    return None


def _side_effects(body: ast.AST | None) -> list[ast.AST]:
    """Statements that count or collect on `self`."""
    found: list[ast.AST] = []
    for node in ast.walk(body) if body is not None else ():
        if isinstance(node, ast.AugAssign) and _on_self(node.target):
            found.append(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("append", "extend") and _on_self(node.func.value):
                found.append(node)
    return found


def _on_self(node: ast.expr) -> bool:
    while isinstance(node, ast.Subscript):
        node = node.value
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def _construct(
    walker: Walker,
    node: ast.Call,
    dotted: str,
    name: str,
    args: list[Value],
    kwargs: dict[str, Value],
) -> Value:
    values = [*args, *kwargs.values()]
    depth = len(walker.loops)
    lower = dotted.lower()
    if name in _SAME or (name == "checkpoint" and not args):
        return args[0] if args else opaque(walker, node)
    if name == "deepcopy" and args and isinstance(args[0], Thing):
        twin = args[0]
        home = twin.attrs.get("__class__")
        kept: dict[str, Value] = {"__class__": home} if home is not None else {}
        return Thing(twin.kind, f"{twin.key}'", bool(walker.loops), kept, depth=depth, node=node)
    if name == "initialize" and "amp" in lower:
        return args[0] if len(args) == 1 else Seq(list(args), depth)
    if name == "initialize" and "deepspeed" in lower:
        return Thing("unknown", f"engine@{node.lineno}", node=node, depth=depth,
                     models=models_of(values))  # fmt: skip
    if name == "master_params":
        return Thing("params", "master", uses={"master"}, models=models_of(args))
    made = _tool(node, name, args, kwargs, depth)
    if made is not None:
        return made
    if name in _WRAPPERS or ("ddp" in lower.split(".")[-1] and args):
        model = args[0] if args else kwargs.get("module")
        if isinstance(model, Tensor):
            model = effects.alias(walker, model)  # what made it was taken for a forward pass
        if isinstance(model, Thing):
            if model.kind == "unknown":
                model.kind = "model"
            model.uses.add("ddp")
            return model
    made = _schedules(walker, node, dotted, name, args, kwargs)
    if made is not None:
        return made
    if dotted.startswith("torch.nn.") and name[:1].isupper() and ".functional." not in dotted:
        if name == "Parameter":
            return Thing("leaf", f"Parameter@{node.lineno}", node=node, depth=depth)
        if name.endswith("Loss"):
            uses = {"sum"} if kwargs.get("reduction") in ("sum", "none") else set()
            if not kwargs.keys() & _REDUCED and name in _MEANS:
                uses.add("mean")
            if name in ("CrossEntropyLoss", "NLLLoss") and (args or "weight" in kwargs):
                uses.add("class_weights")
            return Thing("loss_fn", name, node=node, uses=uses)
        parts = models_of(values)
        uses = {"sparse"} if kwargs.get("sparse") is True else set()
        if is_complex(kwargs.get("dtype")):
            uses.add("complex")
        return Thing("model", f"{name}@{node.lineno}", node=node, depth=depth, models=parts,
                     uses=uses)  # fmt: skip
    if name in _FRESH and kwargs.get("requires_grad") is True:
        uses = {"low"} if is_low(kwargs.get("dtype")) else set()
        if is_complex(kwargs.get("dtype")):
            uses.add("complex")
        return Thing("leaf", f"{name}@{node.lineno}", node=node, depth=depth, uses=uses)
    if name == "chain" and any(has_params(value) for value in args):
        return Thing("params", "chain()", models=models_of(args), depth=depth,
                     uses={"iterator"})  # fmt: skip
    return _anything(walker, node, dotted, name, args, kwargs)


def _tool(
    node: ast.Call, name: str, args: list[Value], kwargs: dict[str, Value], depth: int
) -> Thing | None:
    """A scaler, an engine or a loader."""
    if name == "GradScaler":
        kind = "unknown" if kwargs.get("enabled") is False else "scaler"
        return Thing(kind, text(node.func), node=node, depth=depth, kwargs=kwargs)
    if name == "Accelerator":
        return Thing("accelerator", "Accelerator()", node=node, kwargs=kwargs)
    if name == "Fabric":
        return Thing("fabric", "Fabric()", node=node, kwargs=kwargs)
    if name == "DataLoader":
        data = args[0] if args else kwargs.get("dataset")
        uses = {"stream"} if isinstance(data, Thing) and data.kind == "stream" else set()
        attrs: dict[str, Value] = {}
        if isinstance(data, (Thing, Seq)):
            attrs["dataset"] = data
        return Thing("loader", f"DataLoader@{node.lineno}", node=node, depth=depth, attrs=attrs,
                     kwargs=kwargs, uses=uses)  # fmt: skip
    return None


def _schedules(
    walker: Walker,
    node: ast.Call,
    dotted: str,
    name: str,
    args: list[Value],
    kwargs: dict[str, Value],
) -> Thing | None:
    depth = len(walker.loops)
    lower = dotted.lower()
    if (
        "lr_scheduler" in lower
        or name.endswith(("LR", "LROnPlateau"))
        or "schedule" in name.lower()
    ):
        made = Thing("scheduler", name, node=node, depth=depth, args=tuple(args), kwargs=kwargs)
        walker.trace.made_in[id(node)] = walker.paths[-1]
        for value in (*args, *kwargs.values()):
            if isinstance(value, Thing) and value.kind in ("unknown", "optimizer"):
                value.uses.add("scheduled")
        return made
    first = args[0] if args else kwargs.get("params", kwargs.get("parameters"))
    if name == "AveragedModel":
        return Thing("model", f"{name}@{node.lineno}", node=node, depth=depth, args=tuple(args),
                     kwargs=kwargs)  # fmt: skip
    named = name[:1].isupper() and (".optim." in f".{lower}" or bool(_OPTIMIZERS.search(name)))
    if named or (has_params(first) and name[:1].isupper() and not dotted.startswith("torch.nn")):
        models = models_of([*args, *kwargs.values()])
        if isinstance(first, Thing) and first.kind == "params":
            by_hand.spend(first)
        made = Thing("optimizer", name, node=node, depth=depth, models=models,
                     args=tuple(args), kwargs=kwargs,
                     uses={"torch"} if dotted.startswith("torch.") else set())  # fmt: skip
        walker.note("built", node, made)
        return made
    return None


def _anything(
    walker: Walker,
    node: ast.Call,
    dotted: str,
    name: str,
    args: list[Value],
    kwargs: dict[str, Value],
) -> Value:
    if dotted.startswith("torch.") or dotted.split(".")[0] == "functools":
        if name == "partial":
            made_later = opaque(walker, node)
            made_later.args, made_later.kwargs = tuple(args), kwargs
            return made_later
        parts = calls.tensors([*args, *kwargs.values()])
        if not parts:
            return opaque(walker, node)
        made = merged(parts, node)
        if name in _TESTS:
            return made.but(graph=False, forwards=frozenset(), models=frozenset(), made=node,
                            flags=made.flags | {"detached"})  # fmt: skip
        flags = made.flags - {"sum"}
        if name == "sum" or kwargs.get("reduction") in ("sum", "none"):
            flags |= {"sum"}
        if name in _MEAN_OF and not kwargs.keys() & _REDUCED and len(args) < 3:
            flags |= {"mean"}
        if name in ("cat", "concat", "stack", "concatenate"):
            flags |= {"cat"}
        if "ignore_index" in kwargs and kwargs.get("reduction") not in ("sum", "none"):
            flags |= {"ignores"} if _pads(walker) else set()
        keep = name in ("mean", "sum", "stack", "where", "add", "nan_to_num", "squeeze")
        if name == "div" and len(args) > 1:
            made = effects.divided(made, args[1])
            keep = True
        divisors = made.divisors if keep else ()
        return made.but(flags=flags, divisors=divisors, partial=(), made=node)
    return calls.unknown_call(walker, node, Thing("external", dotted), args, kwargs)


_PADS = ("pad", "mask", "collat", "ignore_label")


def _pads(walker: Walker) -> bool:
    """Whether the script makes anything to ignore; a helper's argument alone does not say so."""
    module = walker.program.load(walker.paths[0])
    if module is None:
        return False
    known = module.tree.__dict__.get("_pads")
    if known is None:
        known = module.tree.__dict__["_pads"] = any(
            _is_padding(node) for node in ast.walk(module.tree)
        )
    return bool(known)


def _is_padding(node: ast.AST) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return isinstance(node.operand, ast.Constant) and node.operand.value == 100
    name = getattr(node, "id", getattr(node, "attr", getattr(node, "arg", None)))
    return isinstance(name, str) and any(word in name.lower() for word in _PADS)


def _builtin(
    walker: Walker, node: ast.Call, name: str, args: list[Value], kwargs: dict[str, Value]
) -> Value:
    if name == "super":
        owner, home = walker.owners[-1] if walker.owners else (None, None)
        made = Thing("unknown", "super()", args=(owner,))
        if home is not None:
            made.attrs["__home__"] = home
        return made
    if name == "len" and args:
        return _length(walker, node, args[0])
    if name == "range":
        return Thing("range", "range", args=tuple(args), depth=len(walker.loops))
    if name in ("enumerate", "zip"):
        start = [kwargs["start"]] if kwargs.get("start") is not None else []
        return Thing(name, name, args=(*args, *start))
    if name in ("list", "tuple", "iter", "sorted", "reversed", "set") and args:
        first = args[0]
        if isinstance(first, Thing) and first.uses & {"once", "iterator"} and name != "iter":
            by_hand.spend(first)
            return Thing("params", first.key, models=first.models, depth=first.depth,
                         args=first.args,
                         uses=first.uses - {"iterator", "once", "spent"})  # fmt: skip
        return first
    if name == "map" and len(args) == 2:
        made = by_hand.each(walker, node, args[0], args[1])
        if made is not None and walker.loops:
            return made
    if name in ("filter", "map") and len(args) > 1:
        inner = args[1]
        if isinstance(inner, Thing) and inner.kind == "params":
            return Thing("params", f"some of {inner.key}", models=inner.models, args=(inner,),
                         depth=len(walker.loops), uses={"once", "filtered"})  # fmt: skip
    if name == "float" and args[:1] == ["inf"]:
        return Num(float("inf"))
    if name in ("int", "float", "round", "abs", "bool") and args:
        if isinstance(args[0], Num):
            value = args[0]
            whole = float(int(value.value)) if name == "int" else value.value
            return Num(round(whole) if name == "round" else whole, value.tags, value.varies)
        if name == "float" and (isinstance(args[0], Tensor) or is_quotient(args[0])):
            return shown(args[0], node, name)
        return args[0] if isinstance(args[0], Thing) else opaque(walker, node)
    if name in _ROUND and args and all(isinstance(value, Num) for value in args):
        numbers = [value for value in args if isinstance(value, Num)]
        best = _ROUND[name](numbers, key=lambda number: number.value)
        return Num(best.value, frozenset().union(*(number.tags for number in numbers)),
                   any(number.varies for number in numbers))  # fmt: skip
    if name == "sum" and args:
        parts = calls.tensors([args[0]])
        return merged(parts, node) if parts else opaque(walker, node)
    if name == "getattr" and len(args) > 1 and isinstance(args[0], Thing):
        if isinstance(args[1], str):
            return attribute(walker, args[0], args[1], node)
    if name == "hasattr" and args[1:] == ["no_sync"] and isinstance(args[0], Thing):
        if "ddp" in args[0].uses:
            return True
    if name == "hasattr" and args[1:] == ["reset_parameters"]:
        return True  # asked of every module, and some have it
    if name == "isinstance" and len(args) == 2 and isinstance(args[0], Thing):
        if "ddp" in args[0].uses and key_of(args[1]).split(".")[-1] in _WRAPPERS:
            return True
    if name in ("setattr", "delattr") and len(args) > 1 and args[1] == "grad":
        if name == "delattr" or (len(args) > 2 and args[2] is None):
            by_hand.delete(walker, node, args[0])
        elif isinstance(args[0], Thing):
            walker.note("set_grad", node, args[0], None, "param")
        return None
    if name in ("isinstance", "hasattr", "callable", "any", "all"):
        return Thing("unknown", f"{name}({','.join(key_of(value) for value in args)})",
                     any(isinstance(value, (Tensor,)) for value in args))  # fmt: skip
    if name in ("print", "str", "repr", "setattr", "next", "type", "dict", "id", "vars"):
        return opaque(walker, node)
    return NotImplemented


def _length(walker: Walker, node: ast.Call, value: Value) -> Value:
    known = count_of(value)
    key = value.key if isinstance(value, Seq) and value.key else key_of(value)
    if known is not None and known <= SURE:
        return Num(known, frozenset((f"{KNOWN}{key})",)))
    if isinstance(value, Thing) and value.kind in ("range",) and value.args:
        last = value.args[-1]
        if len(value.args) == 1:
            return last
    if isinstance(value, Thing) and "stream" in value.uses and walker.loops:
        walker.note("stream_length", node, value)
    if isinstance(value, Thing) and value.kind == "unknown" and value.key.endswith("[i]"):
        return Thing("unknown", f"len({value.key})", True)  # of a batch, not of a loader
    if isinstance(value, (Thing, Seq)) and not isinstance(value, Class):
        return Num(walker.known.get("length", 8), frozenset((f"len({key})",)))
    return Thing("unknown", "len()", True)
