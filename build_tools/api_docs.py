"""`make docs`: the API reference, HTML in docs/api (ignored by git), from the docstrings by pdoc.

A warning of pdoc is an error here, and so is a public name without a docstring, or a public call
whose docstring has the house's sections in another order.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import re
import sys
import typing
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENT = "pdoc==16.0.0"
PACKAGE = "memeff_attn"
# Beside what the package itself exports; those that are not there yet are left out.
FURTHER = (f"{PACKAGE}.info", f"{PACKAGE}.integrations", f"{PACKAGE}.xformers")
SECTIONS = ("Shapes", "Dtypes", "Args", "Memory", "Numerics", "Raises", "Source")
HEAD = re.compile(rf"^((?:{'|'.join(SECTIONS)})(?:, (?:{'|'.join(SECTIONS)}))*):[ \t]*", re.M)
ARGUMENT = re.compile(r"^(\s*)(\w+): ", re.M)


def modules() -> list[str]:
    return [PACKAGE, *(name for name in FURTHER if importlib.util.find_spec(name) is not None)]


def public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """(name, object) of what a module exports, its functions and classes."""
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    ]
    for name in names:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            yield f"{module.__name__}.{name}", value


def sections_of(doc: str) -> list[str]:
    return [name for match in HEAD.finditer(inspect.cleandoc(doc)) for name in match[1].split(", ")]


def faults(module: ModuleType) -> list[str]:
    """What a module's docstrings lack."""
    found = [] if (module.__doc__ or "").strip() else [f"{module.__name__}: no docstring"]
    for name, value in public(module):
        doc = value.__doc__ or ""
        if not doc.strip():
            found.append(f"{name}: no docstring")
            continue
        order = [SECTIONS.index(section) for section in sections_of(doc)]
        if order != sorted(order):
            wanted = ", ".join(SECTIONS)
            found.append(f"{name}: its sections are not in the order {wanted}")
    return found


def as_markdown(doc: str) -> str:
    """A docstring with its sections as paragraphs of their own, and arguments as a list."""
    first, *parts = HEAD.split(inspect.cleandoc(doc))
    text = [first.rstrip()]
    for head, body in zip(parts[::2], parts[1::2], strict=True):
        # What follows on the head's line is indented as the lines below it are.
        lines = inspect.cleandoc(body if body.startswith("\n") else f"\n{_joined(body)}")
        if head == "Args":
            lines = ARGUMENT.sub(r"\1- `\2`: ", lines)
            text.append(f"**{head}**\n\n{lines}")
        else:
            text.append(f"**{head}**: {lines}")
    return "\n\n".join(text) + "\n"


def _joined(body: str) -> str:
    """The rest of the head's line and the lines below, at one indentation."""
    return "\n".join(line.strip() for line in body.splitlines())


def resolve_named_tuples(module: ModuleType) -> None:
    """typing.NamedTuple forgets in which module the names of its fields' types are to be found."""
    for _, value in public(module):
        if inspect.isclass(value) and issubclass(value, tuple) and hasattr(value, "_fields"):
            hints = typing.get_type_hints(value)
            value.__new__.__annotations__ = {f: hints[f] for f in value._fields}


FROM_TORCH = re.compile(r"Cannot determine where \S+\._is_param is taken from")


def build(out: Path) -> list[str]:
    """Writes the pages; returns what is wrong with the docstrings."""
    import pdoc
    import pdoc.render

    found = []
    for name in modules():
        module = importlib.import_module(name)
        found += faults(module)
        for exported in getattr(module, "__all__", ()):
            if inspect.ismodule(child := getattr(module, exported)):
                found += faults(child)
        resolve_named_tuples(module)
    pdoc.render.env.filters["to_markdown"] = as_markdown
    pdoc.render.configure(docformat="markdown", search=True, show_source=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pdoc.pdoc(*modules(), output_directory=out)
    of_others = (DeprecationWarning, PendingDeprecationWarning, FutureWarning)  # torch's, say
    said = [str(w.message).splitlines()[0] for w in caught if not issubclass(w.category, of_others)]
    # A subclass of torch.Tensor has attributes that torch's own metaclass makes, without a source.
    said = [line for line in said if not FROM_TORCH.match(line)]
    return list(dict.fromkeys(found + said))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "api")
    parser.add_argument("--requirement", action="store_true", help="print what pip is to install")
    options = parser.parse_args()
    if options.requirement:
        print(REQUIREMENT)
        return 0
    sys.path.insert(0, str(ROOT))
    found = build(options.out)
    for line in found:
        print(f"docs: {line}", file=sys.stderr)
    pages = len(list(options.out.rglob("*.html")))
    print(f"{options.out}: {pages} pages, {len(found)} faults")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
