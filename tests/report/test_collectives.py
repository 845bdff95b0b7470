"""The collectives of a program as records, as a table and as claims; their reasons; the printed
program folded.
"""

import io
import json

import pytest
import torch
from models import LlamaConfig, build, cuts, lm_batch, lm_loss, sequence_parallel, specs

import ftp
from ftp import P
from ftp.report.text import folded


def lowered(
    layers: int = 3, *, pins: bool = False, dp: str | None = None, **cut: str
) -> ftp.Lowered:
    cfg = LlamaConfig(layers=layers)
    fn, params = ftp.functionalize(build(cfg), constraints=sequence_parallel() if pins else None)
    mesh = ftp.AbstractMesh((2, 2), ("dp", "tp"))
    of_params = ftp.plan(params, specs(cuts(cfg), **cut))  # type: ignore[arg-type]
    step = ftp.shard(lm_loss(fn), mesh, of_params, batch_specs=P(dp), bucket=False)
    return step.lower(params, lm_batch(cfg))


TP = lowered(tp="tp")


def test_the_records_are_a_tuple_and_the_rows_fold_them():
    found = TP.collectives
    assert len(found) == 2 + 4 * 3 + 3 and found[0].op == "all_reduce" and found[-1] in list(found)
    assert isinstance(found[:2], tuple) and tuple(found) == found
    assert sum(row.count for row in found.rows) == len(found)
    assert (
        sum(row.count * row.wire_nbytes for row in found.rows)
        == found.wire_nbytes
        == sum(c.wire_nbytes for c in found)
    )
    assert {row.count for row in found.rows} == {1, 3}


def test_the_rows_do_not_grow_with_depth():
    assert len(lowered(5, tp="tp").collectives.rows) == len(TP.collectives.rows)


def test_every_collective_has_a_reason_that_names_what_is_cut():
    assert all("summed because of params['" in c.cause for c in TP.collectives)
    assert "params['emb.weight'] P('tp', None)" in TP.collectives[0].cause
    zero = lowered(zero="dp", dp="dp").collectives
    gathers = [c for c in zero if c.op == "all_gather"]
    assert gathers and all("cut by params['" in c.cause for c in gathers)
    scattered = [c for c in zero if c.op == "reduce_scatter"]
    assert all(
        "batch[0] P('dp')" in c.cause and "for the result[1]['" in c.cause for c in scattered
    )
    constrained = lowered(pins=True, tp="tp").collectives
    assert any(
        "for the constraint P(None, 'tp', None)" in c.cause
        for c in constrained
        if c.op == "reduce_scatter"
    )
    assert any(
        "cut by the constraint P(None, 'tp', None)" in c.cause
        for c in constrained
        if c.op == "all_gather"
    )


def test_the_table_shows_itself_as_text_html_rich_and_json():
    table = TP.collectives
    lines = str(table).splitlines()
    assert len(lines) == 1 + len(table.rows) + 1 and lines[0].split() == [
        "op",
        "axes",
        "shape",
        "bytes",
        "sent",
        "count",
        "why",
    ]
    html = table._repr_html_()
    assert html.count("<tr>") == 1 + len(table.rows) and "&#x27;" in html and "params['" not in html
    facts = json.loads(json.dumps(table.to_dict()))
    assert facts == table.to_dict()
    assert facts["count"] == len(table) and set(facts["rows"][0]) == {
        "op", "axes", "shape", "global_shape", "dtype", "nbytes", "wire_nbytes", "count", "why",
        "worst_nbytes",
    }  # fmt: skip
    console = pytest.importorskip("rich.console")
    shown = console.Console(width=250, record=True, file=io.StringIO())
    shown.print(table)
    assert "params['emb.weight']" in shown.export_text()


def test_no_collectives_print_too():
    empty = ftp.lower(
        lambda x: x + 1, ftp.AbstractMesh((2,), ("dp",)), P(), torch.ones(3)
    ).collectives
    assert (
        len(empty) == 0 and "0 collectives" in str(empty) and "0 collectives" in empty._repr_html_()
    )


def test_claims_that_hold_pass():
    TP.assert_collectives(
        all_reduce=17, all_gather=0, reduce_scatter=0, all_to_all=0, max_bytes=10**6, none_over="dp"
    )
    TP.assert_collectives()


def test_every_claim_that_does_not_hold_is_named_with_its_lines():
    with pytest.raises(AssertionError) as e:
        TP.assert_collectives(all_reduce=2, all_gather=1, max_bytes=10, none_over=["dp", "tp"])
    text = str(e.value)
    assert (
        "17 all_reduce where 2 are claimed:" in text
        and "0 all_gather where 1 is claimed:\n  (none)" in text
    )
    assert (
        f"{TP.collectives.wire_nbytes:,} bytes sent per rank where at most 10 are claimed:" in text
    )
    assert "17 over 'tp' where none is claimed:" in text and "over 'dp'" not in text
    assert ">> %embedding_all_reduce_tp" in text and "models.py" in text
    assert isinstance(e.value, ftp.FtpError)


def test_the_printed_program_folds_layers_and_can_be_had_whole():
    short, long = (lowered(n, tp="tp") for n in (3, 5))
    assert "x 5:" in str(long) and "x 3:" in str(short)
    assert len(str(long).splitlines()) == len(str(short).splitlines())
    whole = long.text(fold=False)
    assert "x 5:" not in whole and all(f"%{node.name}" in whole for node in long.plan.graph.nodes)


def test_folding_loses_nothing():
    lines = [
        "a",
        *[f"%{op}_{i} = {op}(%x_{i})" for i in range(5) for op in ("mm", "add", "relu")],
        "b",
        "b",
    ]
    assert folded(lines) == ["a", "  block x 5:", *lines[1:4], "  end of block x 5", "b", "b"]
    assert folded(lines[:6]) == lines[:6]
    assert folded([]) == []
    different = [f"%x_{i}: f32[{i}] = f" for i in range(9)]
    assert folded(different) == different


def test_a_bucket_lists_its_members():
    def sums(x, y):
        return x.sum(), y.square().sum(0), (x @ y.T).exp().sum()

    x, y = torch.ones(4, 6), torch.ones(5, 6)
    step = ftp.spmd(sums, ftp.AbstractMesh((2,), ("dp",)), (P("dp"), P()), P(), bucket=True)
    lowered = step.lower(x, y)
    (bucket,) = lowered.collectives
    lowered.assert_collectives(all_reduce=1)
    assert (bucket.op, bucket.nbytes) == ("all_reduce", 8)
    assert [(m.name, m.nbytes) for m in bucket.members] == [("sum_1", 4), ("sum_3", 4)]
    assert all("summed because of x P('dp')" in m.cause for m in bucket.members)
    assert str(lowered).count("in a bucket with 1 more") == 2
