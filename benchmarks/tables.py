"""The largest table that elimination forms for every model of the tests, under every way they are
cut.

python benchmarks/tables.py [--json]
"""

import argparse
import sys
from pathlib import Path

sys.path[:0] = [
    str(Path(__file__).resolve().parents[1]),
    str(Path(__file__).resolve().parents[1] / "tests/support"),
]

import models  # noqa: E402
import record  # noqa: E402

import ftp  # noqa: E402
from ftp import P  # noqa: E402

CONFIGS = {
    "Llama": models.LlamaConfig(dim=32, heads=8, layers=3),
    "Llama GQA": models.LlamaConfig(dim=32, heads=8, kv_heads=4, layers=3),
    "GPT-2": models.GPT2Config(dim=32, heads=8, layers=3),
    "GPT-2 tied, fused": models.GPT2Config(dim=32, heads=8, layers=3, qkv="fused", tied=True),
    "CNN": models.CNNConfig(),
    "MLP": models.MLPConfig(),
}
CASES = {
    "tp": ({"tp": "tp"}, (2,), ("tp",), P()),
    "dp": ({}, (2,), ("dp",), P("dp")),
    "ZeRO-3": ({"zero": "dp"}, (2,), ("dp",), P("dp")),
    "cp": ({}, (2,), ("cp",), P(None, "cp")),
    "cp, weights too": ({"zero": "cp"}, (2,), ("cp",), P(None, "cp")),
    "ZeRO-3 x tp": ({"zero": "dp", "tp": "tp"}, (2, 2), ("dp", "tp"), P("dp")),
    "sp": ({"tp": "tp", "sp": True}, (2,), ("tp",), P()),
    "ZeRO-3 x sp": ({"zero": "dp", "tp": "tp", "sp": True}, (2, 2), ("dp", "tp"), P("dp")),
}


def measure(name: str, case: str) -> dict | None:
    cfg = CONFIGS[name]
    cut, shape, axes, batch_specs = CASES[case]
    is_decoder = isinstance(cfg, models.LlamaConfig | models.GPT2Config)
    if not is_decoder and ("cp" in case or "sp" in case):
        return None
    cut = dict(cut)
    constraints = (
        models.sequence_parallel(dp="dp" if "dp" in axes else None)
        if cut.pop("sp", False)
        else None
    )
    fn, params = ftp.functionalize(models.build(cfg, device="meta"), constraints=constraints)
    batch = models.lm_batch(cfg) if is_decoder else models.class_batch(cfg)
    specs = ftp.plan(params, models.specs(models.cuts(cfg), **cut)) if cut else P()
    plan = (
        ftp.shard(
            models.loss(cfg, fn), ftp.AbstractMesh(shape, axes), specs, batch_specs=batch_specs
        )
        .lower(params, batch)
        .plan
    )
    return {
        "model": name,
        "cut": case,
        "largest table": {axis: s.largest_table for axis, s in plan.solutions.items()},
        "optimal": all(s.optimal for s in plan.solutions.values()),
        "keeps the rules": all(plan.kept_rules.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="write results/tables.json")
    arguments = parser.parse_args()
    rows = [row for name in CONFIGS for case in CASES if (row := measure(name, case))]
    for row in rows:
        proof = "optimal" if row["optimal"] else "not proven"
        print(
            f"{row['model']:18} {row['cut']:16} {row['largest table']!s:28}"
            f" {proof}{'' if row['keeps the rules'] else ', breaks a rule'}"
        )
    if arguments.json:
        record.save("tables", {"rows": rows})


if __name__ == "__main__":
    main()
