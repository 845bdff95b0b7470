"""What is saved comes back bit for bit, on any mesh and specs; whatever is wrong with it is an
error that names it.
"""

import hashlib
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ftp
from ftp import P
from ftp.checkpoint import background, source
from ftp.checkpoint.safetensors_io import BYTES, STORED
from ftp.sharding.pytree import flatten

MESH = ftp.simulated_mesh((2, 2), ("dp", "tp"))


def drawn(shape, dtype, seed=0):
    """Any bytes that the dtype can have, NaNs included."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(2, shape, generator=generator).to(torch.bool)
    return (
        torch.randint(256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
        .view(dtype)
        .squeeze(-1)
    )


def same(a, b):
    """Bit for bit."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))


def raw(x):
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def meta(tree):
    return optree.tree_map(
        lambda x: x.to("meta") if isinstance(x, torch.Tensor) else type(x)(), tree
    )


@st.composite
def trees(draw):
    """Containers in containers, tensors of any dtype and shape, and values of JSON."""
    count = iter(range(100))

    def leaf(kind):
        if kind is torch.Tensor:
            shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
            return drawn(shape, draw(st.sampled_from([*STORED, *BYTES])), next(count))
        return draw(kind)

    values = [st.integers(), st.floats(allow_nan=False), st.booleans(), st.text(max_size=3)]
    leaves = st.sampled_from([torch.Tensor, torch.Tensor, torch.Tensor, *values]).map(leaf)
    keys = st.text("abc", min_size=1, max_size=2)
    return draw(
        st.recursive(
            leaves,
            lambda t: (
                st.dictionaries(keys, t, max_size=3)
                | st.lists(t, max_size=3)
                | st.tuples(t, st.none())
            ),
            max_leaves=6,
        )
    )


@settings(max_examples=25, derandomize=True)
@given(trees())
def test_trees_come_back(tmp_path_factory, tree):
    folder = tmp_path_factory.mktemp("c")
    ftp.save(folder, tree, MESH)
    back = ftp.load(folder, meta(tree), MESH)
    old, new = flatten(tree), flatten(back)
    assert old[1] == new[1]
    for a, b in zip(old[0], new[0], strict=True):
        assert same(a, b) if isinstance(a, torch.Tensor) else (a == b and type(a) is type(b))
    shutil.rmtree(folder)


@pytest.mark.parametrize("dtype", sorted([*STORED, *BYTES], key=str), ids=str)
def test_every_dtype_is_stored_as_safetensors_names_it(tmp_path, dtype):
    from safetensors import safe_open

    x = {"w": drawn((3, 4), dtype), "scalar": drawn((), dtype), "empty": drawn((0, 2), dtype)}
    folder = ftp.save(tmp_path, x, MESH).result()
    back = ftp.load(tmp_path, meta(x), MESH)
    assert all(same(back[k], x[k]) for k in x)
    with safe_open(folder / "rank-00000.safetensors", framework="pt") as file:
        assert file.get_slice("w").get_dtype() == STORED.get(dtype, "U8")


def test_state_of_training_comes_back(tmp_path):
    opt = ftp.optim.from_torch(torch.optim.AdamW, lr=0.1)
    params = {
        "layers.0.w": torch.nn.Parameter(torch.randn(4, 3)),
        "layers.0.b": torch.nn.Parameter(torch.randn(3), requires_grad=False),
    }
    state = opt.init(params)
    tree = {
        "params": params,
        "opt": state,
        "key": ftp.random.key(7),
        "step": 12,
        "data": {"epoch": 1, "at": 5, "file": "a.bin"},
        "none": None,
    }
    specs = {"params": P("tp"), "opt": P("tp"), "key": P(), "step": P(), "data": P(), "none": None}
    ftp.save(tmp_path, tree, MESH, specs, step=12)
    like = {**tree, "step": 0, "data": {"epoch": 0, "at": 0, "file": ""}}
    back = ftp.load(tmp_path, like, MESH, specs)
    for a, b in zip(flatten(tree)[0], flatten(back)[0], strict=True):
        assert same(a, b) if isinstance(a, torch.Tensor) else a == b
    assert (
        isinstance(back["params"]["layers.0.w"], torch.nn.Parameter)
        and not back["params"]["layers.0.b"].requires_grad
    )
    assert ftp.specs_of(back["params"]) == {"layers.0.w": P("tp"), "layers.0.b": P("tp")}
    # A part of it, by the same paths, in another container.
    only = ftp.load(
        tmp_path, {"params": {"layers": {"0": {"w": torch.empty(4, 3, device="meta")}}}}, MESH
    )
    assert same(only["params"]["layers"]["0"]["w"], params["layers.0.w"])


def test_like_may_be_anything_with_shape_and_dtype(tmp_path):
    ftp.save(tmp_path, {"w": torch.ones(3)}, MESH)
    back = ftp.load(
        tmp_path, {"w": SimpleNamespace(shape=(3,), dtype=torch.float32)}, MESH, {"w": P("tp")}
    )
    assert torch.equal(back["w"], torch.ones(3)) and ftp.specs_of(back) == {"w": P("tp")}


def test_tensors_that_share_memory(tmp_path):
    flat = torch.arange(12.0)
    tree = {"a": flat, "b": flat, "c": flat[3:7], "d": flat.view(3, 4).t(), "e": flat[:1].expand(5)}
    ftp.save(tmp_path, tree, MESH)
    assert all(
        same(x, tree[k].contiguous()) for k, x in ftp.load(tmp_path, meta(tree), MESH).items()
    )


def test_the_page_runs(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).resolve().parents[2] / "docs/checkpoints.md").read_text()
    monkeypatch.chdir(tmp_path)
    found: dict = {}
    exec(re.findall(r"^```python\n(.*?)^```", page, flags=re.M | re.S)[0], found)
    assert capsys.readouterr().out == "00000000-step-300\n"
    assert (
        torch.equal(found["state"]["params"]["up"], found["params"]["up"])
        and found["state"]["data"]["position"] == 4096
    )


# Checkpoints of a folder.


def test_the_newest_is_loaded_and_old_ones_go(tmp_path):
    like = torch.empty((), device="meta")
    for value, step in ((1.0, 10), (2.0, 20), (3.0, 15), (4.0, None)):
        ftp.save(tmp_path, torch.tensor(value), MESH, step=step)
    assert [(c.number, c.step) for c in ftp.checkpoints(tmp_path)] == [
        (0, 10),
        (1, 20),
        (2, 15),
        (3, None),
    ]
    assert (
        float(ftp.load(tmp_path, like, MESH)) == 4
        and float(ftp.load(tmp_path, like, MESH, step=20)) == 2
    )
    first = ftp.checkpoints(tmp_path)[0].folder
    assert float(ftp.load(first, like, MESH)) == float(ftp.load(first, like, MESH, step=10)) == 1
    with pytest.raises(ftp.errors.CheckpointError, match="of step 10, not of step 20"):
        ftp.load(first, like, MESH, step=20)
    folder = ftp.save(tmp_path, torch.tensor(5.0), MESH, step=20, keep=2).result()
    assert [c.step for c in ftp.checkpoints(tmp_path)] == [None, 20] and float(
        ftp.load(tmp_path, like, MESH, step=20)
    ) == 5
    assert (
        sorted(os.listdir(tmp_path)) == [".lock-00000000", "00000003", "00000004-step-20"]
        and folder.name == "00000004-step-20"
    )
    with pytest.raises(
        ftp.errors.CheckpointError, match=r"no checkpoint of step 15; it has steps \[20\]"
    ):
        ftp.load(tmp_path, like, MESH, step=15)


def test_what_killed_runs_left_is_no_checkpoint(tmp_path):
    with pytest.raises(ftp.errors.CheckpointError, match="does not exist"):
        ftp.load(tmp_path / "none", 0, MESH)
    done = ftp.save(tmp_path, {"a": 1}, MESH).result()
    shutil.copytree(done, tmp_path / ".saving-00000001-abc")
    shutil.copytree(done, tmp_path / "00000002").joinpath("manifest.json").unlink()
    assert [c.number for c in ftp.checkpoints(tmp_path)] == [0]
    assert ftp.load(tmp_path, {"a": 0}, MESH) == {"a": 1}
    assert ftp.save(tmp_path, {"a": 2}, MESH).result().name == "00000001"
    assert not (tmp_path / ".saving-00000001-abc").exists()


def test_the_newest_whole_checkpoint_is_named_and_the_damaged_are_marked(tmp_path):
    tree = {"w": torch.arange(6), "b": torch.ones(3)}
    folders = [ftp.save(tmp_path, tree, MESH, step=i).result() for i in range(5)]
    assert [c.damage for c in ftp.checkpoints(tmp_path)] == [None] * 5
    # A value, a header, a file that is gone, and a manifest that is cut.
    for i, at in ((4, -1), (3, 20)):
        content = bytearray((folders[i] / "rank-00000.safetensors").read_bytes())
        content[at] ^= 1
        (folders[i] / "rank-00000.safetensors").write_bytes(content)
    (folders[2] / "rank-00000.safetensors").unlink()
    (folders[0] / "manifest.json").write_text("{")
    advice = (
        f"\n  The newest whole checkpoint in {tmp_path} is {{0}}. Load it by its own folder:"
        f" ftp.load('{tmp_path}/{{0}}', ...)."
    )
    for step in (None, 3, 2, 0):
        with pytest.raises(ftp.errors.DamagedError) as caught:
            ftp.load(tmp_path, meta(tree), MESH, step=step)
        assert str(caught.value).endswith(advice.format("00000001-step-1")), step
    damages = [c.damage for c in ftp.checkpoints(tmp_path)]
    assert damages[1] is None and damages[4] is None  # that of values is found by loading
    assert (
        "manifest.json is no manifest" in damages[0]
        and "No such file" in damages[2]
        and "header" in damages[3]
    )
    shutil.rmtree(folders[1])
    with pytest.raises(
        ftp.errors.DamagedError, match=f"No other checkpoint in {tmp_path} is whole."
    ):
        ftp.load(tmp_path, meta(tree), MESH)
    with pytest.raises(ftp.errors.CheckpointError) as caught:
        ftp.load(folders[4], {"x": torch.ones(1)}, MESH)
    assert type(caught.value) is ftp.errors.CheckpointError  # not damaged, it is just not there


SAID = "An earlier save, of which nobody has asked the result, failed: "


def full(*args):
    raise ftp.errors.CheckpointError("the disk is full")


@pytest.mark.parametrize("call", ["save", "load", "destroy_process_group"])
def test_a_save_that_failed_unasked_is_told_once_by_the_next_call(tmp_path, monkeypatch, call):
    tree = {"w": torch.ones(2)}
    ftp.save(tmp_path, tree, MESH)
    calls = {
        "save": lambda: ftp.save(tmp_path, tree, MESH).result(),
        "load": lambda: ftp.load(tmp_path, tree, MESH),
        "destroy_process_group": ftp.destroy_process_group,
    }
    with monkeypatch.context() as patch:
        patch.setattr("ftp.checkpoint.write_shards.write_file", full)
        asked = ftp.save(tmp_path, tree, MESH, wait=False)
        with pytest.raises(ftp.errors.CheckpointError, match="the disk is full"):
            asked.result()
    calls[call]()
    with monkeypatch.context() as patch:
        patch.setattr("ftp.checkpoint.write_shards.write_file", full)
        saving = ftp.save(tmp_path, tree, MESH, wait=False)
        while not saving.done():
            time.sleep(0.001)
    with pytest.raises(ftp.errors.CheckpointError, match=f"{SAID}the disk is full"):
        calls[call]()
    calls[call]()


def test_a_failure_that_is_asked_for_while_the_process_group_ends_is_told_once(
    tmp_path, monkeypatch
):
    failed, slow = (background.Saving(Future()) for _ in range(2))
    failed._future.set_exception(ftp.errors.CheckpointError("the disk is full"))
    monkeypatch.setattr(background, "_unasked", [failed, slow])
    told = []

    def ask():
        try:
            failed.result()
        except ftp.errors.CheckpointError as e:
            told.append(str(e))
        slow._future.set_result(tmp_path)

    asking = threading.Timer(0.1, ask)
    asking.start()
    ftp.destroy_process_group()
    asking.join()
    assert told == ["the disk is full"]


def test_a_save_that_failed_unasked_is_told_at_the_end_of_the_program(tmp_path):
    program = """
import sys, torch, ftp, ftp.checkpoint.write_shards
def full(*args): raise ftp.errors.CheckpointError("the disk is full")
ftp.checkpoint.write_shards.write_file = full
print("it ends")
ftp.save(sys.argv[1], {"w": torch.ones(2)}, ftp.simulated_mesh((2,), ("tp",)), wait=False)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program, tmp_path], capture_output=True, text=True
    )
    assert ended.returncode == 1 and ended.stdout == "it ends\n"
    assert (
        ended.stderr
        == f"ftp: the program ends with status 1. CheckpointError: {SAID}the disk is full\n"
    )
    assert os.listdir(tmp_path) == []


def test_nothing_is_executed(tmp_path):
    class Planted:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "executed"),))

    folder = ftp.save(tmp_path / "c", {"w": torch.ones(2)}, MESH).result()
    assert sorted(os.listdir(folder)) == ["manifest.json", "rank-00000.safetensors"]
    (folder / ".metadata").write_bytes(pickle.dumps(Planted()))
    like = {"w": torch.empty(2, device="meta")}
    assert torch.equal(ftp.load(tmp_path / "c", like, MESH)["w"], torch.ones(2))
    for name in ("rank-00000.safetensors", "manifest.json"):
        (folder / name).write_bytes(pickle.dumps(Planted()))
        with pytest.raises(ftp.errors.CheckpointError, match=name):
            ftp.load(tmp_path / "c", like, MESH)
    assert not (tmp_path / "executed").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_distributed_checkpoint_reads_it(tmp_path):
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    tree = {"a.w": torch.randn(5, 3), "b": torch.randn(4).to(torch.bfloat16), "n": torch.tensor(3)}
    folder = ftp.save(tmp_path, tree, MESH).result()
    into = {k: torch.zeros_like(v) for k, v in tree.items()}
    load(into, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    assert all(same(into[k], tree[k]) for k in tree)


# Errors.


def wrong(tmp_path, like, specs=None):
    with pytest.raises(ftp.FtpError) as caught:
        ftp.load(tmp_path, like, MESH, specs)
    return str(caught.value)


def test_every_leaf_that_does_not_fit_is_named(tmp_path):
    ftp.save(
        tmp_path,
        {
            "a": torch.ones(2, 3),
            "b": torch.ones(2, dtype=torch.bfloat16),
            "n": 3,
            "s": "x",
            "layer": torch.ones(1),
        },
        MESH,
    )
    like = {
        "a": torch.ones(3, 2),
        "b": torch.ones(2),
        "n": torch.ones(1),
        "s": 0,
        "layers": torch.ones(1),
    }
    assert wrong(tmp_path, like).splitlines() == [
        "like['a'] has shape (3, 2), but the saved 'a' (2, 3).",
        "like['b'] is float32, but the saved 'b' bfloat16. Load it as bfloat16, and convert it"
        " with .to(torch.float32).",
        f"like['layers'] is missing: {tmp_path}/00000000 holds no 'layers'. The nearest are"
        " 'layer', 's', 'a'.",
        "like['n'] is a tensor, but the saved 'n' is 3, an int.",
        "like['s'] is an int, but the saved 's' is 'x', a str.",
    ]
    assert "holds no 'S'. The nearest are 's'," in wrong(tmp_path, {"S": "x"})
    assert "has spec P('tp', None, None) of 3 entries" in wrong(
        tmp_path, {"a": torch.ones(2, 3)}, P("tp", None, None)
    )


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ({"a": {"b": 1}, "a.b": 2}, "tree['a']['b'] and tree['a.b'] have one path, 'a.b'"),
        (
            {"a": 1j},
            "tree['a'] is a complex: a checkpoint holds tensors, ints, floats, bools and strings",
        ),
        ({"a": torch.empty(2, device="meta")}, "tree['a'] is on the meta device"),
        (
            {"a": torch.empty(2, dtype=torch.bits8)},
            "tree['a'] is of dtype torch.bits8, which safetensors files cannot hold",
        ),
        ({"a": torch.eye(2).to_sparse()}, "tree['a'] is of layout torch.sparse_coo"),
    ],
)
def test_leaves_that_cannot_be_saved(tmp_path, tree, text):
    with pytest.raises(ftp.errors.InputError) as caught:
        ftp.save(tmp_path, tree, MESH)
    assert text in str(caught.value)
    assert not tmp_path.exists() or os.listdir(tmp_path) == []


@pytest.mark.parametrize("options", [{"step": -1}, {"step": 1.5}, {"keep": 0}, {"keep": True}])
def test_options(tmp_path, options):
    with pytest.raises(ftp.errors.CheckpointError, match="give an int of at least"):
        ftp.save(tmp_path, {"a": 1}, MESH, **options)


def test_every_flipped_byte_is_found(tmp_path):
    tree = {"w": torch.arange(6, dtype=torch.int16), "b": torch.ones(3), "n": 1}
    folder = ftp.save(tmp_path, tree, MESH, step=1).result()
    like = meta(tree)
    for file in sorted(folder.iterdir()):
        good = file.read_bytes()
        for at in range(len(good)):
            file.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
            with pytest.raises(ftp.errors.CheckpointError) as caught:
                ftp.load(tmp_path, like, MESH)
            assert file.name in str(caught.value), at
        for cut in (0, 7, len(good) // 2, len(good) - 1):
            file.write_bytes(good[:cut])
            assert file.name in wrong(tmp_path, like)
        file.write_bytes(good + b"\0")
        assert file.name in wrong(tmp_path, like)
        file.write_bytes(good)
    (folder / "rank-00000.safetensors").unlink()
    assert "rank-00000.safetensors cannot be read: No such file" in wrong(tmp_path, like)


def forged(folder, edit):
    """Whoever can write a manifest can write its hash."""
    content = json.loads((folder / "manifest.json").read_text())
    edit(content["checkpoint"]["tensors"]["w"]["chunks"])
    text = json.dumps(content["checkpoint"], sort_keys=True, separators=(",", ":"))
    content["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(content))


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (
            lambda c: c[0].update(file="../../secret.safetensors", sha256=""),
            "names the file '../../secret.safetensors', which is not one",
        ),
        (
            lambda c: c[0].update(file="/etc/passwd", sha256=""),
            "names the file '/etc/passwd', which is not one of its folder",
        ),
        (
            lambda c: c.append(dict(c[0])),
            "'w' is there twice: rank-00000.safetensors holds [4, 3] elements from [0, 0] on",
        ),
        (
            lambda c: c[0]["box"].update(size=[2, 3]),
            "only a part of 'w' is there: 6 of 12 elements",
        ),
        (
            lambda c: c[0]["box"].update(start=[1, 0]),
            "holds [4, 3] elements of 'w' from [1, 0] on, which are not within shape (4, 3)",
        ),
        (
            lambda c: c[0]["box"].update(start=["0", 0]),
            "of 'w' from ['0', 0] on, which are not within shape (4, 3)",
        ),
        (lambda c: c.clear(), "only a part of 'w' is there: 0 of 12 elements"),
    ],
)
def test_a_forged_manifest_reads_nothing_else(tmp_path, edit, text, verify):
    from safetensors.torch import save_file

    save_file({"w": torch.full((4, 3), 666.0)}, tmp_path / "secret.safetensors")
    forged(ftp.save(tmp_path / "c", {"w": torch.ones(4, 3)}, MESH).result(), edit)
    with pytest.raises(ftp.errors.CheckpointError) as caught:
        ftp.load(tmp_path / "c", {"w": torch.empty(4, 3, device="meta")}, MESH, verify=verify)
    assert text in str(caught.value)


@pytest.mark.parametrize("held", [torch.ones(1, 3), torch.ones(4, 3, dtype=torch.int32)])
def test_a_file_of_another_shape_or_dtype_is_not_converted(tmp_path, held):
    from safetensors.torch import save_file

    folder = ftp.save(tmp_path / "c", {"w": torch.ones(4, 3)}, MESH).result()
    save_file({"w": held}, folder / "rank-00000.safetensors")
    with pytest.raises(
        ftp.errors.CheckpointError, match=r"but F32 of shape \[4, 3\] should be there"
    ):
        ftp.load(tmp_path / "c", {"w": torch.empty(4, 3, device="meta")}, MESH, verify=False)


def test_an_altered_tensor_is_named_with_what_else_there_is(tmp_path):
    tree = {"w": torch.arange(6), "b": torch.ones(3)}
    ftp.save(tmp_path, tree, MESH, step=1)
    file = ftp.save(tmp_path, tree, MESH, step=2).result() / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 128
    file.write_bytes(content)
    assert wrong(tmp_path, meta(tree)) == (
        f"{file} was altered: tensor 'b' does not have the sha256 that the manifest states.\n"
        f"  The newest whole checkpoint in {tmp_path} is 00000000-step-1. Load it by its own"
        " folder:"
        f" ftp.load('{tmp_path}/00000000-step-1', ...)."
    )
    assert same(ftp.load(tmp_path, meta(tree), MESH, step=1)["w"], tree["w"])


def test_a_checkpoint_that_a_later_save_removes_under_a_load(tmp_path, monkeypatch):
    """What a load finds gone is a damage of the checkpoint, not an error of the file system."""
    tree = {"w": torch.arange(6.0)}
    folder = ftp.save(tmp_path, tree, MESH).result()
    read = source.read_header

    def removed_after_its_header(path):
        header = read(path)
        path.unlink()
        return header

    monkeypatch.setattr(source, "read_header", removed_after_its_header)
    with pytest.raises(ftp.errors.DamagedError, match=r"rank-00000.safetensors cannot be read"):
        ftp.load(folder, meta(tree), MESH)
