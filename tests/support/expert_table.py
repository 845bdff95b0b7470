"""Small models of transformers whose tokens travel to their experts: the table of docs/experts.md.

``python tests/support/expert_table.py`` writes it from runs.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import ftp
from ftp import P

PAGE = Path(__file__).resolve().parents[2] / "docs" / "experts.md"
HEAD = (
    "| model | mesh | rows to experts and back | at most | counts | all collectives |\n"
    "|---|---|---|---|---|---|\n"
)
MESHES = {"ep": "ep 2", "dp × tp": "dp = ep 2 × tp 2"}
SMALL = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "intermediate_size": 24,
    "num_experts_per_tok": 2,
}  # fmt: skip
MODELS = {
    "Mixtral": {"num_local_experts": 4, "output_router_logits": True},
    "Qwen3Moe": {
        "num_experts": 4, "moe_intermediate_size": 24, "head_dim": 4, "decoder_sparse_step": 1,
        "output_router_logits": True,
    },
    "DeepseekV3": {
        "n_routed_experts": 4, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
        "v_head_dim": 4, "qk_nope_head_dim": 4, "n_shared_experts": 1, "num_key_value_heads": 4,
    },
    "GptOss": {"num_local_experts": 4, "head_dim": 4, "sliding_window": 8},
    "Olmoe": {"num_experts": 4, "output_router_logits": True},
    "GraniteMoe": {"num_local_experts": 4, "output_router_logits": True},
}  # fmt: skip


def expert_program(name: str, implementation: str, plan: str) -> tuple[float, Any, Any]:
    """The largest difference from one device's loss and gradients, the program, and the specs of
    the experts' parameters with their shapes.
    """
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **MODELS[name]})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.double()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.3) if p.ndim > 1 else None
    x = torch.randint(32, (4, 6))

    def full(out: Any) -> torch.Tensor:
        loss = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())
        aux = getattr(out, "aux_loss", None)
        return loss if aux is None else loss + 0.01 * aux

    model.set_experts_implementation("eager")
    value = full(model(input_ids=x, use_cache=False))
    value.backward()
    model.set_experts_implementation(implementation)
    if plan == "ep":
        mesh = ftp.simulated_mesh(2, "ep")
        specs, constraints = ftp.from_hf(model, axis="ep", expert_axis="ep")
    else:
        mesh = ftp.simulated_mesh((2, 2), ("dp", "tp"))
        specs, constraints = ftp.from_hf(model, expert_axis="dp")
    fn, params = ftp.functionalize(model, constraints=constraints)
    batch = P() if plan == "ep" else P("dp")
    step = ftp.shard(
        lambda p, x: full(fn(p, input_ids=x, use_cache=False)), mesh, specs, batch_specs=batch
    )
    loss, grads = step(params, x)
    off = [abs(float(loss) - float(value.detach()))]
    for path, p in model.named_parameters():
        expected = torch.zeros_like(p) if p.grad is None else p.grad
        off.append(float((grads[path] - expected).abs().max()))
    ours = {path: (specs[path], p.shape) for path, p in params.items() if ".experts." in path}
    return max(off), step.lower(params, x), ours


def row(name: str, plan: str) -> str:
    """A row of the table: bytes that a rank sends in a step."""
    found = expert_program(name, "grouped_mm", plan)[1].collectives
    rows = [c for c in found if c.worst_nbytes is not None]
    counts = [c for c in found if c.op == "all_gather" and c.dtype is torch.int64]
    bytes_of = [
        sum(c.wire_nbytes for c in rows),
        sum(c.worst_nbytes for c in rows),
        sum(c.wire_nbytes for c in counts),
        sum(c.wire_nbytes for c in found),
    ]
    said = {"Qwen3Moe": "Qwen3-MoE", "DeepseekV3": "DeepSeek-V3", "GptOss": "gpt-oss"}
    said |= {"Olmoe": "OLMoE", "GraniteMoe": "GraniteMoE"}
    columns = [said.get(name, name), MESHES[plan], *(f"{n:,}" for n in bytes_of)]
    return f"| {' | '.join(columns)} |"


def table() -> str:
    return HEAD + "".join(f"{row(name, plan)}\n" for name in MODELS for plan in MESHES)


def main() -> None:
    page = PAGE.read_text()
    before, after = page.split(HEAD)
    after = after[after.index("\n\n") + 1 :]
    PAGE.write_text(before + table() + after)


if __name__ == "__main__":
    main()
