"""A captured step compared with eager: both from one state, compared bit for bit, with the state restored."""

from stepgraph.verify.case import Case
from stepgraph.verify.locate import verify
from stepgraph.verify.state import Difference, VerifyReport
