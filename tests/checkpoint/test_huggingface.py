"""Models in Hugging Face's files: read and written by path, whatever is wrong with them named."""

import json
import os
import resource
import subprocess

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import ftp
from ftp import P
from ftp.checkpoint.manifest import SavedTensor, StoredChunk
from ftp.checkpoint.safetensors_io import STORED
from ftp.sharding.pytree import flatten, leaf_paths
from ftp.tensors.boxes import Box, whole
from tests.checkpoint.test_checkpoint import drawn, same  # type: ignore[import-not-found]

MESH = ftp.simulated_mesh((2, 2), ("dp", "tp"))
MODEL = {
    "model.layers.0.w": torch.randn(6, 4),
    "model.layers.1.w": torch.randn(6, 4),
    "head.weight": torch.randn(10, 4).to(torch.bfloat16),
}
META = {name: x.to("meta") for name, x in MODEL.items()}


def sharded(folder):
    """As transformers writes a model in two files."""
    files = {
        "model.layers.0.w": "a.safetensors",
        "model.layers.1.w": "b.safetensors",
        "head.weight": "b.safetensors",
    }
    for file in set(files.values()):
        save_file(
            {n: MODEL[n] for n, f in files.items() if f == file},
            folder / file,
            metadata={"format": "pt"},
        )
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": files})
    )


def wrong(path, like=META, **options):
    with pytest.raises(ftp.FtpError) as caught:
        ftp.load_safetensors(path, like, MESH, **options)
    return str(caught.value)


@pytest.mark.parametrize("form", ["file", "folder", "index", "parts"])
def test_reading(tmp_path, form):
    if form in ("file", "folder"):
        save_file(MODEL, tmp_path / "model.safetensors")
    elif form == "index":
        sharded(tmp_path)
    else:
        for name, x in MODEL.items():
            save_file({name: x}, tmp_path / f"{name}.safetensors")
    specs = ftp.plan(META, {"model.layers.*.w": P("tp"), "head.weight": P(None, "dp")})
    found = ftp.load_safetensors(
        tmp_path / "model.safetensors" if form == "file" else tmp_path, META, MESH, specs
    )
    assert all(same(found[name], x) for name, x in MODEL.items()) and ftp.specs_of(found) == specs
    nested = {"layers": [{"w": META["model.layers.0.w"]}, {"w": META["model.layers.1.w"]}]}
    for rename in (
        {f"layers.{i}.w": f"model.layers.{i}.w" for i in (0, 1)},
        lambda path: f"model.{path}",
    ):
        found = ftp.load_safetensors(tmp_path, nested, MESH, rename=rename)
        assert all(same(found["layers"][i]["w"], MODEL[f"model.layers.{i}.w"]) for i in (0, 1))


def test_a_tied_weight_is_found_by_any_of_its_paths(tmp_path):
    model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    _, params = ftp.functionalize(model)
    assert list(params) == ["0.weight"]
    save_file({"1.weight": torch.ones(5, 3)}, tmp_path / "model.safetensors")
    assert torch.equal(ftp.load_safetensors(tmp_path, params, MESH)["0.weight"], torch.ones(5, 3))


@pytest.mark.parametrize("limit", [1, 100, 10**9])
def test_writing(tmp_path, limit):
    tree = {
        **MODEL,
        "model": {str(dtype): drawn((3, 2), dtype) for dtype in STORED},
        "n": torch.tensor(3),
        "empty": torch.empty(0, 2),
    }
    names = leaf_paths(tree)
    leaves = flatten(tree)[0]
    ftp.save_safetensors(tmp_path, tree, MESH, max_file_bytes=limit)
    files = sorted(f for f in os.listdir(tmp_path) if f.endswith(".safetensors"))
    assert len(files) == (1 if limit == 10**9 else len(files)) and all(
        limit > 1 or len(load_file(tmp_path / f)) <= 2 for f in files
    )
    read = {name: x for file in files for name, x in load_file(tmp_path / file).items()}
    assert set(read) == {".".join(path) for path in names}
    assert all(same(read[".".join(path)], x) for path, x in zip(names, leaves, strict=True))
    assert (
        subprocess.run(
            ["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=tmp_path, check=False
        ).returncode
        == 0
    )
    back = ftp.load_safetensors(tmp_path, tree, MESH)
    assert all(same(a, b) for a, b in zip(flatten(back)[0], leaves, strict=True))
    assert "holds model" in _message(lambda: ftp.save_safetensors(tmp_path, tree, MESH))


def _message(attempt):
    with pytest.raises(ftp.FtpError) as caught:
        attempt()
    return str(caught.value)


def test_transformers_reads_what_is_written(tmp_path):
    transformers = pytest.importorskip("transformers", reason="an optional peer")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11, n_positions=6)
    model = transformers.GPT2LMHeadModel(config)
    _, params = ftp.functionalize(model)
    config.save_pretrained(tmp_path)
    ftp.save_safetensors(tmp_path, params, MESH, max_file_bytes=1000)
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )
    again.save_pretrained(tmp_path / "theirs")
    back = ftp.load_safetensors(tmp_path / "theirs", params, MESH)
    assert all(torch.equal(back[name], x) for name, x in params.items())


def test_what_is_wrong_with_files_is_named(tmp_path):
    assert wrong(tmp_path / "none") == f"{tmp_path}/none does not exist."
    assert wrong(tmp_path) == f"{tmp_path} holds no safetensors files."
    sharded(tmp_path)
    like = {
        "model.layers.0.w": META["head.weight"],
        "head.weight": META["head.weight"].float(),
        "model.layers.2.w": META["head.weight"],
    }
    assert wrong(tmp_path, like).splitlines() == [
        "like['head.weight'] is float32, but the saved 'head.weight' bfloat16."
        " Load it as bfloat16, and convert it with .to(torch.float32).",
        "like['model.layers.0.w'] has shape (10, 4), but the saved 'model.layers.0.w' (6, 4).",
        "like['model.layers.0.w'] is bfloat16, but the saved 'model.layers.0.w' float32."
        " Load it as float32, and convert it with .to(torch.bfloat16).",
        f"like['model.layers.2.w'] is missing: {tmp_path} holds no 'model.layers.2.w'. The nearest"
        " are 'model.layers.0.w', 'head.weight'.",
    ]
    good = (tmp_path / "b.safetensors").read_bytes()
    (tmp_path / "b.safetensors").write_bytes(good[:-1])
    assert (
        f"{tmp_path}/b.safetensors holds {len(good) - 1} bytes where its header says {len(good)}"
        in wrong(tmp_path)
    )
    (tmp_path / "b.safetensors").unlink()
    assert f"{tmp_path}/b.safetensors cannot be read: No such file" in wrong(tmp_path)
    save_file({"head.weight": MODEL["head.weight"]}, tmp_path / "b.safetensors")
    assert (
        f"{tmp_path}/b.safetensors holds no 'model.layers.1.w', which the index says it does"
        in wrong(tmp_path)
    )
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"w": "../w.safetensors"}}'
    )
    assert "model.safetensors.index.json is no index" in wrong(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file({"head.weight": MODEL["head.weight"]}, tmp_path / "c.safetensors")
    assert "'head.weight' is in b.safetensors and in c.safetensors" in wrong(tmp_path)


def parts(folder, chunks):
    """A file for each part of "w", as torch.distributed.checkpoint writes them."""
    for name, value, start, shape in chunks:
        metadata = {
            "format": "pt",
            "DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": start}}),
        }
        save_file(
            {"w": torch.full(shape, value)}, folder / f"{name}.safetensors", metadata=metadata
        )


@pytest.mark.parametrize(
    ("chunks", "text"),
    [
        (
            [("a", 2.0, [0], (6,)), ("b", 2.0, [6], (6,)), ("c", 1.0, [8], (4,))],
            "'w' is there twice: b.safetensors holds [6] elements from [6] on, and c.safetensors"
            " [4] from [8] on, so these are files of"
            " two saves. Remove those of the older one.",
        ),
        (
            [("a", 1.0, [0], (6,)), ("b", 1.0, [8], (4,))],
            "only a part of 'w' is there: 10 of 12 elements. A file is missing, or a save was cut"
            " short.",
        ),
        (
            [("a", 1.0, [0, 0], (12,))],
            "states offsets [0, 0] for 'w', a tensor of shape (12,): one is needed for each dim.",
        ),
        (
            [("a", 1.0, [0], (6,)), ("b", 1.0, [-6], (6,))],
            "b.safetensors has offsets of shards that cannot be read",
        ),
    ],
)
@pytest.mark.parametrize("verify", [True, False])
def test_parts_that_are_not_those_of_one_tensor(tmp_path, chunks, text, verify):
    parts(tmp_path, chunks)
    assert text in wrong(tmp_path, {"w": torch.empty(12, device="meta")}, verify=verify)


@settings(max_examples=200, derandomize=True)
@given(st.data())
def test_a_tensor_is_whole_where_every_element_is_there_once(data):
    shape = tuple(data.draw(st.lists(st.integers(0, 4), max_size=3)))
    # Either cut anew and anew, which is whole, or that with some boxes changed.
    boxes = [whole(shape)]
    for _ in range(data.draw(st.integers(0, 5))):
        box = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        dim, at = data.draw(st.integers(0, max(0, len(shape) - 1))), data.draw(st.integers(0, 4))
        if not shape or at > box.size[dim]:
            boxes.append(box)
            continue
        rest = tuple(n - at if d == dim else n for d, n in enumerate(box.size))
        boxes.append(Box(box.start, tuple(at if d == dim else n for d, n in enumerate(box.size))))
        boxes.append(Box(tuple(a + at if d == dim else a for d, a in enumerate(box.start)), rest))
    for _ in range(data.draw(st.integers(0, 2))):
        i = data.draw(st.integers(0, len(boxes) - 1))
        moved = [
            tuple(max(0, n + data.draw(st.integers(-1, 1))) for n in sizes)
            for sizes in (boxes[i].start, boxes[i].size)
        ]
        boxes[i] = data.draw(st.sampled_from([Box(*moved), boxes[0]]))
    count = torch.zeros(shape, dtype=torch.int)
    is_within = all(
        a + n <= s for box in boxes for a, n, s in zip(box.start, box.size, shape, strict=True)
    )
    for box in boxes:
        count[box.slices((0,) * len(shape))] += 1
    saved = SavedTensor(
        "float32",
        shape,
        "P()",
        tuple(StoredChunk(f"{i}.safetensors", box, "") for i, box in enumerate(boxes)),
    )
    assert (saved.problem("w") is None) == (is_within and bool((count == 1).all()))


def test_a_header_that_is_larger_than_any_is_refused_at_once(tmp_path):
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write((1 << 30).to_bytes(8, "little"))
        file.truncate((1 << 30) + 100)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (
        "says that its header has 1,073,741,824 bytes; safetensors files have at most 100,000,000"
        in wrong(tmp_path)
    )
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # KiB


def test_altered_files_are_named_where_there_are_hashes(tmp_path):
    ftp.save_safetensors(tmp_path, MODEL, MESH, max_file_bytes=100)
    file = tmp_path / "model-00002-of-00003.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert (
        wrong(tmp_path) == f"{file} was altered: it does not have the sha256 that is stated for it."
    )
    found = ftp.load_safetensors(tmp_path, META, MESH, verify=False)
    assert not all(same(found[name], x) for name, x in MODEL.items())


@pytest.mark.parametrize(
    ("tree", "options", "text"),
    [
        ({"w": torch.ones(2), "n": 3}, {}, "tree['n'] is an int; only tensors can be saved."),
        (
            {"w": torch.ones(2, dtype=torch.complex128)},
            {},
            "tree['w'] is of dtype torch.complex128, which safetensors files cannot hold",
        ),
        (
            {"w": torch.ones(2), "v": torch.ones(2)},
            {"rename": lambda path: "x"},
            "tree['v'] and tree['w'] have one name, 'x'",
        ),
        (
            {"w": torch.ones(2)},
            {"max_file_bytes": 0},
            "max_file_bytes=0: give a positive number of bytes",
        ),
    ],
)
def test_what_cannot_be_written(tmp_path, tree, options, text):
    assert text in _message(lambda: ftp.save_safetensors(tmp_path, tree, MESH, **options))
    assert os.listdir(tmp_path) == []
