"""ftp: functional tensor parallel. Pure single-device functions and PartitionSpecs to explicit SPMD
programs for PyTorch.

Public names are loaded at their first use, so that ``import ftp`` costs little over ``import
torch``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from ftp.torch_internals import support

support.check(torch)

if TYPE_CHECKING:
    from ftp import axis, errors, optim, plans, random, static, testing
    from ftp.api.certify import certify
    from ftp.api.compiled_step import load_program
    from ftp.api.init_params import init_params
    from ftp.api.local import local
    from ftp.api.reshard import reshard
    from ftp.api.shard import lower, shard, spmd
    from ftp.api.step import Step
    from ftp.certification.certificate import Certificate
    from ftp.checkpoint.background import Saving
    from ftp.checkpoint.huggingface import load_safetensors, save_safetensors
    from ftp.checkpoint.load import load
    from ftp.checkpoint.manifest import checkpoints
    from ftp.checkpoint.save import save
    from ftp.equivalence.equivalent import equivalent
    from ftp.errors import FtpError
    from ftp.exported import shard_exported
    from ftp.functional.functionalize import functionalize
    from ftp.functional.module_constraints import Constraint
    from ftp.functional.remat import remat
    from ftp.functional.scan import scan
    from ftp.ops.constrain import constrain
    from ftp.partitioning.collectives import Collective
    from ftp.pipeline.placement import Pipeline
    from ftp.pipeline.schedule import Action
    from ftp.planning.cost import Hardware, Link
    from ftp.plans import from_hf, from_megatron, from_parallelize_plan
    from ftp.report.lowered import Lowered
    from ftp.report.visualize import visualize
    from ftp.rules.own import along_dim, einsum, pointwise, reduction, rule
    from ftp.runtime.calibrate import calibrate
    from ftp.searching.result import Found
    from ftp.searching.search import search
    from ftp.sharding.balance import balance
    from ftp.sharding.make_mesh import make_mesh, simulated_mesh
    from ftp.sharding.mesh import AbstractMesh, use_mesh
    from ftp.sharding.plan import plan
    from ftp.sharding.process_group import destroy_process_group, init_process_group
    from ftp.sharding.spec import P, PartitionSpec, units, zigzag
    from ftp.tensors.device_put import device_get, device_put, local_slice, specs_of
    from ftp.tensors.dtensor import from_dtensor, to_dtensor
    from ftp.tensors.replicas import check_replicas
    from ftp.testing.divergence import Divergence, first_divergence
    from ftp.version import __version__

_MODULES = ("axis", "errors", "optim", "plans", "random", "static", "testing")
_HOMES = {
    "ftp.api.certify": "certify",
    "ftp.api.compiled_step": "load_program",
    "ftp.api.init_params": "init_params",
    "ftp.api.local": "local",
    "ftp.api.reshard": "reshard",
    "ftp.api.shard": "lower shard spmd",
    "ftp.api.step": "Step",
    "ftp.certification.certificate": "Certificate",
    "ftp.checkpoint.background": "Saving",
    "ftp.checkpoint.huggingface": "load_safetensors save_safetensors",
    "ftp.checkpoint.load": "load",
    "ftp.checkpoint.manifest": "checkpoints",
    "ftp.checkpoint.save": "save",
    "ftp.equivalence.equivalent": "equivalent",
    "ftp.errors": "FtpError",
    "ftp.exported": "shard_exported",
    "ftp.functional.functionalize": "functionalize",
    "ftp.functional.module_constraints": "Constraint",
    "ftp.functional.remat": "remat",
    "ftp.functional.scan": "scan",
    "ftp.ops.constrain": "constrain",
    "ftp.partitioning.collectives": "Collective",
    "ftp.pipeline.placement": "Pipeline",
    "ftp.pipeline.schedule": "Action",
    "ftp.planning.cost": "Hardware Link",
    "ftp.plans": "from_hf from_megatron from_parallelize_plan",
    "ftp.report.lowered": "Lowered",
    "ftp.report.visualize": "visualize",
    "ftp.rules.own": "along_dim einsum pointwise reduction rule",
    "ftp.runtime.calibrate": "calibrate",
    "ftp.searching.result": "Found",
    "ftp.searching.search": "search",
    "ftp.sharding.balance": "balance",
    "ftp.sharding.make_mesh": "make_mesh simulated_mesh",
    "ftp.sharding.mesh": "AbstractMesh use_mesh",
    "ftp.sharding.plan": "plan",
    "ftp.sharding.process_group": "destroy_process_group init_process_group",
    "ftp.sharding.spec": "P PartitionSpec units zigzag",
    "ftp.tensors.device_put": "device_get device_put local_slice specs_of",
    "ftp.tensors.dtensor": "from_dtensor to_dtensor",
    "ftp.tensors.replicas": "check_replicas",
    "ftp.testing.divergence": "Divergence first_divergence",
    "ftp.version": "__version__",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = [
    "AbstractMesh",
    "Action",
    "Certificate",
    "Collective",
    "Constraint",
    "Divergence",
    "Found",
    "FtpError",
    "Hardware",
    "Link",
    "Lowered",
    "P",
    "PartitionSpec",
    "Pipeline",
    "Saving",
    "Step",
    "__version__",
    "along_dim",
    "axis",
    "balance",
    "calibrate",
    "certify",
    "check_replicas",
    "checkpoints",
    "constrain",
    "destroy_process_group",
    "device_get",
    "device_put",
    "einsum",
    "equivalent",
    "errors",
    "first_divergence",
    "from_dtensor",
    "from_hf",
    "from_megatron",
    "from_parallelize_plan",
    "functionalize",
    "init_params",
    "init_process_group",
    "load",
    "load_program",
    "load_safetensors",
    "local",
    "local_slice",
    "lower",
    "make_mesh",
    "optim",
    "plan",
    "plans",
    "pointwise",
    "random",
    "reduction",
    "remat",
    "reshard",
    "rule",
    "save",
    "save_safetensors",
    "scan",
    "search",
    "shard",
    "shard_exported",
    "simulated_mesh",
    "specs_of",
    "spmd",
    "static",
    "testing",
    "to_dtensor",
    "units",
    "use_mesh",
    "visualize",
    "zigzag",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return _loaded(f"ftp.{name}", name)
    if name not in _HOME_OF:
        raise AttributeError(f"module 'ftp' has no attribute {name!r}")
    found = globals()[name] = getattr(_loaded(_HOME_OF[name], name), name)
    return found


def _loaded(module: str, public: str) -> Any:
    from ftp.errors import RuleError
    from ftp.paused_gc import collection_paused
    from ftp.turns import turn

    try:
        with turn(), collection_paused():
            return import_module(module)
    except (ImportError, AttributeError, RuleError) as error:  # not hidden by hasattr
        raise support.explain(torch, public, error) from error


def __dir__() -> list[str]:
    return sorted(__all__)
