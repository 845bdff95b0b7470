"""JAX: the same train step under jit with NamedShardings of Megatron's plan; two devices of one
process, or two processes over gloo.

It needs jax and numpy alone, so that it may run in an environment of its own (``speed.py
--jax-python``). Weights, batches and sizes come in a file; it answers as `peers.worker` does.
"""

# pyright: reportMissingImports=false

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

RATE, BETA1, BETA2, EPS, DECAY = 1e-3, 0.9, 0.999, 1e-8, 0.01  # torch's AdamW
SIZES = {"f32": 4, "s32": 4, "u32": 4, "pred": 1, "bf16": 2, "f64": 8, "s64": 8}


def serve(spec: dict[str, Any]) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    devices = 1 if spec["ranks"] > 1 else 2
    os.environ["XLA_FLAGS"] = (
        f"--xla_force_host_platform_device_count={devices} --xla_cpu_multi_thread_eigen=false"
    )
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import numpy as np

    if spec["ranks"] > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            f"127.0.0.1:{spec['port']}", num_processes=spec["ranks"], process_id=spec["rank"]
        )
    step = None
    for line in sys.stdin:
        asked = json.loads(line)
        if "first" in asked:
            data = np.load(spec["data"])
            at = time.perf_counter()
            step = _Train(data, spec["sizes"])
            losses = [step(0)]
            answer = {"first": time.perf_counter() - at}
            losses += [step(i) for i in range(1, asked["first"])]
            answer |= {"losses": losses, **step.count()}
        else:
            assert step is not None
            cpu, seconds = time.process_time(), []
            for i in range(asked["run"]):
                at = time.perf_counter()
                step(i)
                seconds.append(time.perf_counter() - at)
            cpu_each = (time.process_time() - cpu) / max(1, asked["run"]) / devices
            answer = {"seconds": seconds, "cpu": cpu_each, "peak_mib": _peak_mib() / devices}
        answers.write(json.dumps(answer) + "\n")


class _Train:
    """The compiled step, and the weights and moments that it keeps."""

    def __init__(self, data: Any, sizes: dict[str, int] | None):
        import jax
        import jax.numpy as jnp
        import numpy as np
        from jax.sharding import Mesh, NamedSharding
        from jax.sharding import PartitionSpec as P

        mesh = Mesh(np.array(jax.devices()), ("tp",))
        specs = {name[2:]: _spec(name[2:], P) for name in data.files if name.startswith("p.")}

        def placed(x: Any, spec: Any) -> Any:
            return jax.make_array_from_callback(
                x.shape, NamedSharding(mesh, spec), lambda part: x[part]
            )

        self.params = {name: placed(data[f"p.{name}"], spec) for name, spec in specs.items()}
        self.moments = [
            {name: placed(np.zeros_like(data[f"p.{name}"]), spec) for name, spec in specs.items()}
            for _ in range(2)
        ]
        self.count_ = placed(np.zeros((), np.float32), P())
        batches = sum(name.startswith("x") for name in data.files)
        self.batches = [
            tuple(placed(_narrow(data[f"{kind}{i}"]), P()) for kind in "xy") for i in range(batches)
        ]

        def loss_fn(params: Any, x: Any, y: Any) -> Any:
            return _mlp(params, x, y) if sizes is None else _decoder(params, x, y, sizes)

        def train(params: Any, m: Any, v: Any, count: Any, x: Any, y: Any) -> Any:
            loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
            count = count + 1
            first, second = 1 - BETA1**count, jnp.sqrt(1 - BETA2**count)
            m = {k: BETA1 * m[k] + (1 - BETA1) * g for k, g in grads.items()}
            v = {k: BETA2 * v[k] + (1 - BETA2) * g * g for k, g in grads.items()}
            params = {
                k: w * (1 - RATE * DECAY) - RATE / first * m[k] / (jnp.sqrt(v[k]) / second + EPS)
                for k, w in params.items()
            }
            return params, m, v, count, loss

        layout = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
        whole = NamedSharding(mesh, P())
        jitted = jax.jit(
            train, donate_argnums=(0, 1, 2, 3), out_shardings=(layout, layout, layout, whole, whole)
        )
        self.run = jitted.lower(self.params, *self.moments, self.count_, *self.batches[0]).compile()

    def __call__(self, i: int) -> float:
        self.params, *self.moments, self.count_, loss = self.run(
            self.params, *self.moments, self.count_, *self.batches[i % len(self.batches)]
        )
        return float(loss)

    def count(self) -> dict[str, Any]:
        """Collectives of the compiled step, and the bytes that they give on a device."""
        kinds: dict[str, int] = {}
        nbytes = 0
        for shapes, kind in re.findall(
            r"= (.+?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"
            r"(?:-start)?\(",
            self.run.as_text(),
        ):
            kinds[kind] = kinds.get(kind, 0) + 1
            for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
                n = SIZES.get(dtype, 4)
                for size in filter(None, dims.split(",")):
                    n *= int(size)
                nbytes += n
        return {"collectives": sum(kinds.values()), "kinds": kinds, "bytes": nbytes}


def _spec(name: str, P: Any) -> Any:
    if name.endswith(("wo.weight", "w2.weight", "net2.weight")):
        return P(None, "tp")
    return P("tp") if not ("norm" in name or name == "net2.bias") else P()


def _narrow(x: Any) -> Any:
    return x.astype("int32") if x.dtype.kind == "i" else x


def _mlp(p: Any, x: Any, y: Any) -> Any:
    import jax.numpy as jnp

    hidden = jnp.maximum(x @ p["net1.weight"].T + p["net1.bias"], 0)
    return jnp.mean((hidden @ p["net2.weight"].T + p["net2.bias"] - y) ** 2)


def _decoder(p: Any, tokens: Any, targets: Any, sizes: dict[str, int]) -> Any:
    import jax
    import jax.numpy as jnp

    heads, width = sizes["heads"], sizes["dim"] // sizes["heads"]
    batch, seq = tokens.shape

    def norm(x: Any, w: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * w

    angles = jnp.arange(seq, dtype=jnp.float32)[:, None] * 10000.0 ** -(
        jnp.arange(0, width, 2, dtype=jnp.float32) / width
    )
    cos, sin = jnp.cos(angles), jnp.sin(angles)

    def rotary(x: Any) -> Any:
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), -1)

    def by_heads(x: Any) -> Any:
        return x.reshape(batch, seq, heads, width).transpose(0, 2, 1, 3)

    mask = jnp.tril(jnp.ones((seq, seq), bool))
    x = p["emb.weight"][tokens]
    for i in range(sizes["layers"]):
        at = f"layers.{i}."
        h = norm(x, p[at + "norm1.weight"])
        q, k, v = (by_heads(h @ p[f"{at}attn.{name}.weight"].T) for name in ("wq", "wk", "wv"))
        scores = rotary(q) @ rotary(k).transpose(0, 1, 3, 2) / width**0.5
        mixed = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), -1) @ v
        x = x + mixed.transpose(0, 2, 1, 3).reshape(batch, seq, -1) @ p[at + "attn.wo.weight"].T
        h = norm(x, p[at + "norm2.weight"])
        x = (
            x
            + (jax.nn.silu(h @ p[at + "mlp.w1.weight"].T) * (h @ p[at + "mlp.w3.weight"].T))
            @ p[at + "mlp.w2.weight"].T
        )
    logits = norm(x, p["norm.weight"]) @ p["head.weight"].T
    picked = jax.nn.one_hot(
        targets, logits.shape[-1], dtype=logits.dtype
    )  # a gather would bring the vocabulary together
    return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.sum(picked * logits, -1))


def _peak_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
