"""golf as a `Family`."""

from stepgraph.models.family import Family
from stepgraph.models.golf.golf import TP_PLAN, TP_SIZES, Golf, GolfConfig

GOLF = Family("golf", GolfConfig, Golf, lambda config: TP_PLAN, TP_SIZES)  # no positions: any length of sequence
