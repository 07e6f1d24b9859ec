"""Pipelines: a model cut into stages that several ranks have, and the schedule that runs them."""

from stepgraph.parallel.pipeline.layout import Pipeline, plan_pipeline
from stepgraph.parallel.pipeline.program import StageGraphs
from stepgraph.parallel.pipeline.schedules import SCHEDULES, check_schedule
