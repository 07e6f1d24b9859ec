"""The child process with a provider more, whose update is wrong: it forgets the first parameter's gradient."""

from stepgraph.bench.harness import EagerStep
from stepgraph.bench.step import child
from stepgraph.bench.step.providers import PROVIDERS


class Wrong(EagerStep):
    def update(self):
        self.params[0].grad.zero_()
        super().update()


PROVIDERS["wrong"] = Wrong

if __name__ == "__main__":
    child.main()
