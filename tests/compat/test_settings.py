"""Changes of torch's settings during a trace: whose are noticed."""

import threading

import torch

from stepgraph import compat


def test_another_threads_setting_is_its_own_affair():
    """A thread that loads batches sets its number of threads when it starts, also while another thread traces."""
    before, seen = torch.get_num_threads(), []
    try:
        with compat.kept_settings(seen.append):
            thread = threading.Thread(target=torch.set_num_threads, args=(before + 1,))
            thread.start()
            thread.join()
            assert not seen
            torch.set_num_threads(before + 2)
            assert seen == ["num threads"]
    finally:
        torch.set_num_threads(before)
