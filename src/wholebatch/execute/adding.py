"""Weight gradients that add themselves in eager code too.

Autograd makes the gradient of a linear layer's weight in the dtype of the product, casts it, and
adds it into `.grad`: three passes over the weight for every micro-batch. Here the matrix product
adds into `.grad` itself, and an embedding scatters its rows into it. It is done where nothing but
the sum can be seen of the difference; everywhere else the layer runs as it is written:

- the layer's own forward is replaced while the loss function runs, and only for layers whose
  forward is torch's own (a subclass with a forward of its own, a parametrised weight, and a weight
  that is used by other code are left alone);
- a backward adds only if it is the window's own: one of the user's within the loss function (a
  gradient penalty) gets gradients as always, and may be differentiated again;
- in checkpointed blocks and under other hooks on saved tensors, under torch.func, modes and
  torch.compile, on a stream of the user's, and where somebody waits for the gradient of a
  parameter (several ranks that reduce during the last backward), autograd adds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional

from wholebatch.execute.fused import can_add_any_product
from wholebatch.loss import Loss, Terms
from wholebatch.precision import Precision

if TYPE_CHECKING:
    from wholebatch.window import Window

__all__ = ["Adding"]

_SIXTEEN_BIT = (torch.bfloat16, torch.float16)
_CAN_LOOK = (
    hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
    and hasattr(torch._C, "_are_functorch_transforms_active")
    and hasattr(torch._C, "_len_torch_dispatch_stack")
    and hasattr(torch._C, "_len_torch_function_stack")
    and hasattr(forward_ad, "_current_level")
)
"""Whether this torch says who watches; these names are its own, and may go."""
LossFunction = Callable[[Any, Any], Any]


class Adding:
    """`eager(micro, loss)`, with weight gradients that add themselves where that is possible."""

    anywhere = False
    """On for tests: also on a device that has no product of its own for it."""

    def __init__(
        self,
        model: nn.Module,
        window: Window,
        precision: Precision,
        device: torch.device,
        eager: Callable[[Any, LossFunction], Loss | Terms],
    ) -> None:
        self.plain = eager
        self.allowed = True
        """Off to measure the gain."""
        self.added = 0
        """How many gradients have added themselves."""
        self._window = window
        self._precision = precision
        self._device = device
        self._model = model
        self._layers: list[tuple[nn.Module, MethodType]] = []
        self._own: set[int] = set()
        self._adds = False  # whether the backward that runs is the window's own
        self._stream: Any = None

    @property
    def possible(self) -> bool:
        """Whether some gradients may never be seen by autograd."""
        return self._window.store.only_eager is None and self._replaces

    @property
    def _replaces(self) -> bool:
        """Whether layers run by our forwards. Who waits for gradients gets them from autograd."""
        if not self.allowed or not _CAN_LOOK:
            return False
        sync = self._window.sync
        able = self.anywhere or can_add_any_product(self._device)
        return able and sync.takes_graphs and not sync.counts_must_agree

    def __call__(self, micro: Any, loss: LossFunction) -> Loss | Terms:
        """One micro-step by eager code."""
        window = self._window
        # Buckets of gradients leave for the other ranks as autograd makes them.
        if not self._replaces or (window.closing and window.sync.ranks > 1):
            return self.plain(micro, loss)
        self._look_at_the_window()

        def forward(model: Any, micro: Any) -> Any:
            with self._in_place():
                result = loss(model, micro)
            self._adds = True  # what comes now is the window's backward
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
        if self._window.micro_batches == 0 or not self._own:
            self._own = {id(p) for group in self._window.target.groups() for p in group}
        if self._device.type == "cuda":
            self._stream = torch.cuda.current_stream(self._device)

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Within it, the layers' forwards are ours."""
        replaced = []
        try:
            for module, forward in self._layers:
                if "forward" not in module.__dict__:  # else it is somebody else's already
                    module.__dict__["forward"] = forward
                    replaced.append(module)
            yield
        finally:
            for module in replaced:
                module.__dict__.pop("forward", None)

    def _forward_of(self, module: nn.Module) -> Callable[[Any, Tensor], Tensor]:
        # A function, bound to the module by MethodType: so a copy of the module, made while the
        # loss function runs, has a method of its own.
        ours: Callable[..., Tensor | None] = _FORWARDS[type(module).forward]

        def forward(layer: Any, x: Tensor) -> Tensor:
            if not torch.compiler.is_compiling() and self._may_add(layer, x):
                result = ours(self, layer, x)
                if result is not None:
                    return result
            plain: Tensor = type(layer).forward(layer, x)
            return plain

        return forward

    def _may_add(self, layer: Any, x: Tensor) -> bool:
        """Whether this call is one that nobody watches."""
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
        """Whether the backward that runs may add to `.grad` of this weight without autograd."""
        if not self._adds or torch.is_grad_enabled():
            return False
        if weight._post_accumulate_grad_hooks or weight._backward_hooks:
            return False
        buffer = weight.grad
        return buffer is None or (
            type(buffer) is Tensor and not buffer.is_sparse and buffer.is_contiguous()
        )

    # ----------------------------------------------------------------- layers

    def linear(self, layer: nn.Linear, x: Tensor) -> Tensor | None:
        """The layer's output, or None where its dtypes are not for us."""
        weight, bias = layer.weight, layer.bias
        kind = weight.device.type
        dtype = weight.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            given = (x.dtype, weight.dtype, dtype if bias is None else bias.dtype)
            if any(one not in (torch.float32, *_SIXTEEN_BIT) for one in given):
                return None  # autocast leaves it as it is
        elif x.dtype is not dtype or (bias is not None and bias.dtype is not dtype):
            return None
        if dtype not in _SIXTEEN_BIT and not self.anywhere:
            return None
        result: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
            x.to(dtype),
            weight,
            bias,
            self._precision.copy_of(weight, dtype),
            None if bias is None else self._precision.copy_of(bias, dtype),
            self,
        )
        return result

    def embedding(self, layer: nn.Embedding, tokens: Tensor) -> Tensor | None:
        """The layer's output, or None where its gradient is of another kind."""
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


class _Linear(torch.autograd.Function):
    """`linear(x, w, b)`; `w` and `b` are the weight and bias in the dtype of `x`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        w: Tensor,
        b: Tensor | None,
        adding: Adding,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.w, ctx.adding = w, adding
        ctx.bias_dtype = None if bias is None else bias.dtype
        return functional.linear(x, w, b)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        # A backward that will be differentiated again must lead to the weight itself.
        w = weight.to(x.dtype) if torch.is_grad_enabled() else ctx.w
        rows = dy.reshape(-1, dy.shape[-1])
        dx = torch.matmul(dy, w) if wants_x else None
        dw = db = None
        if wants_weight:
            left, right = rows.t(), x.reshape(-1, x.shape[-1])
            if not ctx.adding.adds_to(weight) or not _add_product(weight, left, right):
                dw = _product(left, right, weight.dtype)
            else:
                ctx.adding.added += 1
        if wants_bias:
            db = rows.sum(0, dtype=ctx.bias_dtype)
        return dx, dw, db, None, None, None


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left @ right in this dtype: not first in 16 bit, where nobody differentiates it again."""
    if (
        dtype is torch.float32
        and left.dtype in _SIXTEEN_BIT
        and not torch.is_grad_enabled()
        and left.numel()
        and right.numel()
        and can_add_any_product(left.device)
    ):
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(left, right).to(dtype)


@torch.no_grad()
def _add_product(weight: Tensor, left: Tensor, right: Tensor) -> bool:
    """Add left @ right to the weight's `.grad`; False where autograd does it as well."""
    buffer = weight.grad
    if not left.numel() or not right.numel():  # an expert without tokens
        return False
    if left.dtype not in _SIXTEEN_BIT:
        if buffer is None or buffer.dtype is not left.dtype:
            return False
        buffer.addmm_(left, right)
    elif buffer is None:
        if not can_add_any_product(left.device):
            return False
        weight.grad = torch.mm(left, right, out_dtype=torch.float32)
    elif buffer.dtype is not torch.float32:
        return False
    elif can_add_any_product(left.device):
        torch.addmm(buffer, left, right, out_dtype=torch.float32, out=buffer)
        torch.autograd.graph.increment_version(buffer)  # whoever looks sees that it has changed
    else:
        buffer.add_(torch.mm(left, right))
    return True


class _Embedding(torch.autograd.Function):
    """Rows of the weight."""

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
            if ctx.padding >= 0:  # the padding row has no gradient
                rows = rows.masked_fill((which == ctx.padding).unsqueeze(-1), 0.0)
            buffer.index_put_((which,), rows, accumulate=True)
        ctx.adding.added += 1
        return None, None, None, None
