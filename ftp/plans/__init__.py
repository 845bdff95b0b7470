"""Plans that people already have, read as specs and constraints: PyTorch's styles, transformers', Megatron's, adapters; and our own."""

from ftp.plans.hf import from_hf
from ftp.plans.lora import lora
from ftp.plans.megatron import from_megatron
from ftp.plans.models import NAMES, Names, attention, bert, gpt2, llama, mixtral, mlp, sequence_parallel, t5, vit, vocabulary
from ftp.plans.parallelize import from_parallelize_plan, merge

__all__ = [
    "NAMES",
    "Names",
    "attention",
    "bert",
    "from_hf",
    "from_megatron",
    "from_parallelize_plan",
    "gpt2",
    "llama",
    "lora",
    "merge",
    "mixtral",
    "mlp",
    "sequence_parallel",
    "t5",
    "vit",
    "vocabulary",
]
