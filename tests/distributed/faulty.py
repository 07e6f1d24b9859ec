"""Faults in the code that one rank runs, put there when the rank's Python starts: see `of_rank_1`."""

import os

#: Python's own hook of a folder on PYTHONPATH. It replaces a method of a class when the module of that is imported.
_SITE = """
import importlib.abc, importlib.util, os, sys, time

MODULE, CLASS, METHOD, WHAT = os.environ["STEPGRAPH_TEST_FAULT"].split()


def fault(*_, **__):
    if WHAT == "hangs":
        time.sleep(10**6)
    raise RuntimeError("a planted fault")


class Plant(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def planted(module):
            execute(module)
            setattr(getattr(module, CLASS), METHOD, fault)

        spec.loader.exec_module = planted
        return spec


if os.environ.get("RANK") == "1":
    sys.meta_path.insert(0, Plant())
"""

#: Where a rank can fail: the module, class and method that do it.
PLACES = {
    "capture": "stepgraph.train.trainer Run _capture",
    "step": "stepgraph.run.program ProgramRunner __call__",
    "save": "stepgraph.train.trainer Run _save",
}


def of_rank_1(monkeypatch, folder, place: str, what: str) -> None:
    """Rank 1 of processes started from now on ``raises`` or ``hangs`` (``what``) in ``place``."""
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(_SITE)
    monkeypatch.setenv("STEPGRAPH_TEST_FAULT", f"{PLACES[place]} {what}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])))
