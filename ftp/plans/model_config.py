"""A model's configs, objects or dicts, and the sizes that they give by any library's names."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from ftp.errors import SpecError
from ftp.sharding.spec import Entry, P


def head_dim_of(config: Any) -> int | None:
    """Elements of a head, by any config's names."""
    given = value_of(config, "head_dim", "kv_channels")
    if given is not None or config is None:
        return given
    dim, heads = (
        value_of(config, "hidden_size", "n_embd", "dim", "d_model"),
        value_of(config, "num_attention_heads", "n_head", "n_heads"),
    )
    if dim is None or heads is None:
        raise SpecError(
            "config says neither head_dim, nor hidden_size and num_attention_heads (n_embd and"
            " n_head, dim and n_heads)."
        )
    if dim % heads:
        raise SpecError(f"config: {heads} heads do not divide a width of {dim}. Give head_dim.")
    return dim // heads


def value_of(config: Any, *keys: str) -> Any:
    """The value of the first key that a config, an object or a dict, has."""
    for key in keys:
        found = config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)
        if found is not None:
            return found
    return None


def config_of(model: nn.Module, path: str) -> Any:
    """The config of the innermost module around a path that has one."""
    parts = path.split(".")
    for end in range(len(parts), -1, -1):
        try:
            module = model.get_submodule(".".join(parts[:end]))
        except AttributeError:
            continue  # a parameter
        if (config := getattr(module, "config", None)) is not None:
            return config
    return None


def cut_at(dim: int, entry: Entry) -> P:
    """The spec that cuts one dim."""
    return P(*(None,) * dim, entry)
