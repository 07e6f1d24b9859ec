"""The child process with a provider more, whose update is wrong: it goes uphill."""

from stepgraph.bench.model import child
from stepgraph.bench.model.child import PROVIDERS, ModelStep


class Wrong(ModelStep):
    def update(self):
        for param in self.params:
            param.grad.neg_()
        super().update()


PROVIDERS["wrong"] = Wrong

if __name__ == "__main__":
    child.main()
