"""Templates that are compiled when they are used."""

import subprocess
import sys

import pytest

from ftp.torch_internals.deferred_templates import _Template


def test_a_template_is_compiled_at_its_first_use():
    made = []
    template = _Template(lambda source: made.append(source) or source, "text")
    assert not made
    assert template and template.upper() == "TEXT" and template.lower() == "text"
    assert made == ["text"]
    assert not _Template(lambda source: None, "text")  # without jinja


@pytest.mark.slow
def test_inductors_templates_are_not_compiled_by_its_import():
    code = (
        "from ftp.torch_internals.deferred_templates import _Template, compiler; compiler()\n"
        "from torch._inductor.kernel.mm import mm_template\n"
        "assert type(mm_template.template) is _Template\n"
        "assert '_compiled' not in vars(mm_template.template)\n"
        "from torch._inductor.codegen.common import KernelTemplate\n"
        "assert KernelTemplate._template_from_string('a {{b}}').render(b=1) == 'a 1'\n"
        "assert mm_template.template.name is None and mm_template.template\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
