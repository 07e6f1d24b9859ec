"""``stepgraph plan``: the options, and the forecast as tables for a terminal."""

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from stepgraph.config.build import chosen_chunks
from stepgraph.config.command_line import first_word, parse, require_folder
from stepgraph.config.commands import FORECAST, PlanOptions
from stepgraph.config.idle import refuse_idle
from stepgraph.config.presets import PRESETS
from stepgraph.costs.hardware import GPUS
from stepgraph.costs.memory import KINDS
from stepgraph.costs.timeline import Collective
from stepgraph.errors import unknown_name
from stepgraph.inspect.forecast.forecast import Forecast, check_imbalance, forecast, with_microbatches
from stepgraph.inspect.forecast.pipeline import PipelineForecast, ScheduleForecast, forecast_pipeline
from stepgraph.inspect.forecast.tables import (
    assumed_rates,
    new_console,
    new_table,
    offload_text,
    peak_table,
    size_text,
    time_text,
)
from stepgraph.parallel.pipeline.schedules import SCHEDULES, rank_of
from stepgraph.passes import Target
from stepgraph.passes.waiting import Waiting


def main(argv: list[str]) -> int:
    """Runs ``stepgraph plan ARGV`` and returns its exit status. Raises ValueError, in one line, for a wrong use."""
    how = "plan takes its preset first: write stepgraph plan llama3-8b --mesh fsdp=4,tp=2 --gpu h100"
    name, words = first_word(argv, how, "llama3-8b")
    if name not in PRESETS:
        raise unknown_name("preset", name, PRESETS)
    config = PRESETS[name]()
    config, options = parse(
        words,
        "stepgraph plan PRESET",
        config,
        PlanOptions(),
        parts=FORECAST,
        description=f"{PlanOptions.__doc__} Presets: {', '.join(PRESETS)}. Defaults below: {name}.",
    )
    config = with_microbatches(config, words)
    require_folder(options.json)
    config.validate()
    gpu = GPUS[options.gpu]
    check_imbalance(options.imbalance, config.mesh_spec)
    refuse_idle(config, words, Target.forecast(gpu))
    console = new_console()
    pipelined = config.mesh_spec is not None and config.mesh_spec.pp > 1
    with Waiting(lambda line: print(line, file=sys.stderr, flush=True)):
        result = (forecast_pipeline if pipelined else forecast)(config, gpu, options.imbalance)
    if pipelined:
        show_pipeline(result, console)
    else:
        show(result, console)
    if options.json is not None:
        options.json.write_text(json.dumps(result.to_json(), indent=1) + "\n", encoding="utf-8")
    return 0


def show(result: Forecast, console: Console) -> None:
    """Print the forecast."""
    config, gpu, timeline = result.config, result.gpu, result.timeline
    tokens_per_s = config.tokens_per_step / timeline.step_seconds
    console.print(result.title)
    if hasattr(config.model, "moe"):
        parameters, active = config.model.num_params(), config.model.num_params(active=True)
        console.print(f"{parameters / 1e9:,.1f}B parameters, {active / 1e9:,.1f}B of them active per token")
    if chunks := chosen_chunks(config):
        console.print(chunks.line())
    console.print(f"{result.nodes:,} nodes captured in {result.capture_s:.1f} s, {result.plan_s:.1f} s in total\n")
    console.print(_memory_table(result))
    left = gpu.memory - result.peak.total
    console.print(
        f"peak {size_text(result.peak.total)} of {size_text(gpu.memory)}: "
        + (f"{size_text(left)} to spare" if left >= 0 else f"does not fit, {size_text(-left)} too much")
        + "\n"
    )
    if result.over_peak is not None:
        console.print(peak_table(result.over_peak))
    if offloaded := offload_text(timeline.copies):
        console.print(offloaded + "\n")
    if timeline.collectives:
        console.print(_collective_table(timeline.collectives))
    if any(region for region, _ in timeline.regions):
        sums: dict[tuple[str, str], list[float]] = {key: [s, 0.0, 0.0] for key, s in timeline.regions.items()}
        for c in timeline.collectives:
            found = sums.setdefault((c.region, c.phase), [0.0] * 3)
            found[1], found[2] = found[1] + c.seconds, found[2] + c.exposed_seconds
        console.print(_region_table("time per rank by region", ["computation", "communication", "exposed"], sums))
    step, speed = f"step {time_text(timeline.step_seconds)}", f"{tokens_per_s:,.0f} tokens/s"
    if result.ranks == 1:
        console.print(f"{step}: {speed}, MFU {result.mfu:.1%}")
    else:
        console.print(
            f"{step}: computation {time_text(timeline.compute_seconds)}, "
            f"exposed communication {time_text(timeline.exposed_seconds)} "
            f"({timeline.exposed_seconds / timeline.step_seconds:.1%} of the step)"
        )
        console.print(
            f"{speed} in total, {tokens_per_s / result.ranks:,.0f} per GPU, MFU {result.mfu:.1%}; "
            f"{time_text(result.overlapped_seconds)} if all communication were overlapped"
        )
    console.print(assumed_rates(gpu))


def _memory_table(result: Forecast) -> Table:
    phases = list(dict.fromkeys(moment.phase for moment in result.moments))
    fullest = [max((m for m in result.moments if m.phase == phase), key=lambda m: m.total) for phase in phases]
    table = new_table("memory per rank at the peak of each phase", ["kind"], phases)
    for kind in [kind for kind in KINDS if any(m.bytes[kind] for m in fullest)]:
        table.add_row(kind, *(size_text(m.bytes[kind]) if m.bytes[kind] else "" for m in fullest))
    table.add_row("total", *(size_text(m.total) for m in fullest))
    return table


def _collective_table(collectives: Iterable[Collective]) -> Table:
    columns = ["count", "bytes", "time", "exposed"]
    table = new_table("collectives per rank", ["phase", "collective", "role", "axis x ranks", "dtype"], columns)
    kinds: dict[tuple[str, ...], list[Collective]] = {}
    for c in collectives:
        kinds.setdefault((c.phase, c.kind, c.role, f"{c.axis} x {c.ranks}", c.dtype), []).append(c)
    for kind, members in kinds.items():
        table.add_row(
            *kind,
            f"{len(members):,}",
            size_text(sum(c.bytes for c in members)),
            time_text(math.fsum(c.seconds for c in members)),
            time_text(math.fsum(c.exposed_seconds for c in members)),
        )
    return table


def _region_table(title: str, columns: Sequence[str], sums: Mapping[tuple[str, str], Sequence[float]]) -> Table:
    """``sums``: the seconds of the columns, by region and phase."""
    table = new_table(title, ["region", "phase"], columns)
    for (region, phase), found in sorted(sums.items(), key=lambda item: item[0][0] == ""):
        table.add_row(region or "elsewhere", phase, *(time_text(seconds) if seconds else "" for seconds in found))
    return table


def show_pipeline(result: PipelineForecast, console: Console) -> None:
    """Print the forecast: the run's stages, and the schedules side by side."""
    config, gpu, chosen = result.config, result.gpu, result.schedules[result.chosen]
    console.print(result.title)
    console.print(f"microbatch captured in {result.capture_s:.1f} s, {result.plan_s:.1f} s in total\n")
    console.print(_stage_table(result, chosen))
    if any(region for stage in chosen.stages for region, _ in stage.regions):
        slowest = max(chosen.stages, key=lambda stage: stage.seconds["forward"] + stage.seconds["backward"])
        columns = [f"stage {chosen.stages.index(slowest)}, the slowest"]
        sums = {key: [seconds] for key, seconds in slowest.regions.items()}
        console.print(_region_table("computation of a microbatch by region", columns, sums))
    console.print(_schedule_table(result))
    for name, reason in result.refused.items():
        console.print(f"{name} is left out: {reason}")
    best, tokens = result.best, config.tokens_per_step / result.best.step_s
    console.print(
        f"{'best' if result.fits(best) else 'none fits; the fastest'}: --pipeline {best.name}, "
        f"step {time_text(best.step_s)}, {tokens:,.0f} tokens/s in total, {tokens / config.mesh_spec.size:,.0f} per "
        f"GPU, MFU {result.mfu_of(best.step_s):.1%}"
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
