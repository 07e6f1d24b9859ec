"""What all tests share: caches of their own, so that no run reads or leaves anything in the user's."""

import os
import tempfile

if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit the folder of the process that starts them
    _CACHES = tempfile.TemporaryDirectory(prefix="stepgraph-tests-")
    os.environ["XDG_CACHE_HOME"] = _CACHES.name
