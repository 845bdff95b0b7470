"""ftp: functional tensor parallel. Pure single-device functions and PartitionSpecs to explicit SPMD programs for PyTorch."""

from ftp import axis, errors, optim, plans, random, testing
from ftp.api.certify import certify
from ftp.api.init_params import init_params
from ftp.api.reshard import reshard
from ftp.api.shard import lower, shard, spmd
from ftp.api.step import Step
from ftp.certification.certificate import Certificate
from ftp.checkpoint.huggingface import load_safetensors, save_safetensors
from ftp.checkpoint.load import load
from ftp.checkpoint.manifest import checkpoints
from ftp.checkpoint.save import Saving, save
from ftp.errors import FtpError
from ftp.exported import shard_exported
from ftp.functional.functionalize import functionalize
from ftp.functional.module_constraints import Constraint
from ftp.functional.remat import remat
from ftp.functional.scan import scan
from ftp.ops.constrain import constrain
from ftp.partitioning.collectives import Collective
from ftp.per_rank.local import local
from ftp.planning.cost import Hardware, Link
from ftp.plans import from_hf, from_megatron, from_parallelize_plan
from ftp.report.lowered import Lowered
from ftp.report.visualize import visualize
from ftp.rules.registry import along_dim, einsum, pointwise, reduction, rule
from ftp.runtime.calibrate import calibrate
from ftp.searching.result import Found
from ftp.searching.search import search
from ftp.sharding.mesh import AbstractMesh, make_mesh, simulated_mesh, use_mesh
from ftp.sharding.process_group import destroy_process_group, init_process_group
from ftp.sharding.pytree import plan
from ftp.sharding.spec import P, PartitionSpec, units
from ftp.tensors.device_put import device_get, device_put, local_slice, specs_of
from ftp.tensors.dtensor import from_dtensor, to_dtensor
from ftp.tensors.replicas import check_replicas
from ftp.testing.divergence import Divergence, first_divergence
from ftp.version import __version__

__all__ = [
    "AbstractMesh",
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
    "Saving",
    "Step",
    "__version__",
    "along_dim",
    "axis",
    "calibrate",
    "certify",
    "check_replicas",
    "checkpoints",
    "constrain",
    "destroy_process_group",
    "device_get",
    "device_put",
    "einsum",
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
    "testing",
    "to_dtensor",
    "units",
    "use_mesh",
    "visualize",
]
