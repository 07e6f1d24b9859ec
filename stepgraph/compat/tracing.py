"""Tracing with ``make_fx``: runs a trace, reads its graph while it runs, and switches features that it needs."""

import contextlib
import gc
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch._guards import TracingContext, tracing
from torch._subclasses import fake_tensor as fake_tensors
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import (
    PythonKeyTracer,
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
    track_tensor_tree,
)
from torch.fx.graph import _Namespace
from torch.utils import _pytree as pytree

from stepgraph.compat.replaced import for_this_thread, replaced
from stepgraph.compat.versions import TORCH
from stepgraph.errors import CaptureError


@contextlib.contextmanager
def trace_context(mode: FakeTensorMode) -> Iterator[None]:
    """What a trace runs under: one tracing context, backward on this thread. An operator that fails raises, and torch
    does not log the traceback as well: forward may catch the error, and what it does not catch is reported."""
    quiet = replaced(fake_tensors.log, disabled=True)
    with tracing(TracingContext(mode)), torch.autograd.set_multithreading_enabled(False), quiet:
        yield


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Python's garbage collector off, for what makes many objects and keeps nearly all of them, as traces and compilers
    do: it would walk them again and again, and a deep model would take more than linear time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def names_of_copies() -> contextlib.AbstractContextManager[None]:
    """Inside, a copy of the node ``mul_5`` is named after the last ``mul``. Before torch 2.13 its name is searched from
    ``mul_1`` on: passes that copy most of a graph took quadratic time."""
    if TORCH >= (2, 13):
        return contextlib.nullcontext()
    create = _Namespace.create_name

    def create_name(self: Any, candidate: str, obj: Any) -> str:
        base, _, number = candidate.rpartition("_")
        if number.isdigit() and candidate in self._used_names:
            self._base_count[candidate] = self._base_count.get(base, 0)
        return create(self, candidate, obj)

    return replaced(_Namespace, create_name=create_name)


def lazy_graph_module(attributes: Mapping[str, Any] | torch.nn.Module, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """A module of ``graph`` whose code is generated when it is first called or read, and not for one that is run node
    by node."""
    return _LazyGraphModule(attributes, graph)


def generate_code(module: torch.fx.GraphModule) -> None:
    """Generate the code of a lazy module now: its first call would otherwise run a user's hooks for all modules."""
    _LazyGraphModule.force_recompile(module)


def trace(function: Callable[..., Any], fakes: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    """``make_fx`` on fake tensors, with Python's garbage collector off. The module's code is generated when it is first
    called or read: a graph's passes come first, and most graphs are then run node by node or compiled.

    It switches autocast's cache off; here that is as outside, since gradients of a weight that is cast once are added
    up in the lower precision. Code that asks whether FX traces it is answered as in eager.
    """
    caches = torch.is_autocast_cache_enabled()

    def as_outside(*flat: torch.Tensor) -> Any:
        torch.set_autocast_cache_enabled(caches)  # both are put back by make_fx
        tell_code(False)
        return function(*flat)

    fx_trace = torch.fx._symbolic_trace
    # A flag of each thread from torch 2.15 on, of the module before.
    tell_code = getattr(fx_trace, "_set_is_fx_tracing", lambda value: setattr(fx_trace, "_is_fx_tracing_flag", value))
    in_order = replaced(torch.fx.Graph, eliminate_dead_code=_eliminate_dead_code)
    with collector_off(), _use_lazy_graph_module(True), _generators_as_arguments(), in_order:
        return make_fx(as_outside, _disable_torch_fn_metadata_mode=True)(*fakes)


_eliminate = torch.fx.Graph.eliminate_dead_code


def _eliminate_dead_code(graph: torch.fx.Graph, is_impure: Callable[[torch.fx.Node], bool] | None = None) -> bool:
    """``Graph.eliminate_dead_code`` without its lint; only nodes without users are checked for side effects."""
    if is_impure is None:
        return _eliminate(graph)
    with replaced(torch.fx.Graph, lint=lambda _: None):
        return _eliminate(graph, lambda node: bool(node.users) or is_impure(node))


def _generators_as_arguments() -> contextlib.AbstractContextManager[None]:
    """Nodes may be given a `torch.Generator`, as an attribute of the module: torch before 2.13 refuses it."""
    plain = PythonKeyTracer.create_arg
    names: dict[int, str] = {}  # in order: the graph's text is the same in every process

    def create_arg(self: PythonKeyTracer, value: Any) -> Any:
        if not isinstance(value, torch.Generator):
            return plain(self, value)
        name = names.setdefault(id(value), f"_generator_{len(names)}")
        setattr(self.root, name, value)
        return self.create_node("get_attr", name, (), {})

    return replaced(PythonKeyTracer, create_arg=create_arg) if TORCH < (2, 13) else contextlib.nullcontext()


def graph_of_trace() -> torch.fx.Graph:
    """The graph that the running `trace` writes."""
    return get_proxy_mode().tracer.graph


def latest_of_trace() -> torch.fx.Node | None:
    """The latest node of the running `trace`; None without one."""
    mode = get_proxy_mode()
    return None if mode is None else mode.tracer.graph._root.prev


def erase_after(latest: torch.fx.Node | None) -> None:
    """Erase the nodes of the running `trace` that were made after ``latest``."""
    while latest is not None and latest.next.op != "root":
        latest.graph.erase_node(latest.graph._root.prev)


def is_tracing() -> bool:
    """Whether what is called here is recorded: not inside an operator that is."""
    return get_proxy_mode() is not None


def node_of_trace(tensor: torch.Tensor) -> torch.fx.Node | None:
    """The node of the running `trace` that made ``tensor``; None for a tensor that it did not record."""
    slot = get_proxy_slot(tensor, get_proxy_mode().tracer, None)
    return None if slot is None else slot.proxy.node


def constants_of_trace() -> torch.nn.Module:
    """What holds the constants that ``get_attr`` nodes of the running `trace` read, by their targets."""
    return get_proxy_mode().tracer.root


def record_call(function: Callable[..., None], tensors: Sequence[torch.Tensor]) -> None:
    """Add a node to the running `trace` that calls ``function``, which returns nothing, on ``tensors``."""
    tracer = get_proxy_mode().tracer
    arguments = tuple(map(tracer.unwrap_proxy, tensors))
    proxy = tracer.create_proxy("call_function", function, arguments, {}, name=function.__name__)
    proxy.node.meta["val"] = None


def current_sequence_nr() -> int:
    """Sequence number of the autograd node created last on this thread."""
    return torch.autograd._get_sequence_nr() - 1


def rename_node(node: torch.fx.Node, name: str) -> None:
    """Give ``node`` a name near ``name`` that is free and legal in its graph."""
    node._rename(name)
    node.target = node.name


def rename_exactly(node: torch.fx.Node, name: str) -> None:
    """Give ``node`` this name, which is legal and free in its graph."""
    node.name = name
    if node.op == "placeholder":
        node.target = name


#: The context in which a checkpointed function runs again in backward.
Again = Callable[[], contextlib.AbstractContextManager]


#: The context of selective checkpointing for the first run of a function, which changes no result.
_SELECTIVE = torch_checkpoint._CachingTorchDispatchMode


class _Whole(torch.autograd.Function):
    """The identity, whose backward asks for a saved tensor."""

    @staticmethod
    def forward(ctx: Any, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(outputs[0])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        _ = ctx.saved_tensors
        return grads


def _saved_last(function: Callable) -> Callable:
    """``function``, whose results save a tensor after all that it does."""

    def whole(*args: Any) -> Any:
        leaves, spec = pytree.tree_flatten(function(*args))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        for i, saved in zip(places, _Whole.apply(*(leaves[i] for i in places)) if places else (), strict=True):
            leaves[i] = saved
        return pytree.tree_unflatten(leaves, spec)

    return whole


@contextlib.contextmanager
def intercept_checkpoint(
    region: Callable[[bool, bool, bool], contextlib.AbstractContextManager[Again | None]],
    returned: Callable[[Any], None],
) -> Iterator[None]:
    """Inside, ``torch.utils.checkpoint`` runs its function in the context ``region``, which receives whether it is to
    draw the same random numbers when it runs again, whether eager's first run is one without gradients, and whether
    ``context_fn`` gives other contexts for its runs than those of selective checkpointing. If ``region`` gives None,
    the function does not run again, and backward has the values of forward; else it runs again in backward, in the
    context that this gives. ``returned`` receives what the re-entrant variant returns.

    A trace records the second run, and wrongly if the function draws random numbers: eager restores the generator's
    state on the host, which no graph node does. Both variants of checkpoint look up the two replaced names in their
    module when they are called. Should a version of torch call another, the capture fails: gradients would be wrong in
    silence.
    """

    # In torch 2.14 and 2.15 `checkpoint` calls the generator's implementation; 2.11 to 2.13 have only the generator.
    name = "_checkpoint_without_reentrant_generator" + "_impl" * (TORCH >= (2, 14))
    original, hook = getattr(torch_checkpoint, name), torch_checkpoint._checkpoint_hook
    repeated = 0  # open regions that run again
    whole = 0  # of these, functions of the re-entrant variant that are running
    started: list[Generator[None, None, None]] = []  # by torch, which leaves them open where a function raises

    def generator(function: Callable, preserve_rng_state: bool, /, *args: Any, **kwargs: Any) -> Iterator[None]:
        return run(function, preserve_rng_state, args[0], lambda again: original(again, False, *args, **kwargs))

    def implementation(
        function: Callable, args: Any, kwargs: Any, /, *, preserve_rng_state: bool = True, **options: Any
    ) -> Iterator[None]:
        options["preserve_rng_state"] = False
        return run(
            function, preserve_rng_state, options["context_fn"], lambda again: original(again, args, kwargs, **options)
        )

    def check_nesting(refused: int) -> None:
        if refused:
            raise CaptureError(
                "a re-entrant torch.utils.checkpoint of what writes its buffers is called inside another, or calls "
                "one; set use_reentrant=False"
            )

    def run(function: Callable, preserve_rng_state: bool, contexts: Callable, start: Callable) -> Iterator[None]:
        nonlocal repeated
        first, _ = contexts() if torch.is_grad_enabled() else torch_checkpoint.noop_context_fn()
        plain = contexts is torch_checkpoint.noop_context_fn or isinstance(first, _SELECTIVE)
        with region(preserve_rng_state, False, not plain) as again:
            if again is None:
                with contextlib.nullcontext() if plain else first:
                    yield
                return
            check_nesting(whole)

            def in_context(*args: Any, **kwargs: Any) -> Any:
                with again():
                    return function(*args, **kwargs)

            repeated += 1
            try:
                started.append(start(in_context))
                yield from started[-1]
            finally:
                repeated -= 1

    def counted(function: Callable) -> Callable:
        def run(*args: Any) -> Any:
            nonlocal whole
            whole += 1
            try:
                return function(*args)
            finally:
                whole -= 1

        return run

    class Function:
        @staticmethod
        def apply(function: Callable, preserve_rng_state: bool, *args: Any) -> Any:
            # The re-entrant variant has no backward unless one of its own arguments needs one.
            needed = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args) and torch.is_grad_enabled()
            with region(preserve_rng_state, needed, False) as again:
                if needed:
                    args = tuple(map(_detached, args))
                if needed and again is not None:
                    check_nesting(repeated)
                    # It runs again as a whole, once the gradients of all its results are there.
                    with torch_checkpoint.set_checkpoint_early_stop(False):
                        result = torch_checkpoint.checkpoint(
                            _saved_last(counted(function)),
                            *args,
                            use_reentrant=False,
                            preserve_rng_state=preserve_rng_state,
                        )
                else:
                    with torch.set_grad_enabled(needed):
                        result = function(*args)
                returned(result)
                return result

    def recording(*args: Any) -> Any:
        if repeated:
            return hook(*args)
        raise RuntimeError(
            f"stepgraph does not know how torch {torch.__version__} recomputes under torch.utils.checkpoint, and the "
            "gradients could be wrong: install a version that it is tested with, or capture without checkpointing"
        )

    hooks = {
        name: implementation if TORCH >= (2, 14) else generator,
        "_checkpoint_hook": recording,
        # For compilers selective checkpointing keeps all results, and finds written ones among them; eager does not.
        "_is_compiling": lambda *_: False,
    }
    hooks = {name: for_this_thread(ours, getattr(torch_checkpoint, name)) for name, ours in hooks.items()}
    Function.apply = for_this_thread(Function.apply, torch_checkpoint.CheckpointFunction.apply)
    hooks["CheckpointFunction"] = Function
    try:
        with replaced(torch_checkpoint, **hooks):
            yield
    finally:
        for one in reversed(started):  # else its hooks of saved tensors stay until the error is forgotten
            one.close()


def as_accumulated(grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """``grad`` with the memory layout of ``param``, or contiguous where that leaves gaps; copied if need be."""
    if sum((size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True)) >= param.numel():
        return grad.contiguous()
    if grad.stride() == param.stride():
        return grad
    order = sorted(range(param.ndim), key=param.stride, reverse=True)
    return grad.permute(order).contiguous().permute(sorted(range(param.ndim), key=order.__getitem__))


def _detached(given: Any) -> Any:
    """An argument of a re-entrant checkpoint: its gradients are added up, and laid out as it is, before what made it
    gets them, as those of eager's detached tensor are."""
    if isinstance(given, torch.Tensor) and given.requires_grad:
        made, given = given, given.view_as(given)
        given.register_hook(lambda grad: as_accumulated(grad, made))
    return given


def leaf_of(node: Any) -> torch.Tensor | None:
    """The tensor that an autograd node adds up the gradients of; None for other nodes, whose attributes may be set."""
    return node.variable if type(node).__name__ == "AccumulateGrad" else None


def watched_backward(watch: Callable[[list[Any]], None]) -> contextlib.AbstractContextManager[None]:
    """Inside, ``watch`` receives the autograd nodes that a call of ``backward()`` starts from, before it runs."""
    run = torch.autograd._engine_run_backward

    def watched(outputs: Sequence[Any], *args: Any, accumulate_grad: bool, **kwargs: Any) -> Any:
        if accumulate_grad:
            watch([one.grad_fn if isinstance(one, torch.Tensor) else one.node for one in outputs])
        return run(outputs, *args, accumulate_grad=accumulate_grad, **kwargs)

    return replaced(torch.autograd, _engine_run_backward=for_this_thread(watched, run))


@contextlib.contextmanager
def attention_as_in_eager() -> Iterator[None]:
    """Inside, torch's attention and encoder layers without gradients call the operators that they call in eager, where
    they ask whether they are traced, and whether a mode of the trace or a class of tensors takes over functions."""

    plain = (torch.Tensor, torch.nn.Parameter, FakeTensor)

    def is_overridden(given: Sequence[Any]) -> bool:
        return any(isinstance(t, torch.Tensor) and type(t) not in plain for t in given)

    with (
        replaced(torch.nn.modules.activation, _is_make_fx_tracing=lambda: False),
        replaced(
            torch.overrides, has_torch_function=for_this_thread(is_overridden, torch.overrides.has_torch_function)
        ),
    ):
        yield


@contextlib.contextmanager
def inline_compiled() -> Iterator[None]:
    """Inside, functions and modules that ``torch.compile`` made run what they were made from, so that a trace sees it.

    One made with ``fullgraph=True`` leaves behind, in torch 2.11, that Dynamo compiles nothing after a graph break: for
    the rest of the process, were that not put back.
    """
    from torch._dynamo import eval_frame  # a second to load, which only a trace needs

    put = getattr(eval_frame, "set_eval_frame_override", None)
    before = put(eval_frame._EvalFrameOverride.NONE) if put else None
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        if put:
            put(before)


def uncompiled_path(path: str) -> str:
    """A module's path or a parameter's name without the part that ``torch.compile`` adds to them."""
    return ".".join(part for part in path.split(".") if part != "_orig_mod")


def dispatch_flex_attention() -> contextlib.AbstractContextManager[None]:
    """Inside, ``flex_attention`` records its higher-order operator in the trace.

    Called outside Dynamo it would start Dynamo, which refuses to run inside another trace; the module's debug switch
    makes it call the operator directly. Its front end also refuses a backward on the CPU. The operator supports one,
    with dense attention, so a model for GPUs can be captured and tried on a CPU.
    """
    import torch.nn.attention.flex_attention as flex

    return replaced(flex, _FLEX_ATTENTION_DISABLE_COMPILE_DEBUG=True, _validate_device=lambda *_: None)


@torch.no_grad()
def flex_kernel_options(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> dict[str, Any]:
    """The options that ``flex_attention`` gives its operator for these (fake) tensors, with the logarithms that a
    backward reads, by the Triton template alone: that for decoding, which ``AUTO`` takes for fewer than 128 queries,
    refuses some groups of heads."""
    from torch.nn.attention.flex_attention import _apply_kernel_options

    return dict(_apply_kernel_options(query, key, value, True, {"BACKEND": "TRITON"}))


def input_of_trace(tensor: torch.Tensor, name: str) -> torch.fx.Node:
    """Give the running `trace` one more input, after the ones that it has: from here on ``tensor``, a fake one, is this
    input."""
    tracer = get_proxy_mode().tracer
    first = next((node for node in tracer.graph.nodes if node.op != "placeholder"), None)
    with tracer.graph.inserting_before(first) if first is not None else contextlib.nullcontext():
        proxy = tracer.create_proxy("placeholder", name, (), {})
    proxy.node.meta["val"] = tensor
    track_tensor_tree(tensor, proxy, constant=None, tracer=tracer)
    return proxy.node


def same_in_trace(tensor: torch.Tensor, made: torch.Tensor) -> None:
    """``tensor``, a fake one that the running `trace` has not seen, is what made ``made`` from here on."""
    tracer = get_proxy_mode().tracer
    track_tensor_tree(tensor, get_proxy_slot(made, tracer).proxy, constant=None, tracer=tracer)
