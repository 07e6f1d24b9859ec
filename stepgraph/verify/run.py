"""Runs eager and a captured step from one state and compares what they give."""

import dataclasses

from stepgraph.verify.case import Case, calls, differ, outcome, tolerance
from stepgraph.verify.locate import where_they_differ
from stepgraph.verify.state import KINDS, Snapshot, VerifyReport, differences


def verify(case: Case, locate: bool) -> VerifyReport:
    """Compare the step of ``case`` with eager; everything that they change is as before afterwards.

    ``locate``: if they differ, also look for the first node, or the pass, that differs: captures the step again, up
    to once for each pass.
    """
    snapshot = Snapshot(case.state)
    try:
        eager = outcome(case, case.eager)
        captured = {}
        for _ in range(calls(case.bound.traced.program)):
            snapshot.restore()
            captured = outcome(case, lambda: case.bound(case.leaves))
        found = differences(eager, captured)
        report = VerifyReport(
            loss=(float(eager["loss", "loss"]), float(captured["loss", "loss"])),
            compared={kind: sum(key[0] == kind for key in eager) for kind in KINDS},
            differences=tuple(found),
            tolerance=tolerance(case.bound.traced.program),
        )
        if not differ(eager, captured):
            return report
        snapshot.restore()
        if differ(eager, outcome(case, case.eager)):
            return dataclasses.replace(report, repeats=False)
        if locate:
            report = dataclasses.replace(report, parted=where_they_differ(case, snapshot, eager))
        return report
    finally:
        snapshot.restore()
