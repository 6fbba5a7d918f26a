"""The private names of torch and of the interpreter that the package needs, and why.

NOTE [What is checked when]

A private name of torch can go, or change its meaning, in the next version. A function whose name is
gone raises ``UnsupportedTorchError`` when it is called. The tests try the meaning of every name on
an example, with all versions from `OLDEST` to `NEWEST`; with any other version, the import warns.
Where another meaning would not be an error but another number, the example is here, and runs at the
first call: for the objects that checkpointing keeps, and for who holds a tensor. From then on the
bare function takes its place in its module. So callers write ``private.use_count(...)`` and import
no such function by its name.

An example runs in its own thread: modes, transforms, hooks on saved tensors and the current
backward pass belong to a thread, and must neither see the example nor change its answer.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import platform
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice, repeat, starmap
from types import CodeType, FrameType
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from scio_recorder.errors import UnsupportedNetError, UnsupportedTorchError, warn
from scio_recorder.interpreter import frame_around, lines_on_stack, running, stack

Function = TypeVar("Function", bound=Callable[..., Any])
P = ParamSpec("P")
T = TypeVar("T")

# The versions of torch that the tests have run with, see docs/versions.md.
OLDEST, NEWEST = (2, 8), (2, 14)
# What the names of `needs` begin with.
_OWNERS = {"torch": torch, "Tensor": Tensor, "Module": nn.Module()}


def warn_if_untested(version: tuple[int, ...]) -> None:
    """Warn of a version of torch that nobody has tried."""
    if not OLDEST <= version <= NEWEST:
        first, last = (".".join(map(str, tested)) for tested in (OLDEST, NEWEST))
        warn(
            f"scio-recorder was tested with torch {first} to {last}, and this is "
            f"{torch.__version__}: private names of torch may be missing or mean something else"
        )


def unsupported(feature: str, name: str) -> UnsupportedTorchError:
    """Return the error for a feature whose private name is gone or has changed its meaning."""
    return UnsupportedTorchError(
        f"{feature} needs {name}, which torch {torch.__version__} on Python "
        f"{platform.python_version()} does not have, or which means something else there: use "
        "versions that scio-recorder was tested with (docs/versions.md), or do without this "
        "feature"
    )


def lookup(name: str, feature: str) -> Any:
    """Return what a private name stands for, or a function that raises if it is gone."""
    owner, *parts = name.split(".")
    try:
        return functools.reduce(getattr, parts, _OWNERS[owner])
    except AttributeError:

        def gone(*args: Any, **kwargs: Any) -> Any:
            raise unsupported(feature, name)

        return gone


def needs(name: str, feature: str) -> Callable[[Function], Function]:
    """Let a function raise when it is called if a private name that it needs is gone."""
    stands_for = lookup(name, feature)
    is_gone = getattr(stands_for, "__name__", "") == "gone"
    return lambda function: stands_for if is_gone else function


def tried(name: str, feature: str, works: Callable[[Any], bool]) -> Callable[[Function], Function]:
    """Try a function on an example when it is first called."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def first_use(*args: Any) -> Any:
            if function.__globals__[function.__name__] is not function:
                _try_example(works, function, feature, name)
                function.__globals__[function.__name__] = function
            return function(*args)

        return first_use  # type: ignore[return-value]  # the same signature, by functools.wraps

    return decorate


def _try_example(works: Callable[[Any], bool], function: Function, feature: str, name: str) -> None:
    with ThreadPoolExecutor(max_workers=1) as pool:
        try:
            works_here = pool.submit(works, function).result()
        except Exception as error:
            # The name is gone, or is used differently: whatever it raises, the feature is missing.
            raise unsupported(feature, name) from error
    if not works_here:
        raise unsupported(feature, name)


# -- examples, which use only public names of torch ------------------------------------------------


def leaf_and_output() -> tuple[Tensor, Any]:
    """Return a leaf, and what two operations make of it."""
    leaf = torch.ones(1, requires_grad=True, device="cpu")
    return leaf, (leaf * 2).exp()


def distinguishes_kept_results(keeps: Callable[[Tensor], bool]) -> bool:
    """Whether operations that keep their results are found."""
    leaf, output = leaf_and_output()
    several = torch.var_mean(leaf.expand(1, 3))[1]
    return keeps(output) and not keeps(leaf * 2) and not keeps(several)


def _in_both_runs(function: Callable[[], Any]) -> list[Any]:
    """Return a function's results in both runs of a checkpointed region."""
    results = []

    def region(x: Tensor) -> Tensor:
        results.append(function())
        return x.exp()

    leaf, _ = leaf_and_output()
    output: Any = torch.utils.checkpoint.checkpoint(
        region, leaf, use_reentrant=False, preserve_rng_state=False
    )
    output.backward()
    return results


def runs_twice(region_of: Callable[[FrameType], Any]) -> bool:
    """Whether both runs of a checkpointed region find the same object on the stack."""

    def nearest() -> Any:
        regions = map(region_of, stack())
        return next(region for region in regions if region is not None)

    (first, is_first_again), (second, is_second_again) = _in_both_runs(nearest)
    return first is second and not is_first_again and is_second_again


def saves_twice(saving: Callable[[], Any]) -> bool:
    """Whether both runs of a checkpointed region find the same object in its hooks."""
    first, second = _in_both_runs(saving)
    return first is not None and first is second and saving() is None


def counts_what_the_graph_holds(count: Callable[[Tensor], int]) -> bool:
    """Whether references from the graph to a tensor count."""
    leaf, _ = leaf_and_output()
    before = count(leaf)
    held = leaf.exp() * leaf
    after = count(leaf)
    del held
    return before < after and count(leaf) == before


def counts_aliases(count: Callable[[Tensor], int]) -> bool:
    """Whether each tensor that shares memory counts."""
    tensor = torch.ones(2, device="cpu")
    before = count(tensor)
    aliases = [tensor.view(1, 2), tensor.view(2, 1)]
    after = count(tensor)
    del aliases
    return after == before + 2 and count(tensor) == before


_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
warn_if_untested(_VERSION)
_CHECKPOINTING = "activation checkpointing"
_FRAMES_AROUND_HOOK = 7


# -- the backward pass -----------------------------------------------------------------------------


# Returns the number of the backward pass around the caller; -1 outside of one.
backward_pass: Callable[[], int] = lookup("torch._C._current_graph_task_id", "recording gradients")


@needs("torch.autograd.Variable._execution_engine.queue_callback", "gradients")
def call_at_end_of_backward(function: Callable[[], None]) -> None:
    """Call a function when the backward pass around the caller is over.

    The engine owns it, so a backward pass that fails leaves nothing.
    """
    torch.autograd.Variable._execution_engine.queue_callback(function)


# Returns the number of operations that autograd has noted on this thread.
num_operations: Callable[[], int] = lookup("torch.autograd._get_sequence_nr", "gradients")
# Returns the number of operations noted before a node; for a leaf, more than there ever are.
place_of: Callable[[Any], int] = needs("torch._C._FunctionBase._sequence_nr", "gradients")(
    operator.methodcaller("_sequence_nr")
)


# -- tensors that autograd keeps -------------------------------------------------------------------


@needs(
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "recording with gradients, and activation checkpointing,",
)
def active_saved_tensors_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the innermost hooks on saved tensors, to pack and to unpack; None if there are none.

    Only these act. Activation checkpointing uses such hooks, and is recognised by them.
    """
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else tuple(hooks)


@tried("Node._raw_saved_result", "recording with gradients", distinguishes_kept_results)
def keeps_its_result(tensor: Tensor) -> bool:
    """Whether the operation that made a tensor keeps the result for its own backward.

    Autograd names such an attribute ``result``, with a number if there are several.
    """
    kind, number = type(tensor.grad_fn), tensor.output_nr
    return hasattr(kind, "_raw_saved_result") or hasattr(kind, f"_raw_saved_result{number}")


@tried("torch.utils.checkpoint._CheckpointFrame", _CHECKPOINTING, runs_twice)
def checkpointed_region(frame: FrameType) -> tuple[Any, bool] | None:
    """Return the region that a frame of ``torch.utils.checkpoint`` runs, and if it is a re-run.

    The graph keeps an object for each region. The first run holds it in a generator, and a re-run
    in the function that returns tensors saved by the first run.
    """
    kind = torch.utils.checkpoint._CheckpointFrame
    for value in list(frame.f_locals.values()):
        if isinstance(value, kind):
            return value, True
        is_generator = inspect.isgenerator(value)
        for held in inspect.getgeneratorlocals(value).values() if is_generator else ():
            if isinstance(held, kind):
                return held, False
    return None


class Region(NamedTuple):
    """A checkpointed call around the caller."""

    kept: Any  # the object that the graph keeps of it
    is_rerun: bool
    is_reentrant: bool


def regions_around(outermost: Collection[CodeType] = ()) -> list[Region]:
    """Return the checkpointed calls around the caller, innermost first, up to some functions."""
    regions = map(_region_of, stack(outermost))
    return [region for region in regions if region is not None]


def _region_of(frame: FrameType) -> Region | None:
    code = frame.f_code
    if code.co_name in ("forward", "backward"):
        # A static method of an autograd function, not a method of a module.
        first = code.co_varnames[0] if code.co_argcount else "self"
        context = None if first == "self" else frame.f_locals.get(first)
        if isinstance(context, torch.autograd.function.FunctionCtx):
            return Region(context, code.co_name == "backward", is_reentrant=True)
    elif code.co_filename == torch.utils.checkpoint.__file__:
        held = checkpointed_region(frame)
        return None if held is None else Region(*held, is_reentrant=False)
    return None


@tried("torch.utils.checkpoint._checkpoint_hook", _CHECKPOINTING, saves_twice)
def region_that_saves() -> Any:
    """Return the region whose hook on saved tensors is active; None for any other hook."""
    hooks = active_saved_tensors_hooks()
    pack = None if hooks is None else inspect.unwrap(hooks[0])
    if getattr(pack, "__module__", None) != "torch.utils.checkpoint":
        return None
    for cell in getattr(pack, "__closure__", None) or ():
        value = cell.cell_contents
        value = value() if isinstance(value, weakref.ref) else value
        if isinstance(value, torch.utils.checkpoint._CheckpointFrame):
            return value
    raise unsupported(_CHECKPOINTING, "the hook of torch.utils.checkpoint")


def is_saving_inputs_of_a_region() -> bool:
    """Whether a hook on saved tensors is called because a re-run will need the inputs."""
    # Torch's own code lies a few calls around the hook.
    lines = [*islice(lines_on_stack(), _FRAMES_AROUND_HOOK)]
    return any(file == torch.utils.checkpoint.__file__ for file, _ in lines)


# -- memory ----------------------------------------------------------------------------------------


@tried("Tensor._use_count", "recording with gradients", counts_what_the_graph_holds)
def use_count(tensor: Any) -> int:
    """Return the number of references to a tensor from inside torch."""
    return int(tensor._use_count())


@tried("torch._C._storage_Use_Count", "recording with gradients", counts_aliases)
def storage_uses(tensor: Tensor) -> int:
    """Return the number of tensors that share a memory, up to a constant; -1 without storage."""
    try:
        return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
    except (NotImplementedError, RuntimeError):
        return -1


@needs("torch.UntypedStorage._cdata", "recording")
def memory_of(tensor: Tensor) -> int:
    """Return an id of a tensor's memory, valid while it lives."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        # Sparse and other layouts have no storage, and share none.
        return -id(tensor)


@needs("torch.autograd._unsafe_preserve_version_counter", "running a net without a trace")
def restoring_versions(tensors: Sequence[Tensor]) -> Callable[[], Any]:
    """Return a function that sets the version counters of tensors to what they are now."""
    counted = tuple([tensor for tensor in tensors if not tensor.is_inference()])
    # Made for a block, whose end sets the counters, as often as it is called.
    block = torch.autograd._unsafe_preserve_version_counter(counted)  # type: ignore[attr-defined]
    return block.__exit__


# Returns the base of a view; None for other tensors.
base_of: Callable[[Tensor], Tensor | None] = needs("Tensor._base", "recording with gradients")(
    operator.attrgetter("_base")
)


# -- streams and graphs of GPUs --------------------------------------------------------------------

# Whether this process uses a GPU.
_is_in_use: Callable[[], bool] = torch.cuda.is_initialized
# A third of the time of the public way.
_raw_stream: Callable[[int], int] = getattr(
    torch._C,
    "_cuda_getCurrentRawStream",
    lambda device: torch.cuda.current_stream(device).cuda_stream,
)


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured, in which nothing is computed."""
    return _is_in_use() and torch.cuda.is_current_stream_capturing()


def current_streams() -> tuple[int, ...]:
    """Return the addresses of the streams of all GPUs; none if no GPU is in use."""
    if not _is_in_use():
        return ()
    return tuple(map(_raw_stream, range(torch.cuda.device_count())))


def run_on_streams(streams: Sequence[int], function: Callable[[], T]) -> T:
    """Run a function on streams, one for each GPU; the caller's streams wait for its result."""
    with contextlib.ExitStack() as stack:
        for device, (address, here) in enumerate(zip(streams, current_streams(), strict=False)):
            if address != here:
                caller = torch.cuda.current_stream(device)
                other = torch.cuda.default_stream(device)
                if address != other.cuda_stream:
                    other = torch.cuda.ExternalStream(address, device)  # type: ignore[no-untyped-call]  # in torch
                # Called in the opposite order.
                stack.callback(caller.wait_stream, other)
                stack.enter_context(torch.cuda.stream(other))
        return function()


# -- the surroundings of a call --------------------------------------------------------------------


@needs("Tensor._backward_hooks", "recording with gradients")
def has_hooks(tensor: Tensor) -> bool:
    """Whether a tensor has hooks on its gradient."""
    return bool(tensor._backward_hooks)


def restoring_hooks(leaves: Sequence[Tensor]) -> Callable[[], None]:
    """Return a function that sets the hooks on the gradients of leaves to what they are now."""
    names = "_backward_hooks", "_post_accumulate_grad_hooks"
    noted = [
        (leaf, name, hooks := getattr(leaf, name), dict(hooks or {}))
        for leaf in leaves
        for name in names
    ]

    def put_back() -> None:
        for leaf, name, hooks, entries in noted:
            if hooks is not None and hooks != entries:
                hooks.clear()
                hooks.update(entries)
            if getattr(leaf, name) is not hooks:
                setattr(leaf, name, hooks)

    return put_back


def renew_hooks(tensor: Tensor) -> None:
    """Register a tensor's hooks with torch again, since it may have dropped them inside."""
    if _VERSION < (2, 10):
        tensor._backward_hooks = tensor._backward_hooks


# Returns the transform of ``torch.func`` in which the caller runs, whose tensors die with it; None
# outside of one.
transform_around: Callable[[], Any] = lookup(
    "torch._C._functorch.peek_interpreter_stack", "recording"
)
# The mode and the tensors of the older ``vmap`` that ``is_grads_batched=True`` uses.
_VMAP_MODE: Any = torch._C._parse_dispatch_key("VmapMode")
_MAPPED: Any = torch._C._parse_dispatch_key("Batched")
# It has at most 64 levels.
_LEVELS = range(1, 65)


@needs("torch._C._functorch.get_unwrapped", "gradients under vmap")
def unmapped(tensor: Tensor, place: int = 0) -> Tensor:
    """Return a tensor with the dimensions over which ``vmap`` maps it, first or last; others as is.

    Inside ``vmap`` a tensor has no value of its own, and can't be kept.
    """
    functions = torch._C._functorch
    if transform_around() is not None and functions.is_batchedtensor(tensor):
        inner = functions.get_unwrapped(tensor)
        return unmapped(inner.movedim(functions.maybe_get_bdim(tensor), place), place)
    is_mapping = torch._C._dispatch_tls_is_dispatch_key_included(_VMAP_MODE)
    if is_mapping and torch._C._dispatch_keys(tensor).has(_MAPPED):
        for level in _LEVELS:
            # A size that no dimension can have: of another level, the tensor would be expanded.
            with contextlib.suppress(RuntimeError):
                inner = torch._remove_batch_dim(tensor, level, -1, place % (tensor.dim() + 1))
                return unmapped(inner, place)
    return tensor


# Returns whether autocast is on for any kind of device.
is_any_autocast_on: Callable[[], bool] = lookup("torch._C._is_any_autocast_enabled", "recording")


# -- modules ---------------------------------------------------------------------------------------

# The dictionaries of an ``nn.Module`` that hold attached hooks.
HOOK_DICTIONARIES = tuple(name for name in vars(nn.Module()) if "_hooks" in name)
AROUND_FORWARD = tuple(name for name in HOOK_DICTIONARIES if name.startswith("_forward_"))
FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


@needs("Module._forward_hooks", "recording")
def forward_hooks(module: nn.Module) -> tuple[OrderedDict[int, Any], OrderedDict[int, Any]]:
    """Return the live dictionaries of a module's forward hooks and forward pre-hooks.

    Their keys are the numbers of handles. Our hooks must stay behind others, and are removed by
    identity, since handles get lost.
    """
    hooks: Any = module._forward_hooks, module._forward_pre_hooks
    return hooks  # type: ignore[no-any-return]  # ordered, which torch's own type does not say


@needs("torch.nn.modules.module._global_forward_hooks", "recording operations")
def num_forward_hooks(module: nn.Module) -> int:
    """Return how many hooks run before or behind a module's forward, those on all modules too."""
    of_all: Any = torch.nn.modules.module
    num_on_all = len(of_all._global_forward_hooks) + len(of_all._global_forward_pre_hooks)
    return len(module._forward_hooks) + len(module._forward_pre_hooks) + num_on_all


@needs("torch.nn.modules.module._global_forward_hooks", "labelling")
def hooks_on_all_modules() -> tuple[dict[int, Any], ...]:
    """Return the live dictionaries of hooks that act on calls of all modules of the process."""
    of_all: Any = torch.nn.modules.module
    return (
        *(of_all._global_forward_hooks, of_all._global_forward_pre_hooks),
        *(of_all._global_backward_hooks, of_all._global_backward_pre_hooks),
    )


@needs("Module._forward_pre_hooks_with_kwargs", "recording")
def remove_hook(module: nn.Module, number: int) -> None:
    """Remove the forward hook or pre-hook whose handle has a number."""
    for name in AROUND_FORWARD:
        vars(module)[name].pop(number, None)


@needs("Module._non_persistent_buffers_set", "resuming")
def is_saved(module: nn.Module, buffer: str) -> bool:
    """Whether a module saves one of its buffers; the others are made again with the net."""
    return buffer not in module._non_persistent_buffers_set


# -- compiled code ---------------------------------------------------------------------------------


# The module of the compiler, which is only imported when something is compiled, since that is slow.
DYNAMO = "torch._dynamo.eval_frame"


# Returns what compiles the functions that the caller calls, if anything does and this version says
# so. It is a builtin, since dynamo would begin to compile a function here.
compiler_around: Any = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", bool)


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is compiled, by ``torch.compile`` or by its own ``compile``."""
    return uncompiled(module) is not module or calls_compiled(module)


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile`` wrapped, or the module itself."""
    wrapper = getattr(sys.modules.get(DYNAMO), "OptimizedModule", ())
    return module._orig_mod if isinstance(module, wrapper) else module


def calls_compiled(module: nn.Module) -> bool:
    """Whether a module's own ``compile`` was called: it ignores hooks that come later."""
    call = compiled_call(module)
    return call is not None and not getattr(call, "is_plain", False)


def runs_uncompiled() -> bool:
    """Whether compiled code runs as it is written, by ``set_stance("force_eager")``."""
    stance = getattr(sys.modules.get(DYNAMO), "_stance", None)
    return getattr(stance, "stance", "") == "force_eager"


# Returns the function made by a module's own ``compile``, which replaces its call; or None.
compiled_call: Callable[[nn.Module], Callable[..., Any] | None] = needs(
    "Module._compiled_call_impl", "compiled modules"
)(operator.attrgetter("_compiled_call_impl"))


@needs("Module._compiled_call_impl", "recording compiled modules")
def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Set the function that is called in place of a module's hooks and forward; None for these."""
    if call is None:
        vars(module).pop("_compiled_call_impl", None)
    else:
        vars(module)["_compiled_call_impl"] = call


@needs("Module._wrapped_call_impl", "guarding")
def called_module() -> nn.Module | None:
    """Return the module whose call runs the caller, which was set in place of it; None if unknown.

    A shallow copy of a module, such as a replica of ``DataParallel``, calls what is set in place of
    the call of its original.
    """
    frame = frame_around(2)
    if frame.f_code is nn.Module._wrapped_call_impl.__code__:
        module: nn.Module = frame.f_locals["self"]
        return module
    return None


def running_modules() -> Iterator[tuple[Any, FrameType | None]]:
    """Yield each running call of a module, innermost first: the module, and who calls it.

    A call may appear several times, since it consists of several functions of torch.
    """
    file = nn.Module.__call__.__code__.co_filename
    for frame in stack():
        if frame.f_code.co_filename == file:
            yield frame.f_locals.get("self"), frame.f_back


# Returns the function that calls a module's hooks and forward, even if they are replaced.
plain_call: Callable[[nn.Module], Callable[..., Any]] = needs("Module._call_impl", "watching")(
    operator.attrgetter("_call_impl")
)


def is_in_compiled_function(outermost: Collection[CodeType] = ()) -> bool:
    """Whether what ``torch.compile`` has made calls the caller, inside any of some functions."""
    compiler = sys.modules.get(DYNAMO)
    made = getattr(compiler, "OptimizeContext", ())
    for frame in stack(outermost) if made else ():
        is_wrapper = frame.f_code.co_filename == getattr(compiler, "__file__", None)
        if is_wrapper and isinstance(frame.f_locals.get("self"), made):
            return True
    return False


# Calls a function behind the graph that dynamo makes. Set by the function below, since dynamo finds
# it by its name, and to make it imports the compiler.
call_behind_graph: Callable[[Callable[[], None]], None]


def makes_cuda_graphs() -> bool:
    """Whether what compiles the caller makes CUDA graphs."""
    global call_behind_graph
    backends = (frame.f_locals.get("compiler_fn") for frame in (stack() if _is_in_use() else ()))
    backend = next((backend for backend in backends if backend is not None), None)
    # Torch's own backend has options, and others may.
    options: Any = getattr(backend, "get_compiler_config", dict)()
    if not options.get("triton.cudagraphs"):
        return False
    if "call_behind_graph" not in globals():
        call_behind_graph = torch.compiler.disable(  # type: ignore[no-untyped-call]  # in torch
            lambda function: function(),
            reason='write rnet.compile(mode="reduce-overhead"), which copies records in time',
        )
    return True


# What ``torch.compiler.assume_constant_result`` does, which would import the compiler.
makes_cuda_graphs._dynamo_marked_constant = True  # type: ignore[attr-defined]


@needs("torch._C._len_torch_function_stack", "recording operations")
def function_modes() -> list[Any]:
    """Return the function modes of this thread, the outermost first."""
    return [*map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))]


@needs("torch._C._push_on_torch_function_stack", "recording operations")
def set_function_modes(modes: list[Any]) -> None:
    """Replace the function modes of this thread, by one instruction of the interpreter.

    An interruption between two would lose modes of the user.
    """
    leaving = starmap(leave_function_mode, repeat((), num_function_modes()))
    deque(chain(leaving, map(enter_function_mode, modes)), 0)


def without_modes(function: Callable[P, T]) -> Callable[P, T]:
    """Let no mode see what a function calls: the user's own might change what it returns."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        modes = function_modes()
        if not modes:
            return apart_from_modes(function, *args, **kwargs)
        try:
            set_function_modes([])
            return apart_from_modes(function, *args, **kwargs)
        finally:
            set_function_modes(modes)

    return call


# Returns the number of function modes of this thread.
num_function_modes: Callable[[], int] = lookup(
    "torch._C._len_torch_function_stack", "recording operations"
)
# Returns one of them, counted from the outermost.
function_mode_at: Callable[[int], Any] = lookup(
    "torch._C._get_function_stack_at", "recording operations"
)
# Enters a function mode inside of all others.
enter_function_mode: Callable[[Any], None] = lookup(
    "torch._C._push_on_torch_function_stack", "recording operations"
)
# Leaves the innermost function mode.
leave_function_mode: Callable[[], Any] = lookup(
    "torch._C._pop_torch_function_stack", "recording operations"
)


def replace_function_mode(old: Any, new: Any, num_above: int = 0) -> int | None:
    """Leave one function mode of this thread, and enter another outside of a number of others.

    None stands for no mode. What is left already, or entered, stays so.

    Returns
    -------
    int or None
        The number of modes inside of the one that is left; None if it was not there.
    """
    count = num_function_modes()
    innermost = function_mode_at(count - 1) if count else None
    is_there = bool(count) and innermost is old
    if is_there and old is new and not num_above:
        return 0
    if not num_above and (is_there or not count or (old is None and innermost is not new)):
        if is_there:
            leave_function_mode()
        if new is not None:
            enter_function_mode(new)
        return 0 if is_there else None
    modes = function_modes()
    before = modes[::-1].index(old) if old in modes else None
    modes = [mode for mode in modes if mode is not old and mode is not new]
    modes.insert(max(0, len(modes) - num_above), new)
    set_function_modes([mode for mode in modes if mode is not None])
    return before


# Returns a context in which no function mode takes the calls of this thread.
no_function_modes: Callable[[], contextlib.AbstractContextManager[None]] = lookup(
    "torch._C.DisableTorchFunction", "labelling"
)


def is_exporting() -> bool:
    """Whether the running code is being exported; dynamo can follow this.

    While dynamo compiles, torch 2.8 to 2.11 always say so.
    """
    if torch.compiler.is_dynamo_compiling() and _VERSION < (2, 12):
        return False
    return torch.compiler.is_exporting()


# Looked up here, since dynamo follows the function below and can't follow an import.
_pytree: Any = getattr(torch.utils, "_pytree", None)


def flatten_registered(value: Any) -> tuple[list[Any], Callable[[Any], Any]]:
    """Take apart and rebuild the containers that torch knows; dynamo can follow this."""
    if _pytree is None:
        raise unsupported("recording compiled passes", "torch.utils._pytree")
    leaves, structure = _pytree.tree_flatten(value)
    return leaves, lambda new: _pytree.tree_unflatten(new, structure)


# -- libraries that call a network -----------------------------------------------------------------


def generation_in(generate: Callable[..., Any]) -> tuple[str, int] | None:
    """Return the caller's mode of generation, and its number of sequences for each prompt.

    None if it does not run inside that function of transformers. To the network, several sequences
    for one prompt look like several prompts: only the configuration shows the difference.
    """
    function = running((inspect.unwrap(generate).__code__,))
    if function is None:
        return None
    _, variables = function
    try:
        config = variables["generation_config"]
        mode = config.get_generation_mode(variables["assistant_model"])
        return str(getattr(mode, "value", mode)), config.num_return_sequences or 1
    except (KeyError, AttributeError) as error:
        raise unsupported("rows= around generate", "GenerationMixin.generate") from error


def attention_of(net: nn.Module) -> str | None:
    """Return the implementation of attention that a net of transformers has chosen."""
    chosen = None
    # A configuration may be anything, and raise anything.
    with contextlib.suppress(Exception):
        config: Any = net.config
        chosen = config._attn_implementation
    return str(chosen) if isinstance(chosen, str | dict) else None


# -- tensors other than arrays of numbers ----------------------------------------------------------


@needs("Tensor._make_wrapper_subclass", "reading from disk")
def make_wrapper(kind: type[Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Return a tensor of a subclass with a shape and a dtype, but no memory."""
    return kind._make_wrapper_subclass(kind, shape, dtype=dtype)


@needs("torch._C.DisableTorchFunctionSubclass", "reading from disk")
def run_without_overrides(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function of torch without the overrides of subclasses."""
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


# Returns the number of dispatch modes of this thread.
num_dispatch_modes: Callable[[], int] = lookup("torch._C._len_torch_dispatch_stack", "recording")


@needs("torch.utils._python_dispatch._disable_current_modes", "recording")
def no_dispatch_modes() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which no dispatch mode sees operations of this thread."""
    return torch.utils._python_dispatch._disable_current_modes()


def apart_from_modes(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function whose operations no dispatch mode sees but those of `operations_made_by`.

    That of selective checkpointing counts operations, and gives them out again in the second run.
    Our own must see which tensors the network goes on with.
    """
    if not num_dispatch_modes():
        return function(*args, **kwargs)
    with no_dispatch_modes() as modes, contextlib.ExitStack() as stack:
        for mode in reversed(modes):
            if isinstance(mode, _dispatch_mode()):
                stack.enter_context(mode)
        return function(*args, **kwargs)


@needs("torch.utils._python_dispatch.TorchDispatchMode", "force_static_flow")
def operations_made_by(call: Callable[..., Any]) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a function runs every operation of this thread.

    It is given the operation, the types of tensors other than torch's own, and what the operation
    receives: a tuple, and a dictionary unless there are no keywords.
    """
    mode = _dispatch_mode()()
    mode.call = call
    return mode  # type: ignore[no-any-return]  # a context manager


@functools.cache
def _dispatch_mode() -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    def run(mode: Any, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(operation, torch._ops.OpOverload):
            return operation(*args, **kwargs or {})
        return mode.call(operation, types, args, kwargs)

    # Torch would wrap a mode with its own method in a function that imports the compiler. There is
    # one class, since each lives until garbage is collected, with all that it refers to.
    # Functions that compile themselves, such as `flex_attention`, would fail under the mode, and
    # ever after: the compiler remembers that it left them out.
    names = {
        "__torch_dispatch__": run,
        "supports_higher_order_operators": True,
        "ignore_compile_internals": classmethod(lambda cls: True),
    }
    return type("Mode", (type("Calling", (), names), TorchDispatchMode), {})


class _Traced(Tensor):
    __torch_function__ = nn.Parameter.__torch_function__
    __class__ = property(lambda self: torch._subclasses.FakeTensor)


def is_traced(tensor: Tensor) -> bool:
    """Whether a tensor stands for another while code is traced, and has no values."""
    return isinstance(tensor, getattr(torch._subclasses, "FakeTensor", ()))


@needs("torch._subclasses.FakeTensor", "force_static_flow")
def pass_for_traced(tensor: Tensor) -> None:
    """Make a tensor claim to be traced: libraries ask before they look at its values."""
    object.__setattr__(tensor, "__class__", _Traced)


# -- several processes: an example would take more than one ----------------------------------------

FSDP = "torch.distributed.fsdp"
_LABELLING_FSDP = "labelling a net that FSDP has sharded"
# The objects in which ``fully_shard`` notes passes, besides the state of a module.
_NOTES = ("FSDPParamGroup", "FSDPCommContext", "FSDPStateContext")


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    try:
        yield
    except AttributeError as error:
        raise unsupported(_LABELLING_FSDP, name) from error


def loaded(module: str, *names: str) -> tuple[type, ...]:
    """Return classes of a module that takes long to import; none if nobody has imported it."""
    imported = sys.modules.get(module)
    return tuple([getattr(imported, name) for name in names if hasattr(imported, name)])


def fsdp_modules(net: nn.Module) -> list[nn.Module]:
    """Return the modules in a network that FSDP has sharded."""
    kinds = loaded(FSDP, "FSDPModule", "FullyShardedDataParallel")
    return [module for module in net.modules() if isinstance(module, kinds)]


def fsdp_notes(module: Any) -> list[Any]:
    """Return the objects in which ``fully_shard`` notes passes of a module; none for FSDP1.

    Those of single parameters are left out, since they note no passes.
    """
    if not hasattr(module, "reshard"):
        return []
    with _naming("FSDPModule._get_fsdp_state"):
        state = module._get_fsdp_state()
    notes = [state]
    for value in vars(state).values():
        values = value if isinstance(value, list) else [value]
        notes += [part for part in values if type(part).__name__ in _NOTES]
    return notes


def ending(notes: list[Any]) -> Callable[[], None]:
    """Return a function that ends, for FSDP, passes that fail from now on."""
    states = {note: note._training_state for note in notes if "_training_state" in vars(note)}

    def end() -> None:
        for note, state in states.items():
            note._training_state = state

    return end


def take_whole_parameters(module: Any) -> None:
    """Let a module that FSDP has sharded hold only its own shards of parameters."""
    if hasattr(module, "reshard"):
        module.reshard()
        return
    handle = _handle_of(module)
    # Before its first pass it holds nothing else, and the call would fail.
    if handle is not None and module._is_root is not None:
        with _naming("FlatParamHandle.reshard"):
            handle.reshard(handle.uses_sharded_strategy)
            handle.post_reshard()


def flat_parameters(module: Any) -> list[nn.Parameter]:
    """Return the flat parameters that FSDP1 has made of a module's; none for FSDP2."""
    handle = None if hasattr(module, "reshard") else _handle_of(module)
    with _naming("FlatParamHandle.flat_param"):
        return [] if handle is None else [handle.flat_param]


def sizes_before_fsdp1(net: nn.Module) -> dict[int, dict[str, tuple[object, int]]]:
    """Return the sizes of the parameters that FSDP1 has made flat, as they were before.

    By the ``id`` of the module that owned them, and by name: a key, which tied parameters share,
    and the number of elements. No process holds these parameters between passes.
    """
    sizes: dict[int, dict[str, tuple[object, int]]] = {}
    flat: Any
    for flat in chain.from_iterable(map(flat_parameters, fsdp_modules(net))):
        with _naming("FlatParameter._param_infos"):
            for info, shape in zip(flat._param_infos, flat._shapes, strict=True):
                key = id(info.module), info.param_name
                sizes.setdefault(id(info.module), {})[info.param_name] = key, shape.numel()
            for tied in flat._shared_param_infos:
                first = sizes[id(tied.prim_module)][tied.prim_param_name]
                sizes.setdefault(id(tied.module), {})[tied.param_name] = first
    return sizes


def _handle_of(module: Any) -> Any:
    with _naming("FullyShardedDataParallel._handle"):
        return module._handle


def is_inside_fsdp(module: nn.Module) -> bool:
    """Whether a module only works during calls of FSDP's wrapper around it."""
    return bool(vars(module).get("_is_fsdp_managed_module", False))


class NotReplicated(nn.Module):
    """A module of which ``torch.nn.DataParallel`` makes no replicas."""

    def _replicate_for_data_parallel(self) -> nn.Module:
        raise UnsupportedNetError(
            "torch.nn.DataParallel runs replicas that share hooks, and would mix their records: "
            "use DistributedDataParallel, or wrap the net in DataParallel without a recorder"
        )
