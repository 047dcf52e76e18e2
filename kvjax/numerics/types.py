"""Array types with dtype and axes in a signature, such as `Float[Array, "B K G D"]`.

An axis name that several arguments of a function share is one size. The types are those of
`jaxtyping` if it is installed, and the test suite then checks every call. Otherwise they are
`typing.Annotated`, and nothing is checked. A string with one axis begins with a space, which
linters need.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol
from typing import Annotated as Bool
from typing import Annotated as Float
from typing import Annotated as Int32
from typing import Annotated as Shaped
from typing import Annotated as UInt8

if not TYPE_CHECKING and find_spec("jaxtyping"):
    _types = import_module("jaxtyping")
    Bool, Float, Int32, Shaped, UInt8 = (
        getattr(_types, name) for name in ("Bool", "Float", "Int32", "Shaped", "UInt8")
    )

__all__ = ["Bool", "Float", "Int32", "Rope", "Shaped", "UInt8"]


class Rope(Protocol):
    """A kind of rotary position embedding, such as those of `kvjax.models.rope`."""

    def frequencies(self, head_dim: int) -> Any:
        """f32[D/2] radians per position, for channels i and i + D/2."""
        ...
