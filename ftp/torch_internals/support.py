"""The releases of torch that ftp runs on, and the private names of torch that it uses.

``import ftp`` checks both, the names only in modules that ``import torch`` has loaded; the others
are checked when a public name fails to load.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

OLDEST, BELOW = (2, 13), (2, 16)  # as in pyproject.toml

# Private names by module (read at torch 2.13), and private attributes of classes. Of a module
# without names the module itself is used.
NEEDED = {
    "torch": "Tensor._backward_hooks Tensor._has_symbolic_sizes_strides Tensor._is_all_true"
    " Tensor._is_any_true Tensor._make_subclass Tensor._post_accumulate_grad_hooks Tensor._version"
    " library.Library._destroy _assert_async _check _check_with _grouped_mm"
    " _is_all_true _is_any_true _sample_dirichlet _standard_gamma",
    "torch._VF": "_pack_padded_sequence",
    "torch._C": "DispatchKey DispatchKeySet DisableTorchFunction"
    " _AutoDispatchBelowAutograd _DisableTorchDispatch"
    " _ExcludeDispatchKeyGuard _cuda_endAllocateToPool"
    " _cuda_releasePool _current_autograd_node _current_graph_task_id"
    " _dispatch_has_kernel_for_dispatch_key _dispatch_keys"
    " _distributed.Placement _dynamo.guards.TensorGuards _dynamo.guards._empty_strided_cpu"
    " _dynamo.guards._reinterpret_tensor _dynamo.guards._torchinductor_pyobject_tensor_data_ptr"
    " _dynamo.guards.assert_alignment _dynamo.guards.assert_size_stride _is_any_autocast_enabled"
    " _len_torch_function_stack"
    " _set_grad_enabled _set_throw_on_mutable_data_ptr _set_warn_deprecated_on_mutable_data_ptr"
    " _storage_Use_Count",
    "torch._C._autograd": "_get_sequence_nr _pop_saved_tensors_default_hooks"
    " _push_saved_tensors_default_hooks _top_saved_tensors_default_hooks",
    "torch._C._distributed_c10d": "AllgatherOptions AllreduceOptions DebugLevel"
    " PythonCallbackWork _resolve_process_group get_debug_level",
    "torch._C._functorch": "TransformType _add_batch_dim _unwrap_batched get_interpreter_stack"
    " get_unwrapped is_batchedtensor is_functorch_wrapped_tensor is_gradtrackingtensor"
    " maybe_get_level peek_interpreter_stack unwrap_if_dead",
    "torch._decomp": "decomposition_table",
    "torch._functorch.autograd_function": "custom_function_call",
    "torch._functorch.eager_transforms": "_jvp_with_argnums _undo_create_differentiable"
    " grad_and_value_impl lazy_dynamo_disallow",
    "torch._dispatch.python": "enable_python_dispatcher",
    "torch._dynamo.source": "ConstantSource",
    "torch._functorch.pyfunctorch": "VmapInterpreter VmapInterpreter.batch_size"
    " VmapInterpreter.randomness retrieve_all_functorch_interpreters"
    " retrieve_current_functorch_interpreter"
    " temporarily_clear_interpreter_stack",
    "torch._guards": "GuardSource Source TracingContext tracing",
    "torch._higher_order_ops.associative_scan": "AssociativeScanOp generic_associative_scan",
    "torch._higher_order_ops.cond": "CondOp",
    "torch._higher_order_ops.invoke_subgraph": "InvokeSubgraphHOP",
    "torch._higher_order_ops.map": "MapImpl",
    "torch._higher_order_ops.scan": "ScanOp",
    "torch._higher_order_ops.utils": "_hop_compile_and_call",
    "torch._higher_order_ops.while_loop": "WhileLoopOp",
    "torch._inductor.async_compile": "AsyncCompile",
    "torch._inductor.codecache": "CppPythonBindingsCodeCache",
    "torch._inductor.codegen.common": "KernelTemplate._template_from_string",
    "torch._inductor.compile_fx": "compile_fx_inner",
    "torch._inductor.config": "_config _is_default patch fx_graph_cache force_disable_caches",
    "torch._inductor.cpp_builder": "get_cpp_compiler",
    "torch._inductor.cpu_vec_isa": "VecISA pick_vec_isa",
    "torch._inductor.decomposition": "select_decomp_table",
    "torch._inductor.runtime.cache_dir_utils": "cache_dir",
    "torch._library.simple_registry": "singleton",
    "torch._ops": "HigherOrderOperator OpOverload OpOverloadPacket",
    "torch._prims_common": "is_non_overlapping_and_dense_or_false",
    "torch._subclasses.fake_impls": "_compute_slice_index",
    "torch._subclasses.fake_tensor": "DataDependentOutputException DynamicOutputShapeException"
    " FakeTensor FakeTensorMode UnsupportedOperatorException is_fake",
    "torch.autograd": "_get_sequence_nr _profiler_enabled",
    "torch.autograd.function": "_HookMixin _HookMixin._register_hook",
    "torch.autograd.forward_ad": "_current_level _set_fwd_grad_enabled",
    "torch.autograd.grad_mode": "_force_original_view_tracking",
    "torch.cpu": "_init_amx _is_amx_tile_supported",
    "torch.distributed.distributed_c10d": "ProcessGroup._allgather_base"
    " ProcessGroup._device_types ProcessGroup._get_backend"
    " _get_default_group _get_default_store _resolve_process_group _set_pg_timeout",
    "torch.distributed._functional_collectives": "AsyncCollectiveTensor",
    "torch.distributed._symmetric_memory": "_fused_all_gather_matmul_fallback"
    " _fused_matmul_reduce_scatter_fallback",
    "torch.distributed.tensor._redistribute": "_gen_transform_infos"
    " clear_redistribute_planner_cache",
    "torch.distributed.tensor.debug": "_clear_sharding_prop_cache",
    "torch.distributed.tensor.placement_types": "_StridedShard",
    "torch.distributions.constraints": "_PositiveDefinite _PositiveSemidefinite _Square _Symmetric",
    "torch.export": "ExportedProgram._update",
    "torch.fx.experimental._config": "patch",
    "torch.fx.graph": "CodeGen._gen_python_code Graph._target_to_str _BoxedCodeGen _Namespace",
    "torch.fx.graph_module": "_loader",
    "torch.fx.node": "Node._erased Node._next Node._prev Node._rename Node._update_args_kwargs",
    "torch.fx._lazy_graph_module": "_LazyGraphModule _use_lazy_graph_module",
    "torch.fx.experimental.proxy_tensor": "_ProxyTensor",
    "torch.nn.modules.adaptive": "_ASMoutput",
    "torch.nn.modules.batchnorm": "_BatchNorm _BatchNorm._check_input_dim _NormBase",
    "torch.nn.modules.transformer": "_detect_is_causal_mask",
    "torch.optim._muon": "_zeropower_via_newtonschulz",
    "torch.optim.optimizer": "_global_optimizer_post_hooks _global_optimizer_pre_hooks",
    "torch.overrides": "_get_current_function_mode_stack _pop_mode_temporarily",
    "torch.testing._internal.distributed.fake_pg": "FakeStore",
    "torch.utils._config_module": "get_assignments_with_compile_ignored_comments",
    "torch.utils._python_dispatch": "TorchDispatchMode _disable_current_modes"
    " _get_current_dispatch_mode_stack is_traceable_wrapper_subclass_type",
    "torch.utils._ordered_set": "OrderedSet",
    "torch.utils._pytree": "SUPPORTED_NODES GetAttrKey MappingKey TreeSpec register_pytree_node"
    " tree_any tree_flatten tree_leaves tree_map tree_map_only tree_unflatten",
    "torch.utils._sympy.functions": "FloorDiv IntTrueDiv Mod PythonMod ToFloat",
    "torch.utils._sympy.value_ranges": "ValueRanges",
}

# Private attributes that objects of torch get when they are made (read at torch 2.13), by class. A
# class does not have them, so they are not checked.
ATTRIBUTES = (
    "FakeTensorMode._allow_unsafe_data_ptr_access",
    "Graph._find_nodes_lookup_table",
    "Graph._graph_namespace",
    "Graph._insert",
    "Graph._len",
    "Graph._root",
    "Module._backward_pre_hooks",
    "Node._sequence_nr",
    "OpOverload._overloadname",
    "UntypedStorage._cdata",
    "_Namespace._base_count",
    "_Namespace._used_names",
)


def check(torch: ModuleType) -> None:
    """Check torch's release, and the needed names of modules that are loaded.

    Raises:
        ImportError: torch is of another release, or lacks names that ftp uses; it names them.
    """
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if not OLDEST <= release < BELOW:
        oldest, newest = f"{OLDEST[0]}.{OLDEST[1]}", f"{BELOW[0]}.{BELOW[1] - 1}"
        raise ImportError(
            f"ftp runs on torch {oldest} to {newest}; this is torch {torch.__version__}."
            f" Install one with: pip install 'torch>={oldest},<{BELOW[0]}.{BELOW[1]}'"
        )
    if lacking := missing(load=False):
        raise ImportError(_message(torch, lacking))


def explain(torch: ModuleType, public: str, error: Exception) -> ImportError:
    """The error of a public name that failed to load by ``error``."""
    lacking = missing(load=True)
    text = _message(torch, lacking) if lacking else f"torch {torch.__version__}: {error}"
    return ImportError(f"ftp.{public} cannot be loaded. {text}")


def missing(load: bool) -> list[str]:
    """The needed names that torch lacks, in its loaded modules or in all.

    >>> missing(load=False)
    []
    """
    lacking = []
    for module, names in NEEDED.items():
        if load:
            try:
                import_module(module)
            except (ImportError, AttributeError):  # of the module, or of what it imports
                lacking.append(module)
                continue
        home = sys.modules.get(module)
        if home is not None:
            lacking += [f"{module}.{name}" for name in names.split() if not _has(home, name)]
    return lacking


def _has(owner: Any, name: str) -> bool:
    for part in name.split("."):
        if not hasattr(owner, part):
            return False
        owner = getattr(owner, part)
    return True


def _message(torch: ModuleType, lacking: list[str]) -> str:
    return f"torch {torch.__version__} lacks what ftp uses: {', '.join(lacking)}."
