"""The summary below a printed program: collectives by kind, proof of the plan, warnings."""

from collections import Counter
from collections.abc import Sequence

from ftp.planning.plan import Plan
from ftp.report.collectives import Collectives
from ftp.report.lint import Finding
from ftp.report.names import dtype_name


def summary(plan: Plan, collectives: Collectives, findings: Sequence[Finding]) -> list[str]:
    lines = [f"collectives: {len(collectives)}, {collectives.wire_nbytes:,} bytes sent per rank"]
    counts = Counter((c.op, c.axes, c.shape, c.dtype) for c in collectives)
    for (op, axes, shape, dtype), count in counts.items():
        lines.append(
            f"  {count:4d} x {op} over {', '.join(axes)} of {dtype_name(dtype)}{list(shape)}"
        )
    lines += [_proof(plan, axis) for axis in plan.solutions]
    return lines + [str(finding) for finding in findings if finding.severity == "warning"]


def _proof(plan: Plan, axis: str) -> str:
    solution, proof = plan.solutions[axis], "optimal"
    if not solution.optimal:
        gap = (solution.cost - solution.bound) / solution.cost
        proof = f"at most {gap:.1%} above the optimum"
    alike = f" with {plan.alike} repeated layers alike" if plan.alike else ""
    broken = (
        ""
        if plan.kept_rules[axis]
        else "; no plan keeps all placement constraints: some activations or parameters that should"
        " stay are resharded"
    )
    return f"plan over {axis}: {proof}{alike}, largest table {solution.largest_table:,}{broken}"
