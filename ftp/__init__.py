"""ftp: functional tensor parallel. Pure single-device functions and PartitionSpecs to explicit SPMD programs for PyTorch."""

from ftp import axis, errors, optim, plans, random, testing
from ftp.api import lower, reshard, shard, spmd
from ftp.attest import certify
from ftp.calibration import calibrate
from ftp.certificate import Certificate
from ftp.checkpoint import Saving, save
from ftp.collectives import Collective
from ftp.constrain import constrain
from ftp.cost import Hardware, Link
from ftp.divergence import Divergence, first_divergence
from ftp.dtensor import from_dtensor, to_dtensor
from ftp.errors import FtpError
from ftp.exported import shard_exported
from ftp.found import Found
from ftp.functional import functionalize
from ftp.init import init_params
from ftp.local import local
from ftp.lowered import Lowered
from ftp.manifest import checkpoints
from ftp.mesh import AbstractMesh, destroy_process_group, init_process_group, make_mesh, simulated_mesh, use_mesh
from ftp.pictures import visualize
from ftp.pins import Constraint
from ftp.placement import device_get, device_put, local_slice, specs_of
from ftp.plans import from_hf, from_megatron, from_parallelize_plan
from ftp.recompute import remat
from ftp.registry import along_dim, einsum, pointwise, reduction, rule
from ftp.replicas import check_replicas
from ftp.restore import load
from ftp.safetensors_folder import load_safetensors, save_safetensors
from ftp.scan import scan
from ftp.search import search
from ftp.spec import P, PartitionSpec, units
from ftp.step import Step
from ftp.tree import plan
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
