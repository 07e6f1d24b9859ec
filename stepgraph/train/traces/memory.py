"""``--memory-snapshot``: what torch's allocator did in the first steps, for https://pytorch.org/memory_viz."""

from pathlib import Path

from stepgraph import compat

#: The file in a run folder.
FILE = "memory_snapshot.pickle"


class MemorySnapshot:
    """Records allocations from now on. A snapshot holds Python's stack of each: some 100 MB for a large model."""

    def __init__(self, folder: Path):
        self.path = folder / FILE
        self.recording = True
        compat.record_memory(True)

    def write(self) -> None:
        """Write the snapshot and record no more; does nothing the second time."""
        if self.recording:
            self.recording = False
            compat.dump_memory(self.path)
            compat.record_memory(False)
