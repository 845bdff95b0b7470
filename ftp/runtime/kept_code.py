"""Compiled subgraphs in ftp's cache: the next start of the same script runs them without importing
torch's compiler.

A file is the library of a rank's kernels, then the functions that call them as JSON, then the
JSON's length. Loaders of libraries do not read what follows a library.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

import torch

from ftp.ops.native import cache_folder, open_whole, path_of, read_own, trim, write_whole
from ftp.runtime.split_at_collectives import Subgraph
from ftp.torch_internals.inductor_wrappers import Compiled, WrapperText, run_by, settings, written
from ftp.version import own_code

LIMIT = 256 * 2**20  # bytes of all files
_LENGTH = 8  # bytes
_loaded_by: dict[str, str] = {}  # per file in use, the path to its open descriptor


def key_of(subgraphs: Mapping[str, Subgraph]) -> str:
    """A hash of everything that the code depends on; "" if the code must not be kept."""
    values = [value for subgraph in subgraphs.values() for value in subgraph.values()]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    depends = settings()
    if (
        depends is None
        or any(subgraph.is_symbolic for subgraph in subgraphs.values())
        or any(x.device.type != "cpu" for x in tensors)
    ):
        return ""
    text = json.dumps([own_code(), depends, sorted(subgraphs)], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def find(key: str, subgraphs: Mapping[str, Subgraph]) -> dict[str, Compiled] | None:
    """The code of each subgraph; None if it is not kept, or its file is damaged or not this user's
    own.
    """
    for path in sorted(cache_folder("kernels").glob(f"{key}-*.so")):
        opened = open_whole(path)
        if opened is None:
            continue
        handle, content = opened
        end = len(content) - _LENGTH
        start = end - int.from_bytes(content[end:], "little")
        functions = [WrapperText(*function) for function in json.loads(content[start:end])]
        known = _loaded_by.get(path.name)
        library = known or path_of(handle, path) if start else None
        try:
            made = run_by(dict(zip(sorted(subgraphs), functions, strict=True)), library)
        except (ImportError, OSError):
            os.close(handle)
            continue
        if library is None or known:
            os.close(handle)
        else:
            _loaded_by[path.name] = library
        with contextlib.suppress(OSError):  # the folder is read only, or the file is deleted
            os.utime(path)  # used last
        return made
    return None


def keep(key: str, graphs: Mapping[str, Any]) -> None:
    """Store inductor's code of each subgraph, unless it needs inductor to run.

    Args:
        graphs: per subgraph, its ``CompiledFxGraph``.
    """
    found = [written(graphs[name]) for name in sorted(graphs)]
    functions = [one[0] for one in found if one is not None]
    libraries = {one[1] for one in found if one is not None and one[1] is not None}
    if len(functions) < len(found) or len(libraries) > 1:
        return
    text = json.dumps([[f.source, dict(f.kernels)] for f in functions]).encode()
    # Code that cannot be written, as on a full disk, is compiled at the next start.
    with contextlib.suppress(OSError):
        library = b"".join(map(read_own, libraries))
        folder = cache_folder("kernels")
        write_whole(folder, key, library + text + len(text).to_bytes(_LENGTH, "little"))
        trim(folder, LIMIT)
