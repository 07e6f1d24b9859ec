"""What all tests share: caches of their own, so that no run reads or leaves anything in the user's."""

import os
import tempfile

os.environ["STEPGRAPH_CACHE"] = "off"  # no test finds a step that another saved; ranks and commands inherit it
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit the folder of the process that starts them
    _CACHES = tempfile.TemporaryDirectory(prefix="stepgraph-tests-")
    os.environ["XDG_CACHE_HOME"] = _CACHES.name
