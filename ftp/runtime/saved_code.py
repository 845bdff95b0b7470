"""The compiled code of all ranks of a program, saved with it for starts on other machines."""

import dataclasses
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from ftp.dataclass import dataclass
from ftp.errors import ProgramFileError
from ftp.passes.onednn_matmuls import Matmul
from ftp.runtime import kept_code
from ftp.runtime.compile import by_inductor
from ftp.runtime.split_at_collectives import Subgraph
from ftp.torch_internals.inductor_wrappers import Compiled, instructions


@dataclass(frozen=True)
class SavedCode:
    """Code for a program's ranks, ready to run.

    Attributes:
        functions: the code of each subgraph, by its key.
        by_onednn: the matmuls of all ranks: whether the code leaves them to oneDNN.
    """

    functions: Mapping[str, Compiled] = field(default_factory=dict)
    by_onednn: Mapping[Matmul, bool] = field(default_factory=dict)


NO_CODE = SavedCode()


@dataclass(frozen=True)
class CodeFacts:
    """Where code runs, as plain data of a file.

    Attributes:
        made_with: what must be equal here, by name.
        instructions: that the processor must have.
        by_onednn: see `SavedCode`.
    """

    made_with: Mapping[str, Any]
    instructions: list[str]
    by_onednn: Mapping[Matmul, bool]

    def lacking(self) -> str:
        """Why the code cannot run in this process; empty if it can."""
        here = kept_code.made_with()
        if here is None:
            return _OPTIONS
        others = [
            f"{name} is {here.get(name)} here and was {value}"
            for name, value in self.made_with.items()
            if here.get(name) != value
        ]
        missing = sorted({*self.instructions} - {*instructions()})
        if missing:
            others.append(f"this processor lacks {', '.join(missing)}")
        return "; ".join(others)


_OPTIONS = "inductor's options differ from its defaults, or its caches are switched off"


def save_code(
    subgraphs: Mapping[str, Subgraph], by_onednn: Mapping[Matmul, bool]
) -> tuple[dict[str, Any], bytes]:
    """The plain data of `CodeFacts` of the subgraphs' code, and a content for `kept_code.run`.

    Raises:
        ProgramFileError: code that cannot be saved.
    """
    made_with, key = kept_code.made_with(), kept_code.key_of(subgraphs)
    if made_with is None or not key:
        raise _not_saved(_OPTIONS if made_with is None else "it is not for CPUs and known sizes")
    kept = kept_code.find(key)
    try:
        content = kept[0] if kept else kept_code.content_of(by_inductor(subgraphs))
    except OSError as e:
        raise _not_saved(f"{e}") from e
    if content is None:
        raise _not_saved("a part of it runs only within inductor")
    return dataclasses.asdict(CodeFacts(made_with, instructions(), by_onednn)), content


def ready(facts: CodeFacts, content: bytes) -> SavedCode | str:
    """The code of a content, ready to run; why it cannot run here."""
    functions = kept_code.run(content)
    if functions is None:
        return "its library cannot be loaded"
    return SavedCode(functions, facts.by_onednn)


def _not_saved(why: str) -> ProgramFileError:
    return ProgramFileError(
        f"The compiled code cannot be saved: {why}. Save the program without it by"
        " lowered.save(path); it is compiled where it starts."
    )
