"""The forecast of a pipeline as tables for a terminal."""

from rich.console import Console
from rich.table import Table

from stepgraph.inspect.forecast.pipeline import PipelineForecast, ScheduleForecast
from stepgraph.inspect.forecast.tables import assumed_rates, new_table, size_text, time_text
from stepgraph.parallel.pipeline.schedules import SCHEDULES, rank_of


def show_pipeline(result: PipelineForecast, console: Console) -> None:
    """Print the forecast: the run's stages, and the schedules side by side."""
    config, gpu, chosen = result.config, result.gpu, result.schedules[result.chosen]
    console.print(result.title)
    console.print(f"microbatch captured in {result.capture_s:.1f} s, {result.plan_s:.1f} s in all\n")
    console.print(_stage_table(result, chosen))
    if any(region for stage in chosen.stages for region, _ in stage.regions):
        console.print(_region_table(chosen))
    console.print(_schedule_table(result))
    for name, reason in result.refused.items():
        console.print(f"{name} is left out: {reason}")
    best, tokens = result.best, config.tokens_per_step / result.best.step_s
    console.print(
        f"{'best' if result.fits(best) else 'none fits; the fastest'}: --pipeline {best.name}, "
        f"step {time_text(best.step_s)}, {tokens:,.0f} tokens/s in all, {tokens / config.mesh_spec.size:,.0f} per GPU, "
        f"MFU {result.mfu_of(best.step_s):.1%}"
    )
    console.print(assumed_rates(gpu))


def _stage_table(result: PipelineForecast, chosen: ScheduleForecast) -> Table:
    schedule = SCHEDULES[chosen.name]
    halves = ["between halves"] if schedule.halves else []
    columns = ["blocks", "forward", "backward", "state", "kept", *halves, "in flight", "sends"]
    table = new_table(f"stages of {chosen.name}: time and kept bytes per microbatch", ["stage", "rank"], columns)
    for number, stage in enumerate(chosen.stages):
        first, end = stage.blocks
        table.add_row(
            str(number),
            str(rank_of(schedule, result.config.mesh_spec.pp, number)),
            f"{first} to {end - 1}" if end - first > 1 else str(first),
            time_text(stage.seconds["forward"]),
            time_text(stage.seconds["backward"]),
            size_text(stage.state),
            size_text(stage.kept),
            *([size_text(stage.between)] if schedule.halves else []),
            str(chosen.time.most_in_flight(number)),
            size_text(stage.message) if stage.message else "",
        )
    return table


def _region_table(chosen: ScheduleForecast) -> Table:
    slowest = max(chosen.stages, key=lambda stage: stage.seconds["forward"] + stage.seconds["backward"])
    columns = [f"stage {chosen.stages.index(slowest)}, the slowest"]
    table = new_table("computation of a microbatch by region", ["region", "phase"], columns)
    for (region, phase), seconds in sorted(slowest.regions.items(), key=lambda item: item[0][0] == ""):
        table.add_row(region or "elsewhere", phase, time_text(seconds))
    return table


def _schedule_table(result: PipelineForecast) -> Table:
    columns = ["step", "bubble", "exposed sends", "fullest rank"]
    table = new_table("schedules", ["schedule", ""], columns)
    for name, found in result.schedules.items():
        notes = ["this run's"] if name == result.chosen else []
        notes += [] if result.fits(found) else ["does not fit"]
        table.add_row(
            name,
            ", ".join(notes),
            time_text(found.step_s),
            f"{found.time.bubble:.1%}",
            time_text(found.exposed_s),
            size_text(max(found.ranks)),
        )
    return table
