"""Small programs of several Python modules, of which each calls the one before in some way and the first reads a value.

``{call}`` is a call of the module before, ``{load}`` the import of it.
"""

import importlib
import random
import sys
from pathlib import Path

#: How a module imports the one before, ``{before}`` of ``{package}``, and calls it.
LOADS = (
    ("from . import {before}", "{before}.call()"),
    ("from {package}.{before} import call as inner", "inner()"),
    ("import {package}.{before} as q", "q.call()"),
    ("import {package}.{before}", "{package}.{before}.call()"),
    ("from . import {before}; NAME = 'ca'", "getattr({before}, NAME + 'll')()"),
)

LINKS = {
    "function": "def call(): return {call}",
    "method": "class A:\n def m(self): return {call}\ndef call(): return A().m()",
    "static method": "class A:\n @staticmethod\n def m(): return {call}\ndef call(): return A.m()",
    "class method": "class A:\n @classmethod\n def m(cls): return {call}\ndef call(): return A.m()",
    "closure": "def make(k):\n def f(): return {call} * k\n return f\nf1 = make(1)\ndef call(): return f1()",
    "partial": "import functools\ndef g(k): return {call} * k\np = functools.partial(g, 1)\ndef call(): return p()",
    "decorator": (
        "import functools\ndef d(f):\n @functools.wraps(f)\n def w(*a): return f(*a) * {call}\n return w\n"
        "@d\ndef g(): return 1\ndef call(): return g()"
    ),
    "property": "class A:\n @property\n def m(self): return {call}\na = A()\ndef call(): return a.m",
    "module": (
        "from torch import nn\nclass M(nn.Module):\n def forward(self, x): return x * {call}\nm = M()\n"
        "def call(): return m(1)"
    ),
    "hook": (
        "from torch import nn\nm = nn.Identity()\nm.register_forward_hook(lambda m, a, y: y * {call})\n"
        "def call(): return m(1)"
    ),
    "dictionary": "T = {{'a': lambda: {call}}}\ndef call(): return T['a']()",
    "generator": "def g():\n yield {call}\ndef call(): return sum(g())",
    "context": (
        "import contextlib\n@contextlib.contextmanager\ndef c(): yield {call}\ndef call():\n with c() as k: return k"
    ),
    "object": "class A:\n def __call__(self): return {call}\na = A()\ndef call(): return a()",
    "base": (
        "class B:\n def m(self): return {call}\nclass A(B):\n def m(self): return super().m()\n"
        "def call(): return A().m()"
    ),
    "getattr": "class A:\n def m1(self): return {call}\na, i = A(), 1\ndef call(): return getattr(a, 'm%d' % i)()",
    "descriptor": (
        "class D:\n def __get__(self, o, t=None): return {call}\nclass A: m = D()\na = A()\ndef call(): return a.m"
    ),
    "missing attribute": "class A:\n def __getattr__(self, k): return {call}\na = A()\ndef call(): return a.foo",
    "default": "def g(): return {call}\ndef call(f=g): return f()",
    "bound method": "class A:\n def m(self): return {call}\nbound = A().m\ndef call(): return bound()",
    "operator": "class A:\n def __mul__(self, k): return k * {call}\na = A()\ndef call(): return a * 1",
    "metaclass": "class T(type):\n def m(cls): return {call}\nclass A(metaclass=T): pass\ndef call(): return A.m()",
    "local class": "def call():\n class A:\n  def m(self): return {call}\n return A().m()",
    "slot": "class A: __slots__ = ('f',)\ndef g(): return {call}\na = A(); a.f = g\ndef call(): return a.f()",
    "enum": "import enum\nclass E(enum.Enum):\n X = 1\n def m(self): return {call}\ndef call(): return E.X.m()",
    "tuple": "class A(tuple):\n def m(self): return {call}\na = A()\ndef call(): return a.m()",
    "missing key": "class D(dict):\n def __missing__(self, k): return {call}\nd = D()\ndef call(): return d['q']",
    "iterator": "class A:\n def __iter__(self): return iter([{call}])\na = A()\ndef call(): return sum(a)",
    "exception": (
        "class X(Exception):\n def __init__(self): self.k = {call}\ndef call():\n try: raise X()\n"
        " except X as e: return e.k"
    ),
    "single dispatch": (
        "import functools\n@functools.singledispatch\ndef g(x): return 0\n@g.register\ndef _(x: int): return {call}\n"
        "def call(): return g(1)"
    ),
    "weak reference": (
        "import weakref\nclass A:\n def m(self): return {call}\na = A()\nw = weakref.ref(a)\ndef call(): return w().m()"
    ),
    "module's getattr": "def __getattr__(k):\n if k == 'call': return lambda: {call}\n raise AttributeError(k)",
    "late import": "def call():\n {load}\n return {call}",
    "function's attribute": "def f(): return {call}\ndef g(): return g.f()\ng.f = f\ndef call(): return g()",
}

#: The first module, and how what it reads changes: a statement on the module ``first``, with the new ``value``.
VALUES = {
    "global": ("V = 1.0\ndef call(): return V", "first.V = value"),
    "list": ("V = [1.0]\ndef call(): return V[0]", "first.V[0] = value"),
    "object": ("class O: pass\nV = O(); V.k = 1.0\ndef call(): return V.k", "first.V.k = value"),
    "class": ("class O: k = 1.0\ndef call(): return O.k", "first.O.k = value"),
    "nested": ("V = {'a': [{'b': 1.0}]}\ndef call(): return V['a'][0]['b']", "first.V['a'][0]['b'] = value"),
    "array": ("import numpy as np\nV = np.ones(2)\ndef call(): return float(V[1])", "first.V[1] = value"),
    "tensor": ("import torch\nV = torch.ones(())\ndef call(): return V", "first.V.fill_(value)"),
    "closure": (
        "def make():\n c = [1.0]\n def call(): return c[0]\n return call, c\ncall, c = make()",
        "first.c[0] = value",
    ),
    "default": ("def call(c=[1.0]): return c[0]", "first.call.__defaults__[0][0] = value"),
    "module": ("from torch import nn\nm = nn.Identity(); m.k = 1.0\ndef call(): return m.k", "first.m.k = value"),
    "function": ("def f(): return 1.0\ndef call(): return f()", "first.f = lambda: value"),
    "context variable": (
        "import contextvars\nV = contextvars.ContextVar('V', default=1.0)\ndef call(): return V.get()",
        "first.V.set(value)",
    ),
    "set": ("V = {1.0}\ndef call(): return max(V)", "first.V.add(value)"),
    # What a step would do again is refused.
    "count": ("N = 0\ndef call():\n global N\n N += 1\n return float(N)", ""),
    "log": ("V = []\ndef call():\n V.append(1)\n return float(len(V))", ""),
    "draw": ("import random\ndef call(): return random.random()", ""),
}
REFUSED = ("count", "log", "draw")


def write(folder: Path, package: str, value: str, links: list[str], choose: random.Random) -> None:
    """Write a program: ``m0.py`` reads ``value``, and each of ``links`` is a module that calls the one before."""
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text("")
    (folder / package / "m0.py").write_text(VALUES[value][0])
    for i, link in enumerate(links):
        load, call = (text.format(before=f"m{i}", package=package) for text in choose.choice(LOADS))
        first = "" if link == "late import" else f"{load}\n"
        (folder / package / f"m{i + 1}.py").write_text(first + LINKS[link].format(call=call, load=load))


def loaded(package: str, links: list[str]) -> tuple:
    """The program's last module and its first one, as new."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]
    return tuple(importlib.import_module(f"{package}.m{i}") for i in (len(links), 0))
