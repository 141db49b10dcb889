"""Every private name of torch that the compiler uses. Nothing else in it imports one.

torch promises nothing about them. A name that a version of torch does not have is an `ImportError` that says
what it was for, and `tests/test_torch_names.py` fails with the same words. Names are looked up when they are
asked for: some are in modules that take seconds to import.
"""

from __future__ import annotations

import functools
import importlib
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch._dispatch.python import enable_python_dispatcher as enable_python_dispatcher
    from torch._dynamo.backends.common import aot_autograd as aot_autograd
    from torch._dynamo.callback import CallbackArgs as CallbackArgs
    from torch._dynamo.exc import TorchDynamoException as TorchDynamoException
    from torch._functorch._aot_autograd.schemas import OutputAliasInfo as OutputAliasInfo
    from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta as ViewAndMutationMeta
    from torch._guards import TracingContext as TracingContext
    from torch._guards import detect_fake_mode as detect_fake_mode
    from torch._ops import OpOverload as OpOverload
    from torch._subclasses import FakeTensor as FakeTensor
    from torch._subclasses import FakeTensorMode as FakeTensorMode
    from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo
    from torch.utils import _pytree
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

    PyTreeCodeGen = _PyTreeCodeGen
    PyTreeInfo = _PyTreeInfo
    pytree = _pytree


class Name(NamedTuple):
    """A private name: where it is, what it is for, and what is done without it."""

    module: str
    attribute: str
    """Empty: the module itself."""
    purpose: str
    without: str = "required"

    @property
    def path(self) -> str:
        """Module and attribute."""
        return f"{self.module}.{self.attribute}".rstrip(".")

    def found(self) -> Any:
        """What it names.

        Raises:
            ImportError: torch has it no more.
        """
        try:
            module = importlib.import_module(self.module)
            return getattr(module, self.attribute) if self.attribute else module
        except (ImportError, AttributeError) as error:
            import torch

            where = f"torch {torch.__version__} has no {self.path}"
            raise ImportError(f"{where}, which hypatia needs for this: {self.purpose}") from error


NAMES = {
    "OpOverload": Name(
        "torch._ops", "OpOverload", "one overload of an op: what nodes of captured graphs call"
    ),
    "FakeTensor": Name(
        "torch._subclasses", "FakeTensor", "tensors without data, which say what a call would return"
    ),
    "FakeTensorMode": Name("torch._subclasses", "FakeTensorMode", "makes fake tensors of calls"),
    "in_kernel_invocation_manager": Name(
        "torch._subclasses.fake_tensor",
        "in_kernel_invocation_manager",
        "a fake tensor that kernels of the meta device take",
    ),
    "detect_fake_mode": Name(
        "torch._guards", "detect_fake_mode", "the mode that the values of a graph were made in"
    ),
    "TracingContext": Name("torch._guards", "TracingContext", "which inputs of a graph are weights"),
    "tracing": Name("torch._guards", "tracing", "AOTAutograd called without Dynamo"),
    "TorchDispatchMode": Name("torch.utils._python_dispatch", "TorchDispatchMode", "sees every op of a run"),
    "disable_current_modes": Name(
        "torch.utils._python_dispatch",
        "_disable_current_modes",
        "work of ours is not seen by modes of the user's",
    ),
    "dispatch_mode_count": Name(
        "torch._C", "_len_torch_dispatch_stack", "a mode that counts or logs ops is to see torch's"
    ),
    "enable_python_dispatcher": Name(
        "torch._dispatch.python", "enable_python_dispatcher", "fake tensors with open sizes"
    ),
    "pytree": Name("torch.utils._pytree", "", "arguments and results of any structure"),
    "PyTreeCodeGen": Name("torch.fx.graph", "_PyTreeCodeGen", "graphs that are called like their model"),
    "PyTreeInfo": Name("torch.fx.graph", "_PyTreeInfo", "the same: the structure of arguments"),
    "BoxedCodeGen": Name(
        "torch.fx.graph", "_BoxedCodeGen", "graphs that take a list of arguments and empty it"
    ),
    "make_graph_module": Name(
        "torch.fx._lazy_graph_module",
        "_make_graph_module",
        "graphs whose Python code is made when it is needed",
    ),
    "use_lazy_graph_module": Name(
        "torch.fx._lazy_graph_module", "_use_lazy_graph_module", "the same, where torch makes the graph"
    ),
    "reparametrize_module": Name(
        "torch.nn.utils.stateless", "_reparametrize_module", "a model run with fake weights"
    ),
    "compiling_state_context": Name(
        "torch._export.utils", "_compiling_state_context", "a model is told that it is being exported"
    ),
    "is_preservable_composite": Name(
        "torch._export.utils", "_is_preservable_cia_op", "which composite ops torch.export leaves whole"
    ),
    "below_autograd": Name("torch._C", "_AutoDispatchBelowAutograd", "composite ops arrive whole"),
    "DispatchKey": Name("torch._C", "DispatchKey", "which ops are composites, which are structured"),
    "has_kernel_for": Name("torch._C", "_dispatch_has_kernel_for_dispatch_key", "the same"),
    "is_functional_tensor": Name(
        "torch", "_is_functional_tensor", "wrapped tensors of AOTAutograd cannot be checked"
    ),
    "aot_autograd": Name(
        "torch._dynamo.backends.common", "aot_autograd", "forward and backward graphs of what Dynamo captured"
    ),
    "register_backend": Name(
        "torch._dynamo", "register_backend", "the backend's name, where the package is not installed"
    ),
    "min_cut_partition": Name(
        "functorch.compile", "min_cut_rematerialization_partition", "splits a training step in two graphs"
    ),
    "functorch_config": Name(
        "torch._functorch.config", "", "settings of AOTAutograd, set for one compilation"
    ),
    "dynamo_config": Name("torch._dynamo.config", "", "whether torch.compile is switched off"),
    "inductor_config": Name("torch._inductor.config", "", "frozen weights, for a peer of the benchmarks"),
    "trace_structured": Name(
        "torch._logging", "trace_structured", "optimized graphs in torch's structured log"
    ),
    "dynamo_callbacks": Name(
        "torch._dynamo.callback",
        "callback_handler",
        "when a compilation begins and ends: the timeline of a report",
    ),
    "dynamo_counters": Name("torch._dynamo.utils", "counters", "reasons of graph breaks"),
    "TorchDynamoException": Name(
        "torch._dynamo.exc", "TorchDynamoException", "what torch.compile raises by itself"
    ),
    "functorch_active": Name(
        "torch._C", "_are_functorch_transforms_active", "function transforms need torch's own ops"
    ),
    "any_autocast": Name(
        "torch._C", "_is_any_autocast_enabled", "under autocast a plan has the wrong dtypes"
    ),
    "DisableAutocast": Name(
        "torch._C", "_DisableAutocast", "graphs that autocast was traced into run without it"
    ),
    "is_jit_tracing": Name("torch._C", "_is_tracing", "what torch.jit.trace traces is the model as it is"),
    "cublas_allows_tf32": Name("torch._C", "_get_cublas_allow_tf32", "plans are bound for one setting"),
    "set_multithreaded_backward": Name(
        "torch._C", "_set_multithreading_enabled", "option backward_in_caller"
    ),
    "side_effectful_functions": Name(
        "torch.fx.node", "_side_effectful_functions", "functions that are called for what they do"
    ),
    "autograd": Name(
        "torch._C", "_autograd", "whether a backward pass keeps its graph", "gradients are copied, not lent"
    ),
    "current_graph_task": Name(
        "torch._C", "_current_graph_task_id", "the same: whether a backward pass runs"
    ),
    "storage_use_count": Name(
        "torch._C",
        "_storage_Use_Count",
        "whether somebody still holds gradients that were lent",
        "gradients are copied, not lent",
    ),
    "foreach_copy": Name("torch", "_foreach_copy_", "many copies by one kernel"),
    "cuda_stream": Name(
        "torch._C", "_cuda_getCurrentRawStream", "the stream that a plan runs on", "only on a GPU"
    ),
    "begin_allocating_to_pool": Name(
        "torch._C",
        "_cuda_beginAllocateCurrentThreadToPool",
        "memory of a CUDA graph that is recorded by us",
        "only on a GPU",
    ),
    "end_allocating_to_pool": Name("torch._C", "_cuda_endAllocateToPool", "the same", "only on a GPU"),
    "cuda_sleep": Name(
        "torch._C",
        "_cuda_sleep",
        "a GPU that begins when all is queued: its own time, without the host's",
        "only on a GPU, where the larger of both is measured instead",
    ),
    "onednn": Name(
        "torch.ops",
        "mkldnn",
        "oneDNN's convolutions (_convolution_pointwise), their weights (_reorder_convolution_weight), and "
        "whether it has bf16 (_is_mkldnn_bf16_supported)",
        "torch's own convolution over channels last",
    ),
    "release_pool": Name("torch._C", "_cuda_releasePool", "the same", "only on a GPU"),
}

ATTRIBUTES = {
    "torch._ops.OpOverload._schema": "arguments of an op, and whether it changes them",
    "torch._ops.OpOverload._overloadname": "an op as torch's dispatcher names it",
    "torch.fx.Graph._codegen": "how a graph is called",
    "torch.fx.Node._rename": "nodes of a new graph keep the names of the captured one",
    "torch.export.ExportedProgram._guards_code": "what was assumed of sizes while a model was exported",
    "torch.nn.Module._call_impl": "the frames of calls of modules: names of nodes",
    "torch.nn.Module._wrapped_call_impl": "a module that stands for another is called as any module",
    "torch.nn.Module._slow_forward": "the same, while torch.jit traces",
    "torch.nn.Module._parameters": "weights of a module, without a read of the attribute",
    "torch.nn.Module._buffers": "the same",
    "torch.nn.Module._modules": "the same: modules inside of it",
    "torch.nn.Module._forward_hooks": "a model with hooks is called as it is",
    "torch.nn.Module._forward_pre_hooks": "the same; hooks of an exported graph are taken off",
    "torch.nn.Module._forward_pre_hooks_with_kwargs": "the same",
    "torch.nn.Module._backward_hooks": "the same; so is a parameter whose gradient somebody waits for",
    "torch.nn.Module._backward_pre_hooks": "the same",
    "torch.nn.modules.module._global_forward_hooks": "the same, for hooks of all modules",
    "torch.nn.modules.module._global_forward_pre_hooks": "the same",
    "torch.nn.modules.module._global_backward_hooks": "the same",
    "torch.Tensor._backward_hooks": "a gradient that somebody waits for is torch's own",
    "torch.Tensor._post_accumulate_grad_hooks": "the same",
    "torch.Tensor._is_view": "whether a value has memory of its own",
    "torch.Tensor._version": "whether a weight was changed",
    "torch.Tensor._base": "what a tensor is a view of",
    "torch.UntypedStorage._cdata": "which tensors share memory, and how many hold it",
    "torch._dynamo.OptimizedModule._orig_mod": "the model inside of what torch.compile returned",
    "torch.distributed.fsdp.FlatParameter._fsdp_flattened": "weights that FSDP writes without a new version",
    "torch._functorch._aot_autograd.utils.make_boxed_func._boxed_call": "a call takes a list and empties it",
    "torch._C._autograd._get_current_graph_task_keep_graph": "whether a backward pass keeps its graph",
}
"""Private attributes of public things, and what they are for."""


def gathered_parameters() -> set[int] | None:
    """The ids of parameters that ``fully_shard`` gathers before every call; none if nobody knows."""
    states = sys.modules.get("torch.distributed._composable_state")
    if states is None or "torch.distributed.fsdp._fully_shard._fsdp_state" not in sys.modules:
        return set()
    try:
        known = [s for s in states._module_state_mapping.values() if hasattr(s, "_fsdp_param_group")]
        groups = [g for s in known for g in getattr(s, "_fsdp_param_groups", [s._fsdp_param_group]) if g]
        return {id(getattr(p, "_unsharded_param", None)) for g in groups for p in g.fsdp_params}
    except AttributeError:
        return None


def without_autocast() -> AbstractContextManager[object]:
    """Around a graph that was captured under autocast, which would cast once more."""
    found: Any = sys.modules[__name__]
    return found.DisableAutocast() if found.any_autocast() else nullcontext()


def saved_tensors_are_seen() -> bool:
    """Whether somebody sees what autograd keeps now, as checkpoints do, which count it."""
    ask = getattr(optional("autograd"), "_top_saved_tensors_default_hooks", None)
    return ask is not None and ask(True) is not None


def inductor_pools() -> list[object]:
    """The pools of threads in which Inductor compiles, as far as there are some: they run no ops."""
    compiling = getattr(sys.modules.get("torch._inductor.async_compile"), "AsyncCompile", None)
    pools = [getattr(compiling, name, None) for name in ("pool", "thread_pool")]
    # Asked for a pool that is not there, they would make one.
    return [p() for p in pools if p is not None and hasattr(p, "cache_info") and p.cache_info().currsize]


@functools.cache
def optional(name: str) -> Any:
    """What a name stands for; none where torch does not have it."""
    try:
        return NAMES[name].found()
    except ImportError:
        return None


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = NAMES[name].found()
    return value
