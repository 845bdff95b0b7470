"""Pictures of tensors and programs, the page in a real browser, and the command."""

import html.parser
import importlib.util
import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import models
import pytest
import torch
from plan_reshards import unbucketed
from torch import nn

import ftp
from ftp import P
from ftp.__main__ import main

PROGRAM = """
import torch

from ftp import P


def report(mesh):
    params = {
        "up": torch.empty(64, 256, device="meta"),
        "<script>alert(1)</script>": torch.empty(256, 64, device="meta"),
    }
    specs = {"up": P(None, "tp"), "<script>alert(1)</script>": P("tp")}

    def loss_fn(params, x):
        return (torch.relu(x @ params["up"]) @ params["<script>alert(1)</script>"]).square().mean()

    return loss_fn, params, specs, (torch.empty(64, 64, device="meta"),), P("dp")


def broken(mesh):
    return 3
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "reported.py").write_text(PROGRAM)
    return str(tmp_path / "reported.py")


def test_a_tensor_shows_who_holds_what():
    mesh = ftp.simulated_mesh((2, 2), ("dp", "tp"))
    placed = ftp.device_put(torch.ones(5, 4), mesh, P("dp", "tp"))
    text = str(ftp.visualize(placed))
    assert [line for line in text.splitlines() if ":" in line] == [
        "| 0:3, 0:2 | 0:3, 2:4 |",
        "| 3:5, 0:2 | 3:5, 2:4 |",
    ]
    assert "rank 0" in text and "rank 3" in text
    both = ftp.visualize(
        {"a": torch.ones(4), "b": torch.ones(2, 2)}, mesh, {"a": P(("dp", "tp")), "b": P()}
    )
    assert (
        "tensor['a'] (4,) as" in str(both)
        and "ranks 0,1,2,3" in str(both)
        and "rank 2" in str(both)
    )
    scalar = ftp.visualize(torch.tensor(1.0), mesh, P())
    assert "ranks 0,1,2,3" in str(scalar)
    with pytest.raises(ftp.errors.InputError, match="was not placed"):
        ftp.visualize(torch.ones(3))


def test_every_rank_of_a_large_mesh_is_accounted_for():
    mesh = ftp.AbstractMesh((16, 8), ("dp", "tp"))
    text = str(ftp.visualize(torch.empty(64, 64, device="meta"), mesh, P("dp", "tp")))
    assert "and 64 more shards" in text


def test_the_page_is_self_contained_and_escapes_names(file: str, tmp_path: Path, capsys):
    out = tmp_path / "out.html"
    assert main(["report", f"{file}:report", "--mesh", "dp=4,tp=2", "--html", str(out)]) == 0
    text = out.read_text()

    class Links(html.parser.HTMLParser):
        found: list[str] = []  # noqa: RUF012

        def handle_starttag(self, tag, attrs):
            self.found += [tag] if tag in ("script", "link", "img", "iframe") else []
            self.found += [value for name, value in attrs if name in ("src", "href") and value]

    Links().feed(text)
    assert Links.found == [] and "&lt;script&gt;alert(1)" in text
    shown = capsys.readouterr().out
    assert "memory:" in shown and "all_reduce" in shown and "cost on" in shown


def test_the_command_gives_json(file: str, capsys):
    assert (
        main(["report", f"{file}:report", "--mesh", "dp=4,tp=2", "--json", "--hardware", "h100"])
        == 0
    )
    facts = json.loads(capsys.readouterr().out)
    assert facts["ranks"] == 8 and facts["mesh"] == {"dp": 4, "tp": 2}
    assert facts["memory"]["totals"]["parameters"] == 2 * 64 * 256 * 4 // 2
    # A bucket of three gradients, or none: the copy takes as long as the latencies it saves.
    assert facts["collectives"]["count"] == 4 and facts["cost"]["hardware"] == "H100"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{file}:report", "--mesh", "dp:4"], "'dp:4' is no axis. Give distinct name=size pairs"),
        (["{file}:report", "--mesh", "dp=4,dp=2"], "'dp=2' is no axis"),
        (["{file}:missing", "--mesh", "dp=4"], "has no function 'missing'"),
        (
            ["{file}:broken", "--mesh", "dp=4"],
            "returned int. The function takes the mesh and returns a Lowered, or a tuple",
        ),
        (["nowhere.py:report", "--mesh", "dp=4"], "There is no file 'nowhere.py'"),
        (["report", "--mesh", "dp=4"], "is no FILE:FUNCTION"),
        (["--mesh", "dp=4"], "Give either FILE:FUNCTION or --hf CONFIG.json"),
        (["--hf", "nowhere.json", "--mesh", "cp=4"], "--hf"),
        (["{file}:report", "--mesh", "tp=4"], "'dp'"),
    ],
)
def test_what_is_wrong_with_a_command_is_said(
    arguments: list[str], message: str, file: str, capsys
):
    assert main(["report", *(a.replace("{file}", file) for a in arguments)]) == 1
    assert message in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_error():
    """As ``head`` in ``python -m ftp ops | head``: the pipe is closed while there is more to
    write.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "ftp", "ops", "aten.mm.default"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    with process.stderr as errors:
        assert errors.read() == b""
    assert process.wait(60) == 1


def test_a_config_of_transformers(tmp_path: Path, capsys):
    pytest.importorskip("transformers")
    config = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
    }
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    command = [
        "report",
        "--hf",
        str(path),
        "--mesh",
        "dp=2,fsdp=2,tp=2",
        "--batch",
        "8",
        "--seq",
        "16",
        "--json",
    ]
    assert main(command) == 0
    facts = json.loads(capsys.readouterr().out)
    count = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 64 + 2 * 32) + 32 + 2 * 64 * 32
    replicated = 5 * 32  # the norms, which tp leaves whole
    assert facts["memory"]["totals"]["parameters"] == 2 * (
        (count - replicated) // 4 + replicated // 2
    )


def browser():
    binary, driver = (shutil.which(name) for name in ("chromium", "chromedriver"))
    if binary is None or driver is None or importlib.util.find_spec("selenium") is None:
        pytest.skip("no chromium, chromedriver and selenium to open a page with")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    return webdriver.Chrome(
        options=options, service=webdriver.ChromeService(executable_path=driver)
    )


def decoder(layers: int) -> ftp.Lowered:
    cfg = models.LlamaConfig(layers=layers)
    fn, params = ftp.functionalize(models.build(cfg))
    mesh = ftp.AbstractMesh((2, 2), ("dp", "tp"))
    specs = ftp.plan(params, models.specs(models.cuts(cfg), tp="tp"))
    return ftp.shard(models.lm_loss(fn), mesh, specs, batch_specs=P("dp")).lower(
        params, models.lm_batch(cfg)
    )


def test_collectives_by_layer():
    lowered = unbucketed(decoder(4))
    found = lowered.by_layer
    assert list(found) == [*(f"layers.{i}" for i in range(4)), ""]
    assert sum(map(len, found.values())) == len(lowered.collectives)
    for layer in range(1, 3):  # Megatron's four, and one for each of nine parameters
        counts = Counter(c.axes for c in found[f"layers.{layer}"])
        assert counts == {("tp",): 4, ("dp",): 9}, layer
    text = ftp.visualize(lowered).html
    assert "layers.3" in text and "all_reduce tp" in text


def test_what_the_head_moves_is_of_no_layer():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.w1, self.w2 = nn.Linear(6, 10), nn.Linear(10, 6)

        def forward(self, x):
            return x + self.w2(torch.relu(self.w1(x)))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(6, 8)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    fn, params = ftp.functionalize(Model())
    mesh, specs = (
        ftp.simulated_mesh((2,), ("tp",)),
        {"layers.*.w1.*": P("tp"), "layers.*.w2.weight": P(None, "tp"), "head.*": P("tp")},
    )
    specs = ftp.plan(params, specs)
    forward = ftp.lower(fn, mesh, (specs, P()), params, torch.ones(4, 6), out_specs=P())
    one = [("all_reduce", (4, 6))]
    found = {
        name: [(c.op, c.global_shape) for c in records]
        for name, records in forward.by_layer.items()
    }
    assert found == {
        "layers.0": one,
        "layers.1": one,
        "layers.2": one,
        "": [("all_gather", (4, 8))],
    }
    step = ftp.shard(lambda p, x: fn(p, x).square().mean(), mesh, specs).lower(
        params, torch.ones(4, 6)
    )
    of_head = [c for c in step.collectives if "self.head(x)" in c.source]
    assert of_head and all(c in step.by_layer[""] for c in of_head)


def test_layers_that_are_alike_are_one_branch_of_the_outline():
    mesh = ftp.AbstractMesh((4,), ("tp",))
    shapes = {
        f"blocks.{i}.{name}": torch.empty(8, 4, device="meta")
        for i in range(12)
        for name in ("up", "down")
    } | {"out": torch.empty(4)}
    specs = {name: P("tp") if name.endswith("up") else P() for name in shapes} | {
        "blocks.7.up": P(None, "tp")
    }
    text = ftp.visualize(shapes, mesh, specs).html
    assert (
        "<code>0 to 6, 8 to 11</code> <small>2 tensors, 160 B a rank (62% of 256 B) each, 11 equal"
        in text
    )
    assert "<code>7</code>" in text and "f32[8@tp, 4]" in text and "f32[8, 4@tp]" in text
    assert "<code>tensor</code> <small>25 tensors, 1.89 KiB a rank" in text


@pytest.mark.dist
@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_a_browser_shows_the_page(file: str, tmp_path: Path, capsys):
    seen = browser()
    out = tmp_path / "out.html"
    assert main(["report", f"{file}:report", "--mesh", "dp=4,tp=2", "--html", str(out)]) == 0
    capsys.readouterr()
    try:
        seen.get(out.as_uri())
        assert seen.title == "ftp report"
        assert [h.get_attribute("id") for h in seen.find_elements("css selector", "h2")] == [
            "findings", "parameters", "collectives", "memory", "cost", "program",
        ][1 if not seen.find_elements("id", "findings") else 0 :]  # fmt: skip
        assert seen.find_element("id", "timeline").size["width"] > 300
        first = seen.find_element("css selector", "#parameters ~ details[open] table")
        assert (
            first.is_displayed()
            and "P(None, 'tp')" in first.text
            and "<script>alert(1)</script>" in first.text
        )
        holders = first.find_element("css selector", "details")
        holders.find_element("css selector", "summary").click()
        assert "rank" in holders.find_element("css selector", "table.holders").text
        assert seen.execute_script("return performance.getEntriesByType('resource').length") == 0
        ftp.visualize(decoder(2)).save(out)
        seen.get(out.as_uri())
        layers = seen.find_element("css selector", "#layers + details")
        layers.find_element("css selector", "summary").click()
        rows = [row.text for row in layers.find_elements("css selector", "tr")]
        assert rows[0].startswith("layer") and "all_reduce tp" in rows[0]
        assert [row.split()[0] for row in rows[1:]] == ["layers.0", "layers.1", "no"]
        assert [entry for entry in seen.get_log("browser") if entry["level"] == "SEVERE"] == []
    finally:
        seen.quit()
