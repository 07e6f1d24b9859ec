"""The child process with a provider more, whose update is wrong: it forgets the first parameter's gradient; and
without a C++ compiler, so that torch.compile cannot compile."""

from torch._inductor import config

from stepgraph.bench.harness import EagerStep
from stepgraph.bench.step import child
from stepgraph.bench.step.child import PROVIDERS


class Wrong(EagerStep):
    def update(self):
        self.params[0].grad.zero_()
        super().update()


PROVIDERS["wrong"] = Wrong
config.cpp.cxx = (None, "no-such-compiler")  # as CXX=no-such-compiler, which torch reads when it is imported

if __name__ == "__main__":
    child.main()
