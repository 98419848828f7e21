"""The modules of this package under another name: what `compat/xformers` is made of.

Python looks up `a.b.c` in sys.modules first, so entries there make `import xformers.ops.fmha` find
these very module objects: classes are identical, and a function that a program replaces in
`xformers.ops.fmha` is replaced for every caller.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from types import ModuleType

# Run with -m under the other name, which Python does only with a file of its own.
_PROGRAMS = ("info", "aliases")


def install(package: ModuleType) -> None:
    """Gives `package` this package's public names and registers its modules below `package`."""
    source = importlib.import_module(__package__)
    for name in ("__version__", "_has_cpp_library", "_is_opensource", "_is_triton_available"):
        setattr(package, name, getattr(source, name))
    for found in pkgutil.walk_packages(source.__path__, source.__name__ + "."):
        inner = found.name.removeprefix(source.__name__ + ".")
        if inner in _PROGRAMS:
            continue
        module = importlib.import_module(found.name)
        sys.modules[f"{package.__name__}.{inner}"] = module
        if "." not in inner:
            setattr(package, inner, module)
