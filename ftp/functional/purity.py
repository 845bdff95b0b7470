"""Refuse in-place changes of a model's parameters, constants and attributes while it runs."""

from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ftp.errors import TraceError
from ftp.functional.backward_code import as_now
from ftp.functional.modes_of_blocks import ModeOfBlocks
from ftp.functional.writes import tensors_of, written_by
from ftp.source import at_line
from ftp.torch_internals.storages import storage_number


def impure(model: str, name: str, does: str) -> str:
    if name.startswith("buffer"):
        todo = (
            "With fn, params, buffers = functionalize(model, buffers=True) it comes back"
            " updated; in eval mode most modules leave it alone."
        )
        return f"{model} {does} {name} while it runs, but buffers are constants of fn. {todo}"
    if name.startswith("attribute"):
        returned = (
            " Return what is read after the call; empty what is not." if does == "fills" else ""
        )
        return (
            f"{model} {does} {name} while it runs; fn is pure. Make it a buffer, with a value from"
            f" the start, and use functionalize(model, buffers=True).{returned}"
        )
    if name.startswith("frozen"):
        return (
            f"{model} {does} {name} in place while it runs, but frozen parameters are constants of"
            " fn. With fn, params, buffers = functionalize(model, buffers=True) it comes back"
            " updated."
        )
    if name.startswith("'"):
        return (
            f"{model} {does} {name} in place while it runs: they are two values of fn, of which the"
            " other would not change. Keep one of them, and take the other from it in forward."
        )
    return (
        f"{model} {does} {name} in place while it runs; fn is pure and leaves its inputs"
        " as they are. Compute with a new tensor, weight = self.weight * mask, or change the"
        " parameters between steps. If no gradient trains it, as an average of other weights,"
        " freeze it: after requires_grad_(False), fn, params, buffers = functionalize(model,"
        " buffers=True) gives it back updated."
    )


class ChangesFrozen(TraceError):
    """A model writes to a frozen parameter."""


class Copy(NamedTuple):
    """A conversion of a tensor that the model has, or an alias of it.

    Attributes:
        of: that tensor's id.
        is_equal: whether it keeps the same values, in the same dtype.
        is_followed: whether a gradient may flow through it: it is not detached.
    """

    of: int
    tensor: Tensor
    is_equal: bool
    is_followed: bool = True


InModel = Callable[[Tensor, bool], str | None]


class ReadGuard(ModeOfBlocks):
    """Refuse ops that read the memory that an argument of the call has in the model.

    Attributes:
        in_model: gives the path of the argument whose memory, in the model, a tensor shares; the
            flag says whether a gradient with respect to the tensor is asked for.
    """

    def __init__(self, model: str, in_model: InModel):
        super().__init__()
        self.model, self.in_model = model, in_model
        self._tokens: list[Token] = []

    def __enter__(self):
        self._tokens.append(_innermost.set(self))
        return super().__enter__()

    def __exit__(self, *error):
        _innermost.reset(self._tokens.pop())
        return super().__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not _reads_shape(func, out):
            for x in tensors_of((*args, *(kwargs or {}).values())):
                self.check_read(x, func, out)
        return out

    def check_read(self, x: Any, func: Callable, out: Any) -> None:
        if (
            _innermost.get() is self
            and type(x) in (Tensor, nn.Parameter)
            and isinstance(out, Tensor | list | tuple)
            and (path := self.in_model(x, func is torch.autograd.grad)) is not None
        ):
            raise TraceError(
                f"{at_line()}{self.model} reads {path!r} from a tensor that shares its memory,"
                " such as a view made before the call, or the parameter itself in a nested"
                " container, a partial or a closure. There it keeps the values that the model"
                " has now, and gets no gradient. Take it from the module's attribute in"
                " forward."
            )


class WriteGuard(ReadGuard):
    """Refuse, before it runs, an op that writes to a tensor in ``names`` {id: its name}, or that
    reads the memory that an argument of the call has in the model.

    It also lets a model freeze a parameter: ``p.requires_grad = False`` calls ``swap(p,
    p.detach())``, and ``p.requires_grad = True`` swaps back.

    Comparing versions afterwards is not enough: batch_norm and ``.data`` do not bump the version,
    and torch.func's own error for a write to a captured tensor does not name it.

    Attributes:
        attributes: the tensors that attributes hold.
        read: the ids of the tensors in ``names`` that ops have read.
        followed: of these, the ids of those that gradients may flow through.
    """

    def __init__(
        self,
        model: str,
        names: dict[int, str],
        swap: Callable[[Tensor, Tensor], None] | None,
        in_model: InModel,
    ):
        super().__init__(model, in_model)
        self.names = names
        self.swap = swap
        self.read: set[int] = set()
        self.followed: set[int] = set()
        self.attributes: tuple[Tensor, ...] = ()
        self.copies: dict[int, Copy] = {}  # by its id
        self.aliases: list[Tensor] = []  # alive, so that no other tensor gets their ids
        self.frozen: dict[int, tuple[Tensor, Tensor]] = {}  # parameter's id: it, its detached one
        self.own: dict[int, Tensor] = {}  # detached one's id: the parameter
        self._later = ReadGuard(model, in_model)

    @property
    def later(self) -> ModeOfBlocks:
        return self._later

    def stands_for(self, new: Tensor, old: Tensor) -> None:
        if new is not old and (name := self.names.get(id(old))) is not None:
            self.names[id(new)] = name
            original = self.copies[id(old)].of if id(old) in self.copies else id(old)
            self.copies[id(new)] = Copy(original, new, False)

    def is_moved(self, new: Any, old: Tensor) -> bool:
        """Whether ``new`` is ``old`` on another device, or detached."""
        copy = self.copies.get(id(new))
        is_copy = copy is not None and copy.of == id(old) and copy.is_equal
        return is_copy and (new.device != old.device or id(new) in self.names)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _SETS_GRAD and self.swap is not None and self._is_trained(args[0]):
            own = self.own[id(args[0])] if id(args[0]) in self.own else args[0]
            self._train(own, (*args[1:], *kwargs.values(), True)[0])
            return args[0]
        if func == _SETS_DATA and self.names.get(id(args[0]), "") == self.names.get(id(args[1])):
            return None  # module.to(x.device), with nothing to do
        if self.frozen:  # model code may hold the parameter in a variable, which swap cannot reach
            args = tuple(map(self._as_now, args))
            kwargs = {name: self._as_now(x) for name, x in kwargs.items()}
        for tensor in written_by(func, args, kwargs):
            base = tensor if id(tensor) in self.names or not tensor._is_view() else tensor._base
            if (name := self.names.get(id(base))) is not None:
                error = ChangesFrozen if name.startswith("frozen") else TraceError
                raise error(impure(self.model, name, "modifies"))
            self._note_written(base)
        if func in _HOOKS:
            args, kwargs = _with_hook_of_now(args, kwargs)
        out = func(*args, **kwargs)
        if func in CASTS and id(args[0]) in self.names and _is_same(args, kwargs, out):
            return args[0]  # as torch does; within its transforms it makes another tensor
        if func in _ALIASES:
            self._note_written(args[0])  # where a later write is not seen
        if func in _ALIASES and id(args[0]) in self.names:
            self.names[id(out)] = self.names[id(args[0])]
            self.copies[id(out)] = self._copy(args[0])._replace(tensor=out, is_followed=False)
        elif not _reads_shape(func, out):
            self._read(func, (*args, *kwargs.values()), out)
        return out

    def _note_written(self, x: Any) -> None:
        if (copy := self.copies.get(id(x))) is not None:
            self.copies[id(x)] = copy._replace(is_equal=False)

    def _read(self, func: Callable, args: tuple, out: Any) -> None:
        """Note which of the model's attributes an op reads.

        Raises:
            TraceError: it reads the memory that an argument of the call has in the model.
        """
        for x in tensors_of(args):
            copy = self._copy(x)
            if type(x) is nn.Parameter and copy.of not in self.names:
                self._read_through(x)
            if copy.of in self.names:
                if func not in COPIES:
                    self.read.add(copy.of)
                    if torch.is_grad_enabled() and copy.is_followed:
                        self.followed.add(copy.of)
                elif isinstance(out, Tensor) and id(out) not in self.names:
                    is_equal = copy.is_equal and out.dtype == x.dtype
                    self.copies[id(out)] = copy._replace(tensor=out, is_equal=is_equal)
            self.check_read(x, func, out)

    def _read_through(self, x: nn.Parameter) -> None:
        """Note the attributes that ``nn.Parameter(attribute)`` has made a parameter of: it calls no
        function.
        """
        memory = storage_number(x)
        self.read.update(id(held) for held in self.attributes if storage_number(held) == memory)

    def _copy(self, x: Tensor) -> Copy:
        return self.copies.get(id(x), Copy(id(x), x, True))

    def _is_trained(self, x: Tensor) -> bool:
        return self.names.get(id(x), "").startswith("parameter")

    def _train(self, x: Tensor, is_trained: bool) -> None:
        assert self.swap is not None
        if is_trained and id(x) in self.frozen:
            own, frozen = self.frozen.pop(id(x))
            self.swap(frozen, own)
        elif not is_trained and id(x) not in self.frozen:
            frozen = x.detach()
            self.names[id(frozen)] = self.names[id(x)]
            self.aliases.append(frozen)
            self.own[id(frozen)] = x
            self.frozen[id(x)] = x, frozen
            self.swap(x, frozen)

    def _as_now(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self.frozen[id(x)][1] if id(x) in self.frozen else x
        return type(x)(map(self._as_now, x)) if type(x) in (list, tuple) else x


# The guard of the call that runs now: a call inside of another may be given the model's own memory.
_innermost: ContextVar[ReadGuard | None] = ContextVar("innermost", default=None)
_OF: Any = Tensor  # its attributes are descriptors
_SETS_GRAD = (_OF.requires_grad.__set__, Tensor.requires_grad_)
_SETS_DATA = _OF.data.__set__
_ALIASES = (_OF.data.__get__, Tensor.detach, torch.detach)
# Conversions, whose result has the values of the first argument.
CASTS = frozenset(
    getattr(Tensor, name)
    for name in ("to", "type", "type_as", "cpu", "cuda", "float", "double", "half", "bfloat16")
)
COPIES = CASTS | {Tensor.clone, Tensor.contiguous}


_HOOKS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)


def _with_hook_of_now(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The arguments of a call that registers a hook, to run in the surroundings of now."""
    tensor, *given = args
    return (tensor, *map(as_now, given)), {name: as_now(hook) for name, hook in kwargs.items()}


def _is_same(args: tuple, kwargs: dict[str, Any], out: Any) -> bool:
    """Whether a conversion has nothing to do, and nothing asks for a copy."""
    x, *rest = args
    asked = any(value is True for value in (*rest, *kwargs.values())) or "memory_format" in kwargs
    return isinstance(out, Tensor) and (out.dtype, out.device) == (x.dtype, x.device) and not asked


def _reads_shape(func: Callable, out: Any) -> bool:
    """Whether a torch function reads no values: an attribute that is no tensor, as x.T is, or a
    factory like a tensor.
    """
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return not isinstance(out, Tensor)
    return (name.startswith("new_") and name != "new_tensor") or name.endswith("_like")
