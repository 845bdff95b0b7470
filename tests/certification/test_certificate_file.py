"""A certificate's file in which any part was altered, its digest renewed, is no certificate."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from few_or_many import few_or_many
from hypothesis import strategies as st

import ftp
from ftp import P
from ftp.api.certify import certify
from ftp.certification.certificate_file import load_certificate
from ftp.certification.checker import check
from ftp.errors import CertificateError

OTHER = [None, -1, 3, 10**6, "x", [], {}, [1], {"ref": []}, {"node": "x"}, True, 0.5]


def _parts(body: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of the parts of JSON."""
    if isinstance(body, dict | list):
        for key in body if isinstance(body, dict) else range(len(body)):
            yield (*at, key)
            yield from _parts(body[key], (*at, key))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    def loss(w, x):
        return ftp.local(lambda y: y.relu(), None, P(None, "tp"), P(None, "tp"))(x @ w).mean()

    step = ftp.shard(loss, ftp.simulated_mesh((2,), ("tp",)), P(None, "tp"))
    path = tmp_path_factory.mktemp("altered") / "certificate.json"
    certify(step.lower(torch.ones(4, 6), torch.ones(3, 4))).save(path)
    return path, json.loads(path.read_text())


@few_or_many(st.data(), few=40, many=3000)
def test_a_part_that_was_altered_is_an_error_or_counts_nowhere(
    saved: tuple[Path, dict[str, Any]], data: st.DataObject
):
    path, document = saved[0], json.loads(json.dumps(saved[1]))
    body = document["program"]
    *outer, key = data.draw(st.sampled_from(list(_parts(body))))
    part = body
    for each in outer:
        part = part[each]
    other = data.draw(st.sampled_from(["gone", *OTHER]))
    if other == "gone":
        del part[key]
    else:
        part[key] = other
    text = json.dumps(body, separators=(",", ":"))
    document["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(document))
    with suppress(CertificateError):
        check(load_certificate(path))


@pytest.mark.parametrize(
    "text",
    ["[]", "{}", "3", '{"ftp certificate": 8, "program": {}}', "x", "1" * 5000, "[" * 10**6],
    ids=lambda text: text[:8],
)
def test_another_file(tmp_path: Path, text: str):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(CertificateError, match="is no certificate"):
        load_certificate(path)
