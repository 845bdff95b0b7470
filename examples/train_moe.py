"""Train a small dropless mixture of experts on the source of Python's standard library; experts on
the data axis, each cut over the tensor axis.

On a simulated 2 x 2 mesh in this process:

    python examples/train_moe.py

On four processes, with the same losses:

    torchrun --nproc-per-node=4 examples/train_moe.py

The model is transformers' OLMoE as it stands. Tokens travel to the ranks that own their experts,
and no weight of an expert is communicated. Prints the loss and how many tokens each expert got;
writes both to runs/train_moe/load.json, and draws them to load.png if matplotlib is installed.
"""

import argparse
import json
import os
import sysconfig
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import OlmoeConfig, OlmoeForCausalLM

import ftp
from ftp import P

EXPERTS, CHOSEN = 8, 2


def make_model(dim):
    config = OlmoeConfig(
        vocab_size=256, hidden_size=dim, intermediate_size=2 * dim, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=512,
        num_experts=EXPERTS, num_experts_per_tok=CHOSEN, output_router_logits=True,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return OlmoeForCausalLM(config)


def read_bytes(limit):
    """The first source files of the standard library, as ids."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.tensor(list(text[:limit]))


def draw_batch(data, step, batch, context):
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(data) - context, (batch,), generator=generator)
    return torch.stack([data[s : s + context] for s in starts.tolist()])


def main():
    parser = argparse.ArgumentParser(description="Train a small mixture of experts.")
    for name, default in (("steps", 30), ("dim", 32), ("batch", 8), ("context", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", default="runs/train_moe")
    options = parser.parse_args()

    mesh = ftp.make_mesh((2, 2), ("dp", "tp"), device_type="cpu")
    model = make_model(options.dim)
    specs, constraints = ftp.from_hf(model, expert_axis="dp")
    fn, params = ftp.functionalize(model, constraints=constraints)
    opt = ftp.optim.from_torch(torch.optim.AdamW, lr=3e-3)

    def train_step(params, state, ids):
        def loss_fn(params):
            out = fn(params, input_ids=ids, use_cache=False)
            loss = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            chosen = torch.stack(out.router_logits).topk(CHOSEN, -1).indices
            load = F.one_hot(chosen, EXPERTS).sum((1, 2))  # (layer, expert)
            return loss + 0.01 * out.aux_loss, (loss.detach(), load)

        grads, (_, (loss, load)) = torch.func.grad_and_value(loss_fn, has_aux=True)(params)
        params, state = opt.update(grads, state, params)
        return params, state, loss, load

    params = ftp.device_put(params, mesh, specs)
    state = opt.init(params)
    state_specs = opt.specs(params, specs)
    train = ftp.spmd(
        train_step,
        mesh,
        (specs, state_specs, P("dp")),
        (specs, state_specs, P(), P()),
        donate=(0, 1),
    )
    data, losses, loads = read_bytes(1 << 18), [], []
    is_first = os.environ.get("RANK", "0") == "0"
    for step in range(options.steps):
        ids = draw_batch(data, step, options.batch, options.context)
        ids = ftp.device_put(ids, mesh, P("dp"))
        params, state, loss, load = train(params, state, ids)
        losses.append(float(loss))
        loads.append(load.tolist())
        if is_first:
            shown = "  ".join(" ".join(f"{n:4d}" for n in layer) for layer in loads[-1])
            print(f"{step:4d}  loss {losses[-1]:.4f}  tokens per expert {shown}", flush=True)
    if is_first:
        folder = Path(options.out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "load.json").write_text(json.dumps({"loss": losses, "load": loads}))
        draw_load(loads, folder / "load.png")


def draw_load(loads, path):
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(loads[0]), figsize=(9, 3), squeeze=False)
    for layer, ax in enumerate(axes[0]):
        counts = torch.tensor([of_step[layer] for of_step in loads])
        ax.stackplot(range(len(loads)), counts.T.tolist())
        ax.set(title=f"layer {layer}", xlabel="step", ylabel="tokens per expert")
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
