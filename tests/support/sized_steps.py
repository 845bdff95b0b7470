"""Steps of dynamic sizes: models that mix the dynamic dim, in several layouts."""

import torch

import ftp
from ftp import P

MOST = 512
DIMS = {1: torch.export.Dim("S", min=1, max=MOST)}
TP = {"up": P(None, "tp"), "down": P("tp")}


def loss_fn(params, x):
    """A mean and a cumulative sum over the dynamic dim, and a view that splits the width."""
    h = torch.relu(x @ params["up"]).unflatten(-1, (3, 2)).flatten(2) @ params["down"]
    return (h - h.mean(1, keepdim=True) + 0.1 * x.cumsum(1)).square().mean()


def weights():
    generator = torch.Generator().manual_seed(0)
    shapes = {"down": (6, 4), "up": (4, 6)}
    return {k: torch.randn(s, generator=generator, dtype=torch.float64) for k, s in shapes.items()}


def tokens(size):
    generator = torch.Generator().manual_seed(size)
    return torch.randn(2, size, 4, generator=generator, dtype=torch.float64)


def on(**axes):
    return ftp.simulated_mesh(tuple(axes.values()), tuple(axes))


LAYOUTS = {
    "uncut": (on(tp=3), TP, P()),
    "context": (on(cp=3), P(), P(None, "cp")),
    "one axis for both": (on(tp=3), TP, P(None, "tp")),
    "two axes on a dim": (on(dp=2, cp=3), P(), P(None, ("dp", "cp"))),
    "both": (on(cp=2, tp=3), TP, P(None, "cp")),
}


def step_of(name, **options):
    mesh, specs, spec = LAYOUTS[name]
    options = {"dynamic_shapes": DIMS, "certify": True, **options}
    return ftp.shard(loss_fn, mesh, specs, batch_specs=spec, **options)


def program_at(step, size):
    """The program that serves a size, unproven."""
    (family,) = step._dynamic.families.values()
    return family.find((size,)).program((size,))


def moved(w, x):
    """Sums that move the dynamic dim between ranks."""
    return (x.cumsum(0) - x.mean(0)) @ w


def moving(spec=P("cp"), **options):
    dims = None, {0: torch.export.Dim("S", min=1, max=MOST)}
    return ftp.spmd(moved, on(cp=3), (P(None, "cp"), spec), spec, dynamic_shapes=dims, **options)


def arguments(size):
    generator = torch.Generator().manual_seed(size)
    shapes = ((4, 3), (size, 4))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
