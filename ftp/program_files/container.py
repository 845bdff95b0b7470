"""The file of a program: an identifying line, a header, and sections of bytes with hashes."""

import hashlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ftp.dataclass import dataclass
from ftp.errors import ProgramFileError
from ftp.ops.native import read_own, replace_file

_MAGIC = b"ftp program 2\n"  # raised when a field of a plan or program is renamed
_DIGEST = hashlib.sha256().digest_size
_MOST = 4 * 2**30  # bytes of a section when it is unpacked


@dataclass(frozen=True)
class Container:
    """A file's header and its sections, packed.

    >>> packed = pack({"kind": "example"}, {"plan": b"[1]"})
    >>> found = unpack(packed, "example.ftp")
    >>> found.header["kind"], found.section("plan")
    ('example', b'[1]')
    """

    header: Mapping[str, Any]
    sections: Mapping[str, bytes]
    name: str

    def section(self, name: str) -> bytes:
        """The bytes of a section."""
        size, _ = self.header["sections"][name]
        found = zlib.decompressobj().decompress(self.sections[name], min(size, _MOST) + 1)
        if len(found) != size:
            raise damaged(self.name)
        return found

    def json(self, name: str) -> Any:
        """A section of JSON."""
        return json.loads(self.section(name))


def pack(header: Mapping[str, Any], sections: Mapping[str, bytes]) -> bytes:
    """The content of a file."""
    packed = {name: zlib.compress(content, 1) for name, content in sections.items()}
    index = {name: (len(sections[name]), len(content)) for name, content in packed.items()}
    text = json.dumps({**header, "sections": index}, separators=(",", ":")).encode()
    body = b"".join([len(text).to_bytes(8, "little"), text, *packed.values()])
    return b"".join([_MAGIC, hashlib.sha256(body).digest(), body])


def unpack(content: bytes, name: str) -> Container:
    """The inverse of `pack`.

    Args:
        name: the file's name in errors.

    Raises:
        ProgramFileError: content that `pack` did not make, or that is truncated or altered.
    """
    if not content.startswith(_MAGIC):
        what = "is empty" if not content else "is no program that this version of ftp saved"
        raise ProgramFileError(f"{name} {what}. Give a file that lowered.save(path) wrote.")
    view = memoryview(content)[len(_MAGIC) :]
    digest, body = view[:_DIGEST], view[_DIGEST:]
    if hashlib.sha256(body).digest() != digest:
        raise damaged(name)
    length = int.from_bytes(body[:8], "little")
    header = json.loads(bytes(body[8 : 8 + length]))
    sections, at = {}, 8 + length
    for section, (_, size) in header["sections"].items():
        sections[section] = bytes(body[at : at + size])
        at += size
    return Container(header, sections, name)


def damaged(name: str) -> ProgramFileError:
    return ProgramFileError(f"{name} is damaged: truncated, or altered since it was saved.")


def write_file(path: Path, content: bytes) -> None:
    """Write a file of this user's own, whole or not at all."""
    try:
        replace_file(path, content)
    except OSError as e:
        raise ProgramFileError(f"{path} cannot be written: {e.strerror or e}.") from e


def read_file(path: Path) -> Container:
    """A file of this user's own.

    Raises:
        ProgramFileError: a file that is missing or damaged, that another user owns, or that others
            can write to.
    """
    try:
        content = read_own(path)
    except PermissionError as e:
        if e.errno is not None:
            raise ProgramFileError(f"{path} cannot be read: {e.strerror}.") from e
        raise ProgramFileError(
            f"{e}, so that another user may have chosen what it runs. Copy it to a file that only"
            " you can write to."
        ) from e
    except OSError as e:
        raise ProgramFileError(f"{path} cannot be read: {e.strerror or e}.") from e
    return unpack(content, str(path))
