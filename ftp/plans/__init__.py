"""Plans of models: importers of PyTorch's, transformers' and Megatron's plans, LoRA adapters, and
plans of well-known models.

>>> import ftp
>>> ftp.plans.gpt2()["**.attn.c_attn.weight"]
P(None, units('tp', 1, pack=3))
"""

from ftp.plans import legacy_styles as older
from ftp.plans.distribute_module import from_distribute_module
from ftp.plans.huggingface import from_hf
from ftp.plans.legacy_styles import (
    PairwiseParallel,
    PairwiseSequenceParallel,
    make_input_replicate_1d,
    make_input_reshard_replicate,
    make_input_shard_1d,
    make_input_shard_1d_last_dim,
    make_output_replicate_1d,
    make_output_reshard_tensor,
    make_output_shard_1d,
    make_output_tensor,
    make_sharded_output_tensor,
)
from ftp.plans.lora import lora
from ftp.plans.megatron import from_megatron
from ftp.plans.models import (
    attention,
    bert,
    gpt2,
    llama,
    mixtral,
    mlp,
    sequence_parallel,
    t5,
    vit,
    vocabulary,
)
from ftp.plans.names import NAMES, Names
from ftp.plans.parallelize_module import from_parallelize_plan, merge
from ftp.plans.sent_tokens import on_expert_axis, send_tokens

__all__ = [
    "NAMES",
    "Names",
    "PairwiseParallel",
    "PairwiseSequenceParallel",
    "attention",
    "bert",
    "from_distribute_module",
    "from_hf",
    "from_megatron",
    "from_parallelize_plan",
    "gpt2",
    "llama",
    "lora",
    "make_input_replicate_1d",
    "make_input_reshard_replicate",
    "make_input_shard_1d",
    "make_input_shard_1d_last_dim",
    "make_output_replicate_1d",
    "make_output_reshard_tensor",
    "make_output_shard_1d",
    "make_output_tensor",
    "make_sharded_output_tensor",
    "merge",
    "mixtral",
    "mlp",
    "older",
    "on_expert_axis",
    "send_tokens",
    "sequence_parallel",
    "t5",
    "vit",
    "vocabulary",
]
