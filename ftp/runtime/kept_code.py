"""Compiled subgraphs as files, in ftp's cache and within programs' files: a start that finds them
runs them without importing torch's compiler.

A file is the library of the kernels, then as JSON the functions that call them, by the key of
their subgraph, then the JSON's length. Loaders of libraries do not read what follows a library.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from ftp.ops.native import (
    cache_folder,
    digest,
    open_whole,
    path_of,
    read_loaded,
    trim,
    write_whole,
)
from ftp.runtime.split_at_collectives import Subgraph
from ftp.torch_internals.inductor_wrappers import (
    Compiled,
    WrapperText,
    run_by,
    settings,
    surroundings,
    written,
)
from ftp.version import own_code

LIMIT = 256 * 2**20  # bytes of all files
_LENGTH = 8  # bytes
_OF_PROGRAM = "program"
_loaded_by: dict[str, str] = {}  # per file in use, the path to its open descriptor


def made_with() -> dict[str, Any] | None:
    """What code depends on beside its graph and the processor; None if it must not be kept."""
    depends = settings()
    return None if depends is None else {**depends, "ftp's code": own_code()}


def can_be_kept(subgraphs: Collection[Subgraph]) -> bool:
    """Whether subgraphs are for CPUs, and of known sizes."""
    values = [value for subgraph in subgraphs for value in subgraph.values()]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return not any(subgraph.is_symbolic for subgraph in subgraphs) and all(
        x.device.type == "cpu" for x in tensors
    )


def key_of(subgraphs: Mapping[str, Subgraph]) -> str:
    """A hash of everything that the code depends on; "" if the code must not be kept."""
    depends = made_with()
    if depends is None or not can_be_kept(subgraphs.values()):
        return ""
    text = json.dumps([depends, surroundings(), sorted(subgraphs)], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def find(key: str) -> tuple[bytes, dict[str, Compiled]] | None:
    """The content that is kept under a key, and the code of each subgraph; None if there is none,
    or its file is damaged or not this user's own.
    """
    found = map(_loaded, sorted(cache_folder("kernels").glob(f"{key}-*.so")))
    return next((one for one in found if one is not None), None)


def run(content: bytes) -> dict[str, Compiled] | None:
    """The code of each subgraph from the content of a file; None if this machine cannot load it.
    Loaders take files: the content becomes one in ftp's cache.
    """
    folder = cache_folder("kernels")
    found = _loaded(folder / f"{_OF_PROGRAM}-{digest(content)}.so")
    if found is None:
        with contextlib.suppress(OSError):
            found = _loaded(write_whole(folder, _OF_PROGRAM, content))
            trim(folder, LIMIT)
    return found and found[1]


def _loaded(path: Path) -> tuple[bytes, dict[str, Compiled]] | None:
    opened = open_whole(path)
    if opened is None:
        return None
    handle, content = opened
    end = len(content) - _LENGTH
    start = end - int.from_bytes(content[end:], "little")
    texts = json.loads(content[start:end])
    known = _loaded_by.get(path.name)
    library = known or path_of(handle, path) if start else None
    try:
        made = run_by({key: WrapperText(*text) for key, text in texts.items()}, library)
    except (ImportError, OSError):
        os.close(handle)
        return None
    if library is None or known:
        os.close(handle)
    else:
        _loaded_by[path.name] = library
    with contextlib.suppress(OSError):  # the folder is read only, or the file is deleted
        os.utime(path)  # used last
    return content, made


def content_of(graphs: Mapping[str, Any]) -> bytes | None:
    """The content of a file; None if a subgraph's code needs inductor to run.

    Args:
        graphs: per subgraph, its ``CompiledFxGraph``, loaded into this process.

    Raises:
        OSError: a library that cannot be read, or that is another user's.
    """
    found = {key: written(graph) for key, graph in sorted(graphs.items())}
    functions = {key: one[0] for key, one in found.items() if one is not None}
    libraries = {one[1] for one in found.values() if one is not None and one[1] is not None}
    if len(functions) < len(found) or len(libraries) > 1:
        return None
    text = json.dumps({key: [f.source, dict(f.kernels)] for key, f in functions.items()}).encode()
    library = b"".join(map(read_loaded, libraries))
    return library + text + len(text).to_bytes(_LENGTH, "little")


def keep(key: str, graphs: Mapping[str, Any]) -> None:
    """Store inductor's code of each subgraph, unless it needs inductor to run."""
    # Code that cannot be written, as on a full disk, is compiled at the next start.
    with contextlib.suppress(OSError):
        content = content_of(graphs)
        if content is not None:
            folder = cache_folder("kernels")
            write_whole(folder, key, content)
            trim(folder, LIMIT)
