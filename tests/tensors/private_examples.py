"""An example with a known answer for each private name, which shows that its meaning is the same.

The example for a name is the function ``try_NAME``, and answers whether the meaning is the same.
Examples use only public names of torch, so they don't suffer from the changes that they look for.
Those of `private` itself run in the package as well.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from scio_recorder.tensors import private
from scio_recorder.tensors.private import leaf_and_output


def when_differentiated(tensor: Any, function: Callable[[], Any]) -> Any:
    """Return the result of a function that is called when the gradient of a tensor comes."""
    results: list[Any] = []
    handle = tensor.register_hook(lambda gradient: results.append(function()))
    tensor.backward(retain_graph=True)
    handle.remove()
    return results[0]


def try_backward_pass(number: Callable[[], int]) -> bool:
    _, output = leaf_and_output()
    numbers = {number(), *(when_differentiated(output, number) for _ in range(2))}
    return number() == -1 and len(numbers) == 3 and min(numbers) == -1


def try_call_at_end_of_backward(call: Callable[[Callable[[], None]], None]) -> bool:
    leaf, output = leaf_and_output()
    order: list[str] = []
    leaf.register_hook(lambda gradient: order.append("leaf"))  # type: ignore[no-untyped-call]  # torch's own
    when_differentiated(output, lambda: call(lambda: order.append("end")))
    return order == ["leaf", "end"]


def try_num_operations(number: Callable[[], int]) -> bool:
    before = number()
    leaf_and_output()
    return number() == before + 2


def try_place_of(place: Callable[[Any], int]) -> bool:
    _, output = leaf_and_output()
    ((product, _),) = output.grad_fn.next_functions
    (leaf, _), _ = product.next_functions
    return place(product) + 1 == place(output.grad_fn) < 1 << 63 < place(leaf)


def try_active_saved_tensors_hooks(active: Callable[[], Any]) -> bool:
    def pack(tensor: Tensor) -> Tensor:
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        return tensor

    before = active()
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        inside = active()
    return before is None and tuple(inside) == (pack, unpack) and active() is None


def try_memory_of(identity: Callable[[Tensor], int]) -> bool:
    tensor, other = torch.ones(2, device="cpu"), torch.ones(2, device="cpu")
    return identity(tensor) == identity(tensor[1:]) != identity(other)


def try_base_of(base: Callable[[Tensor], Tensor | None]) -> bool:
    leaf, _ = leaf_and_output()
    product = leaf * 2
    return base(product) is None and base(product.view(1, 1)) is product


def try_has_hooks(has_hooks: Callable[[Tensor], bool]) -> bool:
    leaf, output = leaf_and_output()
    output.register_hook(nothing)
    return has_hooks(output) and not has_hooks(leaf)


def try_transform_around(around: Callable[[], Any]) -> bool:
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(around() is not None)
        return x

    torch.vmap(function)(torch.ones(1, device="cpu"))
    return seen == [True] and around() is None


def try_unmapped(unmapped: Callable[[Tensor, int], Tensor]) -> bool:
    x = torch.arange(6.0).view(3, 2).requires_grad_()
    basis = torch.arange(24.0).view(4, 3, 2)
    gradients: list[Tensor] = []
    y = x * 1
    y.register_hook(  # type: ignore[no-untyped-call]  # torch's own
        lambda gradient: gradients.extend(unmapped(gradient, place) for place in (0, -1))
    )

    def pulled(row: Tensor) -> Tensor:
        return torch.autograd.grad(y, x, row, retain_graph=True)[0]

    torch.autograd.grad(y, x, basis, retain_graph=True, is_grads_batched=True)
    torch.func.vmap(pulled)(basis)
    pulled(basis[0])
    wanted = [basis, basis.movedim(0, -1)] * 2 + [basis[0]] * 2
    return all(map(torch.equal, gradients, wanted))


def try_is_any_autocast_on(is_on: Callable[[], bool]) -> bool:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = is_on()
    return inside and not is_on()


def nothing(*call: Any) -> None:
    """Do nothing: a hook for examples."""


def try_forward_hooks(hooks: Callable[[nn.Module], Any]) -> bool:
    module = nn.Identity()
    after = module.register_forward_hook(nothing)
    before = module.register_forward_pre_hook(nothing, with_kwargs=True)
    return bool(hooks(module) == ({after.id: nothing}, {before.id: nothing}))


def try_hooks_on_all_modules(hooks: Callable[[], tuple[dict[int, Any], ...]]) -> bool:
    # Other threads may call it, and it does nothing.
    handle = nn.modules.module.register_module_forward_hook(nothing)
    try:
        return handle.id in hooks()[0]
    finally:
        handle.remove()


def try_restoring_versions(
    restoring_versions: Callable[[Sequence[Tensor]], Callable[[], object]],
) -> bool:
    tensors = [torch.zeros(1).add_(1), torch.zeros(1)]
    put_back = restoring_versions(tensors)
    versions = []
    for _ in range(2):
        for tensor in tensors:
            tensor.add_(1)
        put_back()
        versions.append([tensor._version for tensor in tensors])
    return versions == [[1, 0], [1, 0]]


def try_remove_hook(remove: Callable[[nn.Module, int], None]) -> bool:
    module, calls = nn.Identity(), []
    for register in (module.register_forward_pre_hook, module.register_forward_hook):
        handle = register(lambda *call, **options: calls.append(call), with_kwargs=True)
        remove(module, handle.id)
    return bool(module(1) == 1) and not calls


def try_num_forward_hooks(num_hooks: Callable[[nn.Module], int]) -> bool:
    module, counts = nn.Identity(), []
    of_all: Any = nn.modules.module
    with contextlib.ExitStack() as hooks:
        for register in (
            *(module.register_forward_hook, module.register_forward_pre_hook),
            *(of_all.register_module_forward_hook, of_all.register_module_forward_pre_hook),
        ):
            counts.append(num_hooks(module))
            hooks.enter_context(register(nothing))
        counts.append(num_hooks(module))
    return [count - counts[0] for count in counts] == [0, 1, 2, 3, 4]


def try_is_saved(is_saved: Callable[[nn.Module, str], bool]) -> bool:
    module = nn.Module()
    module.register_buffer("saved", torch.ones(1))
    module.register_buffer("cache", torch.ones(1), persistent=False)
    return is_saved(module, "saved") and not is_saved(module, "cache")


def try_compiled_call(call: Callable[[nn.Module], Any]) -> bool:
    module = nn.Identity()
    bare = call(module) is None
    module._compiled_call_impl = nothing
    return bare and call(module) is nothing


def try_set_compiled_call(set_call: Callable[[nn.Module, Any], None]) -> bool:
    module = nn.Identity()
    set_call(module, lambda number: number + 1)
    return bool(module(1) == 2)


def try_called_module(called_module: Callable[[], nn.Module | None]) -> bool:
    module = nn.Identity()

    def call() -> nn.Module | None:
        return called_module()

    module._compiled_call_impl = call
    return module() is module and call() is None


def try_plain_call(call_of: Callable[[nn.Module], Callable[..., Any]]) -> bool:
    module = nn.Identity()
    module.register_forward_hook(lambda module, args, number: number + 1)
    module._compiled_call_impl = nothing
    return bool(call_of(module)(1) == 2)


class Notes(TorchFunctionMode):
    """Notes the functions of torch that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.calls.append(func)
        return func(*args, **(kwargs or {}))


def try_function_modes(modes: Callable[[], list[Any]]) -> bool:
    with Notes() as outer, Notes() as inner:
        inside = modes()
    return inside == [outer, inner] and modes() == []


def try_set_function_modes(set_modes: Callable[[list[Any]], None]) -> bool:
    tensor, outer = torch.ones(1, device="cpu"), Notes()
    with outer:
        mode = Notes()
        set_modes([mode])
        tensor.exp()
        set_modes([outer])
        tensor.log()
    return mode.calls == [Tensor.exp] and outer.calls == [Tensor.log]


def try_no_function_modes(no_modes: Callable[[], contextlib.AbstractContextManager[None]]) -> bool:
    tensor = torch.ones(1, device="cpu")
    with Notes() as mode:
        with no_modes():
            tensor.exp()
        tensor.log()
    return mode.calls == [Tensor.log]


def try_no_dispatch_modes(no_modes: Callable[[], Any]) -> bool:
    tensor, seen = torch.ones(1, device="cpu"), []

    def note(operation: Any, types: Any, args: Any, kwargs: Any) -> Any:
        seen.append(operation)
        return operation(*args, **kwargs or {})

    with private.operations_made_by(note):
        with no_modes():
            tensor.exp()
        tensor.log()
    return bool(seen == [torch.ops.aten.log.default])


def try_generation_in(generation_in: Callable[[Any], tuple[str, int] | None]) -> bool:
    class Config:
        num_return_sequences = 2

        def get_generation_mode(self, assistant_model: Any) -> str:
            return f"by {assistant_model}"

    def generate(generation_config: Any, assistant_model: Any) -> Any:
        return generation_in(generate)

    return generate(Config(), "one") == ("by one", 2) and generation_in(generate) is None


def try_make_wrapper(make: Callable[..., Tensor]) -> bool:
    class Wrapper(Tensor):
        __torch_dispatch__ = nothing  # type: ignore[assignment]  # is never called

    made = make(Wrapper, (2, 3), torch.float16)
    return type(made) is Wrapper and made.shape == (2, 3) and made.dtype == torch.float16


def try_run_without_overrides(run: Callable[[Callable[..., Any], Any, Any], Any]) -> bool:
    calls = []

    class Watched(Tensor):
        @classmethod
        def __torch_function__(cls, *call: Any) -> Any:
            calls.append(call)

    tensor = torch.ones(2, device="cpu").as_subclass(Watched)
    return run(Tensor.dim, (tensor,), {}) == 1 and not calls


def try_operations_made_by(made_by: Callable[[Any], Any]) -> bool:
    asking = []

    def call(operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asking.append(torch.Tag.data_dependent_output in operation.tags)
        return operation(*args, **kwargs or {})

    with made_by(call):
        is_positive = bool(torch.ones(1, device="cpu") > 0)
    return is_positive and asking[-1] and not any(asking[:-1])


def try_pass_for_traced(change: Callable[[Tensor], None]) -> bool:
    tensor = torch.ones(2, device="cpu")
    change(tensor)
    kind = importlib.import_module("torch._subclasses.fake_tensor").FakeTensor
    return isinstance(tensor, kind) and type(tensor + 1) is Tensor and tensor.tolist() == [1, 1]


EXAMPLES: dict[str, Callable[[Any], bool]] = {
    "keeps_its_result": private.distinguishes_kept_results,
    "checkpointed_region": private.runs_twice,
    "region_that_saves": private.saves_twice,
    "use_count": private.counts_what_the_graph_holds,
    "storage_uses": private.counts_aliases,
    **{name[4:]: value for name, value in list(vars().items()) if name.startswith("try_")},
}
