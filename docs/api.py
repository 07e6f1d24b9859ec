"""Build the API reference from the docstrings of the public modules: `make docs`, or python docs/api.py FOLDER.

A warning of pdoc, and a public function or class without a docstring, are errors.
"""

import html
import sys
import warnings
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pdoc
from torch.library import CustomOpDef

import stepgraph

#: What a reader imports from. A package shows the names that its ``__init__`` offers, not its submodules.
MODULES = (
    "stepgraph",
    "stepgraph.integrations",
    "stepgraph.passes",
    "stepgraph.graph.step_graph",
    "stepgraph.graph.provenance",
    "stepgraph.graph.edit",
    "stepgraph.graph.facts",
    "stepgraph.parallel",
    "stepgraph.models",
    "stepgraph.verify",
    "stepgraph.kernels",
    "stepgraph.kernels.moe",
    "stepgraph.kernels.fp8",
    "stepgraph.kernels.attention",
    "stepgraph.kernels.loss",
)


def offer_names(module: ModuleType) -> None:
    """Prepare a module for pdoc, which reads its dictionary: ``__all__`` of a package is what its ``__init__`` offers,
    names that are imported on demand are there, and an operator is shown as the function that it was made of."""
    if not hasattr(module, "__all__") and hasattr(module, "__path__"):
        offered = (
            name
            for name, value in vars(module).items()
            if isinstance(value, CustomOpDef) or getattr(value, "__module__", "").startswith("stepgraph.")
        )
        module.__all__ = [name for name in offered if not name.startswith("_")]
    for name in getattr(module, "__all__", ()):
        value = getattr(module, name)
        setattr(module, name, value._init_fn if isinstance(value, CustomOpDef) else value)


def without_docstring(module: pdoc.doc.Module) -> list[str]:
    """The public functions and classes of the page that say nothing about themselves."""
    members = [*module.functions, *module.classes]
    return [member.fullname for member in members if not member.name.startswith("_") and not member.docstring]


def first_line(module: pdoc.doc.Module) -> str:
    """What the page is about, as HTML."""
    return html.escape(module.docstring.split("\n\n")[0].replace("`", ""))


def main() -> None:
    folder = Path(sys.argv[1])
    warnings.filterwarnings("error", module="pdoc")
    pdoc.render.configure(docformat="google", show_source=False, footer_text=f"stepgraph {stepgraph.__version__}")
    pages = {}
    for name in MODULES:
        offer_names(import_module(name))
        pages[name] = pdoc.doc.Module.from_name(name)
    silent = [name for page in pages.values() for name in without_docstring(page)]
    if silent:
        sys.exit(f"no docstring: {', '.join(silent)}")
    for name, page in pages.items():
        file = folder / f"{name.replace('.', '/')}.html"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(pdoc.render.html_module(page, pages))
    rows = [f'<li><a href="{n.replace(".", "/")}.html">{n}</a>: {first_line(page)}</li>' for n, page in pages.items()]
    (folder / "index.html").write_text(f"<!doctype html><title>stepgraph</title><ul>{''.join(rows)}</ul>")
    (folder / "search.js").write_text(pdoc.render.search_index(pages))
    print(f"{folder / 'index.html'}: {len(pages)} modules")


if __name__ == "__main__":
    main()
