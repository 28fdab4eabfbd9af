"""Private parts of torch that the package uses: what each is for, and what happens without it.

`INTERNALS` are those of the engine, `WINDOW_INTERNALS` those of the window and of the classes for
DDP, FSDP2 and DeepSpeed, `TEST_AND_MEMORY_INTERNALS` those of `coupled` and `memory`, and
`VERIFICATION_INTERNALS` those of `verification`, where torch has no public function for it.

`missing()` tries each. A test runs it, so that a new torch fails with a sentence. Another reads
the code: a private name of torch that is not here fails it. (Operations of a traced graph,
`aten._to_copy` and the like, are not counted.) Wherever a trace or a compilation fails for another
reason, micro-steps run eagerly, with a warning that says why.
"""

from __future__ import annotations

from importlib import import_module
from operator import attrgetter
from typing import NamedTuple


class Internal(NamedTuple):
    """A private name, its module, what the engine gets by it, and what happens without it."""

    module: str
    name: str
    buys: str
    without: str
    attributes: tuple[str, ...] = ()
    """The private attributes and options of it that the engine uses."""


_EAGER, _SHAPES = "no graphs: eager code", "a graph for each size"
_FAKE = "torch._subclasses.fake_tensor"

INTERNALS = (
    Internal(
        "torch.fx.experimental.proxy_tensor",
        "make_fx",
        "the trace of forward and backward",
        _EAGER,
        (
            "_allow_non_fake_inputs",
            "get_proxy_mode",
            "get_proxy_slot",
        ),
    ),
    Internal("torch._dispatch.python", "enable_python_dispatcher", "the trace", _EAGER),
    Internal(_FAKE, "FakeTensorMode", "tensors without numbers", _EAGER),
    Internal(
        "torch.utils._python_dispatch",
        "TorchDispatchMode",
        "the random numbers of a checkpoint; causal masks",
        _EAGER,
        ("_should_skip_dynamo", "_disable_current_modes"),
    ),
    Internal("torch._ops", "OpOverload", "what an operation writes", _EAGER, ("_schema",)),
    Internal(
        "torch._dynamo.eval_frame",
        "_debug_get_cache_entry_list",
        "the guards of what the code reads, and the text of one that fails",
        _EAGER,
        ("guard_manager", "check_verbose"),
    ),
    Internal(
        "torch._dynamo.guards",
        "install_guard",
        "other tensors in their place",
        _EAGER,
        ("make_guard", "grapharg", "example_value"),
    ),
    Internal(
        "torch._dynamo.symbolic_convert",
        "InstructionTranslator",
        "what the code writes",
        _EAGER,
        (
            "side_effects",
            "_get_modified_vars",
            "store_attr_mutations",
            "mutation_type",
            "original_items",
        ),
    ),
    Internal("torch._dynamo.symbolic_convert", "is_stdlib", "guards of os.getenv", "constants"),
    Internal("torch._dynamo.variables", "ConstDictVariable", "guards of missing keys", "constants"),
    Internal(
        "torch._dynamo.variables",
        "UserDefinedClassVariable",
        "guards of class attributes, before torch 2.13",
        "constants",
    ),
    Internal(
        "torch._dynamo.variables.torch",
        "tracing_state_functions",
        "code that asks if it is compiled takes the way of eager code",
        "the other way, which is compared with eager code",
    ),
    Internal(
        "torch._higher_order_ops.wrap",
        "tag_activation_checkpoint",
        "checkpointed blocks are recomputed",
        _EAGER,
    ),
    Internal(
        "torch._library.custom_ops",
        "OPDEFS",
        "a backward of the user's that Dynamo does not look into is refused",
        _EAGER,
        ("_backward_fn",),
    ),
    Internal(
        "torch",
        "_check_tensor_all_with",
        "assertions of transformers",
        _EAGER,
        ("_check_tensor_all",),
    ),
    Internal("torch.nn", "Module._apply", "a forward that converts a module is refused", _EAGER),
    Internal(
        "torch.fx.experimental.symbolic_shapes",
        "ShapeEnv",
        "dynamic sizes",
        _SHAPES,
        ("_expr", "var_to_range"),
    ),
    Internal(
        "torch._inductor",
        "compile",
        "compiled kernels",
        "graphs as traced",
    ),
    Internal("torch._inductor.config", "patch", "options of Inductor", "graphs as traced"),
    Internal(
        "torch._inductor.lowering",
        "pointwise_cat",
        "the parts of joined products are written in place",
        "Llama 9% slower",
        ("V", "ConcatKernel", "is_storage_and_layout", "is_pointwise_use"),
    ),
    Internal(
        "torch",
        "_foreach_zero_",
        "buffers zeroed, and weights cast, by one kernel",
        "an error in tests",
        ("_foreach_copy_",),
    ),
    Internal(
        "torch.optim.optimizer",
        "Optimizer.register_step_post_hook",
        "hooks run once, not per bucket, and a step that others look into is refused",
        "optimizer_state='host' fails",
        (
            "_optimizer_step_post_hooks",
            "_optimizer_step_pre_hooks",
            "_global_optimizer_pre_hooks",
        ),
    ),
)
"""Every name counts, with or without an underscore: the attributes are those of torch's objects."""

_TEST = "an error in tests"
WINDOW_INTERNALS = (
    Internal("torch", "Tensor._version", "finds writes into an open window", _TEST),
    Internal(
        "torch",
        "Tensor._backward_hooks",
        "hooks on parameters see the whole gradient, once",
        "they would run on each micro-batch",
        ("_backward_hooks", "_post_accumulate_grad_hooks"),
    ),
    Internal(
        "torch",
        "_foreach_mul_",
        "one kernel multiplies all gradients, takes all norms or copies all buffers",
        _TEST,
        ("_foreach_norm", "_foreach_copy_"),
    ),
    Internal(
        "torch.autograd.graph",
        "_engine_run_backward",
        "a backward without the checks of torch.autograd.backward: 15% of a tiny micro-step",
        _TEST,
        ("_execution_engine",),
    ),
    Internal(
        "torch._dynamo.eval_frame",
        "cached_backends",
        "no hook on all modules where torch.compile is used, of which torch warns",
        _TEST,
    ),
    Internal(
        "torch.nn",
        "Module._apply",
        "state that a forward changes is put back; finds hooks of engines",
        _TEST,
        ("_buffers", "_parameters", "_forward_hooks", "_forward_pre_hooks"),
    ),
    Internal(
        "torch.optim.optimizer",
        "_global_optimizer_pre_hooks",
        "an optimizer steps before the norm is read only if no hook looks at it",
        _TEST,
        (
            "_global_optimizer_post_hooks",
            "_optimizer_step_pre_hooks",
            "_optimizer_step_post_hooks",
        ),
    ),
    Internal("torch._C", "_are_functorch_transforms_active", "no checks inside vmap", "no checks"),
    Internal("torch._C", "_current_graph_task_id", "tells a recomputed forward", _TEST),
    Internal("torch._C", "_len_torch_dispatch_stack", "tells a trace of a DDP model", _TEST),
    Internal("torch._subclasses.fake_tensor", "FakeTensor", "slices join a traced graph", _TEST),
    Internal(
        "torch.utils._pytree",
        "tree_leaves",
        "tensors of the inputs of a stage, or of a block",
        _TEST,
    ),
    Internal(
        "torch.distributed.fsdp",
        "FSDPModule._get_fsdp_state",
        "the mesh of the data-parallel ranks, and a divisor that the user has set; for gathered "
        "windows the policy of precision and the forward hooks, which are off meanwhile",
        "FSDP2 fails",
        (
            "_fsdp_param_group",
            "_mp_policy",
            "_pre_forward_hook_handle",
            "_post_forward_hook_handle",
            "_is_fsdp_managed_module",
        ),
    ),
    Internal(
        "torch.distributed.distributed_c10d",
        "_set_pg_timeout",
        "a rank that hangs ends the job soon",
        "the timeout stays as it was given",
        ("_get_default_store", "_comm_hooks"),
    ),
)
"""DeepSpeed's `engine._config._param_dict` tells if the user has set a clipping of its own."""

TEST_AND_MEMORY_INTERNALS = (
    Internal(
        "torch.utils._python_dispatch",
        "TorchDispatchMode",
        "sees every operation: live bytes, random numbers",
        _TEST,
        ("_should_skip_dynamo",),
    ),
    Internal(_FAKE, "FakeTensorMode", "memory of a model that is not there", "no plan"),
    Internal("torch", "Tensor._indices", "bytes of sparse gradients", _TEST, ("_values",)),
    Internal("torch", "Tensor._backward_hooks", "the test runs no hook of the user's", _TEST),
    Internal("torch", "Tensor._version", "finds a step of another model's optimizer", _TEST),
    Internal(
        "torch._dynamo.eval_frame",
        "cached_backends",
        "no hook on all modules where torch.compile is used, of which torch warns",
        _TEST,
    ),
    Internal("torch", "_foreach_norm", "one kernel takes the norms of all weights", _TEST),
    Internal("torch._ops", "OpOverload", "which argument is a generator", _TEST, ("_schema",)),
    Internal(
        "torch.autograd.graph",
        "Node",
        "the last reduction of a loss: sum or mean, and over how many",
        "fewer mistakes are found in loops of one's own",
        (
            "_saved_alpha",
            "_saved_reduction",
            "_saved_self",
            "_saved_other",
            "_saved_self_sym_sizes",
            "_saved_total_weight",
            "_input_metadata",
        ),
    ),
)

_LESS = "fewer loops are judged"
VERIFICATION_INTERNALS = (
    Internal(
        "torch.autograd.graph",
        "Node",
        "how the loss of somebody's loop is made: means, sums, factors, masks",
        _LESS,
        (
            *("_saved_alpha", "_saved_dim", "_saved_ignore_index", "_saved_mask", "_saved_other"),
            *("_saved_reduction", "_saved_self", "_saved_self_sym_sizes", "_saved_target"),
            *("_saved_total_weight", "_saved_weight", "_input_metadata"),
        ),
    ),
    Internal("torch", "Tensor._backward_hooks", "a loop that has hooks is not judged", _LESS),
    Internal(
        "torch.overrides",
        "_get_current_function_mode",
        "a watch leaves its mode once it knows enough, where a loop has entered none after it",
        "every call of torch of a watched loop costs two microseconds",
    ),
    Internal(
        "torch.utils._python_dispatch", "TorchDispatchMode", "the lines that draw numbers", _LESS
    ),
    Internal("torch.nn.modules.batchnorm", "_BatchNorm", "stays as it is in a proof", _LESS),
    Internal("torch.nn.modules.instancenorm", "_InstanceNorm", "stays as it is in a proof", _LESS),
    Internal("torch.nn.modules.dropout", "_DropoutNd", "is switched off in a proof", _LESS),
    Internal("torch.nn.modules.conv", "_ConvNd", "cuDNN may round to TF32", _LESS),
)


def missing() -> list[Internal]:
    """Return the parts that this torch does not have."""
    every = (*INTERNALS, *WINDOW_INTERNALS, *TEST_AND_MEMORY_INTERNALS, *VERIFICATION_INTERNALS)
    return [one for one in every if not _is_there(one)]


def _is_there(internal: Internal) -> bool:
    try:
        attrgetter(internal.name)(import_module(internal.module))
    except (ImportError, AttributeError):
        return False
    return True
