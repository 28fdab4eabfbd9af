"""Weight gradients that the matrix product itself adds into the gradient buffer.

Autograd computes the gradient of a linear layer's weight, `dW = dYᵀ X`, in the dtype of the
product, casts it, and adds it to `.grad`: three passes over the weight for every micro-batch, about
10 bytes per parameter. cuBLAS can save it, because its 16-bit products accept an fp32 addend. The
CPU has no kernel for this.

Compiled graphs use it as an operation (`add_product`). In eager code (`Adding`) the matrix product
adds into `.grad`, and an embedding scatters its rows into it, only where the sum is all that can be
observed; docs/speed.md lists where. The forward of torch's own layers is replaced while the loss
function runs, and only the window's own backward adds this way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional

from wholebatch.compile.cross_entropy import entropy_in_place
from wholebatch.compile.fusion import ANY_STRIDES, once_per_machine, operation
from wholebatch.losses.loss import Loss, Terms
from wholebatch.window.precision import SIXTEEN_BIT, Precision

_CAN_LOOK = (
    hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
    and hasattr(torch._C, "_are_functorch_transforms_active")
    and hasattr(torch._C, "_len_torch_dispatch_stack")
    and hasattr(torch._C, "_len_torch_function_stack")
    and hasattr(forward_ad, "_current_level")
)
"""True if this torch has the private functions that report hooks, modes and transforms."""
LossFunction = Callable[[Any, Any], Any]


@cache
def add_product(*, gaps: bool = False) -> Any:
    """Return the op `(buffer, left, right)`: `buffer += left @ right` in one kernel.

    With `gaps`, it takes matrices of any strides from Inductor: the rows of a padded product.
    """
    name = "add_product_with_gaps" if gaps else "add_product"

    def run(buffer: Tensor, left: Tensor, right: Tensor) -> None:
        torch.addmm(buffer, left, right, out_dtype=torch.float32, out=buffer)

    options = ANY_STRIDES if gaps else {}
    return operation(name, run, lambda *_: None, ("buffer",), **options)


@once_per_machine
def can_add_products(device: torch.device) -> bool:
    """True if this device has the kernel and it adds correctly: odd sizes too, fp16, no buffer."""
    return device.type == "cuda" and all(
        _adds(device, dtype, sizes)
        for dtype in (torch.bfloat16, torch.float16)
        for sizes in ((32, 48, 64), (5, 7, 3), (1, 33, 17))
    )


def _adds(device: torch.device, dtype: torch.dtype, sizes: tuple[int, int, int]) -> bool:
    """Test the kernel on small integers, whose sums are exact in any order.

    It draws no random numbers, so the user's generators are left alone.
    """
    rows, inner, columns = sizes
    left, right, buffer = (
        torch.arange(high * wide, device=device).remainder(number).sub(3).reshape(high, wide)
        for number, (high, wide) in zip(
            (7, 5, 9), ((inner, rows), (inner, columns), (rows, columns)), strict=True
        )
    )
    wanted = (left.t().double() @ right.double()).float()
    buffer = buffer.float()
    before = buffer.clone()
    left, right = left.to(dtype).t(), right.to(dtype)
    try:
        torch.addmm(buffer, left, right, out_dtype=torch.float32, out=buffer)
        made = torch.mm(left, right, out_dtype=torch.float32)
    except (RuntimeError, TypeError):
        return False
    return torch.equal(made, wanted) and torch.equal(buffer, wanted + before)


class Adding:
    """`eager(micro, loss)` with weight gradients added directly into `.grad` where possible."""

    entropy = staticmethod(entropy_in_place)
    anywhere = False
    """Set by tests: also use it on devices without an fp32-accumulating product."""

    def __init__(
        self,
        model: nn.Module,
        window: Any,
        precision: Precision,
        device: torch.device,
        eager: Callable[[Any, LossFunction], Loss | Terms],
        *,
        allowed: bool = True,
    ) -> None:
        self.plain = eager
        self.allowed = allowed
        """Set to False to measure the gain."""
        self.reduces = False
        """True if the next backward reduces the gradients over the ranks."""
        self.added = 0
        """The number of gradients added without autograd."""
        self._window = window
        self._precision = precision
        self._device = device
        self._model = model
        self._layers: list[tuple[nn.Module, MethodType]] = []
        self.copy_of = precision.copy_of
        self._own: set[int] = set()
        self._adds = False  # True while the window's own backward runs.
        self._stream: Any = None

    @property
    def possible(self) -> bool:
        """True if autograd may not see some of the gradients."""
        return self._window.store.only_eager is None and self.replaces

    @property
    def replaces(self) -> bool:
        """True if the forwards of layers are replaced: not where something waits for gradients."""
        if not self.allowed or not _CAN_LOOK:
            return False
        sync = self._window.sync
        able = self.anywhere or can_add_products(self._device)
        return able and sync.takes_graphs and not sync.counts_must_agree

    def __call__(self, micro: Any, loss: LossFunction) -> Loss | Terms:
        """Run one micro-step eagerly."""
        # Buckets of gradients are sent to the other ranks as autograd produces them.
        if not self.replaces or (self.reduces and self._window.sync.ranks > 1):
            return self.plain(micro, loss)
        self._look_at_the_window()

        def forward(model: Any, micro: Any) -> Any:
            with self._in_place():
                result = loss(model, micro)
            self._adds = True  # The window's backward comes next.
            return result

        try:
            return self.plain(micro, forward)
        finally:
            self._adds = False

    def _look_at_the_window(self) -> None:
        if not self._layers:
            self._layers = [
                (module, MethodType(self._forward_of(module), module))
                for module in self._model.modules()
                if getattr(type(module), "forward", None) in _FORWARDS
            ]
        if self._window.now.micro_batches == 0 or not self._own:
            self._own = {id(p) for group in self._window.target.groups() for p in group}
        if self._device.type == "cuda":
            self._stream = torch.cuda.current_stream(self._device)

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Replace the forwards of the layers within this context."""
        replaced = []
        try:
            for module, forward in self._layers:
                # Skip a module whose forward other code than the precision has replaced.
                before = module.__dict__.get("forward")
                if before is self._precision.forward_of(module):
                    module.__dict__["forward"] = forward
                    replaced.append((module, before))
            yield
        finally:
            for module, before in replaced:
                if before is None:
                    module.__dict__.pop("forward", None)
                else:
                    module.__dict__["forward"] = before

    def _forward_of(self, module: nn.Module) -> Callable[[Any, Tensor], Tensor]:
        # Bind the function to the module with MethodType: a copy of the module that is made while
        # the loss function runs then gets a method of its own.
        ours: Callable[..., Tensor | None] = _FORWARDS[type(module).forward]

        def forward(layer: Any, x: Tensor) -> Tensor:
            if not torch.compiler.is_compiling() and self.may_add(layer, x):
                result = ours(self, layer, x)
                if result is not None:
                    return result
            before = self._precision.forward_of(layer)
            plain: Tensor = type(layer).forward(layer, x) if before is None else before(x)
            return plain

        return forward

    def may_add(self, layer: Any, x: Tensor) -> bool:
        """True if no hook, mode or transform observes this call."""
        weight = layer._parameters.get("weight")
        return (
            id(weight) in self._own
            and type(weight) is nn.Parameter
            and weight.requires_grad
            and weight.is_contiguous()
            and type(x) is Tensor
            and x.device == weight.device
            and torch.is_grad_enabled()
            and torch._C._autograd._top_saved_tensors_default_hooks(False) is None
            and not torch._C._are_functorch_transforms_active()
            and not torch._C._len_torch_dispatch_stack()
            and not torch._C._len_torch_function_stack()
            and forward_ad._current_level < 0
            and (self._stream is None or torch.cuda.current_stream(x.device) == self._stream)
        )

    def adds_to(self, weight: Tensor) -> bool:
        """True if the current backward may add to this weight's `.grad` without autograd."""
        if not self._adds or torch.is_grad_enabled():
            return False
        if weight._post_accumulate_grad_hooks or weight._backward_hooks:
            return False
        buffer = weight.grad
        return buffer is None or (
            type(buffer) is Tensor and not buffer.is_sparse and buffer.is_contiguous()
        )

    def add(self, weight: Tensor, left: Tensor, right: Tensor) -> bool:
        """Add `left @ right` to the weight's `.grad`; return False if autograd should add it."""
        if not self.adds_to(weight) or not _add_product(weight, left, right):
            return False
        self.added += 1
        return True

    def weight_gradient(self, weight: Tensor, left: Tensor, right: Tensor) -> Tensor | None:
        """Add `left @ right` to the weight's `.grad`, or return it for autograd to add."""
        if self.add(weight, left, right):
            return None
        return _product(left, right, weight.dtype)

    # ----------------------------------------------------------------- layers

    def linear(self, layer: nn.Linear, x: Tensor) -> Tensor | None:
        """Return the layer's output, or None if its dtypes are not supported."""
        weight, bias = layer.weight, layer.bias
        kind = weight.device.type
        dtype = weight.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            given = (x.dtype, weight.dtype, dtype if bias is None else bias.dtype)
            if any(one not in (torch.float32, *SIXTEEN_BIT) for one in given):
                return None  # Autocast does not cast this dtype.
        elif x.dtype is not dtype or (bias is not None and bias.dtype is not dtype):
            return None
        if dtype not in SIXTEEN_BIT and not self.anywhere:
            return None
        return self._precision.linear(layer, x, dtype, self)

    def embedding(self, layer: nn.Embedding, tokens: Tensor) -> Tensor | None:
        """Return the layer's output, or None if its gradient is of another kind."""
        if layer.sparse or layer.scale_grad_by_freq or layer.max_norm is not None:
            return None
        padding = -1 if layer.padding_idx is None else layer.padding_idx
        result: Tensor = _Embedding.apply(  # type: ignore[no-untyped-call]
            tokens, layer.weight, padding, self
        )
        return result


_FORWARDS: dict[Any, Any] = {
    nn.Linear.forward: Adding.linear,
    nn.Embedding.forward: Adding.embedding,
}


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `left @ right` in this dtype.

    On CUDA a 16-bit product is computed in float32 directly, unless it is differentiated again.
    """
    if (
        dtype is torch.float32
        and left.dtype in SIXTEEN_BIT
        and not torch.is_grad_enabled()
        and left.numel()
        and right.numel()
        and can_add_products(left.device)
    ):
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(left, right).to(dtype)


@torch.no_grad()
def _add_product(weight: Tensor, left: Tensor, right: Tensor) -> bool:
    """Add `left @ right` to the weight's `.grad`; return False if autograd should add it."""
    buffer = weight.grad
    if not left.numel() or not right.numel():  # For example an expert without tokens.
        return False
    if left.dtype not in SIXTEEN_BIT:
        if buffer is None or buffer.dtype is not left.dtype:
            return False
        buffer.addmm_(left, right)
    elif buffer is None:
        if not can_add_products(left.device):
            return False
        weight.grad = torch.mm(left, right, out_dtype=torch.float32)
    elif buffer.dtype is not torch.float32:
        return False
    elif can_add_products(left.device):
        torch.addmm(buffer, left, right, out_dtype=torch.float32, out=buffer)
        # `Gradients.take_back` detects the change by the version.
        torch.autograd.graph.increment_version(buffer)
    else:
        buffer.add_(torch.mm(left, right))
    return True


class _Embedding(torch.autograd.Function):
    """An embedding lookup: the rows of the weight for these tokens."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, padding: int, adding: Adding) -> Tensor:
        ctx.save_for_backward(tokens, weight)
        ctx.padding, ctx.adding = padding, adding
        return functional.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        tokens, weight = ctx.saved_tensors
        buffer = weight.grad
        if buffer is None or not ctx.adding.adds_to(weight):
            dw = torch.ops.aten.embedding_dense_backward(
                dy, tokens, weight.shape[0], ctx.padding, False
            )
            return None, dw, None, None
        with torch.no_grad():
            rows = dy.reshape(-1, dy.shape[-1]).to(buffer.dtype)
            which = tokens.reshape(-1)
            if ctx.padding >= 0:  # The padding row gets no gradient.
                rows = rows.masked_fill((which == ctx.padding).unsqueeze(-1), 0.0)
            buffer.index_put_((which,), rows, accumulate=True)
        ctx.adding.added += 1
        return None, None, None, None
