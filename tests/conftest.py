"""What holds for all tests."""

import os

os.environ["STEPGRAPH_CACHE"] = "off"  # no test finds a step that another saved; ranks and commands inherit it
