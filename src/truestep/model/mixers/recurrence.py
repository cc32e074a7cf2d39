"""Recurrent layers: convolutions over time, gated delta rules, state-space models, and a user's own.

A transformers model calls such an operation as a function of the module that has its code. `register` names the
function that an operation replaces. `put_in` looks for modules whose methods use a registered function, and gives them
copies of these methods that call our operation. transformers' own code is not changed. An operation is called with one
of
- `packed_layout` (training): it runs on packed documents, which are independent of each other;
- `paged` (the engine): `paged.step.recur(module, recurrence, call)` computes the output;
- neither (one document without packing): the model's own plain function runs.

Both arguments come from `handed`, because some models do not pass them on to their layers.
"""

import functools
import inspect
import threading
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from truestep.model.handed import hand_on, handed
from truestep.model.mixers.context_parallel import Context, check_share, heads_needed
from truestep.model.mixers.paths import Paths
from truestep.weights.errors import ModelError

Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class LayerState:
    """The state that one operation of one layer keeps for one sequence: a tensor of fixed shape."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Call:
    """A call of a model's function. Its arguments are also attributes. Example: `call.query`."""

    function: Callable[..., Any]  # the model's own plain function, without kernels
    arguments: Mapping[str, Any]  # by name, with defaults, without the model's extra keyword arguments
    kernels: bool = False  # whether kernels may be used, not only plain torch

    def __getattr__(self, name: str) -> Any:
        try:
            return self.arguments[name]
        except KeyError:
            raise AttributeError(f"{self.function.__name__} has no argument {name}") from None

    def __getstate__(self) -> Any:  # without this, copying would call `__getattr__` before the fields exist
        return self.__dict__

    def replaced(self, **named: Any) -> "Call":
        return replace(self, arguments={**self.arguments, **named})


class Recurrence(ABC):
    """An operation that carries a state from token to token. Outputs have the form of the model's function.

    Tensors of a call have the layout of the model's function, for a batch of one: S tokens of D packed documents, or
    one token for each of R sequences.
    """

    kernel: ClassVar[bool] = False  # whether `linear_kernels` has a kernel for it
    tokens: ClassVar[
        Mapping[str, int]
    ] = {}  # arguments with a dimension of tokens, and its index; for kernels and shared prefixes
    output_tokens: ClassVar[int] = 1  # index of the output's dimension of tokens
    wide: ClassVar[Collection[str]] = ()  # arguments that stay float32 if the model computes in half precision

    @abstractmethod
    def state(self, call: Call) -> LayerState:
        """Describe the state that one sequence keeps."""

    @abstractmethod
    def packed(
        self, call: Call, segments: torch.Tensor, longest: int, spans: Spans, initial: torch.Tensor | None
    ) -> tuple[Any, torch.Tensor]:
        """Compute packed documents. Return the output and each document's final state, [D, *shape].

        `segments`: cumulative lengths on the device, int32 [D + 1]. `spans`: each document's begin and end, on the
        host. `initial`: the states [D, *shape] that documents begin with; None: zeros."""

    @abstractmethod
    def step(self, call: Call, states: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Compute the next token of each of R sequences. Return the output and the new states, [R, *shape]."""

    def exchanged(self, call: Call, context: Context) -> tuple[Call, Callable[[Any], Any]]:
        """Exchange this rank's tokens for all tokens of a share of the heads or channels. Return the new call, and a
        function that exchanges the output back."""
        raise ModelError(
            f"parallel.context: {call.function.__name__} has no way to divide a document's tokens over ranks"
        )


_registered: dict[str, Recurrence | None] = {}


def register(function_name: str, recurrence: Recurrence | None) -> None:
    """Replace functions of this name in models' code by an operation. None: keep the model's own plain function, and
    switch off kernels of other packages."""
    _registered[function_name] = recurrence
    _methods_of.cache_clear()
    _replaced_methods.cache_clear()


class _Running(threading.local):
    """The module whose forward pass is running. It is per thread, because the backward pass has its own threads."""

    module: torch.nn.Module | None = None


_running = _Running()


# Names that only the code of layers with a recurrent state in transformers' caches uses.
_SIGNS = {"update_recurrent_state", "update_conv_state", "set_linear_cache", "recurrent_states"}


def put_in(model: Any) -> None:
    """Put the registered operations in a model. Refuse a model with recurrent layers that call none of them."""
    found = False
    for name, module in model.named_modules():
        kind: Any = type(module)
        replaced = _replaced_methods(kind)
        if not replaced and _keeps_state(kind):
            raise ModelError(
                f"{type(model).__name__}: {name} ({type(module).__name__}) keeps a state from token to token, and no "
                "operation is registered for it (truestep.model.mixers.register): packed documents would see each other"
            )
        if not replaced:
            continue
        for method, function in replaced.items():
            setattr(module, method, types.MethodType(function, module))
        module.register_forward_pre_hook(_enter)
        module.register_forward_hook(_leave)
        found = True
    if found:
        hand_on(model)


_KERNELS = "_recurrent_kernels"  # a module's attribute: the function names that use kernels


def use_kernels(model: Any, names: Collection[str]) -> None:
    """Use kernels for a model's operations of these names, and plain torch for the others."""
    for module in recurrent_modules(model):
        vars(module)[_KERNELS] = names


_seen: list[tuple[Recurrence, Call]] | None = None


@contextmanager
def calls_seen() -> Iterator[list[tuple[Recurrence, Call]]]:
    """Collect the calls of all operations on packed documents within the block."""
    global _seen
    _seen = []
    try:
        yield _seen
    finally:
        _seen = None


def recurrent_modules(model: Any) -> list[torch.nn.Module]:
    """List the modules that call a registered operation."""
    recurrent = {kind for kind in _kinds(model) if any(_operations(kind))}
    return [module for module in model.modules() if type(module) in recurrent]


def _kinds(model: Any) -> set[type]:
    """Return the classes of a model's modules: to look at one takes a millisecond, and its layers share few."""
    return {type(module) for module in model.modules()}


@functools.cache
def _replaced_methods(kind: type) -> dict[str, types.FunctionType]:
    """Return copies of a class's methods that use registered functions. The copies have other globals, with our
    operations. All modules of a class share them, so that torch.compile compiles them once."""
    replaced = {}
    for method, function, names in _methods_of(kind):
        ours = {name: _in_place_of(_registered[name], function.__globals__[name]) for name in names}
        code, given = function.__code__, function.__globals__ | ours
        changed = types.FunctionType(code, given, function.__name__, function.__defaults__, function.__closure__)
        changed.__kwdefaults__ = function.__kwdefaults__
        replaced[method] = changed
    return replaced


@functools.cache
def _methods_of(kind: type) -> list[tuple[str, types.FunctionType, list[str]]]:
    """List a class's methods that call registered functions of their module, without their decorators."""
    found = []
    for method in dir(kind):
        function = inspect.unwrap(getattr(kind, method)) if callable(getattr(kind, method)) else None
        if isinstance(function, types.FunctionType):
            known = function.__globals__.keys() & _registered.keys()
            names = [name for name in function.__code__.co_names if name in known]
            if names:
                found.append((method, function, names))
    return found


def _keeps_state(kind: type) -> bool:
    forward = inspect.unwrap(kind.forward) if hasattr(kind, "forward") else None
    return isinstance(forward, types.FunctionType) and not _SIGNS.isdisjoint(forward.__code__.co_names)


def _operations(kind: type) -> Iterator[Recurrence]:
    for _, _, names in _methods_of(kind):
        yield from (recurrence for name in names if (recurrence := _registered[name]) is not None)


def _in_place_of(recurrence: Recurrence | None, function: Any) -> Any:
    """Return the function that replaces a model's function. Compiled layers call it outside their graphs."""
    plain = inspect.unwrap(function)  # the plain function, without other packages' kernels
    signature = inspect.signature(plain)
    rest = next((one.name for one in signature.parameters.values() if one.kind is one.VAR_KEYWORD), None)

    @torch.compiler.disable
    @functools.wraps(plain)
    def dispatch(*arguments: Any, **named: Any) -> Any:
        for name in ("packed_layout", "paged"):
            named.pop(name, None)
        packed_layout, paged = handed("packed_layout"), handed("paged")
        if recurrence is None or (packed_layout is None and paged is None):
            return plain(*arguments, **named)
        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        if rest is not None:
            del bound.arguments[rest]
        kernels: Collection[str] = vars(_running.module).get(_KERNELS, ()) if _running.module is not None else ()
        call = Call(plain, bound.arguments, plain.__name__ in kernels)
        if _seen is not None:
            _seen.append((recurrence, call))
        if paged is not None:
            return paged.step.recur(_running.module, recurrence, call)
        return run_packed(recurrence, call, packed_layout)

    return dispatch


def exchange_heads(call: Call, context: Context, heads: Sequence[str], groups: Sequence[str]) -> Call:
    """Exchange tokens for heads. `heads`: names of arguments [1, S, heads, ...]. `groups`: names of arguments [1, S,
    groups, ...]; each group serves equally many heads."""
    count, shared = (call.arguments[names[0]].shape[2] for names in (heads, groups))
    check_share("heads of a recurrent layer", count, context.size)
    needed = heads_needed(count, shared, context.size)
    given = {name: call.arguments[name][0] for name in heads}
    for name in groups:
        index = torch.tensor(needed, device=call.arguments[name].device)
        given[name] = call.arguments[name][0].index_select(1, index)
    exchanged: dict[str, Any] = {}
    # the tensors of one message need the same dtype
    for kind in sorted({str(tensor.dtype) for tensor in given.values()}):
        names = [name for name, tensor in given.items() if str(tensor.dtype) == kind]
        exchanged |= zip(names, context.tokens_for_shares(*(given[name] for name in names)), strict=True)
    return call.replaced(**{name: tensor[None] for name, tensor in exchanged.items()})


def run_packed(recurrence: Recurrence, call: Call, layout: Any) -> Any:
    """Compute packed documents, which start with a zero state. `layout`: a `PackedLayout`."""
    back: Callable[[Any], Any] | None = None
    if layout.context is not None:
        call, back = recurrence.exchanged(call, layout.context)
    if layout.paths is None:
        output, _ = recurrence.packed(call, layout.segments, layout.longest, layout.spans, None)
    else:
        output = _along_paths(recurrence, call, layout.paths)
    return output if back is None else back(output)


def _along_paths(recurrence: Recurrence, call: Call, paths: Paths) -> Any:
    """Compute segments level by level. Each segment starts with its parent's final state."""
    outputs, final, form = [], None, None
    for level in paths.levels:
        initial = None
        if level.parents is not None:
            # A state gets one gradient from each child. This conversion makes autograd sum them in float32.
            assert final is not None
            wide = final.to(torch.promote_types(final.dtype, torch.float32))
            initial = wide.index_select(0, level.parents).to(final.dtype)
        own = {
            name: call.arguments[name].index_select(dimension, level.tokens)
            for name, dimension in recurrence.tokens.items()
            if call.arguments[name] is not None
        }
        form, final = recurrence.packed(call.replaced(**own), level.segments, level.longest, level.spans, initial)
        outputs.append(form[0] if isinstance(form, tuple) else form)
    output = torch.cat(outputs, recurrence.output_tokens).index_select(recurrence.output_tokens, paths.restore)
    return (output, *form[1:]) if isinstance(form, tuple) else output


def cannot_share(model: Any) -> list[str]:
    """Name the operations of a model that do not support shared prefixes: their `tokens` is empty."""
    operations = (each for kind in _kinds(model) for each in _operations(kind))
    return sorted({type(operation).__name__ for operation in operations if not operation.tokens})


@torch.compiler.disable
def _enter(module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
    module.__dict__["_called_from"] = _running.module
    _running.module = module


@torch.compiler.disable
def _leave(module: torch.nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
    _running.module = module.__dict__.pop("_called_from", None)
