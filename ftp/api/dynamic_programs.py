"""The programs of a step that serve many sizes: find the family of a call. A step whose shapes do
not change needs no more of this than to count them.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from ftp.api.arguments import Arguments
from ftp.api.definition import Definition
from ftp.api.dynamic_shapes import Dynamic, SeenShapes
from ftp.api.inputs import Inputs
from ftp.api.planned import Planned
from ftp.distributed.calls import exchange
from ftp.errors import CertificateError
from ftp.sharding.mesh import Mesh

if TYPE_CHECKING:
    from ftp.api.families import Family, ShapeCounts


class DynamicPrograms:
    """The families of programs of a step with dynamic sizes.

    Args:
        limit: the number of families that are kept: those whose programs were used last.

    Attributes:
        families: by the key of a call without its dynamic sizes.
    """

    def __init__(self, limit: int):
        self.families: dict[tuple[object, ...], Family] = {}
        self._seen, self._limit = SeenShapes(limit), limit
        self._used: dict[int, Family] = {}  # by id, the latest at the end
        self._key_of = WeakKeyDictionary[Planned, tuple[object, ...]]()

    def known(self, definition: Definition, call: Arguments) -> Dynamic | None:
        """The dims that change size, as far as known before the call; None if no dim does."""
        if definition.dynamic is not None:
            return definition.dynamic(call.args)
        return self._seen.known(call)

    def found(self, definition: Definition, inputs: Inputs) -> Dynamic | None:
        """The dims that change size, with this call counted; None if no dim does."""
        if definition.dynamic is not None:
            return definition.dynamic(inputs.call.args)
        if not definition.finds_dynamic:
            return None
        return self._seen.add(inputs.call, inputs.shapes)

    def counts(self) -> "ShapeCounts":
        from ftp.api import families

        return families.counts({id(f): f for f in self.families.values()}.values())

    def use(self, planned: Planned) -> None:
        """Mark the family of a program as used. Drops the least recently used one where there are
        too many.
        """
        family = self.families.get(self._key_of.get(planned, ()))
        if family is None:
            return
        self._used[id(family)] = self._used.pop(id(family), family)
        if len(self._used) > self._limit:
            del self._used[next(iter(self._used))]
            self.families = {key: f for key, f in self.families.items() if id(f) in self._used}

    def drop_outgrown(self) -> None:
        """Drop the families with programs of tables that later traces have replaced."""
        known = self.families.items()
        self.families = {key: family for key, family in known if not family.is_outgrown}

    def at_new_size(self, call: Arguments, dynamic: Dynamic, mesh: Mesh) -> Planned | None:
        """The program for these arguments by a plan that was made at another size; None if there is
        none.
        """
        from ftp.api import families
        from ftp.api.family_programs import at_size

        family = self._family(call, dynamic, mesh)
        if family is None or not family.traces:
            return None
        sized = families.sizes_of(call.leaves, dynamic, family, mesh)
        if sized is None or (dynamic.is_seen and not dynamic.fits(sized)):
            return None
        values = dynamic.values(sized, call.names)
        plan = family.find(values)
        if plan is None:
            return None
        planned, refused = None, ""
        try:
            planned = at_size(plan, call, values, mesh)
        except CertificateError as error:
            refused = str(error)
        if plan.planned.program.options.certify:
            # Ranks may have made the graphs of these sizes at other sizes: they decide together.
            refused = next(filter(None, exchange(mesh, "certificate", refused)), "")
        if planned is None or refused:  # `build` plans these sizes alone
            say = partial(families.warn_of_refused, dynamic) if family.why_not else family.give_up
            say(CertificateError(refused))
            return None
        family.served += 1
        self._key_of[planned] = _key(call, dynamic)
        return planned

    def _family(self, call: Arguments, dynamic: Dynamic, mesh: Mesh) -> "Family | None":
        """The family of this call: programs of calls that differ from it only in dynamic sizes."""
        from ftp.api import families

        key = _key(call, dynamic)
        if key not in self.families:
            known = self.families.values()
            like = next((f for f in known if families.is_like(f, call, dynamic, mesh)), None)
            if like is not None:
                self.families[key] = like
        return self.families.get(key)

    def build(
        self,
        definition: Definition,
        inputs: Inputs,
        dynamic: Dynamic,
        build: Callable[[Inputs], Planned],
    ) -> Planned:
        """The program for these inputs: one that serves many sizes where possible, else the program
        of these sizes, by ``build``.
        """
        from ftp.api.families import Family
        from ftp.api.family_programs import built

        key = _key(inputs.call, dynamic)
        family = self._family(inputs.call, dynamic, definition.mesh)
        if family is None:
            family = self.families[key] = Family(dynamic)
        planned = built(family, definition, inputs, dynamic, build)
        self._key_of[planned] = key
        return planned


def _key(call: Arguments, dynamic: Dynamic) -> tuple[object, ...]:
    names = ((leaf, *dims.items()) for leaf, dims in dynamic.dims.items())
    return (*names, *call.key_without(dynamic.dims))
